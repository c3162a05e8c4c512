"""How keys and values are to be cached: what a configuration says of it, and the scales that the files hold, under any of the names that they have had.

Of one attention module ``…self_attn`` (``…mixer``, ``…attn``): ``k_scale`` and ``v_scale`` on it (compressed-tensors, vLLM); on its projections, ``k_proj.k_scale`` and ``v_proj.v_scale``
(ModelOpt; on latent attention too, which has no such projections), ``qkv_proj.k_scale``, ``attn.k_scale``; ``k_proj.output_scale`` (older compressed-tensors, Quark); and one ``kv_scale``
for both (AutoFP8). Where several are there, the first in this order counts. What bears such a name anywhere else is no scale of keys and values, and is named as unused; but for
``output_scale``, which a parameter of any module may be called: whether the model has one is the placement's to say.

Whether keys and values are rounded is for the configuration to say: a scale that nothing asks for is left alone, and named in a warning. Only ``quant_method: fp8`` has no
standard key for it, so that there a scale is the statement.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from headrace.checkpoint import Entry
from headrace.errors import UnsupportedQuantization
from headrace.quantization.family import unknown
from headrace.quantization.findings import Findings
from headrace.quantization.modules import KvQuantization
from headrace.quantization.section import QuantizationSection

_KEYS = ("kv_cache_scheme", "kv_cache_quant_algo", "kv_cache_quant_targets", "static_kv_dtype")
_ALGORITHMS = {
    "fp8": "e4m3",
    "fp8_e4m3": "e4m3",
    "float8_e4m3fn": "e4m3",
    "torch.float8_e4m3fn": "e4m3",
    "nvfp4": "nvfp4",
}
_NVFP4_GROUP = 16
_NUMBER = re.compile(r"\d+")
_HOLDERS = ("k_proj", "v_proj", "qkv_proj", "attn")
"""Parts of an attention module that a scale may sit on, instead of on the module itself."""
_PROJECTIONS = frozenset(
    {"q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"}
)
"""Parts that only attention has."""
_ATTENTION_WORDS = ("attn", "attention")
"""One of them is in the name of an attention module whose projections are called otherwise (``Wqkv``, ``query_key_value``, ``wq``)."""
_KEY, _VALUE, _BOTH = "k", "v", "kv"
_ORDER = (
    ("", "k_scale", _KEY),
    ("", "v_scale", _VALUE),
    ("k_proj", "k_scale", _KEY),
    ("v_proj", "v_scale", _VALUE),
    ("qkv_proj", "k_scale", _KEY),
    ("qkv_proj", "v_scale", _VALUE),
    ("attn", "k_scale", _KEY),
    ("attn", "v_scale", _VALUE),
    ("k_proj", "output_scale", _KEY),
    ("v_proj", "output_scale", _VALUE),
    ("", "kv_scale", _BOTH),
    ("qkv_proj", "kv_scale", _BOTH),
    ("attn", "kv_scale", _BOTH),
    ("k_proj", "kv_scale", _BOTH),
)
"""Part, suffix, and what it scales; the first counts."""
_RANKS = {(holder, suffix): rank for rank, (holder, suffix, _) in enumerate(_ORDER)}


def find_kv(
    sections: Iterable[QuantizationSection], scales: Iterable[Entry], modules: Iterable[str], findings: Findings
) -> tuple[KvQuantization | None, list[str]]:
    """Return how keys and values are rounded, and the names of scales that nothing takes.

    ``sections`` are all that were found, ``scales`` the entries that are called like such scales, ``modules`` the names of all modules that have a weight. Raises
    `UnsupportedQuantization` for formats that are not known.
    """
    sections = list(sections)
    split = [name.rpartition(".") for name in modules]
    attentions = dict.fromkeys(parent for parent, _, last in split if last in _PROJECTIONS)
    named = (parent for parent, _, _ in split if parent.rpartition(".")[2].endswith(_ATTENTION_WORDS))
    found, unused = _by_attention(scales, frozenset((*attentions, *named)))
    asked = next((format for section in sections if (format := declared_format(section)) is not None), None)
    if asked is None and found and sections and sections[0].method == "fp8":
        asked = "e4m3"
    if asked is None:
        left = [*unused, *(entry.name for pair in found.values() for entry in dict.fromkeys(pair) if entry is not None)]
        if left:
            findings.add(
                "Scales of keys and values that no configuration asks for are not used; keys and values are left as they are",
                *left,
            )
        return None, left
    if unused:
        findings.add("Scales of keys and values that no attention module takes are not used", *unused)
    # Towers have attention as well, and are not meant: only layers of the same names are.
    alike = {_NUMBER.sub("0", name) for name in found}
    bare = [name for name in attentions if name not in found and _NUMBER.sub("0", name) in alike]
    if bare:
        findings.add(
            "Attention modules without scales of keys and values, beside others that have them; theirs are taken as 1",
            *bare,
        )
    group_size = _NVFP4_GROUP if asked == "nvfp4" else None
    return KvQuantization(format=asked, scales=found, group_size=group_size), unused


def declared_format(section: QuantizationSection) -> str | None:
    """Return the format in which ``section`` asks for keys and values to be cached: ``e4m3``, ``nvfp4``; None where it asks for none.

    Raises `UnsupportedQuantization` for any other.
    """
    for key in _KEYS:
        said = section.raw.get(key)
        if not said:
            continue
        if key == "kv_cache_quant_targets":
            return "e4m3"
        if isinstance(said, Mapping):
            return _format_of_scheme(section, said)
        name = str(said).lower()
        if name in ("auto", "none"):
            continue
        if name not in _ALGORITHMS:
            raise unknown(section, key, said, ("FP8", "NVFP4"))
        return _ALGORITHMS[name]
    return _format_of_outputs(section)


def _format_of_scheme(section: QuantizationSection, scheme: Mapping[str, Any]) -> str:
    bits, kind = scheme.get("num_bits"), str(scheme.get("type") or "float").lower()
    if (bits, kind) == (8, "float") and scheme.get("dynamic") is not True:
        return "e4m3"
    if (bits, kind) == (4, "float") and scheme.get("group_size") in (None, _NVFP4_GROUP):
        return "nvfp4"
    how = "dynamic " if scheme.get("dynamic") is True else ""
    raise UnsupportedQuantization(
        f"{section.place} caches keys and values as {how}{bits}-bit {kind} values, which is not done here.",
        "Known are 8-bit floats with stored scales, and NVFP4 in groups of 16.",
        "Use a checkpoint with another format for keys and values, or none.",
    )


def _format_of_outputs(section: QuantizationSection) -> str | None:
    """Return the format of the older form: a group that rounds what ``k_proj`` and ``v_proj`` give."""
    groups = section.raw.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        outputs = group.get("output_activations") if isinstance(group, Mapping) else None
        targets = group.get("targets") if outputs else None
        if not isinstance(outputs, Mapping) or not isinstance(targets, (list, tuple)) or not targets:
            continue
        if all(str(target).rstrip("$").endswith(("k_proj", "v_proj")) for target in targets):
            return _format_of_scheme(section, outputs)
    return None


def _by_attention(
    scales: Iterable[Entry], attentions: frozenset[str]
) -> tuple[dict[str, tuple[Entry | None, Entry | None]], list[str]]:
    """Return the scales of keys and of values by attention module, and the names of those that no module takes."""
    ranked: dict[str, list[tuple[int, Entry]]] = {}
    unused: list[str] = []
    for entry in scales:
        parent, _, suffix = entry.name.rpartition(".")
        owner, _, last = parent.rpartition(".")
        holder = last if last in _HOLDERS and parent not in attentions else ""
        attention = owner if holder else parent
        rank = _RANKS.get((holder, suffix))
        if rank is None or attention not in attentions:
            if suffix != "output_scale":
                unused.append(entry.name)
            continue
        ranked.setdefault(attention, []).append((rank, entry))
    found: dict[str, tuple[Entry | None, Entry | None]] = {}
    for attention, candidates in ranked.items():
        candidates.sort(key=lambda pair: pair[0])
        key = _first(candidates, _KEY) or _first(candidates, _BOTH)
        value = _first(candidates, _VALUE) or _first(candidates, _BOTH)
        # One scale alone stands for both, as engines have always read it.
        found[attention] = (key or value, value or key)
        unused.extend(entry.name for _, entry in candidates if entry is not key and entry is not value)
    return found, unused


def _first(candidates: list[tuple[int, Entry]], what: str) -> Entry | None:
    return next((entry for rank, entry in candidates if _ORDER[rank][2] == what), None)


def describe_kv(kv: KvQuantization | None) -> str | None:
    """Return how keys and values are cached, in words: ``FP8, scales for 61 attention modules``; None where they are left as they are."""
    if kv is None:
        return None
    label = {"e4m3": "FP8", "nvfp4": "NVFP4"}.get(kv.format, kv.format)
    count = len(kv.scales)
    return (
        f"{label}, scales for {count:,} attention module{'' if count == 1 else 's'}"
        if count
        else f"{label}, no scales (taken as 1)"
    )
