"""`DistributedDataParallel` on a CUDA device: every gradient is averaged, in whatever order a model is wrapped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import memscale
from memscale import Config
from support.one_process import STEPS, batch, build, count_buckets, process_group, train

CONFIG = Config(
    mode="aggressive",
    force_optimize=True,
    enable_logging=False,
    use_mixed_precision=False,
    use_8bit_optimizer=False,
    enable_tiling=False,
    fused_host_step=False,
)
ORDERS = ["wrap, parallel", "wrap with a sample, parallel", "parallel, wrap", "parallel, wrap with a sample"]


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if not dist.is_gloo_available():
        pytest.skip("this torch is built without gloo")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with process_group():
        yield


@pytest.mark.parametrize("order", ORDERS)
def test_every_gradient_is_averaged(
    order: str, computing: Callable[[], AbstractContextManager[None]], group: None
) -> None:
    with computing():
        plain = DistributedDataParallel(build().cuda(), device_ids=[0])
        expected = count_buckets(plain), train(plain)
        model: nn.Module = build().cuda()
        for act in order.split(", "):
            if act == "parallel":
                model = DistributedDataParallel(model, device_ids=[0])
                buckets = count_buckets(model)
            else:
                wrapped = memscale.wrap(model, CONFIG, batch().cuda() if act.endswith("sample") else None)
        assert (buckets, train(model)) == expected
        assert buckets[0] >= STEPS
        plan = wrapped._memscale_executor.plan
        assert any("checkpointing" in layer.techniques for layer in plan.layers)
        assert plan.optimizer.state == "host"
        assert {each.device.type for each in model.parameters()} == {"cuda"}
        memscale.detach(wrapped)
