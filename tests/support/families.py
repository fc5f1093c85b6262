"""Tiny models of every family the suite must hold for.

Each family is built from a config with random weights (no download), trains one step in a few
milliseconds on the CPU, and is used the way its users use it: `family.loss(family.build(), family.batch())`.
Dropout is on wherever the family has it: a mask that differs on recompute is the first thing to break.
`SMALL_FAMILIES` has the same models large enough that weights and activations make their peak, not library
workspaces; `benchmarks/predictions.py` measures those.

Example:
    >>> family = FAMILIES["gpt2"]
    >>> loss = family.loss(family.build(), family.batch())
    >>> loss.backward()
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LAYERS = 3
HEADS = 4
DROPOUT = 0.1
SPEECH_POSITIONS = 32  # of Whisper's encoder, which takes windows of one size only


@dataclass(frozen=True)
class Scale:
    """How large the models of all families are.

    Attributes:
        vocab: Words of a language model.
        hidden: Width of a transformer.
        length: Default tokens of a sample.
        positions: Longest sample a transformer can take.
        image: Pixels along the edge of an image.
        patch: Pixels along the edge of a vision transformer's patch.
        classes: Classes of an image classifier.
        mels: Frequency bins of a speech sample.
        channels: Channels of a convolutional network, level by level.
        window: Tokens that a sliding-window attention sees; fewer than `length`, or it would be plain attention.
    """

    vocab: int
    hidden: int
    length: int
    positions: int
    image: int
    patch: int
    classes: int
    mels: int
    channels: tuple[int, int, int]
    window: int


TINY = Scale(97, 32, 12, 64, 16, 4, 10, 8, (8, 16, 32), 8)
SMALL = Scale(4096, 256, 64, 64, 64, 8, 100, 80, (32, 64, 128), 32)
VOCAB, HIDDEN = TINY.vocab, TINY.hidden

Batch = dict[str, Tensor] | tuple[Tensor, ...]


@dataclass(frozen=True)
class Family:
    """One kind of model, and how it is built, fed and asked for a loss.

    Attributes:
        name: Key in `FAMILIES`.
        make: `(scale)` to the model; called by `build` under a fixed seed.
        inputs: `(scale, generator, batch_size, length)` to a CPU batch.
        forward: `(model, batch)` to the scalar loss; the default calls `model(**batch).loss`.
        depth: Repeated blocks in the model: distinct modules, each counted once.
        calls: How often one forward pass calls each repeated block (weight sharing).
        images: A sample is an image; its length is in pixels along an edge.
        scale: How large it is.
        data_dependent: Shapes inside the model depend on values, so no static analysis can follow it.
        dropout: Draws random numbers in training.
        updates_buffers: A forward pass in training changes buffers (batch-norm statistics).
        transformers: Needs the `transformers` package to build.
    """

    name: str
    make: Callable[[Scale], nn.Module]
    inputs: Callable[[Scale, torch.Generator, int, int], Batch]
    depth: int
    forward: Callable[[nn.Module, Any], Tensor] = field(default=lambda model, batch: model(**batch).loss)
    calls: int = 1
    images: bool = False
    scale: Scale = TINY
    data_dependent: bool = False
    dropout: bool = True
    updates_buffers: bool = False
    transformers: bool = True

    @property
    def length(self) -> int:
        """Default length of a sample: tokens, or pixels along an edge."""
        return self.scale.image if self.images else self.scale.length

    def build(self) -> nn.Module:
        """Returns a new model in training mode, the same weights each time; the global RNG is not moved."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.make(self.scale).train()

    def batch(
        self, device: str | torch.device = "cpu", batch_size: int = 2, length: int | None = None
    ) -> Batch:
        """Returns the same batch for the same arguments, on any device; the global RNG is not moved."""
        generator = torch.Generator().manual_seed(1)
        batch = self.inputs(self.scale, generator, batch_size, self.length if length is None else length)
        if isinstance(batch, dict):
            return {key: value.to(device) for key, value in batch.items()}
        return tuple(value.to(device) for value in batch)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Calls the model as its users would and returns the scalar loss; the outputs are dropped."""
        return self.forward(model, batch)


# Inputs ------------------------------------------------------------------------------------------


def _tokens(scale: Scale, generator: torch.Generator, *shape: int, low: int = 3) -> Tensor:
    # From 3 up, so that no random token is one of the padding, begin or end tokens of a config.
    return torch.randint(low, scale.vocab, shape, generator=generator)


def _causal(scale: Scale, generator: torch.Generator, batch: int, length: int) -> Batch:
    ids = _tokens(scale, generator, batch, length)
    return {"input_ids": ids, "labels": ids.clone()}


def _masked(scale: Scale, generator: torch.Generator, batch: int, length: int) -> Batch:
    ids = _tokens(scale, generator, batch, length)
    labels = torch.where(torch.rand(ids.shape, generator=generator) < 0.5, ids, -100)
    labels[:, 0] = ids[:, 0]  # a batch without a single masked token would have no loss
    mask = torch.ones_like(ids)
    mask[-1, length - length // 4 :] = 0  # the last sample is padded, as batches are
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def _translation(scale: Scale, generator: torch.Generator, batch: int, length: int) -> Batch:
    return {
        "input_ids": _tokens(scale, generator, batch, length),
        "labels": _tokens(scale, generator, batch, max(2, length // 2)),
    }


def _speech(scale: Scale, generator: torch.Generator, batch: int, length: int) -> Batch:
    # Whisper takes windows of one fixed size only; the length is that of the transcript.
    return {
        "input_features": torch.randn(batch, scale.mels, 2 * SPEECH_POSITIONS, generator=generator),
        "labels": _tokens(scale, generator, batch, length),
    }


def _pixels(scale: Scale, generator: torch.Generator, batch: int, length: int) -> Batch:
    return {
        "pixel_values": torch.randn(batch, 3, length, length, generator=generator),
        "labels": torch.randint(scale.classes, (batch,), generator=generator),
    }


def _image_pair(scale: Scale, generator: torch.Generator, batch: int, length: int) -> Batch:
    return (
        torch.randn(batch, 3, length, length, generator=generator),
        torch.randint(scale.classes, (batch,), generator=generator),
    )


def _image_to_image(scale: Scale, generator: torch.Generator, batch: int, length: int) -> Batch:
    return (
        torch.randn(batch, 3, length, length, generator=generator),
        torch.randn(batch, 3, length, length, generator=generator),
    )


def _next_token_pair(scale: Scale, generator: torch.Generator, batch: int, length: int) -> Batch:
    ids = _tokens(scale, generator, batch, length + 1)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def _cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, target = batch
    return F.cross_entropy(model(inputs).flatten(0, -2), target.flatten())


# From transformers -------------------------------------------------------------------------------


def _gpt2(scale: Scale) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=scale.vocab,
            n_positions=scale.positions,
            n_embd=scale.hidden,
            n_layer=LAYERS,
            n_head=HEADS,
            resid_pdrop=DROPOUT,
            embd_pdrop=DROPOUT,
            attn_pdrop=DROPOUT,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def _bert(scale: Scale) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=scale.vocab,
            hidden_size=scale.hidden,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            intermediate_size=2 * scale.hidden,
            max_position_embeddings=scale.positions,
            hidden_dropout_prob=DROPOUT,
            attention_probs_dropout_prob=DROPOUT,
        )
    )


def _llama_like(scale: Scale, prefix: str, **extra: Any) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{prefix}Config")(
        vocab_size=scale.vocab,
        hidden_size=scale.hidden,
        intermediate_size=2 * scale.hidden,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        max_position_embeddings=scale.positions,
        attention_dropout=DROPOUT,
        bos_token_id=1,
        eos_token_id=2,
        **extra,
    )
    return getattr(transformers, f"{prefix}ForCausalLM")(config)


def _mixtral(scale: Scale) -> nn.Module:
    # "eager" loops over the experts that were hit: the form whose shapes depend on the data.
    return _llama_like(
        scale, "Mixtral", num_local_experts=4, num_experts_per_tok=2, experts_implementation="eager"
    )


def _t5(scale: Scale) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=scale.vocab,
            d_model=scale.hidden,
            d_kv=scale.hidden // HEADS,
            d_ff=2 * scale.hidden,
            num_layers=LAYERS,
            num_decoder_layers=LAYERS,
            num_heads=HEADS,
            relative_attention_num_buckets=8,
            dropout_rate=DROPOUT,
            pad_token_id=0,
            eos_token_id=1,
            decoder_start_token_id=0,
        )
    )


def _vit(scale: Scale) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=scale.hidden,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            intermediate_size=2 * scale.hidden,
            hidden_dropout_prob=DROPOUT,
            attention_probs_dropout_prob=DROPOUT,
            image_size=scale.image,
            patch_size=scale.patch,
            num_labels=scale.classes,
        )
    )


def _whisper(scale: Scale) -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    return WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=scale.vocab,
            num_mel_bins=scale.mels,
            d_model=scale.hidden,
            encoder_layers=LAYERS,
            decoder_layers=LAYERS,
            encoder_attention_heads=HEADS,
            decoder_attention_heads=HEADS,
            encoder_ffn_dim=2 * scale.hidden,
            decoder_ffn_dim=2 * scale.hidden,
            max_source_positions=SPEECH_POSITIONS,
            max_target_positions=scale.positions,
            dropout=DROPOUT,
            attention_dropout=DROPOUT,
            activation_dropout=DROPOUT,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
            suppress_tokens=None,
            begin_suppress_tokens=None,
        )
    )


def _resnet(scale: Scale) -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(
        ResNetConfig(
            embedding_size=scale.channels[0],
            hidden_sizes=list(scale.channels),
            depths=[2, 3, 2],
            layer_type="basic",
            num_labels=scale.classes,
        )
    )


def _loss_without_cache(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """A wrapped model has no cache for generation in training. A plain one that has none computes the same to the bit.

    With a cache, keys and values are laid out anew, and on some CPUs (AVX2) the last bit of a product hangs on that.
    """
    return model(**batch, use_cache=False).loss


def _frozen_embeddings(scale: Scale) -> nn.Module:
    model = _gpt2(scale)
    model.transformer.wte.requires_grad_(False)  # type: ignore[union-attr]
    model.transformer.wpe.requires_grad_(False)  # type: ignore[union-attr]
    return model


class LoRALinear(nn.Module):
    """A frozen linear layer with a trained low-rank detour, as adapters written by hand look."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base
        self.dropout = nn.Dropout(DROPOUT)
        self.lora_a = nn.Linear(base.in_features, rank, bias=False)
        # Not zero, as adapters usually start: then lora_a would get no gradient in the first step.
        self.lora_b = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * self.lora_b(self.lora_a(self.dropout(x)))


