"""Where a stored name goes in a part of a model, and under which name it is fed to it. Asks Transformers' renaming of the whole model and of the part; knows no prefixes.

A stored name is fed without its first few dotted parts (``language_model.``), and with other numbers where layers or experts are numbered anew: whichever spelling the part's
own renaming takes to where the whole model's takes the stored one. So what a tensor becomes is always what it would become in the whole model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter

from headrace.engines.parts import Part
from headrace.engines.renaming import Renamer, StackSlot
from headrace.errors import InvalidSetting, PlacementError

OTHER_EXPERTS = "other experts"


@dataclass(frozen=True, slots=True)
class Route:
    """What becomes of a stored name."""

    target: str
    """The whole model's parameter; where it has none, the name that the renaming ends with."""
    fed: str | None = None
    """The name under which the part takes the tensor; None where it does not."""
    group: str | None = None
    """The word for what is left out; None where the tensor is fed, or has no place in the whole model."""
    others: tuple[str, ...] = ()
    """Further parameters of the whole model that the same tensor fills: a stored qkv its k and v."""
    is_plain: bool = False
    """The tensor becomes its parameter by itself and as it is."""
    num_experts: int | None = None
    """Where the tensor is itself a stack of all experts, of which some are wanted: how many it stacks."""


class Routes:
    """The routes of stored names into one part. Not for several threads."""

    def __init__(self, part: Part, *, key_mapping: Any = None) -> None:
        """``key_mapping`` is the option of ``from_pretrained``."""
        self._part = part
        mapping = get_model_conversion_mapping(part.whole, key_mapping)
        self._whole = Renamer(part.whole, mapping)
        self._targets: dict[str, list[str]] = {
            pattern: converter.target_patterns
            for converter in mapping
            if isinstance(converter, WeightConverter)
            for pattern in converter.source_patterns
        }
        self._own = Renamer(part.own, get_model_conversion_mapping(part.own, key_mapping))
        experts = part.experts
        self._numbers = None if experts is None else {expert: number for number, expert in enumerate(experts)}
        self._num_stripped = 0
        self._of_experts: dict[tuple[str, str], Route] = {}
        """Name up to and after an expert's number → the route of one such expert, with ``{}`` for the number in ``fed``."""

    def __call__(self, name: str) -> Route:
        """Return the route of ``name``. Raises `PlacementError` where the part has the tensor's parameter, and no spelling of the name that leads to it."""
        around, expert = _split(name)
        known = self._of_experts.get(around)
        if known is None or expert is None:
            return self._find(name, around)
        if known.fed is None:
            return known
        number = self._number_of(expert)
        if number is None:
            return Route(known.target, group=OTHER_EXPERTS)
        return replace(known, fed=known.fed.format(number))

    def _find(self, name: str, around: tuple[str, str]) -> Route:
        target, pattern = self._whole(name)
        if target not in self._whole.wanted:
            return Route(target)
        own, others = self._part.names.get(target), self._others(target, pattern)
        slot = self._whole.slot(name) if pattern is not None else None
        if own is None:
            route = Route(target, group=self._part.groups[target], others=others)
            if slot is not None:
                self._remember(around, slot, route, slot.expert)
            return route
        wanted = slot
        if slot is not None:
            number = self._number_of(slot.expert)
            if number is None:
                return Route(target, group=OTHER_EXPERTS)
            wanted = StackSlot(own, number, slot.position, slot.num_positions)
        fed = self._fed(name, (own, pattern), slot, wanted)
        if fed is None:
            raise self._dead_end(name, target)
        if slot is not None and wanted is not None:
            self._remember(around, slot, Route(target, fed), wanted.expert)
        num_experts = None
        if slot is None and self._whole.wanted[target].shape != self._own.wanted[own].shape:
            if "*" in (pattern or ""):
                raise self._changed_experts(name, target)
            num_experts = int(self._whole.wanted[target].shape[0])
        return Route(target, fed, others=others, is_plain=pattern is None, num_experts=num_experts)

    def _dead_end(self, name: str, target: str) -> PlacementError:
        return PlacementError(
            f"{name} belongs to the part that is loaded, and cannot be brought to it.",
            f"{type(self._part.whole).__name__} makes {target} of it, and {type(self._part.own).__name__} nothing.",
            "Load the whole model, and please report its class.",
        )

    def _changed_experts(self, name: str, target: str) -> InvalidSetting:
        return InvalidSetting(
            f"Experts of {type(self._part.whole).__name__} cannot be chosen.",
            f"{name} and those of the other experts are changed on their way into {target}, and not only stacked.",
            "Load it without experts.",
        )

    def _others(self, target: str, pattern: str | None) -> tuple[str, ...]:
        first, *others = self._targets.get(pattern, [""]) if pattern is not None else [""]
        return tuple(target.replace(first, other) for other in others)

    def _remember(self, around: tuple[str, str], slot: StackSlot, route: Route, number: int) -> None:
        """Keep the route for the other experts of the same stack: there can be tens of thousands."""
        other = self._whole.slot(f"{around[0]}.{slot.expert + 1}.{around[1]}")
        if other != replace(slot, expert=slot.expert + 1):
            return
        if route.fed is None:
            self._of_experts[around] = route
            return
        fed_around, fed_number = _split(route.fed)
        if fed_number == number:
            fed = ".{}.".join(part.replace("{", "{{").replace("}", "}}") for part in fed_around)
            self._of_experts[around] = replace(route, fed=fed)

    def leads_anywhere(self, target: str) -> bool:
        """Say whether ``target`` is a parameter of the whole model."""
        return target in self._whole.wanted

    def _number_of(self, expert: int) -> int | None:
        """Return the number of an expert in the part; None where it is not wanted."""
        return expert if self._numbers is None else self._numbers.get(expert)

    def _fed(
        self, name: str, wanted: tuple[str, str | None], slot: StackSlot | None, own_slot: StackSlot | None
    ) -> str | None:
        for num_stripped, spelling in self._spellings(name, wanted[0], slot, own_slot):
            if self._own(spelling) == wanted and (own_slot is None or self._own.slot(spelling) == own_slot):
                self._num_stripped = num_stripped
                return spelling
        if wanted[1] is None and self._own.is_plain(wanted[0]):
            return wanted[0]
        return None

    def _spellings(
        self, name: str, own: str, slot: StackSlot | None, own_slot: StackSlot | None
    ) -> Iterator[tuple[int, str]]:
        """Yield what ``name`` could be called in the part, the likeliest first, with how many dotted parts are taken off."""
        parts = name.split(".")
        stripped = [self._num_stripped, *(count for count in range(len(parts)) if count != self._num_stripped)]
        renumbered = list(_renumbered(parts, slot, own_slot, own))
        for count in stripped:
            for spelled in renumbered:
                if count < len(parts):
                    yield count, ".".join(spelled[count:])


