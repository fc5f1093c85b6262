"""Private torch APIs that tell where autograd is (tried on torch 2.13).

Without them the tracker could not tell backward from forward, nor which module a backward tensor belongs to.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

graph_task = torch._C._current_graph_task_id
OUTSIDE_BACKWARD = -1


def in_backward() -> bool:
    """Is this thread running inside a backward pass?"""
    return bool(graph_task() != OUTSIDE_BACKWARD)


def next_sequence_number() -> int:
    """The number that autograd's next node will get in this thread."""
    return int(torch._C._autograd._get_sequence_nr())


def running_sequence_number() -> int | None:
    """The number of the node whose backward is running; the nodes of leaves (AccumulateGrad) have none."""
    node = torch._C._current_autograd_node()
    if node is None:
        return None
    number = int(node._sequence_nr())
    return number if number < 1 << 62 else None


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call back once when the backward pass that is running has made all gradients; not if it fails."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)
