"""Load formats and extra configuration: names and types as they are typed, and errors that list what is allowed."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.errors import InvalidSetting
from headrace.settings import Settings, TransportSettings
from headrace.streaming.formats import ExtraConfig, LoadFormat, parse_extra_config


def test_formats_are_the_names_that_are_typed() -> None:
    assert [str(one) for one in LoadFormat] == [
        "auto",
        "headrace",
        "runai_streamer",
        "safetensors",
        "modelopt",
        "dummy",
    ]
    assert LoadFormat.parse("runai_streamer") is LoadFormat.RUNAI_STREAMER
    assert LoadFormat.parse(LoadFormat.DUMMY) is LoadFormat.DUMMY


@pytest.mark.parametrize("name", ["runai", "AUTO", "", "pt"])
def test_unknown_format_lists_the_known(name: str) -> None:
    with pytest.raises(InvalidSetting, match=r"not a load format.*auto, headrace, runai_streamer") as raised:
        LoadFormat.parse(name)
    assert repr(name) in raised.value.what


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, ExtraConfig()),
        ({}, ExtraConfig()),
        ("{}", ExtraConfig()),
        ({"concurrency": 16}, ExtraConfig(concurrency=16)),
        ('{"memory_limit": -1, "distributed": false}', ExtraConfig(memory_limit=-1, distributed=False)),
        (
            {"memory_limit": 0, "distributed": True, "concurrency": 1},
            ExtraConfig(memory_limit=0, distributed=True, concurrency=1),
        ),
        (ExtraConfig(concurrency=3), ExtraConfig(concurrency=3)),
    ],
)
def test_extra_config_is_read(given: Any, expected: ExtraConfig) -> None:
    assert parse_extra_config(given) == expected


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"concurrency": "16"}, "concurrency is '16', not a whole number"),
        ({"concurrency": True}, "concurrency is True, not a whole number"),
        ({"concurrency": 16.0}, "concurrency is 16.0, not a whole number"),
        ({"concurrency": 0}, "concurrency is 0, less than 1"),
        ({"memory_limit": False}, "memory_limit is False, not a whole number"),
        ({"memory_limit": -2}, "memory_limit is -2, less than -1"),
        ({"distributed": 1}, "distributed is 1, not true or false"),
        ({"distributed": "true"}, "distributed is 'true', not true or false"),
        ({"concurency": 16}, "Unknown in the extra config: 'concurency'"),
        ({"a": 1, "concurrency": 16, "b": 2}, "Unknown in the extra config: 'a', 'b'"),
        ({"concurrency": None}, "concurrency is null"),
        ('{"concurrency": 16', "is not JSON"),
        ('{"concurrency": 16, "concurrency": 8}', "is not JSON"),
        ("[16]", "not an object"),
        ("16", "not an object"),
    ],
)
def test_errors_list_what_is_allowed(given: Any, what: str) -> None:
    with pytest.raises(InvalidSetting) as raised:
        parse_extra_config(given)
    assert what in raised.value.what
    for key in (
        "concurrency (a whole number, at least 1)",
        "memory_limit (a whole number",
        "distributed (true or false)",
    ):
        assert key in raised.value.mend


def test_a_wrong_field_is_refused_however_it_is_given() -> None:
    with pytest.raises(InvalidSetting, match="concurrency is True"):
        ExtraConfig(concurrency=True)


def test_what_is_said_takes_the_place_of_settings() -> None:
    settings = Settings(memory_limit_bytes=5, progress=False, transport=TransportSettings(num_connections=3))
    assert ExtraConfig().applied_to(settings) == settings
    assert ExtraConfig(distributed=True).applied_to(settings) == settings
    applied = ExtraConfig(concurrency=9, memory_limit=-1).applied_to(settings)
    assert (applied.transport.num_connections, applied.memory_limit_bytes, applied.progress) == (9, -1, False)