def _lora(scale: Scale) -> nn.Module:
    model = _llama_like(scale, "Llama").requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and name.endswith("_proj"):
                setattr(module, name, LoRALinear(child))
    return model


# Of our own --------------------------------------------------------------------------------------


class TransformerEncoderModel(nn.Module):
    """`nn.TransformerEncoder` between an embedding and a head."""

    def __init__(self, scale: Scale = TINY) -> None:
        super().__init__()
        self.embedding = nn.Embedding(scale.vocab, scale.hidden)
        layer = nn.TransformerEncoderLayer(
            scale.hidden, 4, 2 * scale.hidden, DROPOUT, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(
            layer, LAYERS, nn.LayerNorm(scale.hidden), enable_nested_tensor=False
        )
        self.head = nn.Linear(scale.hidden, scale.vocab)

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
        return self.head(self.encoder(self.embedding(ids), mask=mask, is_causal=True))


class LSTMModel(nn.Module):
    """A two-layer language model of the years before attention."""

    def __init__(self, scale: Scale = TINY) -> None:
        super().__init__()
        self.embedding = nn.Embedding(scale.vocab, scale.hidden)
        self.lstm = nn.LSTM(scale.hidden, scale.hidden, num_layers=2, dropout=DROPOUT, batch_first=True)
        self.head = nn.Linear(scale.hidden, scale.vocab)

    def forward(self, ids: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(ids))
        return self.head(hidden)


def _cnn(scale: Scale) -> nn.Module:
    _, narrow, wide = scale.channels
    return nn.Sequential(
        nn.Conv2d(3, narrow, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(narrow, wide, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(wide, wide, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(DROPOUT),
        nn.Linear(wide, scale.classes),
    )


class ResidualConv(nn.Module):
    """The block of the U-Net: two normalised convolutions around a shortcut."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(4, inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.dropout = nn.Dropout(DROPOUT)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.conv1(F.silu(self.norm1(x)))
        hidden = self.conv2(self.dropout(F.silu(self.norm2(hidden))))
        return hidden + self.shortcut(x)


class UNet(nn.Module):
    """Three levels down, a middle, three levels up; each level a list of blocks in a list of levels."""

    def __init__(self, scale: Scale = TINY) -> None:
        super().__init__()
        first = scale.channels[0]
        widths = (first, 2 * first, 3 * first)
        self.stem = nn.Conv2d(3, widths[0], 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        width = widths[0]
        for level in widths:
            down = nn.Conv2d(level, level, 3, stride=2, padding=1)
            self.down.append(nn.ModuleList([ResidualConv(width, level), ResidualConv(level, level), down]))
            width = level
        self.middle = nn.ModuleList([ResidualConv(width, width), ResidualConv(width, width)])
        for level in reversed(widths):
            up = nn.ConvTranspose2d(width, level, 2, stride=2)
            self.up.append(nn.ModuleList([up, ResidualConv(2 * level, level), ResidualConv(level, level)]))
            width = level
        self.out = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        skips = []
        for first, second, down in self.down:  # type: ignore[misc]
            x = second(first(x))
            skips.append(x)
            x = down(x)
        for block in self.middle:
            x = block(x)
        for up, first, second in self.up:  # type: ignore[misc]
            x = second(first(torch.cat([up(x), skips.pop()], dim=1)))
        return self.out(x)


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, scale: Scale = TINY) -> None:
        super().__init__()
        self.heads = HEADS
        hidden = scale.hidden
        self.norm1 = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.proj = nn.Linear(hidden, hidden)
        self.norm2 = nn.LayerNorm(hidden)
        self.mlp = nn.Sequential(
            nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden), nn.Dropout(DROPOUT)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.proj(attended.transpose(1, 2).flatten(2)), DROPOUT, self.training)
        return x + self.mlp(self.norm2(x))


class TiedModel(nn.Module):
    """A small GPT whose head is its embedding."""

    def __init__(self, scale: Scale = TINY) -> None:
        super().__init__()
        self.tokens = nn.Embedding(scale.vocab, scale.hidden)
        self.positions = nn.Parameter(torch.randn(scale.positions, scale.hidden) * 0.02)
        self.blocks = nn.ModuleList(Block(scale) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(scale.hidden)
        self.head = nn.Linear(scale.hidden, scale.vocab, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class SharedBlockModel(nn.Module):
    """One block called three times, as ALBERT does it: a list with a single layer in it."""

    def __init__(self, scale: Scale = TINY) -> None:
        super().__init__()
        self.embedding = nn.Embedding(scale.vocab, scale.hidden)
        self.layers = nn.ModuleList([Block(scale)])
        self.head = nn.Linear(scale.hidden, scale.vocab)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for _ in range(LAYERS):
            x = self.layers[0](x)
        return self.head(x)


@dataclass
class Gates:
    """What a keyword-only block tells about itself, beside its result."""

    mean: Tensor
    label: str


@dataclass
class KeywordOutput:
    """What the keyword-only model returns."""

    loss: Tensor | None
    logits: Tensor
    gates: list[Gates]


class KeywordBlock(nn.Module):
    """A gated MLP that takes keyword arguments only and returns a dict with a dataclass in it."""

    def __init__(self, index: int, scale: Scale = TINY) -> None:
        super().__init__()
        self.layer_idx = index
        self.norm = nn.LayerNorm(scale.hidden)
        self.up = nn.Linear(scale.hidden, 4 * scale.hidden)
        self.down = nn.Linear(2 * scale.hidden, scale.hidden)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(
        self, *, hidden: Tensor, state: dict[str, Tensor | None], scale: float = 1.0
    ) -> dict[str, Any]:
        value, gate = self.up(self.norm(hidden)).chunk(2, dim=-1)
        gate = torch.sigmoid(gate)
        update = self.dropout(self.down(value * gate)) * scale
        if (mask := state["mask"]) is not None:
            update = update * mask.unsqueeze(-1)
        return {"hidden": hidden + update, "gates": Gates(gate.mean(), f"layer {self.layer_idx}")}


class KeywordModel(nn.Module):
    """A model that can be called by keyword only, from top to bottom."""

    def __init__(self, scale: Scale = TINY) -> None:
        super().__init__()
        self.embedding = nn.Embedding(scale.vocab, scale.hidden)
        self.layers = nn.ModuleList(KeywordBlock(i, scale) for i in range(LAYERS))
        self.head = nn.Linear(scale.hidden, scale.vocab)

    def forward(
        self, *, tokens: Tensor, mask: Tensor | None = None, labels: Tensor | None = None
    ) -> KeywordOutput:
        hidden = self.embedding(tokens)
        gates = []
        for layer in self.layers:
            out = layer(hidden=hidden, state={"mask": mask}, scale=0.5)
            hidden = out["hidden"]
            gates.append(out["gates"])
        logits = self.head(hidden)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
            loss = loss + 0.01 * torch.stack([gate.mean for gate in gates]).sum()
        return KeywordOutput(loss, logits, gates)


def _keyword_inputs(scale: Scale, generator: torch.Generator, batch: int, length: int) -> Batch:
    tokens, labels = _next_token_pair(scale, generator, batch, length)
    mask = torch.ones(batch, length)
    mask[-1, length - length // 4 :] = 0
    return {"tokens": tokens, "mask": mask, "labels": labels}


def _image_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, target = batch
    return F.mse_loss(model(images), target)


def _class_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, target = batch
    return F.cross_entropy(model(images), target)


def _own(name: str, make: Callable[[Scale], nn.Module], **extra: Any) -> Family:
    return Family(
        name,
        make,
        **{
            "inputs": _next_token_pair,
            "forward": _cross_entropy,
            "depth": LAYERS,
            "transformers": False,
            **extra,
        },
    )


_ALL = (
    Family("gpt2", _gpt2, _causal, LAYERS, _loss_without_cache),
    Family("bert", _bert, _masked, LAYERS),
    Family("llama", lambda scale: _llama_like(scale, "Llama"), _causal, LAYERS),
    # A window shorter than the sample, or the sliding mask would be the plain causal one.
    Family(
        "mistral", lambda scale: _llama_like(scale, "Mistral", sliding_window=scale.window), _causal, LAYERS
    ),
    Family("t5", _t5, _translation, 2 * LAYERS, _loss_without_cache),
    Family("vit", _vit, _pixels, LAYERS, images=True),
    Family("whisper", _whisper, _speech, 2 * LAYERS),
    Family("mixtral", _mixtral, _causal, LAYERS, data_dependent=True),
    Family("resnet", _resnet, _pixels, 7, images=True, dropout=False, updates_buffers=True),
    _own("transformer_encoder", TransformerEncoderModel),
    _own("lstm", LSTMModel, depth=0),
    _own("cnn", _cnn, inputs=_image_pair, forward=_class_loss, images=True),
    _own(
        "unet",
        UNet,
        inputs=_image_to_image,
        forward=_image_loss,
        depth=14,
        images=True,
        updates_buffers=True,
    ),
    _own("tied", TiedModel),
    Family("frozen_embeddings", _frozen_embeddings, _causal, LAYERS, _loss_without_cache),
    Family("lora", _lora, _causal, LAYERS),
    _own(
        "kwargs_only",
        KeywordModel,
        inputs=_keyword_inputs,
        forward=lambda model, batch: model(**batch).loss,
    ),
    _own("shared_block", SharedBlockModel, depth=1, calls=LAYERS),
)

FAMILIES: dict[str, Family] = {family.name: family for family in _ALL}

SMALL_FAMILIES: dict[str, Family] = {name: replace(family, scale=SMALL) for name, family in FAMILIES.items()}
