"""Where the simulator, the executing device and the CPU agree, and where they do not and why.

This is data: the tests hold every entry, and the table in docs/simulator.md is written from it.

    python tests/support/agreement.py        # prints the table
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from support.families import FAMILIES


@dataclass(frozen=True)
class Agreement:
    """What holds for one family over three AdamW steps with dropout on.

    Attributes:
        device_bytes: The simulated peak on ``vgpu`` minus the executing device's; None if it can't be simulated.
        host_bytes: The simulated peak on the CPU minus the tracked one of a real CPU run; None as above;
            "within 1%" where it depends on the CPU by how much.
        losses: "equal" to the CPU's bit for bit, "close" (to float32's precision) or "other".
        reason: Why, where something differs.
    """

    device_bytes: int | None = 0
    host_bytes: int | str | None = 0
    losses: str = "equal"
    reason: str = ""


EXCEPTIONS = {
    "whisper": Agreement(
        losses="other",
        reason="draws whether to drop a layer on the host, so host and device draw in another order",
    ),
    "mixtral": Agreement(
        device_bytes=None,
        host_bytes=None,
        reason="which experts are hit depends on the data (`nonzero`): can't be simulated, is executed",
    ),
    "lstm": Agreement(
        host_bytes="within 1%",
        reason="the CPU's own kernel (oneDNN) keeps a workspace whose size depends on the CPU",
    ),
    "unet": Agreement(
        device_bytes=3 * (512 - 6_144),
        host_bytes=3 * (4 - 6_144),
        reason="the CPU's `mse_loss` returns the buffer it summed up: 6,144 B for each of the three losses kept",
    ),
}


def agreement(name: str) -> Agreement:
    return EXCEPTIONS.get(name, Agreement())


def _bytes(difference: int | str | None) -> str:
    if difference is None:
        return "not simulated"
    if isinstance(difference, str):
        return difference
    return "equal" if difference == 0 else f"{difference:+,} B"


def table() -> str:
    """The table of docs/simulator.md."""
    lines = [
        "| family | simulated − executing device | simulated CPU − CPU | losses: executing device and CPU | why |",
        "|---|---|---|---|---|",
    ]
    for name in FAMILIES:
        row = agreement(name)
        lines.append(
            f"| {name} | {_bytes(row.device_bytes)} | {_bytes(row.host_bytes)} | {row.losses} | {row.reason} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
