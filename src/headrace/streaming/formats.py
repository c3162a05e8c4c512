"""How weights come into memory, by name: the load formats and the extra configuration that goes with them. Pure; chooses nothing and reads nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from headrace.errors import InvalidSetting
from headrace.settings import Settings

_SOURCE = "the extra config"
_JSON_KINDS = {bool: "true or false", int: "a whole number"}


class LoadFormat(StrEnum):
    """The names that ``load_format`` and ``--load-format`` take."""

    AUTO = "auto"
    """`HEADRACE`, for every uri."""
    HEADRACE = "headrace"
    """Headrace's own transport: any store, pinned versions, bounded memory."""
    RUNAI_STREAMER = "runai_streamer"
    """The same path with Run:ai Model Streamer as the transport (extra ``runai``)."""
    SAFETENSORS = "safetensors"
    """The files of a local folder, mapped into memory by the safetensors library."""
    MODELOPT = "modelopt"
    """A plain local model, quantized while it loads by NVIDIA ModelOpt's calibrating workflow (extra ``modelopt``)."""
    DUMMY = "dummy"
    """Random weights of the right shapes; no weight byte is read."""

    @classmethod
    def parse(cls, name: str) -> LoadFormat:
        """Return the format called ``name``; `InvalidSetting` lists the known ones."""
        try:
            return cls(name)
        except ValueError as error:
            known = ", ".join(cls)
            raise InvalidSetting(f"{name!r} is not a load format.", mend=f"Known: {known}.") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraConfig:
    """What ``model_loader_extra_config`` may say, under the names that Run:ai Model Streamer's users know. None: not said."""

    concurrency: int | None = None
    """Connections or reading threads, at least 1."""
    memory_limit: int | None = None
    """Bytes of buffer memory; -1 is unlimited, 0 the smallest that works."""
    distributed: bool | None = None
    """Whether the ranks of one node share the reading."""

    def __post_init__(self) -> None:
        for name, (kind, least) in _ALLOWED.items():
            value = getattr(self, name)
            if value is None:
                continue
            if type(value) is not kind:  # a bool is an int in Python, and must not count as one here
                raise InvalidSetting(f"Extra config {name} is {value!r}, not {_JSON_KINDS[kind]}.", mend=_allowed())
            if least is not None and isinstance(value, int) and value < least:
                raise InvalidSetting(f"Extra config {name} is {value}, less than {least}.", mend=_allowed())

    def applied_to(self, settings: Settings) -> Settings:
        """Return ``settings`` with ``concurrency`` as connections and ``memory_limit`` as memory limit, where they are said; ``distributed`` is no setting."""
        if self.concurrency is not None:
            settings = settings.changed(_SOURCE, num_connections=self.concurrency)
        if self.memory_limit is not None:
            settings = settings.changed(_SOURCE, memory_limit_bytes=self.memory_limit)
        return settings


_ALLOWED: dict[str, tuple[type, int | None]] = {
    "concurrency": (int, 1),
    "memory_limit": (int, -1),
    "distributed": (bool, None),
}
"""Key to its type and its least value."""


def parse_extra_config(config: ExtraConfig | Mapping[str, Any] | str | None) -> ExtraConfig:
    """Return the extra configuration that a mapping or the text of a JSON object says; None and ``{}`` say nothing.

    `InvalidSetting` for text that is no JSON object, an unknown key, or a value of the wrong type (true is not a number, 1 is not true): it lists what is allowed.
    """
    if config is None:
        return ExtraConfig()
    if isinstance(config, ExtraConfig):
        return config
    if isinstance(config, str):
        config = _parsed(config)
    if not isinstance(config, Mapping):
        raise InvalidSetting(f"The extra config is {config!r}, not an object of keys and values.", mend=_allowed())
    unknown = [key for key in config if key not in _ALLOWED]
    if unknown:
        raise InvalidSetting(
            f"Unknown in the extra config: {', '.join(repr(key) for key in unknown)}.", mend=_allowed()
        )
    nothing = [key for key, value in config.items() if value is None]
    if nothing:
        raise InvalidSetting(f"Extra config {nothing[0]} is null.", "Leave a key out to say nothing.", _allowed())
    return ExtraConfig(**config)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except ValueError as error:
        raise InvalidSetting(f"The extra config {text!r} is not JSON.", f"{error}.", _allowed()) from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    twice = [key for key in keys if keys.count(key) > 1]
    if twice:
        raise ValueError(f"{twice[0]!r} is there twice")
    return dict(pairs)


def _allowed() -> str:
    keys = ", ".join(
        f"{name} ({_JSON_KINDS[kind]}{'' if least is None else f', at least {least}'})"
        for name, (kind, least) in _ALLOWED.items()
    )
    return f"Allowed: {keys}."
