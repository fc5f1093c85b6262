"""Parse and format sizes in bytes."""

from __future__ import annotations

import re
from fractions import Fraction

from memscale.errors import ConfigError, ConfigTypeError, shown

__all__ = ["BYTES_PER_GB", "format_bytes", "parse_bytes"]

BYTES_PER_GB = 10**9
"""What every setting named `..._gb` counts in: "6GB" and `6` of such a setting are the same size."""

_PREFIXES = "kmgtpe"
_FACTORS = (
    {"": 1, "b": 1}
    | {f"{prefix}b": 1000**power for power, prefix in enumerate(_PREFIXES, start=1)}
    | {f"{prefix}ib": 1024**power for power, prefix in enumerate(_PREFIXES, start=1)}
)
_BINARY_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_SIZE = re.compile(r"(?P<sign>[+-]?)(?P<number>[0-9][0-9_]*(?:\.[0-9]+)?|\.[0-9]+)\s*(?P<unit>[A-Za-z]*)")
_LARGEST = 2**63 - 1  # ssize_t
_ALLOWED = 'a size such as "6GB" (6·10⁹ bytes), "6GiB" (6·2³⁰ bytes), "512 MiB", or a whole number of bytes'


def parse_bytes(value: int | str, *, field: str) -> int:
    """Read a size as a number of bytes; a fraction of a byte is dropped.

    Args:
        value: A whole number of bytes, or a number with a unit in any case: decimal (`kB`, `MB`, `GB`, ...: powers
            of 1000) or binary (`KiB`, `MiB`, `GiB`, ...: powers of 1024).
        field: What the size is for; error messages name it.

    Raises:
        ConfigTypeError: The value is neither an `int` nor a `str`.
        ConfigError: The value is not a size, or not a size above zero.

    Example:
        >>> parse_bytes("6GB", field="memory_budget"), parse_bytes("1.5 GiB", field="memory_budget")
        (6000000000, 1610612736)
    """
    # bool first: True is an int in Python.
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ConfigTypeError(
            f"{field}={shown(value)} is a {type(value).__name__}, which is not a size: give {_ALLOWED}."
        )
    size = value if isinstance(value, int) else _parse_text(value, field)
    if size <= 0:
        raise ConfigError(f"{field}={shown(value)} must be more than zero bytes: give {_ALLOWED}.")
    if size > _LARGEST:
        raise ConfigError(f"{field}={shown(value)} is more than 2⁶³ bytes, past any memory: give {_ALLOWED}.")
    return size


def _parse_text(text: str, field: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{field}={shown(text)} is not a size: give {_ALLOWED}.")
    unit = match["unit"]
    factor = _FACTORS.get(unit.lower())
    if factor is None:
        hint = ""
        if f"{unit.lower()}b" in _FACTORS:  # "6G", "6Gi"
            prefix = unit[0].upper()
            hint = f" For {unit!r}, write {prefix}B (powers of 1000) or {prefix}iB (powers of 1024)."
        raise ConfigError(f"{field}={shown(text)} has the unknown unit {unit!r}: give {_ALLOWED}.{hint}")
    try:
        # A Fraction, as 0.1 GB in floating point is not 10⁸ bytes.
        number = Fraction(match["number"].replace("_", ""))
    except ValueError:  # more digits than Python agrees to convert
        raise ConfigError(f"{field}={shown(text)} has too many digits: give {_ALLOWED}.") from None
    size = int(number * factor)
    return -size if match["sign"] == "-" else size


def format_bytes(n: int) -> str:
    """Write a number of bytes in the binary unit that fits it, with one or two decimals.

    Example:
        >>> format_bytes(512), format_bytes(2**20), format_bytes(-2_802_465_211)
        ('512 B', '1.0 MiB', '-2.61 GiB')
    """
    sign, size = ("-", -n) if n < 0 else ("", n)
    if size < 1024:
        return f"{sign}{size} B"
    power = 0
    hundredths = size * 100
    while hundredths >= 102400 and power < len(_BINARY_UNITS):  # 1023.999 KiB is to be read as 1.0 MiB
        power += 1
        hundredths = (size * 100 + 1024**power // 2) // 1024**power
    whole, fraction = divmod(hundredths, 100)
    decimals = f"{fraction:02d}".removesuffix("0")
    return f"{sign}{whole}.{decimals} {_BINARY_UNITS[power - 1]}"
