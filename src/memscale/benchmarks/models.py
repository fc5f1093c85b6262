"""The models and devices of the suite, by name. Models are built with random weights; nothing is downloaded.

To add a model: an entry in `_ALL`. Its numbers are those of the published checkpoint's configuration.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from memscale.errors import ConfigError, ConfigTypeError, MemScaleError, shown
from memscale.hardware import GpuSpec, gpu_or_size, virtual_hardware
from memscale.units import format_bytes

PUBLISHED_ON = "NVIDIA GeForce RTX 3090"  # the device of every published figure


class MissingPackageError(MemScaleError, ImportError):
    """Something was asked for that needs a package which is not installed."""


@dataclass(frozen=True)
class Published:
    """Peak device memory in GiB by the documentation of memscale 1.1, another package: RTX 3090, fp32 AdamW."""

    baseline_gib: float | None  # without any optimization; None if it does not fit the card
    peak_gib: float  # with theirs


Inputs: TypeAlias = dict[str, Tensor]
"""The keyword arguments of a training call: with labels, so that the output has a `loss`."""

MakeInputs: TypeAlias = Callable[[int, int, torch.device | str], Inputs]
"""Makes the inputs of so many samples of so many tokens (0 if samples have one size) on a device."""


@dataclass(frozen=True)
class BenchmarkModel:
    name: str
    batch: int  # samples, by default
    seq: int | None  # tokens in a sample, by default; None if all samples have one size, as images
    make: Callable[[], nn.Module]
    make_inputs: MakeInputs
    # What building it imports: transformers leaves some 100 MiB to a model's first use.
    modules: tuple[str, ...]
    positions: int | None = None  # tokens in a sample, at most; None: as many as memory holds
    published: Published | None = None  # with the default batch

    def build(self) -> nn.Module:
        """Return the model with random weights, on the CPU (or what `torch.device` says), in training mode."""
        return self.make().train()

    def check_length(self, seq: int | None) -> None:
        """Raise a ConfigError if the model takes no samples of `seq` tokens; None is the length of one-size samples."""
        if (seq is None) != (self.seq is None):
            one_size = (
                "its samples have one size: leave seq out" if self.seq is None else "give a number of tokens"
            )
            raise ConfigError(f"seq={seq} is not allowed for {self.name}: {one_size}.")
        if seq is not None and self.positions is not None and seq > self.positions:
            raise ConfigError(f"seq={seq} is too long for {self.name}: it has {self.positions} positions.")

    def inputs(self, batch: int, seq: int | None = None, device: torch.device | str = "cpu") -> Inputs:
        """Return a random batch; every token of `labels` counts in the loss."""
        self.check_length(seq)
        return self.make_inputs(batch, seq or 0, device)


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise MissingPackageError(
            "The benchmark models are built with transformers, which is not installed: "
            "pip install transformers.",
            name="transformers",
        ) from None


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence warnings of transformers in the block, such as those of a model that has no trained weights."""
    logging = _transformers().utils.logging
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _make(config: str, model: str, settings: Mapping[str, Any]) -> nn.Module:
    with quiet_transformers():
        library = _transformers()
        built: nn.Module = getattr(library, model)(getattr(library, config)(**settings))
    return built


def _of_transformers(
    name: str,
    batch: int,
    seq: int | None,
    classes: tuple[str, str],
    make_inputs: MakeInputs,
    *,
    package: str,
    positions: int | None = None,
    published: Published | None = None,
    **settings: Any,
) -> BenchmarkModel:
    return BenchmarkModel(
        name,
        batch,
        seq,
        functools.partial(_make, *classes, settings),
        make_inputs,
        ("transformers", f"transformers.models.{package}.modeling_{package}"),
        positions,
        published,
    )


def _tokens(vocabulary: int, batch: int, seq: int, device: torch.device | str) -> Inputs:
    ids = torch.randint(0, vocabulary, (batch, seq), device=device)
    return {"input_ids": ids, "labels": ids}


def _images(batch: int, seq: int, device: torch.device | str) -> Inputs:
    return {
        "pixel_values": torch.randn(batch, 3, 224, 224, device=device),
        "labels": torch.randint(0, 1000, (batch,), device=device),
    }


