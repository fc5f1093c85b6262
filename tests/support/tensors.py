"""Tensors of every kind for the tests of tiers, and how to compare them."""

import torch
from hypothesis import strategies as st

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
)


def filled(numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """One dimension of random bits; for bool, of values it can have."""
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype is torch.bool else 256
    raw = torch.randint(high, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype)


def bits(tensor: torch.Tensor) -> bytes:
    """The values, NaNs and signs of zeros included."""
    values = tensor.detach().cpu().resolve_conj().resolve_neg()
    dense = torch.empty(values.numel(), dtype=values.dtype)
    dense.view(values.shape).copy_(values)
    return bytes(dense.view(torch.uint8).tolist())


def assert_same(loaded: torch.Tensor, original: torch.Tensor) -> None:
    assert loaded.shape == original.shape
    assert loaded.stride() == original.stride()
    assert loaded.dtype is original.dtype
    assert loaded.device == original.device
    assert not loaded.requires_grad
    assert bits(loaded) == bits(original)


@st.composite
def views(draw: st.DrawFn, base: torch.Tensor) -> torch.Tensor:
    """Any view of `base` that strides can say: transposed, sliced, expanded, overlapping, empty, a scalar."""
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    stride = draw(st.lists(st.integers(0, 9), min_size=len(shape), max_size=len(shape)))
    span = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    offset = draw(st.integers(0, max(0, base.numel() - span)))
    return base.as_strided(shape, stride, offset)


@st.composite
def groups(draw: st.DrawFn) -> list[torch.Tensor]:
    """Tensors over one or two storages, some of them of another dtype than their storage began with."""
    tensors = []
    for seed in range(draw(st.integers(1, 2))):
        base = filled(draw(st.integers(85, 160)), draw(st.sampled_from(DTYPES)), seed)
        for _ in range(draw(st.integers(1, 3))):
            other = draw(st.sampled_from(DTYPES))
            fits = other.itemsize <= base.element_size() and other is not torch.bool
            again = base.view(other) if fits and draw(st.booleans()) else base
            tensor = draw(views(again))
            tensors.append(tensor.conj() if tensor.is_complex() and draw(st.booleans()) else tensor)
    return tensors
