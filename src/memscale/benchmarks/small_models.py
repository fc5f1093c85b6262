"""Small models of many families, from their configurations with random weights: nothing is downloaded.

They are large enough that weights and activations make their peak, not the workspaces of libraries, and small
enough that a step takes a fraction of a second on a CPU. Dropout is on where a family has it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memscale.benchmarks.registry import quiet_transformers

__all__ = ["SMALL_MODELS", "Batch", "SmallModel"]

VOCABULARY = 4096
WIDTH = 256
LAYERS = 3
HEADS = 4
LENGTH = 64
CLASSES = 100
IMAGE = 64
DROPOUT = 0.1

Batch = dict[str, Tensor] | tuple[Tensor, Tensor]
"""Keywords of a model that returns its loss, or what a model is called with and its targets."""


@dataclass(frozen=True)
class SmallModel:
    """A model of one family, and how it is fed.

    Attributes:
        name: of the family.
        make: builds it.
        inputs: so many samples, on the CPU.
        loss: of a model and a batch; by default the model's own.
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[int], Batch]
    loss: Callable[[nn.Module, Any], Tensor] = lambda model, batch: model(**batch).loss

    def build(self) -> nn.Module:
        """The model in training mode, the same weights each time."""
        with torch.random.fork_rng(devices=[]), quiet_transformers():
            torch.manual_seed(0)
            return self.make().train()

    def batch(self, size: int, device: torch.device | str = "cpu") -> Batch:
        """The same batch each time, on a device."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            batch = self.inputs(size)
        if isinstance(batch, dict):
            return {name: tensor.to(device) for name, tensor in batch.items()}
        return batch[0].to(device), batch[1].to(device)


# Batches --------------------------------------------------------------------------------------------


def _words(size: int, length: int = LENGTH) -> Tensor:
    # From 3 up: none of them is a padding, begin or end token.
    return torch.randint(3, VOCABULARY, (size, length))


def _causal(size: int) -> Batch:
    words = _words(size)
    return {"input_ids": words, "labels": words.clone()}


def _masked(size: int) -> Batch:
    words = _words(size)
    return {"input_ids": words, "labels": torch.where(torch.rand(words.shape) < 0.5, words, -100)}


def _translation(size: int) -> Batch:
    return {"input_ids": _words(size), "labels": _words(size, LENGTH // 2)}


def _speech(size: int) -> Batch:
    return {"input_features": torch.randn(size, 80, 2 * LENGTH), "labels": _words(size, LENGTH // 2)}


def _pictures(size: int) -> Batch:
    return {
        "pixel_values": torch.randn(size, 3, IMAGE, IMAGE),
        "labels": torch.randint(CLASSES, (size,)),
    }


def _pictures_and_classes(size: int) -> Batch:
    return torch.randn(size, 3, IMAGE, IMAGE), torch.randint(CLASSES, (size,))


def _pictures_and_pictures(size: int) -> Batch:
    return torch.randn(size, 3, IMAGE, IMAGE), torch.randn(size, 3, IMAGE, IMAGE)


def _words_and_next_words(size: int) -> Batch:
    words = _words(size, LENGTH + 1)
    return words[:, :-1].contiguous(), words[:, 1:].contiguous()


def _cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def _squared_error(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return F.mse_loss(model(inputs), targets)


# From transformers ----------------------------------------------------------------------------------


def _transformers(name: str, head: str, **settings: Any) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{name}Config")(**settings)
    model: nn.Module = getattr(transformers, f"{name}{head}")(config)
    return model


def _gpt2() -> nn.Module:
    return _transformers(
        "GPT2",
        "LMHeadModel",
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        bos_token_id=1,
        eos_token_id=2,
    )


def _bert() -> nn.Module:
    return _transformers(
        "Bert",
        "ForMaskedLM",
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH,
        max_position_embeddings=LENGTH,
    )


def _llama_like(name: str, **settings: Any) -> nn.Module:
    return _transformers(
        name,
        "ForCausalLM",
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
        max_position_embeddings=LENGTH,
        bos_token_id=1,
        eos_token_id=2,
        **settings,
    )


def _t5() -> nn.Module:
    return _transformers(
        "T5",
        "ForConditionalGeneration",
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_kv=WIDTH // HEADS,
        d_ff=4 * WIDTH,
        num_layers=LAYERS,
        num_heads=HEADS,
        dropout_rate=DROPOUT,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
    )


def _vit() -> nn.Module:
    return _transformers(
        "ViT",
        "ForImageClassification",
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH,
        hidden_dropout_prob=DROPOUT,
        attention_probs_dropout_prob=DROPOUT,
        image_size=IMAGE,
        patch_size=8,
        num_labels=CLASSES,
    )


def _whisper() -> nn.Module:
    return _transformers(
        "Whisper",
        "ForConditionalGeneration",
        vocab_size=VOCABULARY,
        num_mel_bins=80,
        d_model=WIDTH,
        encoder_layers=LAYERS,
        decoder_layers=LAYERS,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=4 * WIDTH,
        decoder_ffn_dim=4 * WIDTH,
        max_source_positions=LENGTH,
        max_target_positions=LENGTH,
        dropout=DROPOUT,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )


def _resnet() -> nn.Module:
    return _transformers(
        "ResNet",
        "ForImageClassification",
        embedding_size=64,
        hidden_sizes=[64, 128, 256],
        depths=[2, 2, 2],
        layer_type="basic",
        num_labels=CLASSES,
    )


# Of our own -----------------------------------------------------------------------------------------


class Encoder(nn.Module):
    """``nn.TransformerEncoder`` between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, DROPOUT, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, words: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(words.shape[1], device=words.device)
        hidden = self.encoder(self.embedding(words), mask=mask, is_causal=True)
        logits: Tensor = self.head(hidden)
        return logits


