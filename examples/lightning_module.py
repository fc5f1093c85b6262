"""Lightning with a callback: python examples/lightning_module.py"""

import lightning
import torch
from torch import nn

import memscale
from memscale.integrations.lightning import MemScaleCallback


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)) for _ in range(6))
        self.net = nn.Sequential(*layers)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return (self.net(batch) - batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


trainer = lightning.Trainer(
    max_steps=4,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    callbacks=[MemScaleCallback(memscale.Config(force_optimize=True))],  # forced, as it is tiny
)
trainer.fit(Module(), torch.utils.data.DataLoader(torch.randn(256, 128), batch_size=64))
