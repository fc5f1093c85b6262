"""The training runs whose memory others published, as fake tensors can run them: models from shapes, and steps.

Each is written from the description in its source; where that ran an older torch that kept more, so does this.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import transformers  # here: not to be imported among fake tensors
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, apply_rotary_pos_emb
from transformers.optimization import Adafactor

from memscale.benchmarks.models import MODELS, quiet_transformers

__all__ = [
    "OPERATORS",
    "GptShape",
    "bert_large",
    "head_and_loss",
    "llama_3b",
    "lora",
    "operator",
    "vision_transformer",
]


def head_and_loss(device: torch.device, tokens: int, width: int = 4096, vocabulary: int = 128256) -> None:
    """Liger-Kernel's torch baseline: an LM head and cross entropy in bf16; gradients add up over the passes.

    Its script has the head of the other implementation on the device, too.
    """
    head, _other = (
        nn.Linear(width, vocabulary, bias=False, dtype=torch.bfloat16).to(device) for _ in range(2)
    )
    x = torch.randn(tokens, width, dtype=torch.bfloat16, device=device, requires_grad=True)
    target = torch.randint(vocabulary, (tokens,), device=device)
    for _ in range(3):
        F.cross_entropy(head(x), target).backward()


def _cross_entropy(device: torch.device, vocabulary: int) -> Callable[[], None]:
    logits = torch.randn(8 * 2048, vocabulary, device=device, requires_grad=True)
    target = torch.randint(vocabulary, (8 * 2048,), device=device)
    return lambda: F.cross_entropy(logits, target).backward()


def _log_probabilities(device: torch.device, rows: int, vocabulary: int) -> Tensor:
    return torch.randn(rows, vocabulary, device=device, requires_grad=True).log_softmax(dim=-1)


def _kl_divergence(device: torch.device, vocabulary: int) -> Callable[[], None]:
    log_q = _log_probabilities(device, 8 * 2048, vocabulary)
    p = torch.randn(8 * 2048, vocabulary, device=device).softmax(dim=-1)
    return lambda: F.kl_div(log_q, p, reduction="batchmean").backward(retain_graph=True)


def _jensen_shannon(device: torch.device, vocabulary: int) -> Callable[[], None]:
    log_q = _log_probabilities(device, 4 * 2048, vocabulary)
    log_p = torch.randn(4 * 2048, vocabulary, device=device).log_softmax(dim=-1)

    def run() -> None:
        m = torch.lerp(torch.exp(log_q), torch.exp(log_p), 0.5)
        of_p = F.kl_div(torch.log(m), log_p, reduction="none", log_target=True).sum(dim=-1)
        of_q = F.kl_div(torch.log(m), log_q, reduction="none", log_target=True).sum(dim=-1)
        ((0.5 * of_p + 0.5 * of_q) / log_q.shape[0]).sum().backward(retain_graph=True)

    return run


def _gated_mlp(device: torch.device, length: int, batch: int, activation: str) -> Callable[[], None]:
    config = transformers.LlamaConfig(hidden_size=4096, intermediate_size=11008, hidden_act=activation)
    mlp = LlamaMLP(config).to(device, torch.bfloat16)
    x = torch.randn(batch, length, 4096, device=device, dtype=torch.bfloat16, requires_grad=True)

    def run() -> None:
        y = mlp(x)
        y.backward(torch.randn_like(y), retain_graph=True)

    return run


def _norm(norm: nn.Module, x: Tensor) -> Callable[[], None]:
    norm.to(x.device)  # its weights stay in fp32
    gradient = torch.randn_like(x)
    x.requires_grad_()
    return lambda: norm(x).backward(gradient, retain_graph=True)


def _rotary(device: torch.device, length: int) -> Callable[[], None]:
    q, k = (
        torch.randn(1, length, heads, 256, device=device, dtype=torch.bfloat16, requires_grad=True).transpose(
            1, 2
        )
        for heads in (32, 8)
    )
    gradients = torch.randn_like(q), torch.randn_like(k)
    frequencies = torch.rand(1, 128, 1, device=device)
    positions = torch.arange(length, device=device, dtype=torch.float32).view(1, 1, length)
    angles = (frequencies @ positions).transpose(1, 2)  # a product: cuBLAS has its workspace from then on
    both = torch.cat((angles, angles), dim=-1)
    cos, sin = both.cos().to(q.dtype), both.sin().to(q.dtype)
    del angles, both

    def run() -> None:
        out = apply_rotary_pos_emb(q, k, cos, sin)
        torch.autograd.grad(out, (q, k), gradients, retain_graph=True)

    return run


class _Attention(nn.Module):
    """Attention in elementary operations, with a mask; where that is true makes no difference to memory."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.q(x), self.k(x), self.v(x)
        q, k, v = (each.view(batch, length, self.heads, -1).transpose(1, 2) for each in (q, k, v))
        scores = torch.matmul(q, k.transpose(-2, -1)) * (width // self.heads) ** -0.5
        mask = torch.zeros(length, length, device=x.device, dtype=torch.bool)
        scores = scores.masked_fill(~mask, float("-inf"))
        weights = torch.softmax(scores, dim=-1)
        attended = torch.matmul(weights, v).transpose(1, 2).contiguous().view(batch, length, width)
        return self.out(attended)


def _attention(device: torch.device, length: int) -> Callable[[], None]:
    attention, _other = (_Attention(512, 8).to(device) for _ in range(2))
    x = torch.randn(2, length, 512, device=device, requires_grad=True)
    gradient = torch.randn_like(x)

    def run(_other: nn.Module = _other) -> None:  # the script has the other implementation on the device, too
        y = attention(x)
        y.backward(gradient, retain_graph=True)

    return run


OPERATORS: dict[str, Callable[[torch.device, int], Callable[[], None]]] = {
    "cross entropy": _cross_entropy,
    "KL divergence": _kl_divergence,
    "Jensen-Shannon divergence": _jensen_shannon,
    "GEGLU": lambda device, x: _gated_mlp(device, x, 8, "gelu_pytorch_tanh"),
    "SwiGLU": lambda device, x: _gated_mlp(device, x, 4, "silu"),
    "layer norm": lambda device, x: _norm(nn.LayerNorm(x), torch.randn(4096, x, device=device)),
    "RMS norm": lambda device, x: _norm(
        LlamaRMSNorm(x), torch.randn(2048, x, device=device, dtype=torch.bfloat16)
    ),
    "rotary embedding": _rotary,
    "attention written out, fp32": _attention,
}
"""Liger-Kernel's torch baselines, by name: what makes the tensors, and returns forward and backward."""


def operator(device: torch.device, name: str, size: int) -> None:
    """Run forward and backward of an operator three times, as the script does ten; gradients add up."""
    run = OPERATORS[name](device, size)
    for _ in range(3):
        run()


@dataclass(frozen=True)
class GptShape:
    """A model as LitGPT describes it."""

    layers: int
    width: int
    heads: int
    vocabulary: int  # padded
    intermediate: int
    rotary: float = 1.0  # the share of a head that is rotated
    is_llama: bool = False  # RMS norm in fp32, gated MLP, no biases, residuals one after the other
    shares_norm: bool = False  # one norm for attention and MLP
    head_bias: bool = False
    rank: int = 8


class _RmsNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(torch.mean(wide * wide, dim=-1, keepdim=True) + 1e-5)
        return (self.weight * normed).to(x.dtype)


class _LoraQkv(nn.Module):
    """Queries, keys and values in one product, with low-rank updates of queries and values."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.linear = nn.Linear(shape.width, 3 * shape.width, bias=not shape.is_llama)
        self.down = nn.Parameter(torch.zeros(2 * shape.rank, shape.width))
        self.up = nn.Parameter(torch.zeros(2 * shape.width, shape.rank))
        places = torch.arange(3 * shape.width)
        self.register_buffer(
            "places", torch.cat([places[: shape.width], places[2 * shape.width :]]), persistent=False
        )

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x)
        low = F.linear(F.dropout(x, 0.05), self.down)
        update = F.conv1d(low.transpose(-2, -1), self.up.unsqueeze(-1), groups=2).transpose(-2, -1)
        padded = x.new_zeros(x.shape[0] * x.shape[1], out.shape[-1])
        padded = padded.index_copy(1, self.places, update.reshape(-1, update.shape[-1]))
        return out + padded.view_as(out) * 2.0


class _Block(nn.Module):
    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.shape = shape
        bias = not shape.is_llama
        norm = _RmsNorm if shape.is_llama else nn.LayerNorm
        self.norm1 = norm(shape.width)
        self.norm2 = None if shape.shares_norm else norm(shape.width)
        self.qkv = _LoraQkv(shape)
        self.out = nn.Linear(shape.width, shape.width, bias=bias)
        self.fc = nn.Linear(shape.width, shape.intermediate, bias=bias)
        self.gate = nn.Linear(shape.width, shape.intermediate, bias=bias) if shape.is_llama else None
        self.proj = nn.Linear(shape.intermediate, shape.width, bias=bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed = self.norm1(x)
        attended = self._attend(normed, cos, sin)
        if self.shape.is_llama:
            x = attended + x
            return self._mlp(self.norm2(x)) + x
        second = normed if self.norm2 is None else self.norm2(x)
        return self._mlp(second) + attended + x

    def _attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.shape.heads
        packed = self.qkv(x).view(batch, length, heads, 3, width // heads).permute(0, 2, 3, 1, 4)
        q, k, v = (each.reshape(batch, heads, length, -1) for each in packed.split(1, dim=2))
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))

    def _mlp(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.proj(F.gelu(self.fc(x)))
        return self.proj(F.silu(self.fc(x)) * self.gate(x))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned = x[..., : cos.shape[-1]]
    first, second = turned.chunk(2, dim=-1)
    roped = (turned * cos) + (torch.cat((-second, first), dim=-1) * sin)
    return torch.cat((roped.to(x.dtype), x[..., cos.shape[-1] :]), dim=-1)


class _Gpt(nn.Module):
    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(_Block(shape) for _ in range(shape.layers))
        self.norm = _RmsNorm(shape.width) if shape.is_llama else nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=shape.head_bias)
        self.rotated = int(shape.rotary * shape.width // shape.heads)

    def forward(self, ids: Tensor) -> list[Tensor]:
        x = self.embedding(ids)
        cos = torch.ones(ids.shape[1], self.rotated, dtype=x.dtype, device=x.device)
        for block in self.blocks:
            x = block(x, cos, cos)
        return [self.head(part) for part in self.norm(x).split(128, dim=1)]


def lora(device: torch.device, shape: GptShape, batch: int, length: int) -> None:
    """LitGPT's LoRA: bf16 throughout, and loss in chunks of 128 tokens.

    One batch: its script begins with the longest sample, and steps the low-rank matrices many batches later.
    """
    model = _Gpt(shape).to(torch.bfloat16).to(device).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith((".up", ".down")))
    ids = torch.randint(0, 1000, (batch, length), device=device)
    chunks = [part.float() for part in model(ids)]  # as Lightning Fabric does with a module's outputs
    chunks[-1] = chunks[-1][:, :-1]
    targets = ids[:, 1:].split(128, dim=1)
    losses = [
        F.cross_entropy(part.reshape(-1, part.shape[-1]), target.reshape(-1), reduction="none")
        for part, target in zip(chunks, targets, strict=True)
    ]
    torch.cat(losses).mean().backward()


class _KeepInput(torch.autograd.Function):
    """Keep a tensor until the backward of another: torch 1.10's softmax saved its input beside its result."""

    @staticmethod
    def forward(ctx, kept: Tensor, result: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(kept)
        return result.view_as(result)

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[no-untyped-def]
        return None, gradient


@contextlib.contextmanager
def _softmax_of_torch_1_10() -> Iterator[None]:
    today = F.softmax

    def softmax(x: Tensor, *args: object, **kwargs: object) -> Tensor:
        x = x.float()  # under autocast; else it is so already
        return _KeepInput.apply(x, today(x, *args, **kwargs))

    F.softmax = softmax
    try:
        yield
    finally:
        F.softmax = today


def bert_large(
    device: torch.device,
    batch: int,
    accumulate: int = 1,
    *,
    checkpointing: bool = False,
    half: bool = False,
    adafactor: bool = False,
) -> None:
    """transformers' performance guide of January 2022: bert-large, 512 tokens, Trainer, torch 1.10.

    That torch had neither foreach optimizers nor gradients set to None.
    """
    config = transformers.BertConfig(
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
        attn_implementation="eager",
    )
    with quiet_transformers(), _softmax_of_torch_1_10():
        model = transformers.BertForSequenceClassification(config).to(device).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": True})
        parameters = list(model.parameters())
        optimizer: torch.optim.Optimizer
        if adafactor:
            optimizer = Adafactor(parameters, lr=5e-5, scale_parameter=False, relative_step=False)
        else:
            optimizer = torch.optim.AdamW(parameters, lr=5e-5, foreach=False)
        for _ in range(2):
            for _ in range(accumulate):
                ids = torch.randint(100, 30000, (batch, 512), device=device)
                labels = torch.zeros(batch, dtype=torch.long, device=device)
                with torch.autocast(device.type, torch.float16, enabled=half):
                    loss = model(input_ids=ids, labels=labels).loss
                (loss / accumulate).backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=False)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)


