"""The cache of Hugging Face models: off while they train, as it was at all other times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memscale
from memscale.checkpointing.technique import NoCache, no_cache_hooks
from memscale.config import Config
from memscale.executor import Executor, executor_of
from support.checkpointed import checkpoint_plan, wrapped
from support.families import FAMILIES

transformers = pytest.importorskip("transformers")

IDS = torch.arange(3, 15).reshape(2, 6)


def build(name: str) -> nn.Module:
    return FAMILIES[name].build()


def configs(model: nn.Module) -> list[Any]:
    return [
        module.config for module in model.modules() if hasattr(getattr(module, "config", None), "use_cache")
    ]


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "mixtral"])
def test_off_in_training_on_in_evaluation(name: str, regions) -> None:
    model = build(name)
    assert model(IDS).past_key_values is not None
    wrapped(model)
    assert model(IDS).past_key_values is None
    assert len(regions) == 3
    with torch.no_grad():
        assert model(IDS).past_key_values is not None
    assert model.eval()(IDS).past_key_values is not None
    model.train()._memscale_executor.detach()
    assert model(IDS).past_key_values is not None
    assert len(regions) == 3


@pytest.mark.parametrize("name", ["gpt2", "t5", "whisper", "bert"])
def test_the_config_never_changes_not_even_inside_a_pass(name: str) -> None:
    family, model = FAMILIES[name], build(name)
    expected = [config.use_cache for config in configs(model)]
    assert expected
    seen: list[list[bool]] = []
    for module in model.modules():
        module.register_forward_hook(lambda *_: seen.append([config.use_cache for config in configs(model)]))
    wrapped(model)
    family.loss(model, family.batch()).backward()
    assert seen
    assert all(values == expected for values in seen)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_the_config_is_right_after_a_pass_that_failed(error: type[BaseException]) -> None:
    def fail(*_: Any) -> None:
        raise error

    model = wrapped(build("gpt2"))
    model.transformer.h[1].register_forward_pre_hook(fail)
    with pytest.raises(error):
        model(IDS)
    assert model.config.use_cache is True


def test_a_cache_that_is_asked_for_is_given_and_not_written_to_twice(
    regions, caplog: pytest.LogCaptureFixture
) -> None:
    plain, model = build("gpt2"), wrapped(build("gpt2"))

    def run(model: nn.Module) -> tuple[Any, list[torch.Tensor]]:
        torch.manual_seed(1)
        model.zero_grad()
        output = model(IDS, labels=IDS, use_cache=True)
        output.loss.backward()
        return output.past_key_values, [output.loss, *(p.grad.clone() for p in model.parameters())]

    for _ in range(2):
        cache, ours = run(model)
        _, expected = run(plain)
        assert cache.get_seq_length() == IDS.shape[1]
        assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
    assert len(regions) == 2 * 3
    assert caplog.text.count("asked for a cache") == 1


def test_a_cache_of_the_callers_own_is_read(regions) -> None:
    """As prefix tuning does it."""
    plain, model = build("gpt2"), wrapped(build("gpt2"))
    losses = []
    for each in (plain, model):
        cache = transformers.DynamicCache(config=each.config)
        with torch.no_grad():
            each.eval()(IDS[:, :2], past_key_values=cache)
        each.train()
        torch.manual_seed(1)
        losses.append(each(IDS, past_key_values=cache).logits.sum())
        losses[-1].backward()
    assert torch.equal(*losses)
    assert all(map(torch.equal, *([p.grad for p in each.parameters()] for each in (plain, model))))
    assert len(regions) == 3


def test_generation_in_training_mode_has_its_cache(regions) -> None:
    model = wrapped(build("gpt2"))
    torch.manual_seed(0)
    ours = model.generate(IDS, max_new_tokens=3, do_sample=False, pad_token_id=0)
    torch.manual_seed(0)
    plain = build("gpt2").generate(IDS, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert torch.equal(ours, plain)
    assert not regions


def test_a_model_inside_a_users_own_is_found() -> None:
    class Mine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.language = build("gpt2")

        def forward(self, ids: torch.Tensor) -> Any:
            return self.language(ids)

    model = wrapped(Mine())
    assert model(IDS).past_key_values is None


def test_no_hook_where_there_is_no_cache() -> None:
    assert no_cache_hooks(build("vit"), logs=True) == []
    assert no_cache_hooks(nn.Linear(2, 2), logs=True) == []
    model = wrapped(build("tied"))
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_silence_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    model = build("gpt2")
    Executor(model, checkpoint_plan(model), Config(enable_logging=False)).attach()
    model(IDS, use_cache=True)
    assert not caplog.records


class Positional(nn.Module):
    config = type("Settings", (), {"use_cache": True})()

    def forward(self, x: int, use_cache: bool | None = None, **rest: Any) -> tuple[Any, ...]:
        return x, use_cache, rest


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda model: model(1), (1, False, {})),
        (lambda model: model(1, None), (1, False, {})),
        (lambda model: model(1, True), (1, True, {})),
        (lambda model: model(1, False), (1, False, {})),
        (lambda model: model(1, use_cache=None), (1, False, {})),
        (lambda model: model(1, use_cache=True), (1, True, {})),
        (lambda model: model(1, other=2), (1, False, {"other": 2})),
        (lambda model: model(1, past_key_values=3), (1, None, {"past_key_values": 3})),
        (lambda model: model.eval()(1), (1, None, {})),
    ],
)
def test_what_a_caller_says_is_respected(call: Callable[[nn.Module], Any], expected: tuple[Any, ...]) -> None:
    model = Positional()
    ((module, hook),) = no_cache_hooks(model, logs=False)
    assert isinstance(hook, NoCache)
    assert module is model
    model.register_forward_pre_hook(hook, with_kwargs=True)
    assert call(model) == expected


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_a_model_that_is_left_as_it_is_keeps_its_cache(name: str) -> None:
    def said(model: nn.Module) -> list[object]:
        """What each module is told in the second step; a wrapped model is planned for in the first one."""
        found: list[object] = []
        for module in model.modules():
            module.register_forward_pre_hook(
                lambda _, args, kwargs: found.append(kwargs.get("use_cache")), with_kwargs=True
            )
        for _ in range(2):
            found.clear()
            output = model(**FAMILIES[name].batch())
            assert output.past_key_values is not None
            output.loss.backward()
        return found

    idle = Config(
        enable_checkpointing=False, enable_offloading=False, enable_tiling=False, enable_logging=False
    )
    model = memscale.wrap(build(name), idle)
    assert said(model) == said(build(name))
    assert executor_of(model).plan.does_nothing
