"""Where config.json and ModelOpt's own file say different things of one checkpoint. The tensors decide; this names what they decided between."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.quantization.family import names_in
from headrace.quantization.findings import Findings, list_names
from headrace.quantization.kvscales import declared_format
from headrace.quantization.matching import canonical_name
from headrace.quantization.section import QuantizationSection

_LISTS = ("ignore", "exclude_modules", "modules_to_not_convert", "ignored_layers")


def compare_sections(section: QuantizationSection, other: QuantizationSection, findings: Findings) -> None:
    """Add a sentence for each thing on which ``section``, which counts, and ``other`` disagree. What only one of them names is no disagreement."""
    places = f"{section.place} and {other.place} disagree"
    if section.method != other.method:
        findings.add(f"{places}: {section.method} and {other.method}; the first counts where the tensors do not tell")
        return
    if section.algorithm and other.algorithm and section.algorithm.upper() != other.algorithm.upper():
        findings.add(
            f"{places}: {section.algorithm} and {other.algorithm}; the tensors count, and the first where they do not tell"
        )
    first, second = _excluded(section), _excluded(other)
    if first is not None and second is not None and first != second:
        parts = [
            f"only {place} excludes {list_names(sorted(names))}"
            for place, names in ((section.place, first - second), (other.place, second - first))
            if names
        ]
        findings.add(f"{places}: {', and '.join(parts)}; the tensors count")
    first_kv, second_kv = declared_format(section), declared_format(other)
    if first_kv != second_kv:
        findings.add(
            f"{places}: keys and values are cached as {first_kv or 'they are'} and as {second_kv or 'they are'}; {first_kv or second_kv} counts"
        )
    sizes = (section.raw.get("group_size"), other.raw.get("group_size"))
    if None not in sizes and sizes[0] != sizes[1]:
        findings.add(f"{places}: groups of {sizes[0]} and of {sizes[1]}; the tensors count")


def _excluded(section: QuantizationSection) -> set[str] | None:
    if not any(section.raw.get(key) is not None for key in _LISTS):
        return None
    listed: Iterable[str] = names_in(section, *_LISTS)
    return {name if name.startswith("re:") else canonical_name(name) for name in map(str, listed)}