def _speech(batch: int, seq: int, device: torch.device | str) -> Inputs:
    """Return 30 seconds of sound a sample, which is what Whisper always takes, and `seq` tokens of text."""
    sound = torch.randn(batch, 80, 3000, device=device)
    return {"input_features": sound, "labels": torch.randint(0, 51865, (batch, seq), device=device)}


def _latents(batch: int, seq: int, device: torch.device | str) -> Inputs:
    """Return what the denoiser sees of images of 512 x 512 pixels, and their encoded captions."""
    noisy = torch.randn(batch, 4, 64, 64, device=device)
    return {
        "noisy": noisy,
        "timesteps": torch.randint(0, 1000, (batch,), device=device),
        "text": torch.randn(batch, 77, 768, device=device),
        "labels": torch.randn_like(noisy),
    }


def _make_unet() -> nn.Module:
    from memscale.benchmarks.unet import DiffusionUNet

    return DiffusionUNet()


def _transformer_shape(
    name: str,
    layers: int,
    width: int,
    heads: int,
    batch: int,
    seq: int,
    *,
    classes: tuple[str, str],
    package: str,
    vocabulary: int,
    positions: int,
    published: Published | None = None,
) -> BenchmarkModel:
    return _of_transformers(
        name,
        batch,
        seq,
        classes,
        functools.partial(_tokens, vocabulary),
        package=package,
        positions=positions,
        published=published,
        vocab_size=vocabulary,
        max_position_embeddings=positions,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        bos_token_id=vocabulary - 1,
        eos_token_id=vocabulary - 1,
    )


