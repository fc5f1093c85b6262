"""A model that does not fit: with a hard limit on memory the plain one fails, and the one on disk trains within it."""

from __future__ import annotations

import pytest

from memscale.errors import ProfileError
from memscale.memory.process import measure_in_fresh_process

pytestmark = pytest.mark.cpu_only

MIB = 2**20
LAYERS, WIDTH = (
    24,
    256,
)  # 2 MiB of parameters a layer, 48 in all; four times that with gradients and Adam's moments
ROOM_MIB = 96


def train_within(room_mib: int, on_disk: bool) -> dict[str, object]:
    """Two steps after which the process may not take more private memory than that; its losses, and its peak."""
    import resource
    from pathlib import Path

    import torch

    from memscale.executor import Executor
    from memscale.memory.process import peak_rss_bytes, reset_peak_rss, rss_bytes
    from support.disk import QUIET, adamw, disk_plan
    from support.wrapping import Stack

    torch.manual_seed(0)
    torch.set_num_threads(1)
    small = Stack(1, WIDTH)  # what libraries take once is not counted
    small(torch.randn(64, WIDTH)).sum().backward()
    adamw(small).step()
    start = rss_bytes()
    model = Stack(LAYERS, WIDTH).train()
    whole = sum(parameter.nbytes for parameter in model.parameters())
    if on_disk:
        Executor(model, disk_plan(model, bucket_bytes=4 * MIB), QUIET).attach()
    status = Path("/proc/self/status").read_text()
    now = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmData")) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (now + room_mib * MIB,) * 2)
    reset_peak_rss()
    optimizer = adamw(model)
    losses = []
    for step in range(2):
        torch.manual_seed(step)
        loss = model(torch.randn(64, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return {"losses": losses, "peak": peak_rss_bytes() - start, "whole": whole}


@pytest.mark.slow
def test_trains_within_a_limit_that_is_too_small_for_the_plain_model() -> None:
    with pytest.raises(ProfileError, match="alloc"):
        measure_in_fresh_process(train_within, ROOM_MIB, False)
    plain = measure_in_fresh_process(train_within, 1024, False).result
    limited = measure_in_fresh_process(train_within, ROOM_MIB, True).result
    assert limited["losses"] == plain["losses"]
    assert plain["peak"] > 3.5 * plain["whole"]
    assert limited["peak"] < plain["whole"]
