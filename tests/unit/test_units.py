"""Sizes and durations, as written and as read."""

from __future__ import annotations

import pytest

from headrace.errors import InvalidSetting
from headrace.units import format_bytes, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (0, 0),
        (4096, 4096),
        ("4096", 4096),
        ("64MiB", 64 << 20),
        ("4 GiB", 4 << 30),
        ("1.5GB", 1_500_000_000),
        ("2k", 2000),
        (" 7 b ", 7),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_sizes_are_read(text: str | int, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "4 furlongs", "-1", -1, True, "1e9", "4GiB4"])
def test_what_is_no_size_is_refused(text: str | int) -> None:
    with pytest.raises(InvalidSetting, match="is not a size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1500, "1.5 kB"),
        (269_060_552, "269 MB"),
        (2_000_000_000, "2 GB"),
        (1_234_567_890_123, "1.23 TB"),
    ],
)
def test_sizes_are_written(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.254, "0.25 s"), (12.34, "12.3 s"), (119.94, "119.9 s"), (245, "4 min 05 s")]
)
def test_durations_are_written(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
