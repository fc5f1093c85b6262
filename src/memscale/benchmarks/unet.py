"""A denoising U-Net of the shape of Stable Diffusion 1.5's, written here so that the suite needs no other package.

The channels, the blocks and the attention over the text are that model's; its 859,520,964 parameters are too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_GROUPS = 32


class Denoised(NamedTuple):
    """What the model returns: the mean squared error, and the noise that it found."""

    loss: Tensor
    noise: Tensor


class _ResidualBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, time: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(_GROUPS, inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.time = nn.Linear(time, outputs)
        self.norm2 = nn.GroupNorm(_GROUPS, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.shortcut = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        hidden = self.conv1(F.silu(self.norm1(x)))
        hidden = hidden + self.time(F.silu(time))[:, :, None, None]
        hidden = self.conv2(F.silu(self.norm2(hidden)))
        out: Tensor = self.shortcut(x) + hidden
        return out


class _Attention(nn.Module):
    def __init__(self, width: int, context: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(context, width, bias=False)
        self.value = nn.Linear(context, width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        projected = (self.query(x), self.key(context), self.value(context))
        query, key, value = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in projected)
        mixed = F.scaled_dot_product_attention(query, key, value)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class _TransformerBlock(nn.Module):
    """Attention of the image's positions to each other and to the text, and a gated MLP."""

    def __init__(self, width: int, text: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(_GROUPS, width, eps=1e-6)
        self.project_in = nn.Conv2d(width, width, 1)
        self.norm1 = nn.LayerNorm(width)
        self.self_attention = _Attention(width, width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.text_attention = _Attention(width, text, heads)
        self.norm3 = nn.LayerNorm(width)
        self.gate = nn.Linear(width, 8 * width)
        self.down = nn.Linear(4 * width, width)
        self.project_out = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        hidden = self.project_in(self.norm(x)).flatten(2).transpose(1, 2)
        normed = self.norm1(hidden)
        hidden = hidden + self.self_attention(normed, normed)
        hidden = hidden + self.text_attention(self.norm2(hidden), text)
        value, gate = self.gate(self.norm3(hidden)).chunk(2, dim=-1)
        hidden = hidden + self.down(value * F.gelu(gate))
        out: Tensor = x + self.project_out(hidden.transpose(1, 2).unflatten(2, x.shape[2:]))
        return out


class _Layer(nn.Module):
    """A residual block and, at the resolutions that have it, attention."""

    def __init__(self, inputs: int, outputs: int, time: int, text: int, heads: int, attention: bool) -> None:
        super().__init__()
        self.residual = _ResidualBlock(inputs, outputs, time)
        self.attention = _TransformerBlock(outputs, text, heads) if attention else None

    def forward(self, x: Tensor, time: Tensor, text: Tensor) -> Tensor:
        x = self.residual(x, time)
        return x if self.attention is None else self.attention(x, text)


class DiffusionUNet(nn.Module):
    """Predict the noise in latents at a timestep, given an encoded text.

    Args:
        widths: Channels at each resolution; all but the last have attention.
        channels: Channels of the latents.
        text: Width of the encoded text.
        heads: Heads of each attention.
        depth: Layers at each resolution on the way down; one more on the way up.
    """

    def __init__(
        self,
        widths: Sequence[int] = (320, 640, 1280, 1280),
        channels: int = 4,
        text: int = 768,
        heads: int = 8,
        depth: int = 2,
    ) -> None:
        super().__init__()
        first, last = widths[0], widths[-1]
        time = 4 * first
        self.frequencies = first // 2
        self.time = nn.Sequential(nn.Linear(first, time), nn.SiLU(), nn.Linear(time, time))
        self.conv_in = nn.Conv2d(channels, first, 3, padding=1)

        self.down = nn.ModuleList()
        self.downsample = nn.ModuleList()
        skips, width = [first], first
        for level, outputs in enumerate(widths):
            attention = level < len(widths) - 1
            layers = nn.ModuleList()
            for _ in range(depth):
                layers.append(_Layer(width, outputs, time, text, heads, attention))
                width = outputs
                skips.append(width)
            self.down.append(layers)
            if attention:
                self.downsample.append(nn.Conv2d(width, width, 3, stride=2, padding=1))
                skips.append(width)

        self.middle_in = _Layer(last, last, time, text, heads, attention=True)
        self.middle_out = _ResidualBlock(last, last, time)

        self.up = nn.ModuleList()
        self.upsample = nn.ModuleList()
        for level, outputs in reversed(list(enumerate(widths))):
            layers = nn.ModuleList()
            for _ in range(depth + 1):
                attention = level < len(widths) - 1
                layers.append(_Layer(width + skips.pop(), outputs, time, text, heads, attention))
                width = outputs
            self.up.append(layers)
            if level > 0:
                self.upsample.append(nn.Conv2d(width, width, 3, padding=1))

        self.norm_out = nn.GroupNorm(_GROUPS, first)
        self.conv_out = nn.Conv2d(first, channels, 3, padding=1)

    def forward(self, noisy: Tensor, timesteps: Tensor, text: Tensor, labels: Tensor) -> Denoised:
        time = self.time(self._embed(timesteps))
        x = self.conv_in(noisy)
        skips = [x]
        for level, layers in enumerate(self.down):
            for layer in cast(nn.ModuleList, layers):
                x = layer(x, time, text)
                skips.append(x)
            if level < len(self.downsample):
                x = self.downsample[level](x)
                skips.append(x)
        x = self.middle_out(self.middle_in(x, time, text), time)
        for level, layers in enumerate(self.up):
            for layer in cast(nn.ModuleList, layers):
                x = layer(torch.cat([x, skips.pop()], dim=1), time, text)
            if level < len(self.upsample):
                x = self.upsample[level](F.interpolate(x, scale_factor=2.0, mode="nearest"))
        noise = self.conv_out(F.silu(self.norm_out(x)))
        return Denoised(F.mse_loss(noise, labels), noise)

    def _embed(self, timesteps: Tensor) -> Tensor:
        """Return the sines and cosines of the timesteps."""
        steps = torch.arange(self.frequencies, device=timesteps.device, dtype=torch.float32)
        angles = timesteps[:, None] * torch.exp(-math.log(10000) / self.frequencies * steps)
        return torch.cat([angles.cos(), angles.sin()], dim=-1)
