"""Finding a GPU in the table by the name people, drivers and clouds give it.

Note [How a name is matched]
A name is cut into words: "rtx3090Ti", "RTX 3090 Ti" and "NVIDIA GeForce RTX 3090 Ti" all hold {3090, ti}.
Some words say which GPU it is (the core: 3090, ti, laptop, super); others may be there or not (vendor,
product line, memory, form factor). A query matches a GPU if it has all of the core, and nothing that the GPU
is not: so "3090" is never a 3090 Ti, "3090 Ti" never a 3090, "AMD 3090" nothing at all, and the slice
"A100-SXM4-40GB MIG 1g.5gb" is not taken for the card.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache

from memscale.errors import ConfigTypeError, HardwareError, shown
from memscale.hardware.gpu_table import GPU_TABLE, GpuSpec, Vendor

__all__ = ["find_gpu", "list_gpus"]

_VENDOR_WORDS: dict[Vendor, frozenset[str]] = {
    "nvidia": frozenset({"nvidia", "geforce", "tesla", "quadro"}),
    "amd": frozenset({"amd", "radeon", "instinct", "pro"}),
}
_LINE_WORDS = frozenset({"rtx", "gtx", "rx"})
_DETAIL_WORDS = frozenset({"pcie", "sxm", "blackwell", "workstation", "server", "edition", "generation"})
_FILLERS = frozenset({"gpu", "graphics", "card", "with", "design", "series"})
_SYNONYMS = {"mobile": "laptop", "notebook": "laptop"}

# What a driver calls a GPU besides the words of its canonical name.
_ALSO_CALLED: dict[str, frozenset[str]] = {
    "NVIDIA H100 SXM5 80GB": frozenset({"hbm3"}),  # "NVIDIA H100 80GB HBM3"
    "NVIDIA GH200 96GB": frozenset({"480gb"}),  # "NVIDIA GH200 480GB": the memory of its CPU
    "NVIDIA GH200 144GB": frozenset({"hbm3e"}),  # "NVIDIA GH200 144G HBM3e"
    "AMD Instinct MI250": frozenset({"mi250x"}),  # "AMD Instinct MI250X / MI250", for either
}

_MAX_Q = re.compile(r"max[\s_-]*q")
_MEMORY = re.compile(r"(?<![a-z0-9.])(\d+)\s*g(?:i?b)?(?![a-z0-9])")
_PREFIX = re.compile("nvidia|amd|geforce|radeon|instinct|tesla|quadro|titan|rtx|gtx|rx|pro")
_SUFFIX = re.compile("ti|super|laptop|mobile|maxq|xtx|xt|gre|sff|ada|d|gpu")
_PREFIXES = re.compile(f"(?:{_PREFIX.pattern})*")
_FUSED = re.compile(rf"(\d{{3,4}})((?:{_SUFFIX.pattern})+)")


def find_gpu(name: str, *, memory_bytes: int | None = None) -> GpuSpec:
    """Find the GPU that `name` means.

    Case, spaces, hyphens and the vendor's words do not matter. Where several GPUs fit the name ("A100" is
    sold with 40 and with 80 GB), the answer is the cautious one, always the same: the least memory, then the
    lowest fp16 rate, then the lowest memory bandwidth.

    Args:
        name: As people write it ("3090", "A100-80GB", "4090 laptop") or as `torch.cuda.get_device_name`
            reports it.
        memory_bytes: The memory of the device, where it is known: among several fits, the nearest to it is
            taken.

    Raises:
        HardwareError: No GPU is known by that name; the message lists the nearest.

    Example:
        >>> find_gpu("rtx3090").name
        'NVIDIA GeForce RTX 3090'
        >>> find_gpu("A100").memory_bytes // 2**30
        40
    """
    if not isinstance(name, str):
        raise ConfigTypeError(
            f"A GPU is found by its name, such as 'RTX 3090'; got {shown(name)}, a {type(name).__name__}."
        )
    words = _words(name)
    fits = [entry.gpu for entry in _entries() if entry.fits(words)]
    if not fits:
        raise HardwareError(_unknown(name, words))
    if memory_bytes is not None:
        # A driver reports a little less than the nominal size, so "nearest" and not "equal".
        nearest = min(abs(gpu.memory_bytes - memory_bytes) for gpu in fits)
        fits = [gpu for gpu in fits if abs(gpu.memory_bytes - memory_bytes) == nearest]
    return min(fits, key=lambda gpu: (gpu.memory_bytes, gpu.fp16_tflops, gpu.memory_bandwidth_gbs))


def list_gpus() -> tuple[GpuSpec, ...]:
    """Every GPU that is known by name, oldest architecture first.

    Example:
        >>> len(list_gpus()) >= 50
        True
    """
    return GPU_TABLE


@dataclass(frozen=True, slots=True)
class _Entry:
    """A GPU with the words of its name. See Note [How a name is matched]."""

    gpu: GpuSpec
    core: frozenset[str]
    allowed: frozenset[str]

    def fits(self, words: frozenset[str]) -> bool:
        return self.core <= words <= self.allowed


@cache
def _entries() -> tuple[_Entry, ...]:
    return tuple(map(_entry, GPU_TABLE))


def _entry(gpu: GpuSpec) -> _Entry:
    words = _words(gpu.name)
    memory = f"{gpu.memory_bytes // 2**30}gb"
    # "TITAN" is several GPUs, so there the product line is what tells them apart.
    line = frozenset[str]() if "titan" in words else _LINE_WORDS
    vendor = _VENDOR_WORDS[gpu.vendor]
    core = words - vendor - line - _DETAIL_WORDS - {memory}
    allowed = words | vendor | {memory} | _ALSO_CALLED.get(gpu.name, frozenset())
    return _Entry(gpu, core, allowed)


def _words(name: str) -> frozenset[str]:
    text = _MAX_Q.sub("maxq", name.lower())
    text = _MEMORY.sub(r" \1gb ", text)
    parts = [part for run in re.findall(r"[a-z0-9]+", text) for part in _split(run)]
    return frozenset(map(_same_word, parts)) - _FILLERS


def _split(run: str) -> list[str]:
    """Cut what people write in one: "rtx4070tisuper" is rtx, 4070, ti, super."""
    start = _PREFIXES.match(run)
    end = start.end() if start else 0
    fused = _FUSED.fullmatch(run, end)
    model = [fused[1], *_SUFFIX.findall(fused[2])] if fused else [run[end:]]
    return [*_PREFIX.findall(run[:end]), *filter(None, model)]


def _same_word(word: str) -> str:
    # Which SXM a module has follows from its generation.
    return "sxm" if re.fullmatch(r"sxm\d", word) else _SYNONYMS.get(word, word)


def _unknown(name: str, words: frozenset[str]) -> str:
    nearest = _nearest(words)
    advice = (
        "give one of the names that `memscale.hardware.list_gpus()` has, or a size of device memory in bytes"
    )
    if not nearest:
        return f"No GPU is known as {shown(name)}, and no name comes near it: {advice}."
    return f"No GPU is known as {shown(name)}. The nearest names are {', '.join(nearest)}: {advice}."


def _nearest(words: frozenset[str], count: int = 5) -> tuple[str, ...]:
    """The names most like `words`: those that share words of their core first."""
    known = words - _VENDOR_WORDS["nvidia"] - _VENDOR_WORDS["amd"] - _LINE_WORDS
    plain = "".join(sorted(word for word in known if not _MEMORY.fullmatch(word)))
    scored: list[tuple[float, int, str]] = []
    for position, entry in enumerate(_entries()):
        likeness = SequenceMatcher(None, plain, "".join(sorted(entry.core)), autojunk=False).ratio()
        score = likeness + len(words & entry.core) / len(entry.core)
        if score > 0.5:
            scored.append((-score, position, entry.gpu.name))
    return tuple(name for _, _, name in sorted(scored)[:count])