def _split(name: str) -> tuple[tuple[str, str], int | None]:
    """Return what is before and behind the last number in ``name``, and the number."""
    parts = name.split(".")
    for place in reversed(range(len(parts))):
        if parts[place].isdigit():
            return (".".join(parts[:place]), ".".join(parts[place + 1 :])), int(parts[place])
    return (name, ""), None


def _renumbered(parts: list[str], slot: StackSlot | None, own_slot: StackSlot | None, own: str) -> Iterator[list[str]]:
    """Yield ``parts`` with another layer and another expert, in every way in which their numbers can be meant."""
    places = [place for place, part in enumerate(parts) if part.isdigit()]
    numbers = [part for part in own.split(".") if part.isdigit()]
    layers: list[tuple[int, str] | None] = [None]
    if numbers:
        layers += [(place, numbers[0]) for place in places if parts[place] != numbers[0]]
    experts: list[tuple[int, str] | None] = [None]
    if slot is not None and own_slot is not None and slot.expert != own_slot.expert:
        experts = [(place, str(own_slot.expert)) for place in places if parts[place] == str(slot.expert)]
    for layer in layers:
        for expert in experts:
            if layer is not None and expert is not None and layer[0] == expert[0]:
                continue
            spelled = list(parts)
            for change in (layer, expert):
                if change is not None:
                    spelled[change[0]] = change[1]
            yield spelled
