"""What ``model_loader_extra_config`` may say to the SGLang loader. Pure; knows no SGLang."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.engines.engine_options import parse_engine_options
from headrace.storage import Uri
from headrace.streaming.formats import ExtraConfig

_SWITCHES = {"check_weights": "true or false: whether weights that do not come end the start, or are a warning"}
_MEANINGLESS = {"enable_gds": "Headrace reads from stores, through the memory of the node."}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderOptions:
    """The extra configuration, taken apart."""

    extra: ExtraConfig
    uri: Uri | None = None
    """Where the weights are, if not where the model is."""
    check_weights: bool = True
    """Whether parameters that got no weights end the start."""


def parse_loader_options(config: object) -> LoaderOptions:
    """Return what ``config`` says. Raises as `parse_engine_options`."""
    found = parse_engine_options(config, switches=_SWITCHES, meaningless=_MEANINGLESS)
    return LoaderOptions(extra=found.extra, uri=found.uri, **found.switches)
