"""Private torch APIs that tell where autograd is (tried on torch 2.13).

Without them the tracker could not tell backward from forward, nor which module a backward tensor belongs to.
"""

from __future__ import annotations

import torch


def in_backward() -> bool:
    """Is this thread running inside a backward pass?"""
    return bool(torch._C._current_graph_task_id() != -1)


def next_sequence_number() -> int:
    """The number that autograd's next node will get in this thread."""
    return int(torch._C._autograd._get_sequence_nr())


def running_sequence_number() -> int | None:
    """The number of the node whose backward is running; leaves (AccumulateGrad) have none that means anything."""
    node = torch._C._current_autograd_node()
    if node is None:
        return None
    number = int(node._sequence_nr())
    return number if number < 1 << 62 else None
