"""What ``model_loader_extra_config`` may say to the SGLang loader. Pure; knows no SGLang."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from headrace.errors import InvalidSetting
from headrace.storage import Uri, is_object_uri, parse_uri
from headrace.streaming.formats import ExtraConfig, parse_extra_config

_ALLOWED = {
    "concurrency": "connections of the node, a whole number, at least 1",
    "memory_limit": "bytes of buffer memory of the node, a whole number; -1 is unlimited, 0 the smallest that works",
    "distributed": "true or false: whether the ranks of one tensor-parallel group share the reading",
    "uri": "where the weights are, for a local folder of side files: text such as s3://bucket/model",
    "check_weights": "true or false: whether weights that do not come end the start, or are a warning",
}
_MEANINGLESS = {
    "enable_multithread_load": "Headrace reads over several connections at once; concurrency says how many.",
    "num_threads": "Headrace calls it concurrency.",
    "enable_gds": "Headrace reads from stores, through the memory of the node.",
}
_STREAM_KEYS = ("concurrency", "memory_limit", "distributed")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderOptions:
    """The extra configuration, taken apart."""

    extra: ExtraConfig
    uri: Uri | None = None
    """Where the weights are, if not where the model is."""
    check_weights: bool = True
    """Whether parameters that got no weights end the start."""


def parse_loader_options(config: object) -> LoaderOptions:
    """Return what ``config`` says. Raises `InvalidSetting`, which lists what is allowed, for anything else than known keys with values of the right kind."""
    if not isinstance(config, Mapping):
        raise InvalidSetting(f"model_loader_extra_config is a {type(config).__name__}, not an object.", mend=_allowed())
    for key in config:
        if key in _MEANINGLESS:
            raise InvalidSetting(f"{key} means nothing to Headrace.", _MEANINGLESS[key], _allowed())
        if key not in _ALLOWED:
            near = get_close_matches(str(key), _ALLOWED, n=1)
            hint = f"Did you mean {near[0]}?" if near else ""
            raise InvalidSetting(f"Unknown in model_loader_extra_config: {key!r}.", hint, _allowed())
    checks = config.get("check_weights", True)
    if not isinstance(checks, bool):
        raise InvalidSetting(f"check_weights is {checks!r}.", "It must be true or false.", _allowed())
    return LoaderOptions(
        extra=parse_extra_config({key: config[key] for key in _STREAM_KEYS if key in config}),
        uri=_parsed_uri(config["uri"]) if "uri" in config else None,
        check_weights=checks,
    )


def _parsed_uri(value: object) -> Uri:
    if not isinstance(value, str) or not is_object_uri(value):
        raise InvalidSetting(
            f"uri is {value!r}.", "It says in which store the weights are.", "Write text such as s3://bucket/model."
        )
    return parse_uri(value)


def _allowed() -> str:
    return f"Allowed: {'; '.join(f'{key} ({kind})' for key, kind in _ALLOWED.items())}."
