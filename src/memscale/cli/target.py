"""What a command is about: a model by its name, by a Hugging Face config, or by a function that builds it.

Models are built on the meta device, without weights: nothing is downloaded and nothing is allocated.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memscale.benchmarks.models import MODELS, MissingPackageError, quiet_transformers, unknown_name
from memscale.errors import ConfigError, shown
from memscale.planner.estimates import batch_size_of, length_of, with_batch_size, with_length
from memscale.profiler import Sample, hinted_sample, sample_of


@dataclass(frozen=True)
class Target:
    """A model on the meta device, and a batch to train it with."""

    name: str
    model: nn.Module
    sample: Sample
    remark: str = ""  # what the user may not have meant
    is_batch_derived: bool = False  # from the model's config; else it is the user's own, or the registry's

    @property
    def size(self) -> str:
        """Return the batch in words: "4 × 512"; of one without a length, the samples."""
        batch, length = batch_size_of(self.sample), length_of(self.sample)
        return f"{batch} × {length}" if length > 1 else str(batch)


def find_target(text: str, batch: int | None = None, seq: int | None = None) -> Target:
    """Return what `text` names: a model of the registry, a config (file or directory), or `package.module:factory`.

    Args:
        text: `"gpt2-xl"`, `"./config.json"`, `"my_package.models:build"`. A factory takes no arguments and returns a
            model, or a model and a batch as the model is called with it.
        batch: samples in a batch; what the model has by default if not given.
        seq: tokens in a sample, likewise.

    Raises:
        ConfigError: there is no such model, or it does not take such a batch.
    """
    for name, value in (("--batch", batch), ("--seq", seq)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} {value} is not allowed: give a whole number from 1 on.")
    if text in MODELS:
        entry = MODELS[text]
        with torch.device("meta"), quiet_transformers():
            model = entry.build()
            inputs = entry.inputs(batch or entry.batch, seq or entry.seq, "meta")
        return Target(text, model, sample_of(inputs, model))
    path = Path(text)
    remark, is_derived = "", False
    if path.exists():
        name, model, sample, remark = _from_config(path)
        is_derived = True
    elif ":" in text:
        name, model, sample, is_derived = _from_factory(text)
    elif os.sep in text or text.endswith(".json"):
        raise ConfigError(f"{text}: there is no such file or directory.")
    else:
        error = unknown_name("model", text, MODELS)
        raise ConfigError(f"{error} Or give the path of a Hugging Face config, or package.module:factory.")
    return Target(name, model, _resized(model, sample, batch, seq), remark, is_derived)


def _resized(model: nn.Module, sample: Sample, batch: int | None, seq: int | None) -> Sample:
    if batch is not None:
        sample = with_batch_size(model, sample, batch)
    if seq is not None:
        if length_of(sample) <= 1:
            raise ConfigError(f"--seq {seq}: the batch of this model has no dimension for a sequence.")
        sample = with_length(model, sample, seq)
    return sample


def _from_config(path: Path) -> tuple[str, nn.Module, Sample, str]:
    """Build a model from a `config.json` of transformers, or a directory that has one."""
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"{path}: there is no config.json in this directory.")
    try:
        import transformers
    except ModuleNotFoundError:
        raise MissingPackageError(
            "A Hugging Face config needs transformers, which is not installed: pip install transformers.",
            name="transformers",
        ) from None
    try:
        config = transformers.AutoConfig.from_pretrained(str(file), local_files_only=True)
    except Exception as error:  # of transformers, which reads what a person wrote
        raise ConfigError(f"{file} is not a config of transformers: {_first_line(error)}") from error
    names = getattr(config, "architectures", None) or []
    kind: Any = getattr(transformers, names[0], None) if names else None
    with torch.device("meta"), quiet_transformers():
        try:
            build = kind._from_config if kind is not None else transformers.AutoModelForCausalLM.from_config
            model: nn.Module = build(config)
        except Exception as error:
            raise ConfigError(f"{file}: no model can be built from it: {_first_line(error)}") from error
    sample = hinted_sample(model)
    if sample is None:
        raise ConfigError(
            f"{file}: its batch cannot be derived from the config of a {type(model).__name__}. Write a function that "
            "returns the model and a batch, and give it as package.module:function."
        )
    name = type(model).__name__
    named = f"{names[0]}, which transformers has not" if names else "no class in architectures"
    remark = "" if kind is not None else f"{file} names {named}: this is {name}, by its type."
    return name, model.train(), sample, remark


def _from_factory(text: str) -> tuple[str, nn.Module, Sample, bool]:
    """Build a model with the user's function; the current directory is searched for its module."""
    module_name, _, name = text.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        factory: Callable[[], Any] = getattr(importlib.import_module(module_name), name)
    except Exception as error:  # whatever the user's module does when it is imported
        raise ConfigError(f"{text} cannot be imported: {_in_a_line(error)}") from error
    finally:
        sys.path.remove(os.getcwd())
    if not callable(factory):
        raise ConfigError(f"{text} is {shown(factory)}: name a function that returns a model.")
    try:
        with torch.device("meta"):
            built = factory()
    except Exception as error:
        raise ConfigError(f"{text} failed on the meta device: {_in_a_line(error)}") from error
    model, batch = built if isinstance(built, tuple) and len(built) == 2 else (built, None)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{text} returned {shown(built)}: it must return an nn.Module, or (module, batch).")
    sample = hinted_sample(model) if batch is None else sample_of(batch, model)
    if sample is None:
        raise ConfigError(
            f"{text} returned a {type(model).__name__} without a batch, and none can be derived from it: "
            "return (module, batch), the batch as the model is called with it."
        )
    return name, model.train(), sample, batch is None


def _in_a_line(error: Exception) -> str:
    """Return what happened in the user's code, and where in it, in one line."""
    frames = [
        each
        for each in traceback.extract_tb(error.__traceback__)[1:]
        if not each.filename.startswith("<") and each.filename != importlib.__file__
    ]
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {_first_line(error)}{where}"


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
