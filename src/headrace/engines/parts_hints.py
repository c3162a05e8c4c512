"""Adds to a `PlacementError` what only the model's class tells: which of its parts the checkpoint holds nothing of, and what an unexpected tensor was probably meant to be."""

from __future__ import annotations

from collections import Counter
from difflib import get_close_matches
from typing import Any

from headrace.engines.parts_language import find_language
from headrace.engines.parts_leftout import group_of
from headrace.engines.placement import Placement, list_names
from headrace.engines.renaming import Renamer
from headrace.errors import PlacementError

_MOST_NAMES = 12


def with_hints(error: PlacementError, placement: Placement, model: Any, renamer: Renamer) -> PlacementError:
    """Return ``error`` with what can be said beyond it. ``model`` is on the meta device."""
    lines, mend = [error.why], [error.mend]
    hints = [
        f"{name} (near {near})"
        for name in placement.unexpected[:_MOST_NAMES]
        if f"{name} (near " not in error.why and (near := nearest(renamer(name)[0], placement.missing)) is not None
    ]
    absent = _absent_groups(placement, model)
    if absent:
        listed = [f"{group} ({count} parameters)" for group, count in sorted(absent.items())]
        lines.append(f"nothing is there of: {', '.join(listed)}")
        mend += _without(absent, placement, model)
    if hints:
        lines.append(f"probably meant: {list_names(hints)}")
    return type(error)(error.what, "\n".join(lines), " ".join(mend))


def nearest(name: str, unfilled: Any) -> str | None:
    """Return what ``name``, as the class renames it, most resembles among the parameters that nothing fills."""
    found = get_close_matches(name, list(unfilled)[:2000], n=1, cutoff=0.75)
    return found[0] if found else None


def _absent_groups(placement: Placement, model: Any) -> Counter[str]:
    """Return the parts of a multimodal model of which everything is missing, with the number of their parameters."""
    if find_language(model) is None:
        return Counter()
    prefix = model.base_model_prefix
    missing = Counter(group_of(name, prefix) for name in placement.missing)
    whole = Counter(group_of(name, prefix) for name in model.state_dict())
    return Counter({group: count for group, count in missing.items() if count == whole[group]})


def _without(absent: Counter[str], placement: Placement, model: Any) -> list[str]:
    """Return the advice to load what is there, where all that is missing lies in what could be left out."""
    language = find_language(model)
    if language is None or sum(absent.values()) != len(placement.missing):
        return []
    of_language = {group_of(path, model.base_model_prefix) for path in language.paths}
    if not absent.keys() & of_language:
        return ["language_only=True loads the language model without it."]
    return ["encoder_only=True loads the rest without it."] if absent.keys() <= of_language else []
