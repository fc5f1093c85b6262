"""Sizes: what is read, what is refused, what is written."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memscale.errors import ConfigError, ConfigTypeError, MemScaleError
from memscale.units import format_bytes, parse_bytes

DECIMAL = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
BINARY = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@pytest.mark.parametrize(
    ("written", "size"),
    [
        ("6GB", 6 * 10**9),
        ("6GiB", 6 * 2**30),
        ("6gib", 6 * 2**30),
        ("6 Gb", 6 * 10**9),
        ("512 MiB", 512 * 2**20),
        ("  1.5GB ", 1_500_000_000),
        (".5KiB", 512),
        ("0.1GB", 10**8),
        ("+2kB", 2000),
        ("1.9B", 1),
        ("4096", 4096),
        ("6_000_000 B", 6_000_000),
        (6_000_000_000, 6_000_000_000),
        (1, 1),
        (2**63 - 1, 2**63 - 1),
    ],
)
def test_sizes_that_are_read(written, size):
    assert parse_bytes(written, field="memory_budget") == size


@pytest.mark.parametrize(
    ("written", "error", "reason"),
    [
        (0, ConfigError, "more than zero"),
        (-1, ConfigError, "more than zero"),
        ("0GB", ConfigError, "more than zero"),
        ("-6GB", ConfigError, "more than zero"),
        ("0.9B", ConfigError, "more than zero"),
        (2**63, ConfigError, "2⁶³"),
        ("10000000EiB", ConfigError, "2⁶³"),
        pytest.param(10**5000, ConfigError, "2⁶³", id="an int too long to print"),
        pytest.param("9" * 5000, ConfigError, "too many digits", id="a text too long to convert"),
        ("6 parsecs", ConfigError, "unknown unit 'parsecs'"),
        ("6G", ConfigError, re.escape("write GB (powers of 1000) or GiB (powers of 1024)")),
        ("6Gi", ConfigError, re.escape("write GB (powers of 1000) or GiB (powers of 1024)")),
        ("", ConfigError, "not a size"),
        ("GB", ConfigError, "not a size"),
        ("1,5GB", ConfigError, "not a size"),
        ("1e9", ConfigError, "not a size"),
        ("nan", ConfigError, "not a size"),
        ("inf GB", ConfigError, "not a size"),
        ("6GB 2MB", ConfigError, "not a size"),
        ("٦GB", ConfigError, "not a size"),
        (True, ConfigTypeError, "is a bool"),
        (math.nan, ConfigTypeError, "is a float"),
        (6e9, ConfigTypeError, "is a float"),
        (None, ConfigTypeError, "is a NoneType"),
        (b"6GB", ConfigTypeError, "is a bytes"),
    ],
)
def test_sizes_that_are_refused(written, error, reason):
    with pytest.raises(error, match=reason) as caught:
        parse_bytes(written, field="some_field")
    assert isinstance(caught.value, MemScaleError)
    assert str(caught.value).startswith("some_field=")
    assert '"6GB"' in str(caught.value), "the message shows what would be right"
    assert len(str(caught.value)) < 400


@given(number=st.integers(1, 10**6), unit=st.sampled_from(sorted(DECIMAL | BINARY)), data=st.data())
def test_a_number_and_a_unit_multiply(number, unit, data):
    written = data.draw(
        st.sampled_from([f"{number}{unit}", f"{number} {unit.upper()}", f"{number}{unit.lower()} "])
    )
    assert parse_bytes(written, field="f") == number * (DECIMAL | BINARY)[unit]


@given(st.text(max_size=12))
def test_any_text_is_read_or_refused_by_name(text):
    try:
        size = parse_bytes(text, field="f")
    except ConfigError:
        with pytest.raises(ConfigError, match=r"^f="):
            parse_bytes(text, field="f")
    else:
        assert size > 0


@pytest.mark.parametrize(
    ("size", "written"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (2**20, "1.0 MiB"),
        (2**20 - 1, "1.0 MiB"),
        (1536, "1.5 KiB"),
        (2_802_465_211, "2.61 GiB"),
        (-2_802_465_211, "-2.61 GiB"),
        (-512, "-512 B"),
        (10 * 2**30, "10.0 GiB"),
        (2**70, "1024.0 EiB"),
    ],
)
def test_sizes_as_they_are_written(size, written):
    assert format_bytes(size) == written


@given(st.integers(1, 2**62))
def test_what_is_written_reads_back_to_within_a_hundredth_of_its_unit(size):
    assert parse_bytes(format_bytes(size), field="f") == pytest.approx(size, rel=0.005, abs=1)
    assert format_bytes(-size) == "-" + format_bytes(size)


@given(st.integers(0, 2**62))
def test_no_size_is_written_with_a_thousand_and_twenty_four(size):
    assert float(format_bytes(size).split()[0]) < 1024
