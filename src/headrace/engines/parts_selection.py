"""Sorts a checkpoint's tensors for one part of a model: what is fed, under which name; what is knowingly left out; what nothing explains.

Names, packed modules, KV scales and lists of modules are all put into the part's own names, so that everything after this sees a checkpoint of the part.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from headrace.checkpoint import Entry
from headrace.engines.conversion import needless_names
from headrace.engines.parts import Part
from headrace.engines.parts_account import UNUSED
from headrace.engines.parts_hints import nearest
from headrace.engines.parts_names import OTHER_EXPERTS, Route, Routes
from headrace.engines.placement import list_names
from headrace.errors import InvalidSetting, PlacementError
from headrace.quantization import CheckpointQuantization, QuantizedModule

logger = logging.getLogger("headrace")

_OF_ATTENTION = ("o_proj", "out_proj", "dense", "q_proj", "q_b_proj")
"""Projections by whose place an attention module is found. As in `installation`."""
_LISTS = ("ignore", "exclude_modules", "modules_to_not_convert")


@dataclass(frozen=True, slots=True)
class Stored:
    """What there is to select from, and how strictly."""

    entries: Mapping[str, Entry]
    is_strict: bool = True
    """A tensor that has no place in the whole model is an error, and not a warning."""
    can_slice: bool = True
    """A tensor may be read in part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """A checkpoint, as its part of a model sees it."""

    entries: Mapping[str, Entry]
    """The name under which it is fed → entry; of a stack of all experts only the wanted ones, with their own shape and place."""
    quantization: CheckpointQuantization | None
    """In the part's names, without what the part has not; None where the checkpoint is not quantized."""
    groups: Mapping[str, str]
    """Stored name → the word for what it belongs to, for all that is left out."""
    absent: tuple[str, ...] = ()
    """Groups that the model has and the checkpoint has nothing of."""


def select(
    part: Part,
    stored: Stored,
    quantization: CheckpointQuantization | None,
    *,
    source: str,
    key_mapping: Any = None,
) -> Selection:
    """Return the selection for ``part``. ``key_mapping`` is the option of ``from_pretrained``.

    Raises `PlacementError` for a tensor that has no place in the whole model (with the nearest name that is not filled), and for two that would fill one parameter;
    `InvalidSetting` where chosen experts lie in a tensor that cannot be cut.
    """
    sorter = _Sorter(part, Routes(part, key_mapping=key_mapping), source=source, can_slice=stored.can_slice)
    if quantization is not None:
        for module in quantization.modules.values():
            sorter.add_module(module)
        sorter.add_unused(quantization.unused)
        for attention, pair in (quantization.kv.scales if quantization.kv else {}).items():
            sorter.add_scales(attention, pair)
    for entry in stored.entries.values():
        sorter.add(entry)
    sorter.settle(strict=stored.is_strict)
    return Selection(
        entries=sorter.entries,
        quantization=None if quantization is None else _renamed(quantization, sorter),
        groups=sorter.groups,
        absent=sorter.absent(),
    )


