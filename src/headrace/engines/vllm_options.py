"""What ``model_loader_extra_config`` may say to the vLLM loader. Pure; knows no vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.engines.engine_options import parse_engine_options
from headrace.storage import Uri
from headrace.streaming.formats import ExtraConfig

_THEIRS = {"enable_weights_track": "true or false: vLLM's own check that every parameter was loaded"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderOptions:
    """The extra configuration, taken apart."""

    extra: ExtraConfig
    uri: Uri | None = None
    """Where the weights are, if not where the model is."""
    theirs: Mapping[str, bool]
    """What is for vLLM's own loader beneath ours."""


def parse_loader_options(config: object) -> LoaderOptions:
    """Return what ``config`` says. Raises as `parse_engine_options`."""
    found = parse_engine_options(config, switches=_THEIRS)
    return LoaderOptions(extra=found.extra, uri=found.uri, theirs=found.switches)
