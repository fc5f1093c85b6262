"""What is predicted of each placement that a plan can contain is what two training steps need on the virtual GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from memscale import Config, Plan
from memscale.execution_plan import OptimizerPlan
from memscale.executor import Executor
from memscale.hardware import virtual_hardware
from memscale.optimizer.needs import needs_of
from memscale.planner.assembly import Verdict, plan_of
from memscale.planner.cost_model import Choice, CostModel, full_checkpointing
from memscale.planner.make_plan import ProfiledModel, profile_settings
from memscale.planner.predict import Step, predict, rehearsal
from memscale.profiler import Place, Sample
from memscale.simulator import simulate
from support.offloaded import plan_of as offloaded_plan

GPU = "RTX 3090"
HARDWARE = virtual_hardware(GPU)
CONFIG = Config(enable_logging=False)
TOKENS = torch.zeros(4, 256, dtype=torch.long)
SAMPLE = Sample((), {"input_ids": TOKENS, "labels": TOKENS})


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(n_layer=6, n_embd=512, n_head=8, vocab_size=8192)).train()


def trained(
    plan: Plan,
    batch: torch.Tensor = TOKENS,
    make: Callable[[nn.Module], torch.optim.Optimizer] = lambda model: torch.optim.AdamW(model.parameters()),
) -> int:
    """Return the peak of two steps of training with a plan."""
    with simulate(GPU) as simulation:
        model = gpt2()
        Executor(model, plan, CONFIG.replace(warmup_steps=0), device=simulation.device).attach()
        tokens = batch.to(simulation.device)
        simulation.tracker.reset_peak()
        optimizer = make(model)
        for _ in range(2):
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return simulation.peak_bytes


@functools.cache
def profiled(config: Config) -> tuple[nn.Module, ProfiledModel]:
    with torch.device("meta"):
        model = gpt2()
    with rehearsal(model):
        return model, profile_settings(model, SAMPLE, config, HARDWARE)


@pytest.mark.matrix(14)
@pytest.mark.parametrize("states_on_host", [0, 4, 9], ids="state of {} blocks on host".format)
@pytest.mark.parametrize("activations", ["inputs kept", "inputs offloaded", "saved offloaded"])
@pytest.mark.parametrize("offloaded", [0, 3, 6], ids="{} layers offloaded".format)
@pytest.mark.parametrize("prefetch", [0, 1], ids=["waiting", "prefetching"])
@pytest.mark.parametrize("host_step", ["cpu", "device", "device in backward"], ids="stepped on the {}".format)
def test_predicted_is_what_training_needs(
    states_on_host: int, activations: str, offloaded: int, prefetch: int, host_step: str
) -> None:
    host_step, _, overlapped = host_step.partition(" ")
    config = CONFIG.replace(overlap_optimizer=bool(overlapped))
    model, known = profiled(config)
    device_step = host_step == "device"
    setting, needs = next(
        each for each in known.under if each[0].bucketed and each[0].device_step == device_step
    )
    costs = CostModel(needs, HARDWARE, config, setting, prefetch)
    layers = [index for index, block in enumerate(costs.blocks) if block.role == "repeated"]
    choices = list(full_checkpointing(costs.blocks))
    for index in layers:
        is_offloaded = index in layers[len(layers) - offloaded :]
        if activations == "saved offloaded":
            choices[index] = Choice("offloading", int(is_offloaded), False, is_offloaded, True)
        else:
            inputs = activations == "inputs offloaded" and index > layers[0]
            choices[index] = choices[index]._replace(offloaded=is_offloaded, input_offloaded=inputs)
    point = costs.point(tuple(choices), states_on_host)
    plan = plan_of(Verdict(point, "by-hand"), known.profile, HARDWARE, config, under=known.under)
    assert plan.optimizer is not None
    assert plan.optimizer.overlapped == bool(overlapped and (states_on_host or offloaded))
    assert plan.optimizer.bucket_bytes > 0
    assert (plan.optimizer.state == "host") == bool(states_on_host)
    assert plan.optimizer.host_step == (host_step if offloaded else "cpu")
    with rehearsal(model):
        predicted = predict(model, plan, SAMPLE, Place.of(HARDWARE.device), config, Step(1, 1))
    peak = trained(predicted)
    assert peak <= predicted.predicted_peak_bytes + predicted.allowance_bytes
    assert predicted.predicted_peak_bytes == pytest.approx(peak, rel=0.01)
    # The allocator gets the requests of training, one by one; of steps of masters, and in backward, only their sums.
    if not offloaded and not overlapped:
        assert predicted.predicted_peak_bytes == peak
    # Estimated. Without prefetching what is saved comes back tensor by tensor, and is estimated as a whole.
    rough = prefetch or activations == "saved offloaded"
    # How full buckets are in backward is not estimated: all are taken to be there in the backward of each layer.
    assert point.peak_bytes == pytest.approx(peak, rel=0.2 if overlapped else 0.1 if rough else 0.05)


@pytest.mark.parametrize("bucket", [2**20, 2**23, 2**26], ids="{} bytes".format)
@pytest.mark.parametrize("kind", ["AdamW", "RMSprop", "SGD"])
@pytest.mark.matrix(5)
def test_the_peak_of_a_step_on_the_device_is_predicted(kind: str, bucket: int) -> None:
    """All parameters are on the host, and a batch of a few tokens needs less than two buckets."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return getattr(torch.optim, kind)(model.parameters(), lr=0.1)

    with torch.device("meta"):
        model = gpt2()
    tokens = TOKENS[:1, :8]
    plan = offloaded_plan(
        model,
        to="host",
        activations=False,
        optimizer=OptimizerPlan(bucket_bytes=bucket, host_step="device"),
    )
    place, sample = Place.of(HARDWARE.device), Sample((), {"input_ids": tokens, "labels": tokens})
    with rehearsal(model):
        needs = needs_of(make(model), model, place)
        predicted = predict(model, plan, sample, place, CONFIG, Step(1, 1), needs)
    peak = trained(predicted, tokens, make)
    assert predicted.predicted_peak_bytes == pytest.approx(peak, rel=0.01)
    if bucket > 2**23:
        assert predicted.peak_at == "optimizer step"
        assert peak > 2 * bucket