_gpt2_model = functools.partial(
    _transformer_shape,
    classes=("GPT2Config", "GPT2LMHeadModel"),
    package="gpt2",
    vocabulary=50257,
    positions=1024,
)
_bert_model = functools.partial(
    _transformer_shape,
    classes=("BertConfig", "BertForMaskedLM"),
    package="bert",
    vocabulary=30522,
    positions=512,
)
_llama_3_2 = functools.partial(
    _of_transformers,
    classes=("LlamaConfig", "LlamaForCausalLM"),
    make_inputs=functools.partial(_tokens, 128256),
    package="llama",
    positions=131072,
    vocab_size=128256,
    intermediate_size=8192,
    num_key_value_heads=8,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    rope_parameters={
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    tie_word_embeddings=True,
    bos_token_id=128000,
    eos_token_id=128001,
)

_ALL = (
    # name, layers, width, heads, batch, seq
    _bert_model("bert-base", 12, 768, 12, 16, 128, published=Published(3.14, 0.84)),
    _bert_model("bert-large", 24, 1024, 16, 16, 128, published=Published(7.60, 2.02)),
    _gpt2_model("gpt2-medium", 24, 1024, 16, 4, 512, published=Published(10.87, 2.61)),
    _gpt2_model("gpt2-large", 36, 1280, 20, 2, 512, published=Published(14.87, 4.68)),
    _gpt2_model("gpt2-xl", 48, 1600, 25, 1, 512, published=Published(None, 9.25)),
    _gpt2_model("gpt2", 12, 768, 12, 4, 512),
    # name, batch, seq
    _llama_3_2(
        "llama-3.2-1b", 1, 2048, hidden_size=2048, num_hidden_layers=16, num_attention_heads=32, head_dim=64
    ),
    _llama_3_2(
        "llama-3.2-3b", 1, 2048, hidden_size=3072, num_hidden_layers=28, num_attention_heads=24, head_dim=128
    ),
    _of_transformers(
        "qwen3-0.6b",
        1,
        2048,
        ("Qwen3Config", "Qwen3ForCausalLM"),
        functools.partial(_tokens, 151936),
        package="qwen3",
        positions=40960,
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        tie_word_embeddings=True,
        bos_token_id=151643,
        eos_token_id=151645,
    ),
    _of_transformers(
        "t5-large",
        4,
        512,  # of the text as of its translation
        ("T5Config", "T5ForConditionalGeneration"),
        functools.partial(_tokens, 32128),
        package="t5",
        vocab_size=32128,
        d_model=1024,
        d_kv=64,
        d_ff=4096,
        num_layers=24,
        num_heads=16,
        decoder_start_token_id=0,
    ),
    _of_transformers(
        "vit-large",
        32,
        None,
        ("ViTConfig", "ViTForImageClassification"),
        _images,
        package="vit",
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
        patch_size=16,
        image_size=224,
        num_labels=1000,
    ),
    _of_transformers(
        "whisper-medium",
        4,
        448,
        ("WhisperConfig", "WhisperForConditionalGeneration"),
        _speech,
        package="whisper",
        positions=448,
        vocab_size=51865,
        d_model=1024,
        encoder_layers=24,
        encoder_attention_heads=16,
        encoder_ffn_dim=4096,
        decoder_layers=24,
        decoder_attention_heads=16,
        decoder_ffn_dim=4096,
        num_mel_bins=80,
        max_source_positions=1500,
        max_target_positions=448,
    ),
    _of_transformers(
        "resnet-50",
        64,
        None,
        ("ResNetConfig", "ResNetForImageClassification"),
        _images,
        package="resnet",
        embedding_size=64,
        hidden_sizes=[256, 512, 1024, 2048],
        depths=[3, 4, 6, 3],
        layer_type="bottleneck",
        num_labels=1000,
    ),
    BenchmarkModel("diffusion-unet", 4, None, _make_unet, _latents, ("memscale.benchmarks.unet",)),
    # Small enough to be trained on a CPU in seconds.
    _gpt2_model("gpt2-small", 12, 512, 8, 4, 512),
    _gpt2_model("gpt2-tiny", 2, 64, 2, 2, 64, vocabulary=1000, positions=128),
    _bert_model("bert-tiny", 2, 64, 2, 2, 64, vocabulary=1000, positions=128),
)

MODELS: dict[str, BenchmarkModel] = {model.name: model for model in _ALL}
"""Every model of the suite by its name."""

DEFAULT_MODELS: tuple[str, ...] = tuple(model.name for model in _ALL if model.published is not None)
"""What the suite runs unless told otherwise: the models with published figures."""


def find_model(name: str) -> BenchmarkModel:
    """Return the model of that name; raise a ConfigError that lists the names there are if it is none of them."""
    if not isinstance(name, str):
        raise ConfigError(f"A model is found by its name, such as 'gpt2-medium'; got {shown(name)}.")
    if name not in MODELS:
        raise unknown_name("model", name, MODELS)
    return MODELS[name]


Device: TypeAlias = GpuSpec | int | None
"""What a case runs on: a GPU of the table or so many bytes (simulated), or None for the CPU (measured)."""


def find_device(on: str) -> Device:
    """Return the device that `on` names: a GPU ("RTX 3090", "a100-80gb"), a size ("24GiB"), or "cpu"."""
    if not isinstance(on, str):
        raise ConfigTypeError(
            f"on={shown(on)} is a {type(on).__name__}: give the name of a GPU, a size as text, or 'cpu'."
        )
    text = on.strip()
    if text.lower() == "cpu":
        return None
    return gpu_or_size(text, field="on")


def device_name(on: str) -> str:
    """Return the device in full: its name, and its memory unless the name says that.

    Example:
        >>> device_name("rtx3090"), device_name("24GiB"), device_name("cpu")
        ('NVIDIA GeForce RTX 3090, 24.0 GiB', 'a GPU of 24.0 GiB', 'the CPU')
    """
    device = find_device(on)
    if device is None:
        return "the CPU"
    if isinstance(device, GpuSpec):
        return f"{device.name}, {format_bytes(device.memory_bytes)}"
    return f"a GPU of {format_bytes(device)}"


def assumed_host(on: str) -> str:
    """Return the link and the host that are assumed of a simulated device: plans and step times depend on them.

    Example:
        >>> assumed_host("rtx3090")
        'a link of 32 GB/s each way (published rate) to a host of 64.0 GiB'
    """
    device = find_device(on)
    assert device is not None, "the CPU is not simulated"
    hardware = virtual_hardware(device)
    link, host = hardware.device.link_bandwidth / 1e9, format_bytes(hardware.host.total_ram_bytes)
    return f"a link of {link:.0f} GB/s each way (published rate) to a host of {host}"


def unknown_name(kind: str, name: object, allowed: Iterable[str]) -> ConfigError:
    names = list(allowed)
    near = get_close_matches(str(name).lower(), names, n=1, cutoff=0.5)
    guess = f"; did you mean {near[0]}?" if near else "."
    return ConfigError(f"There is no {kind} {shown(name)}{guess} Allowed: {', '.join(names)}.")
