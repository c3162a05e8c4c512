"""What every family of methods answers: one section of a configuration, read once, and then asked about each module."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from headrace.errors import UnsupportedQuantization
from headrace.quantization.matching import NamePatterns
from headrace.quantization.scheme import InputQuantization, Role, Scheme, StoredPart
from headrace.quantization.section import QuantizationSection

Rule = TypeVar("Rule", bound=Hashable)
"""What the section says of one module, as far as it differs between modules. Modules of one rule and of the same parts have the same answer."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What a module's parts are, under its rule."""

    scheme: Scheme
    inputs: InputQuantization | None = None
    remarks: tuple[str, ...] = ()
    """What is odd about it: sentences for `Findings`."""


class Family(ABC, Generic[Rule]):
    """One section, understood. Made once for a checkpoint; what does not depend on a module is checked when it is made."""

    def __init__(self, section: QuantizationSection, *, excluded: Iterable[str] = ()) -> None:
        self.section = section
        self.excludes = NamePatterns(excluded, place=section.place)
        self.remarks: list[str] = []
        """What is odd about the section as a whole: sentences for `Findings`."""

    @abstractmethod
    def rule_for(self, module: str, kind: str) -> Rule | None:
        """Return what the section says of ``module``; None where it says nothing. Exclusions are not looked at: the tensors have already decided."""

    @abstractmethod
    def read(self, module: str, parts: Mapping[Role, StoredPart], rule: Rule | None) -> Reading:
        """Return the scheme that ``parts`` make. Raises `UnsupportedQuantization` that names the module."""

    def expects(self, module: str, kind: str) -> bool:
        """Say whether the section means ``module`` to be quantized, and says so in a way that its absence would be a contradiction."""
        return bool(self.excludes) and kind == "Linear" and self.excludes.find(module, kind=kind) is None


def names_in(section: QuantizationSection, *keys: str) -> list[str]:
    """Return the lists under ``keys`` as one. Raises `UnsupportedQuantization` for what is no list."""
    found: list[str] = []
    for key in keys:
        listed = section.raw.get(key)
        if listed is None:
            continue
        if isinstance(listed, str) or not isinstance(listed, Iterable):
            raise UnsupportedQuantization(
                f"{section.place} has {listed!r} under {key}.",
                "It must be a list of names.",
                "Take the file from where the model was made.",
            )
        found.extend(listed)
    return found


def whole_number(section: QuantizationSection, content: Mapping[str, Any], key: str, default: int | None) -> int | None:
    """Return the number under ``key``, or ``default``. Raises `UnsupportedQuantization` for anything else."""
    found = content.get(key)
    if found is None:
        return default
    if not isinstance(found, int) or isinstance(found, bool):
        raise UnsupportedQuantization(
            f"{section.place} has {found!r} as {key}.",
            "It must be a whole number.",
            "Take the file from where the model was made.",
        )
    return found


def unknown(section: QuantizationSection, what: str, found: object, known: Iterable[str]) -> UnsupportedQuantization:
    """Return the error for a value that nothing here understands."""
    return UnsupportedQuantization(
        f"{section.place} names the {what} {found!r}, which cannot be read here.",
        f"Known are {', '.join(known)}.",
        "Use another quantization of the model, or its unquantized form; headrace.stream gives the tensors as they are stored.",
    )
