"""The modules that random models are made of: each maps a tensor (batch, length, width) to one of the same shape.

Every piece is small, and each stands for something that real models do and that a memory technique may get wrong:
in-place operations on aliases, state that forward changes, random numbers from several generators, values that travel
outside of arguments and results.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

Options = dict[str, Any]

IN_PLACE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu_": lambda x: F.relu(x, inplace=True),
    "leaky_relu_": lambda x: F.leaky_relu(x, 0.1, inplace=True),
    "elu_": lambda x: F.elu(x, inplace=True),
    "mul_": lambda x: x.mul_(1.3),
    "add_sigmoid_": lambda x: x.add_(0.2).sigmoid_(),
    "tanh_": lambda x: x.tanh_(),
    "clamp_": lambda x: x.clamp_(-1.0, 1.0),
    "silu_": lambda x: F.silu(x, inplace=True),
    "dropout_": lambda x: F.dropout(x, 0.3, True, inplace=True),
    "masked_fill_": lambda x: x.masked_fill_(x > 1.0, 0.5),
    "copy_": lambda x: x.copy_(x * 0.5),
}

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "tanh": torch.tanh,
    "silu": F.silu,
    "softmax": lambda x: F.softmax(x, -1),
    "square": lambda x: x.square() * 0.5,
    "exp": lambda x: torch.exp(torch.tanh(x)),
    "softplus": F.softplus,
    "hardtanh": F.hardtanh,
    "log_softmax": lambda x: F.log_softmax(x, -1),
}


@dataclass
class Build:
    """What the pieces of one model have in common while it is built.

    Attributes:
        width: Features.
        board: What modules pass to each other outside of arguments and results.
        modules: Modules that several blocks call.
        weights: Parameters that several modules own.
    """

    width: int
    board: dict[str, Any] = field(default_factory=dict)
    modules: dict[int, nn.Module] = field(default_factory=dict)
    weights: dict[int, nn.Parameter] = field(default_factory=dict)

    def shared_linear(self, number: int) -> nn.Module:
        if number not in self.modules:
            self.modules[number] = nn.Linear(self.width, self.width)
        return self.modules[number]

    def tied_weight(self, number: int) -> nn.Parameter:
        if number not in self.weights:
            self.weights[number] = nn.Linear(self.width, self.width).weight
        return self.weights[number]


class Linear(nn.Module):
    """A product, with an activation in place on its result or on an alias of that."""

    def __init__(self, build: Build, options: Options) -> None:
        super().__init__()
        self.linear = nn.Linear(build.width, build.width, bias=options["bias"])
        if options["tied"] is not None:
            self.linear.weight = build.tied_weight(options["tied"])
        if options["frozen"]:
            self.linear.requires_grad_(False)
        self.then = options["then"]
        self.alias = options["alias"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if self.then is None:
            return y
        act = IN_PLACE[self.then]
        if self.alias == "view":
            act(y.view(-1, y.shape[-1]))
        elif self.alias == "transpose":
            act(y.transpose(0, 1))
        elif self.alias == "slice":
            act(y[..., : y.shape[-1] // 2])
        else:
            y = act(y)
        return y


class InPlaceModule(nn.Module):
    """torch's modules with inplace=True, on their own input or on a fresh tensor."""

    def __init__(self, build: Build, options: Options) -> None:
        super().__init__()
        kinds = {
            "relu": nn.ReLU(inplace=True),
            "leaky": nn.LeakyReLU(0.2, inplace=True),
            "elu": nn.ELU(inplace=True),
            "hardtanh": nn.Hardtanh(inplace=True),
            "dropout": nn.Dropout(0.2, inplace=True),
            "silu": nn.SiLU(inplace=True),
        }
        self.act = kinds[options["act"]]
        self.direct = options["direct"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(x if self.direct else x * 1.2)


class Activation(nn.Module):
    def __init__(self, build: Build, options: Options) -> None:
        super().__init__()
        self.act = options["act"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ACTIVATIONS[self.act](x)


class Mlp(nn.Module):
    def __init__(self, build: Build, options: Options) -> None:
        super().__init__()
        self.up = nn.Linear(build.width, 2 * build.width, bias=options["bias"])
        self.down = nn.Linear(2 * build.width, build.width)
        self.act = options["act"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(ACTIVATIONS[self.act](self.up(x)))


class Gated(nn.Module):
    """One product cut into two, one of them changed in place."""

    def __init__(self, build: Build, options: Options) -> None:
        super().__init__()
        self.both = nn.Linear(build.width, 2 * build.width, bias=options["bias"])
        self.cut = options["cut"]
        self.then = options["then"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = self.both(x)
        width = both.shape[-1] // 2
        if self.cut == "chunk":
            value, gate = both.chunk(2, -1)
        elif self.cut == "split":
            value, gate = both.split(width, -1)
        elif self.cut == "unsafe_chunk":
            value, gate = torch.unsafe_chunk(both, 2, -1)
        elif self.cut == "unsafe_split":
            value, gate = torch.unsafe_split(both, width, -1)
        else:
            value, gate = both[..., :width], both[..., width:]
        if self.then is not None and self.cut not in ("chunk", "split"):
            # (Results of chunk and split may not be changed in place.)
            value = IN_PLACE[self.then](value)
        return value * torch.sigmoid(gate)


class Views(nn.Module):
    """Aliases of all kinds and back again."""

    def __init__(self, build: Build, options: Options) -> None:
        super().__init__()
        self.kind = options["kind"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        if self.kind == "view":
            return x.reshape(batch * length, width).view(batch, length, width)
        if self.kind == "transpose":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        if self.kind == "expand":
            return x.unsqueeze(0).expand(3, -1, -1, -1).mean(0)
        if self.kind == "chunk":
            first, second = x.chunk(2, -1)
            return torch.cat([second, first], -1)
        if self.kind == "split":
            return torch.stack(x.unbind(1)[::-1], 1)
        if self.kind == "unsafe_view":
            return torch.ops.aten._unsafe_view(x.contiguous() * 1.1, [batch, length, width])
        if self.kind == "flip":
            return x.flip(1)
        if self.kind == "as_strided":
            y = (x * 0.9).contiguous()
            return y.as_strided((batch, length, width), (length * width, width, 1))
        if self.kind == "unfold":
            return F.pad(x, (0, 0, 1, 0)).unfold(1, length, 1).mean(1).transpose(1, 2)
        return x  # the input itself


class Norm(nn.Module):
    def __init__(self, build: Build, options: Options) -> None:
        super().__init__()
        self.kind = options["kind"]
        if self.kind == "layer":
            self.norm: nn.Module = nn.LayerNorm(build.width)
        elif self.kind == "rms":
            self.norm = nn.RMSNorm(build.width)
        elif self.kind == "batch":
            self.norm = nn.BatchNorm1d(build.width, momentum=options["momentum"])
        elif self.kind == "instance":
            self.norm = nn.InstanceNorm1d(build.width, affine=True, track_running_stats=True)
        else:
            self.norm = nn.GroupNorm(2, build.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind in ("layer", "rms"):
            return self.norm(x)
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class Dropout(nn.Module):
    def __init__(self, build: Build, options: Options) -> None:
        super().__init__()
        kinds = {"plain": nn.Dropout, "alpha": nn.AlphaDropout, "feature": nn.Dropout1d}
        self.dropout = kinds[options["kind"]](options["p"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(x)


class Recurrent(nn.Module):
    def __init__(self, build: Build, options: Options) -> None:
        super().__init__()
        kinds = {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}
        both = options["bidirectional"]
        self.rnn = kinds[options["kind"]](
            build.width,
            build.width // 2 if both else build.width,
            num_layers=options["layers"],
            batch_first=True,
            bidirectional=both,
            bias=options["bias"],
            dropout=options["dropout"] if options["layers"] > 1 else 0.0,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = self.rnn(x)
        return y


class Cell(nn.Module):
    """A recurrent cell, called for each position."""

    def __init__(self, build: Build, options: Options) -> None:
        super().__init__()
        self.cell = nn.GRUCell(build.width, build.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state, states = torch.zeros_like(x[:, 0]), []
        for position in range(x.shape[1]):
            state = self.cell(x[:, position], state)
            states.append(state)
        return torch.stack(states, 1)


class Attention(nn.Module):
    def __init__(self, build: Build, options: Options) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(
            build.width, 2, dropout=options["dropout"], batch_first=True, bias=options["bias"]
        )
        self.weights = options["weights"]
        self.causal = options["causal"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = None
        if self.causal:
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        y, _ = self.attention(x, x, x, need_weights=self.weights, attn_mask=mask)
        return y


class Scores(nn.Module):
    """Attention written out, with a mask filled in place."""

    def __init__(self, build: Build, options: Options) -> None:
        super().__init__()
        self.qkv = nn.Linear(build.width, 3 * build.width, bias=False)
        self.out = nn.Linear(build.width, build.width)
        self.fused = options["fused"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = torch.matmul(q, k.transpose(-2, -1)).div_((width // 2) ** 0.5)
            hidden = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            scores.masked_fill_(hidden, float("-inf"))
            y = torch.matmul(F.softmax(scores, -1), v)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Conv(nn.Module):
    def __init__(self, build: Build, options: Options) -> None:
        super().__init__()
        self.conv = nn.Conv1d(
            build.width, build.width, 3, padding=1, groups=options["groups"], bias=options["bias"]
        )
        self.then = options["then"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x.transpose(1, 2))
        if self.then is not None:
            y = IN_PLACE[self.then](y)
        return y.transpose(1, 2)


class Positions(nn.Module):
    """A table of positions, which it looks up by an index that is a buffer."""

    def __init__(self, build: Build, options: Options) -> None:
        super().__init__()
        self.table = nn.Embedding(16, build.width)
        self.register_buffer("index", torch.arange(16), persistent=options["persistent"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table(self.index[: x.shape[1]])


class LazyTable(nn.Module):
    """A table that is made in the first call and kept as an attribute, as rotary embeddings often are."""

    def __init__(self, build: Build, options: Options) -> None:
        super().__init__()
        self.table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None or self.table.shape[0] < x.shape[1] or self.table.device != x.device:
            positions = torch.arange(x.shape[1], device=x.device, dtype=torch.float32)
            self.table = torch.cos(positions)[:, None] * torch.ones(x.shape[2], device=x.device)
        return x * self.table[: x.shape[1]].to(x.dtype)


class RunningMean(nn.Module):
    """A buffer that forward changes and uses."""

    def __init__(self, build: Build, options: Options) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(build.width))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.how = options["how"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                now = x.detach().float().mean((0, 1))
                if self.how == "in place":
                    self.mean.mul_(0.9).add_(now, alpha=0.1)
                    self.calls += 1
                elif self.how == "new":
                    self.mean = 0.9 * self.mean + 0.1 * now
                    self.calls = self.calls + 1
                else:
                    self.mean.copy_(now)
                    self.calls.fill_(7)
        return (x - self.mean.to(x.dtype)) * (1 + 0.01 * self.calls.to(x.dtype))


class Counter(nn.Module):
    """A Python number that forward counts up and computes with."""

    def __init__(self, build: Build, options: Options) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.tanh(x * (1 + 1 / self.calls))


class Normed(nn.Module):
    """A weight that is computed anew at each call: weight norm, or spectral norm, whose buffers change."""

    def __init__(self, build: Build, options: Options) -> None:
        super().__init__()
        linear = nn.Linear(build.width, build.width)
        norm = parametrizations.spectral_norm if options["spectral"] else parametrizations.weight_norm
        self.linear = norm(linear)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class NoGrad(nn.Module):
    """A part without gradient beside one that has one."""

    def __init__(self, build: Build, options: Options) -> None:
        super().__init__()
        self.teacher = nn.Linear(build.width, build.width)
        self.student = nn.Linear(build.width, build.width)
        self.how = options["how"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "no_grad":
            with torch.no_grad():
                target = self.teacher(x)
        elif self.how == "inference":
            with torch.inference_mode():
                target = self.teacher(x)
            target = target.clone()  # an inference tensor cannot be saved for backward
        else:
            target = self.teacher(x).detach()
        return self.student(x) - 0.5 * target


class Random(nn.Module):
    """Random numbers from generators other than torch's."""

    def __init__(self, build: Build, options: Options) -> None:
        super().__init__()
        self.source = options["source"]
        if self.source == "own":
            self.generator = torch.Generator().manual_seed(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        if self.source == "own":
            noise = torch.rand(x.shape[-1], generator=self.generator).to(x.dtype).to(x.device)
            return torch.tanh(x * (0.5 + noise))
        if self.source == "python":
            return torch.tanh(x * (0.5 + random.random()))
        if self.source == "numpy":
            noise = torch.from_numpy(np.random.rand(x.shape[-1])).to(x.dtype).to(x.device)
            return torch.tanh(x * (0.5 + noise))
        if self.source == "torch host":
            return torch.tanh(x * (0.5 + torch.rand(x.shape[-1]).to(x.dtype).to(x.device)))
        return torch.tanh(x + 0.1 * torch.randn_like(x))


class LayerDrop(nn.Module):
    """A layer that is left out at random."""

    def __init__(self, build: Build, options: Options) -> None:
        super().__init__()
        self.linear = nn.Linear(build.width, build.width)
        self.source = options["source"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            drawn = random.random() if self.source == "python" else float(torch.rand(()))
            if drawn < 0.4:
                return x
        return x + torch.tanh(self.linear(x))


class Branch(nn.Module):
    """One of two layers, chosen by the data."""

    def __init__(self, build: Build, options: Options) -> None:
        super().__init__()
        self.one = nn.Linear(build.width, build.width)
        self.other = nn.Linear(build.width, build.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.detach().float().sum() > 0:
            return torch.tanh(self.one(x))
        return F.gelu(self.other(x))


class Routed(nn.Module):
    """Experts, each with the positions that are routed to it."""

    def __init__(self, build: Build, options: Options) -> None:
        super().__init__()
        self.router = nn.Linear(build.width, 2)
        self.experts = nn.ModuleList(nn.Linear(build.width, build.width) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        share, choice = F.softmax(self.router(flat), -1).max(-1)
        y = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            chosen = (choice == number).nonzero().squeeze(-1)
            y.index_add_(0, chosen, expert(flat[chosen]) * share[chosen, None])
        return y.view_as(x)


class Sorted(nn.Module):
    """Operations with indices."""

    def __init__(self, build: Build, options: Options) -> None:
        super().__init__()
        self.kind = options["kind"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "sort":
            return x.sort(1).values
        if self.kind == "topk":
            values, index = x.topk(2, -1)
            return torch.zeros_like(x).scatter(-1, index, values) + x
        if self.kind == "cumsum":
            return x.cumsum(1) * 0.3
        if self.kind == "gather":
            return x.gather(1, x.argsort(1))
        if self.kind == "index_put":
            y = x.clone()
            y[:, 0] = x[:, -1] * 0.5
            return y
        return torch.fft.irfft(torch.fft.rfft(x, dim=1), n=x.shape[1], dim=1)


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * gradient


class _Tanh(torch.autograd.Function):
    """Saves its output."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        return gradient * (1 - y * y)


class _Double(torch.autograd.Function):
    """Changes its input, and says so."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


class _Attribute(torch.autograd.Function):
    """Keeps a tensor as an attribute, past save_for_backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.sign = x.detach().sign()
        return x.abs()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * ctx.sign


class Custom(nn.Module):
    def __init__(self, build: Build, options: Options) -> None:
        super().__init__()
        self.kind = options["kind"]
        self.linear = nn.Linear(build.width, build.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        functions = {"cube": _Cube, "tanh": _Tanh, "double": _Double, "attribute": _Attribute}
        return functions[self.kind].apply(self.linear(x) * 0.5)


class OtherType(nn.Module):
    """A layer in another type than the model's."""

    def __init__(self, build: Build, options: Options) -> None:
        super().__init__()
        self.dtype = {"double": torch.float64, "bfloat16": torch.bfloat16}[options["dtype"]]
        self.linear = nn.Linear(build.width, build.width, dtype=self.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.to(self.dtype)).to(x.dtype)


class Autocast(nn.Module):
    """A layer that switches autocast on for itself."""

    def __init__(self, build: Build, options: Options) -> None:
        super().__init__()
        self.linear = nn.Linear(build.width, build.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            y = self.linear(x)
        return y.to(x.dtype)


class Shared(nn.Module):
    """A module that other blocks call too."""

    def __init__(self, build: Build, options: Options) -> None:
        super().__init__()
        self.shared = build.shared_linear(options["number"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.shared(x))


class Twice(nn.Module):
    """A module that is called twice, the second time with its own result."""

    def __init__(self, build: Build, options: Options) -> None:
        super().__init__()
        self.linear = nn.Linear(build.width, build.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(torch.tanh(self.linear(x))))


class Writer(nn.Module):
    """Leaves a tensor for a later module, outside of its result."""

    def __init__(self, build: Build, options: Options) -> None:
        super().__init__()
        self.board = build.board
        self.linear = nn.Linear(build.width, build.width)
        self.history = options["history"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.board["note"] = y if self.history else y.detach()
        return x + torch.tanh(y)


class Reader(nn.Module):
    """Uses what a `Writer` has left, if there is anything."""

    def __init__(self, build: Build, options: Options) -> None:
        super().__init__()
        self.board = build.board

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        note = self.board.get("note")
        return x if note is None or note.shape != x.shape else x + 0.5 * torch.sigmoid(note)


class Memory(nn.Module):
    """Keeps a tensor from call to call, as an attribute that is no buffer, and computes with it."""

    def __init__(self, build: Build, options: Options) -> None:
        super().__init__()
        self.how = options["how"]
        first = torch.zeros(build.width)
        self.state: Any = {
            "list": [],
            "deque": deque(maxlen=2),
            "nested": {"all": [[first]]},
            "tuple": (first, 0),
            "element in place": [first],
        }.get(self.how, first)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states = [each for each in tree_leaves(self.state) if isinstance(each, torch.Tensor)]
        before = states[-1].detach().to(x) if states else None
        y = torch.tanh(x) if before is None else x * torch.sigmoid(before)
        after = y.mean((0, 1)).float()
        if self.how == "replaced":
            self.state = after.detach()
        elif self.how == "with history":
            self.state = after
        elif self.how == "in place":
            self.state = self.state.to(x.device)
            self.state.mul_(0.5).add_(after.detach())
        elif self.how == "element in place":
            self.state[0] = self.state[0].to(x.device)
            self.state[0].copy_(after.detach())
        elif self.how == "tuple":
            self.state = (after.detach(), self.state[1] + 1)
        elif self.how == "nested":
            self.state["all"].append([after.detach()])
        else:
            self.state.append(after.detach())
        return y


class Hooked(nn.Module):
    """A layer whose user has put hooks on it, which change what goes in, what comes out and gradients."""

    def __init__(self, build: Build, options: Options) -> None:
        super().__init__()
        self.linear = nn.Linear(build.width, build.width)
        self.kind = options["kind"]
        if self.kind == "forward":
            self.linear.register_forward_hook(_scaled_output)
        elif self.kind == "pre":
            self.linear.register_forward_pre_hook(_scaled_input)
        elif self.kind == "backward":
            self.linear.register_full_backward_hook(_scaled_gradient)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if self.kind == "tensor" and y.requires_grad:
            y.register_hook(_halved)
        return torch.tanh(y)


def _scaled_output(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 0.7


def _scaled_input(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return (args[0] * 1.3,)


def _scaled_gradient(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    return tuple(None if each is None else each * 0.9 for each in inputs)


def _halved(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * 0.5


# Pieces around pieces -------------------------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self, inner: nn.Module, options: Options) -> None:
        super().__init__()
        self.inner = inner
        self.in_place = options["in_place"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        if self.in_place and y is not x:
            y += x
            return y
        return x + y


class Parallel(nn.Module):
    """Branches of one input, added or put side by side."""

    def __init__(self, inner: list[nn.Module], options: Options) -> None:
        super().__init__()
        self.branches = nn.ModuleList(inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([branch(x) for branch in self.branches]).mean(0)


class Checkpointed(nn.Module):
    """A part that its author has checkpointed with torch's own function."""

    def __init__(self, inner: nn.Module, options: Options) -> None:
        super().__init__()
        self.inner = inner
        self.reentrant = options["reentrant"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and torch.is_grad_enabled():
            return checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return self.inner(x)


class OnCpuSaved(nn.Module):
    """A part whose author keeps what it saves in a form of his own."""

    def __init__(self, inner: nn.Module, options: Options) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(_packed, _unpacked):
            return self.inner(x)


def _packed(tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    return "packed", tensor


def _unpacked(packed: tuple[str, torch.Tensor]) -> torch.Tensor:
    return packed[1]


LEAVES: dict[str, Callable[[Build, Options], nn.Module]] = {
    "linear": Linear,
    "in_place": InPlaceModule,
    "activation": Activation,
    "mlp": Mlp,
    "gated": Gated,
    "views": Views,
    "norm": Norm,
    "dropout": Dropout,
    "recurrent": Recurrent,
    "cell": Cell,
    "attention": Attention,
    "scores": Scores,
    "conv": Conv,
    "positions": Positions,
    "lazy_table": LazyTable,
    "running_mean": RunningMean,
    "counter": Counter,
    "normed": Normed,
    "no_grad": NoGrad,
    "random": Random,
    "layer_drop": LayerDrop,
    "branch": Branch,
    "routed": Routed,
    "sorted": Sorted,
    "custom": Custom,
    "other_type": OtherType,
    "autocast": Autocast,
    "shared": Shared,
    "twice": Twice,
    "writer": Writer,
    "reader": Reader,
    "memory": Memory,
    "hooked": Hooked,
}
