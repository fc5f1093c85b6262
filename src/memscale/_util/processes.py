"""The processes of a job of torch.distributed."""

from __future__ import annotations

import torch


def in_process_group() -> bool:
    """Return whether torch.distributed has been initialised, be it for this process alone."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def process_count() -> int:
    """Return how many processes train together; 1 where torch.distributed is not in use."""
    return torch.distributed.get_world_size() if in_process_group() else 1


def process_rank() -> int:
    """Return the number of this process among them, from 0 on."""
    return torch.distributed.get_rank() if process_count() > 1 else 0