class Residual(nn.Module):
    """Two normalised convolutions around a shortcut."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(8, inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.conv1(F.silu(self.norm1(x)))
        hidden = self.conv2(F.silu(self.norm2(hidden)))
        result: Tensor = hidden + self.shortcut(x)
        return result


class UNet(nn.Module):
    """Three levels down, a middle, three levels up, with what each level had on the way down beside it."""

    def __init__(self, widths: tuple[int, ...] = (32, 64, 128)) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, widths[0], 3, padding=1)
        before = (widths[0], *widths)
        self.down = nn.ModuleList(Residual(*pair) for pair in zip(before, widths, strict=False))
        self.middle = nn.ModuleList(Residual(widths[-1], widths[-1]) for _ in range(2))
        after = (widths[-1], *reversed(widths))
        self.up = nn.ModuleList(
            Residual(wide + width, width) for wide, width in zip(after, reversed(widths), strict=False)
        )
        self.out = nn.Conv2d(widths[0], 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        kept = []
        for block in self.down:
            x = block(x)
            kept.append(x)
            x = F.max_pool2d(x, 2)
        for block in self.middle:
            x = block(x)
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), kept.pop()], dim=1))
        result: Tensor = self.out(x)
        return result


def _cnn() -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 32), (32, 64), (64, 128), (128, 256)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    side = IMAGE // 2**4
    return nn.Sequential(*layers, nn.Flatten(), nn.Dropout(DROPOUT), nn.Linear(256 * side**2, CLASSES))


_ALL = (
    SmallModel("GPT-2", _gpt2, _causal),
    SmallModel("BERT", _bert, _masked),
    SmallModel("Llama", lambda: _llama_like("Llama"), _causal),
    # A window shorter than the samples: else its mask would be the plain causal one.
    SmallModel("Mistral", lambda: _llama_like("Mistral", sliding_window=LENGTH // 2), _causal),
    SmallModel("Qwen2", lambda: _llama_like("Qwen2"), _causal),
    # "eager" loops over the experts that were hit: shapes depend on the data.
    SmallModel(
        "Mixtral",
        lambda: _llama_like("Mixtral", num_local_experts=4, experts_implementation="eager"),
        _causal,
    ),
    SmallModel("T5", _t5, _translation),
    SmallModel("Whisper", _whisper, _speech),
    SmallModel("ViT", _vit, _pictures),
    SmallModel("ResNet", _resnet, _pictures),
    SmallModel("nn.TransformerEncoder", Encoder, _words_and_next_words, _cross_entropy),
    SmallModel("U-Net", UNet, _pictures_and_pictures, _squared_error),
    SmallModel("CNN", _cnn, _pictures_and_classes, _cross_entropy),
)

SMALL_MODELS: dict[str, SmallModel] = {model.name: model for model in _ALL}
