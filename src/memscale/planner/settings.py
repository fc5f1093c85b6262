"""What concerns a model as a whole, settled before its layers are: precision, tiles, 8-bit state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memscale.config import Config
from memscale.execution_plan import LayerPlan, LossTiling, Offloading, Plan, Precision, Tier, Tiling
from memscale.hardware import Hardware
from memscale.planner.precision_rules import choose_precision
from memscale.profiler import Block
from memscale.units import format_bytes

__all__ = ["NOTHING", "Batch", "Setting", "settings_for"]

TILE_BYTES = (
    32 * 2**20
)  # of logits at a time: 128 tokens of GPT-2. Smaller tiles are slower, larger ones hardly faster
BUDGET_SHARE = 32  # a budget's share for one tile of logits
LEAST_ROWS = 16
WORTH_TILING = 64 * 2**20  # logits that take less are left whole unless tiling is asked for
LONG_SEQUENCE = 4096  # positions from which on a layer's MLP is computed in tiles
MLP_ROWS = 1024
EIGHT_BIT_SHARE = 2.1 / 8  # of Adam's state, with its scales; embeddings and small tensors stay in 32 bits


@dataclass(frozen=True)
class Batch:
    """What of a batch and of a model's head the tiles follow from.

    Attributes:
        positions: positions of one sequence.
        tokens: positions of all sequences.
        vocabulary: outputs of the head; 0 if none was found.
    """

    positions: int
    tokens: int
    vocabulary: int

    @property
    def logits_bytes(self) -> int:
        return 4 * self.tokens * self.vocabulary


@dataclass(frozen=True)
class Setting:
    """One way to treat a model as a whole."""

    loss: LossTiling | None = None
    precision: Precision | None = None
    mlp_rows: int | None = None
    eight_bit: bool = False
    notes: tuple[str, ...] = ()

    @property
    def changes_the_profile(self) -> bool:
        """Whether a step with it needs other memory than what optimizer state takes less."""
        return self.loss is not None or self.precision is not None or self.mlp_rows is not None

    @property
    def working_share(self) -> float:
        return 1.0 if self.precision is None else 0.5

    @property
    def state_share(self) -> float:
        return EIGHT_BIT_SHARE if self.eight_bit else 1.0

    def alone(
        self, blocks: Sequence[Block], home: Tier | None, resident: Mapping[str, tuple[str, ...]]
    ) -> Plan:
        """A plan that does this and nothing else, to profile a model under it.

        Args:
            blocks: the model's.
            home: where parameters may live, if they may; then they do, as most plans will have it.
            resident: by block, the parameters that stay on the device all the same.
        """
        layers = []
        for block in blocks:
            techniques: list[str] = []
            if home is not None:
                techniques.append("offloading")
            tiles = None
            if self.mlp_rows is not None and block.role == "repeated":
                techniques.append("tiling")
                tiles = Tiling(self.mlp_rows)
            layers.append(
                LayerPlan(
                    block.name,
                    block.members,
                    tuple(techniques),
                    "",
                    "",
                    offloading=None
                    if home is None
                    else Offloading(home, resident=resident.get(block.name, ())),
                    tiling=tiles,
                )
            )
        return Plan(tuple(layers), loss=self.loss, precision=self.precision)


NOTHING = Setting()


def settings_for(hardware: Hardware, config: Config, batch: Batch) -> tuple[Setting, ...]:
    """The settings to choose from; several if it depends on what they gain.

    What the user asks for, by a field or by AGGRESSIVE, is in all of them. On a CPU the loss may be tiled in
    BALANCED too, where the logits are large: the three copies of them that backward has would undo much of what
    offloading gains there.
    """
    precision, reason = choose_precision(hardware.device, config.use_mixed_precision)
    notes: tuple[str, ...] = ()
    if config.use_mixed_precision and precision is None:
        notes = (f"no mixed precision: {reason}",)
    asked = Setting(
        precision=precision,
        eight_bit=config.use_8bit_optimizer,
        notes=notes,
        mlp_rows=MLP_ROWS if config.enable_tiling and batch.positions >= LONG_SEQUENCE else None,
    )
    tiles = _loss_tiles(config, batch)
    if tiles is None:
        return (asked,)
    tiled = Setting(tiles, asked.precision, asked.mlp_rows, asked.eight_bit, asked.notes)
    if config.enable_tiling:
        return (tiled,)
    may = "enable_tiling" not in config.explicit_fields and config.enable_offloading
    if hardware.device.kind == "cpu" and may and batch.logits_bytes >= WORTH_TILING:
        return asked, tiled
    return (asked,)


def _loss_tiles(config: Config, batch: Batch) -> LossTiling | None:
    if not batch.vocabulary or not batch.tokens:
        return None
    room = TILE_BYTES
    if config.memory_budget_bytes is not None:
        room = min(room, config.memory_budget_bytes // BUDGET_SHARE)
    rows = LEAST_ROWS
    while 2 * rows * batch.vocabulary * 4 <= room and rows < batch.tokens:
        rows *= 2
    whole, tile = format_bytes(batch.logits_bytes), format_bytes(4 * rows * batch.vocabulary)
    return LossTiling(rows, "logits-in-tiles", f"logits of {whole} are never whole, but {tile} at a time")