class _Sorter:
    """Takes one thing after the other; what came before is not taken twice."""

    def __init__(self, part: Part, routes: Routes, *, source: str, can_slice: bool) -> None:
        self.entries: dict[str, Entry] = {}
        self.groups: dict[str, str] = {}
        self.modules: dict[str, QuantizedModule] = {}
        self.scales: dict[str, tuple[Entry | None, Entry | None]] = {}
        self.prefixes: Counter[str] = Counter()
        self._part = part
        self._routes = routes
        self._source = source
        self._can_slice = can_slice
        self._seen: set[str] = set()
        self._reached: set[str] = set()
        self._homeless: dict[str, str] = {}
        self._owners: dict[str, list[str]] = defaultdict(list)

    def add(self, entry: Entry) -> None:
        if entry.name in self._seen:
            return
        route = self._follow(entry.name, [entry])
        if route.fed is not None:
            self._own(route, entry.name)
            self._feed(route.fed, self._sliced(entry, route))

    def add_module(self, module: QuantizedModule) -> None:
        """Sort a packed module by where its weight would go."""
        suffix = "" if module.num_experts is not None else ".weight"
        entries = list(module.entries.values())
        route = self._follow(f"{module.name}{suffix}", entries)
        if route.fed is None:
            return
        self._own(route, module.name)
        name = route.fed.removesuffix(suffix)
        parts = {role: self._sliced(entry, route) for role, entry in module.entries.items()}
        num_experts = module.num_experts
        if route.num_experts is not None and self._part.experts is not None:
            num_experts = len(self._part.experts)
        self.modules[name] = replace(module, name=name, entries=parts, num_experts=num_experts)
        for role, entry in module.entries.items():
            self._feed(f"{name}{entry.name.removeprefix(module.name)}", parts[role])

    def add_unused(self, names: Iterable[str]) -> None:
        for name in names:
            self._seen.add(name)
            self.groups[name] = UNUSED

    def add_scales(self, attention: str, pair: tuple[Entry | None, Entry | None]) -> None:
        """Sort the KV scales of an attention module by where its projections go."""
        entries = [entry for entry in pair if entry is not None]
        for projection in _OF_ATTENTION:
            suffix = f".{projection}.weight"
            if self._routes.leads_anywhere(self._routes(f"{attention}{suffix}").target):
                route = self._follow(f"{attention}{suffix}", entries)
                if route.fed is not None:
                    self.scales[route.fed.removesuffix(suffix)] = pair
                return
        for entry in entries:
            self._seen.add(entry.name)
            self._homeless[entry.name] = entry.name

    def settle(self, *, strict: bool) -> None:
        """Sort what has no place, and complain."""
        needless = needless_names(self._part.whole, self._homeless)
        self.groups |= needless
        unknown = {name: target for name, target in self._homeless.items() if name not in needless}
        doubled = [f"{name} from {' and '.join(names)}" for name, names in self._owners.items() if len(names) > 1]
        if doubled:
            raise self._error(
                f"doubled ({len(doubled)}): {list_names(doubled)}", "Check the checkpoint's files and index."
            )
        if not unknown:
            return
        self.groups |= dict.fromkeys(unknown, "unexpected")
        unfilled = sorted((set(self._part.names) | set(self._part.groups)) - self._reached)
        hinted = [_hinted(name, target, unfilled) for name, target in sorted(unknown.items())[:12]]
        line = f"unexpected ({len(unknown)}): {list_names(hinted, total=len(unknown))}"
        if strict:
            raise self._error(
                line, "Check config.json against the weights. Where it is meant, pass strict=False to leave them out."
            )
        logger.warning("%s in %s: %s", self._source, type(self._part.whole).__name__, line)

    def absent(self) -> tuple[str, ...]:
        """Return the groups of which the whole model has parameters, and the checkpoint nothing."""
        tied = {*self._part.whole.all_tied_weights_keys}
        there = {self._part.groups[name] for name in self._reached if name in self._part.groups}
        expected = {group for name, group in self._part.groups.items() if name not in tied}
        return tuple(sorted(expected - there))

    def _follow(self, name: str, entries: Iterable[Entry]) -> Route:
        """Return the route of ``name``, and note for ``entries``, which go the same way, what it means."""
        route = self._routes(name)
        names = [entry.name for entry in entries]
        self._seen.update(names)
        if self._routes.leads_anywhere(route.target):
            self._reached |= {route.target, *route.others}
        if route.group is not None:
            self.groups |= dict.fromkeys(names, route.group)
        elif route.fed is None:
            self._homeless |= dict.fromkeys(names, route.target)
        else:
            parts = name.split(".")
            self.prefixes["".join(f"{part}." for part in parts[: max(0, len(parts) - route.fed.count(".") - 1)])] += 1
        return route

    def _own(self, route: Route, name: str) -> None:
        """Note who fills a parameter by itself."""
        if route.is_plain or route.fed in self.entries:
            self._owners[route.target].append(name)

    def _feed(self, fed: str, entry: Entry) -> None:
        self.entries.setdefault(fed, entry)

    def _sliced(self, entry: Entry, route: Route) -> Entry:
        """Return the entry, or that part of it that holds the wanted ones of the experts that it stacks."""
        experts, total = self._part.experts, route.num_experts
        if total is None or experts is None:
            return entry
        follow = experts == tuple(range(experts[0], experts[-1] + 1))
        if not (
            self._can_slice and follow and entry.shape and entry.shape[0] == total and entry.size_bytes % total == 0
        ):
            raise InvalidSetting(
                f"{entry.name} of {self._source} holds all experts of a layer in one tensor, and the chosen ones cannot be read by themselves.",
                "Experts that follow each other can, with the load formats auto and headrace.",
                f"Choose experts as a range, such as range({experts[0]}, {experts[0] + len(experts)}).",
            )
        self.groups[entry.name] = OTHER_EXPERTS
        size = entry.size_bytes // total
        start = entry.start + experts[0] * size
        return replace(entry, shape=(len(experts), *entry.shape[1:]), start=start, stop=start + len(experts) * size)

    def _error(self, line: str, mend: str) -> PlacementError:
        return PlacementError(
            f"{self._source} does not fit {type(self._part.whole).__name__}. No weight byte was read.",
            f"In the checkpoint's and the model's names:\n{line}",
            mend,
        )


def _renamed(quantization: CheckpointQuantization, sorter: _Sorter) -> CheckpointQuantization:
    """Return what is quantized of the part, in its names; its section's lists of modules as well."""
    raw = dict(quantization.section.raw)
    prefix = max(sorter.prefixes, key=lambda found: sorter.prefixes[found], default="")
    for key in _LISTS:
        if prefix and isinstance(raw.get(key), list):
            raw[key] = [name.removeprefix(prefix) if isinstance(name, str) else name for name in raw[key]]
    section = replace(quantization.section, raw=raw)
    kv = replace(quantization.kv, scales=sorter.scales) if quantization.kv is not None and sorter.scales else None
    return replace(quantization, section=section, modules=sorter.modules, kv=kv)


def _hinted(name: str, target: str, unfilled: list[str]) -> str:
    near = nearest(target, unfilled)
    return name if near is None else f"{name} (near {near})"