class _VitBlock(nn.Module):
    def __init__(self, width: int = 1024, heads: int = 16) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        x = self.attention(normed, normed, normed, need_weights=False)[0] + x
        return x + self.mlp(self.norm2(x))


class _Vit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 1024, 16, 16)
        self.first = nn.Parameter(torch.zeros(1, 1, 1024))
        self.positions = nn.Parameter(torch.zeros(1, 197, 1024))
        self.blocks = nn.Sequential(*(_VitBlock() for _ in range(24)))
        self.norm = nn.LayerNorm(1024, eps=1e-6)
        self.head = nn.Linear(1024, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).permute(0, 2, 1)
        x = torch.cat([self.first.expand(x.shape[0], -1, -1), x], dim=1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


def vision_transformer(device: torch.device, batch: int, *, mixed: bool = False, bf16: bool = False) -> None:
    """Raschka's torchvision ViT-L/16 with Adam; gradients are set to None between forward and backward."""
    dtype = torch.bfloat16 if bf16 else torch.float32
    model = _Vit().to(device, dtype).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-5)
    for _ in range(3):
        images = torch.randn(batch, 3, 224, 224, dtype=dtype, device=device)
        labels = torch.randint(0, 10, (batch,), device=device)
        with torch.autocast(device.type, torch.float16, enabled=mixed):
            logits = model(images)
        loss = F.cross_entropy(logits.float(), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def _attention_with_repeated_keys(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **settings: float
) -> tuple[Tensor, None]:
    """Attend as torchtune does, which copies keys and values for every query head; transformers does not."""
    groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=settings["scaling"])
    return out.transpose(1, 2), None


transformers.AttentionInterface.register("with_repeated_keys", _attention_with_repeated_keys)


def llama_3b(device: torch.device, batch: int = 2, length: int = 4096) -> None:
    """torchtune's full finetuning of Llama 3.2 3B in bf16 throughout, logits whole and in fp32, fused AdamW."""
    model = MODELS["llama-3.2-3b"].make()
    model.set_attn_implementation("with_repeated_keys")  # type: ignore[operator]
    model.to(torch.bfloat16).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.randint(0, 1000, (batch, length), device=device)
    for _ in range(2):
        logits = model(input_ids=ids, use_cache=False).logits.float()
        loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), ids.reshape(-1))
        del logits
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
