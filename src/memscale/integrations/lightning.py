"""Lightning: a callback that wraps the module for the time of training."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback

import memscale
from memscale.config import Config
from memscale.executor import executor_of


class MemScaleCallback(Callback):
    """Wraps the LightningModule when training begins, and detaches it when training ends or fails.

    The plan is made from the first training batch, for the optimizer and the accumulation of the Trainer.

    Args:
        config: as for ``memscale.wrap``.

    Example:
        >>> MemScaleCallback(Config(mode="aggressive")).config.mode.value  # Trainer(..., callbacks=[this])
        'aggressive'
    """

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or Config()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        config = self.config
        # Under manual optimization the module itself decides when it steps.
        if "gradient_accumulation_steps" not in config.explicit_fields and pl_module.automatic_optimization:
            config = config.replace(gradient_accumulation_steps=trainer.accumulate_grad_batches)
        only = trainer.optimizers[0] if len(trainer.optimizers) == 1 else None
        memscale.wrap(pl_module, config, optimizer=only)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._detach(pl_module)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._detach(pl_module)

    def _detach(self, pl_module: Any) -> None:
        if executor_of(pl_module) is not None:
            memscale.detach(pl_module)
