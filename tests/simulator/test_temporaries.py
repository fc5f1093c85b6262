"""Memory that kernels take beside their results: CUDA's temporaries, and the workspace of oneDNN's LSTM."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from memscale import MemoryTracker
from memscale.simulator import simulate
from memscale.simulator.fake import lstm_workspace_bytes

SCORES = 16 * 2**20  # bytes; the allocator takes it as it is


def peak_in_backward(forward: Callable[[torch.Tensor], torch.Tensor], device: str) -> int:
    """What backward of one operation has in use at most, above its operands and its result."""
    with simulate("1GiB", device=device) as simulation:
        x = torch.randn(4, 4, 512, 512, device=simulation.device, requires_grad=True)
        out = forward(x)
        gradient = torch.randn_like(out)
        tracker = simulation.tracker
        before = tracker.live_bytes(simulation.device)
        tracker.reset_peak()
        (grad,) = torch.autograd.grad(out, x, gradient)
        return simulation.peak_bytes - before - grad.nbytes


def test_softmax_multiplies_into_a_whole_matrix_on_cuda_only() -> None:
    assert peak_in_backward(lambda x: x.softmax(-1), "vgpu") == SCORES
    assert peak_in_backward(lambda x: x.softmax(-1), "cpu") == 0


def test_log_softmax_needs_no_temporary() -> None:
    assert peak_in_backward(lambda x: x.log_softmax(-1), "vgpu") == 0


def test_group_norm_sums_by_sample_and_channel_on_cuda_only() -> None:
    def norm(x: torch.Tensor) -> torch.Tensor:
        return functional.group_norm(x, 2)

    # Two sums for 4 × 4 samples and channels, two numbers for 4 × 2 groups: a block of 512 bytes each.
    assert peak_in_backward(norm, "vgpu") == 4 * 512
    assert peak_in_backward(norm, "cpu") == 0


def test_attention_written_out_needs_the_temporary_at_its_peak() -> None:
    """Forward keeps probabilities only; backward has them, their gradient, that of the scores, and the product."""
    with simulate("1GiB") as simulation:
        q, k, v = (torch.randn(4, 4, 512, 64, device=simulation.device, requires_grad=True) for _ in range(3))
        small = 7 * q.nbytes  # three operands, output, its gradient, and two more gradients
        out = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        simulation.tracker.reset_peak()
        out.backward(torch.ones_like(out))
        workspaces = simulation.tracker.workspace_bytes(simulation.device)
    assert 4 * SCORES <= simulation.peak_bytes - workspaces <= 4 * SCORES + small


@pytest.mark.parametrize(
    ("steps", "samples", "inputs", "hidden"),
    [(50, 16, 48, 64), (7, 5, 33, 17), (20, 3, 64, 128), (1, 1, 1, 1), (9, 2, 300, 100)],
)
def test_the_workspace_of_an_lstm_on_the_cpu(steps: int, samples: int, inputs: int, hidden: int) -> None:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    model, x = nn.LSTM(inputs, hidden), torch.randn(steps, samples, inputs)
    with MemoryTracker() as tracker:
        out, _ = model(x)
        out.sum().backward()
    with simulate("1GiB", device="cpu") as simulation:
        twin, y = simulation.copy_of(model), simulation.batch_of(x)
        simulated, _ = twin(y)
        simulated.sum().backward()
    assert lstm_workspace_bytes(steps, samples, inputs, hidden) < tracker.peak_bytes("cpu")
    # A second bias gradient is all that is missing.
    assert (
        0
        <= tracker.peak_bytes("cpu") - simulation.peak_bytes
        <= 0.01 * tracker.peak_bytes("cpu") + 16 * hidden
    )
