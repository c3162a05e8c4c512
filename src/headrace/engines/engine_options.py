"""What ``model_loader_extra_config`` may say to the loader of any engine. Pure; knows no engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from headrace.errors import InvalidSetting
from headrace.storage import Uri, is_object_uri, parse_uri
from headrace.streaming.formats import ExtraConfig, parse_extra_config

_STREAM_KEYS = {
    "concurrency": "connections of the node, a whole number, at least 1",
    "memory_limit": "bytes of buffer memory of the node, a whole number; -1 is unlimited, 0 the smallest that works",
    "distributed": "true or false: whether the ranks of one tensor-parallel group share the reading",
}
_URI_KEY = {"uri": "where the weights are, for a local folder of side files: text such as s3://bucket/model"}
_MEANINGLESS = {
    "enable_multithread_load": "Headrace reads over several connections at once; concurrency says how many.",
    "num_threads": "Headrace calls it concurrency.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """The extra configuration, taken apart."""

    extra: ExtraConfig
    uri: Uri | None = None
    """Where the weights are, if not where the model is."""
    switches: Mapping[str, bool]
    """Those of the engine's own keys that were given."""


def parse_engine_options(
    config: object, *, switches: Mapping[str, str], meaningless: Mapping[str, str] | None = None
) -> EngineOptions:
    """Return what ``config`` says. Raises `InvalidSetting`, which lists what is allowed, for anything else than known keys with values of the right kind.

    ``switches`` are the engine's own keys, each true or false, with what they mean; ``meaningless`` are keys of its own loader, with why they say nothing here.
    """
    known = _STREAM_KEYS | _URI_KEY | dict(switches)
    allowed = f"Allowed: {'; '.join(f'{key} ({kind})' for key, kind in known.items())}."
    if not isinstance(config, Mapping):
        raise InvalidSetting(f"model_loader_extra_config is a {type(config).__name__}, not an object.", mend=allowed)
    refused = _MEANINGLESS | dict(meaningless or {})
    for key in config:
        if key in refused:
            raise InvalidSetting(f"{key} means nothing to Headrace.", refused[key], allowed)
        if key not in known:
            near = get_close_matches(str(key), known, n=1)
            hint = f"Did you mean {near[0]}?" if near else ""
            raise InvalidSetting(f"Unknown in model_loader_extra_config: {key!r}.", hint, allowed)
    given = {key: config[key] for key in switches if key in config}
    for key, value in given.items():
        if not isinstance(value, bool):
            raise InvalidSetting(f"{key} is {value!r}.", "It must be true or false.", allowed)
    return EngineOptions(
        extra=parse_extra_config({key: config[key] for key in _STREAM_KEYS if key in config}),
        uri=_parsed_uri(config["uri"]) if "uri" in config else None,
        switches=given,
    )


def _parsed_uri(value: object) -> Uri:
    if not isinstance(value, str) or not is_object_uri(value):
        raise InvalidSetting(
            f"uri is {value!r}.", "It says in which store the weights are.", "Write text such as s3://bucket/model."
        )
    return parse_uri(value)
