"""Which files of a folder are the checkpoint. Pure: takes keys, returns keys.

Rules, in order:

1. A single file that the user named is the checkpoint; a single index that the user named is the index.
2. With an index, exactly the files that it names. ``model.safetensors.index.json`` is taken before others; one whose name has fewer dots (no variant)
   before one with more; then by name. ``consolidated*`` indexes count only where no other index or safetensors file is there, and an index of
   another variant gives way to a plain ``model.safetensors``.
3. Without an index, every safetensors file of the folder itself but ``consolidated*``, adapters, and precision variants (``model.fp16.safetensors``)
   of a file that is there too. A numbered family (``-00001-of-00004``) must be complete.

Sub-folders count only where the index names them. Pickled weights never count.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from headrace.checkpoint.index import INDEX_SUFFIX, WEIGHTS_SUFFIX, WeightIndex
from headrace.checkpoint.keys import natural_order
from headrace.checkpoint.wording import counted, listed
from headrace.errors import MissingFiles, NoWeights

_NUMBERED = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{1,18})-of-(?P<total>[0-9]{1,18})\.safetensors")
_VARIANT = re.compile(r"(?P<base>.+)\.(?:fp16|bf16|fp32|non_ema|ema)(?:-[0-9]+-of-[0-9]+)?\.safetensors")
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_OTHER_FORMATS = (".gguf", ".onnx", ".h5", ".msgpack", ".npz", ".tensors")
_MOST_MISSING = 1000
_PLAIN_INDEX = f"model{INDEX_SUFFIX}"
_PLAIN_FILE = f"model{WEIGHTS_SUFFIX}"


@dataclass(frozen=True, slots=True)
class Selection:
    """The keys of the weight files in natural order, and what a person should know about the choice (full sentences)."""

    files: tuple[str, ...]
    notes: tuple[str, ...] = ()


def choose_index(keys: Iterable[str], selected_key: str | None = None) -> tuple[str | None, tuple[str, ...]]:
    """Return the index to follow among ``keys`` (one level) and notes; None where there is none to follow."""
    every = sorted(keys)
    if selected_key is not None:
        return (selected_key, ()) if selected_key.endswith(INDEX_SUFFIX) else (None, ())
    indexes = sorted((key for key in every if key.endswith(INDEX_SUFFIX) and not _is_adapter(key)), key=_index_rank)
    if not indexes:
        return None, ()
    best, others = indexes[0], indexes[1:]
    weights = [key for key in every if key.endswith(WEIGHTS_SUFFIX)]
    if best.startswith("consolidated") and not all(key.startswith("consolidated") for key in weights):
        return None, (f"Not followed: {listed(indexes)}, since there are files that are not consolidated.",)
    if best != _PLAIN_INDEX and best.startswith("model.") and _PLAIN_FILE in weights:
        note = f"Not followed: {listed(indexes)}, since {_PLAIN_FILE} is there. To load it, name the index in the uri."
        return None, (note,)
    if not others:
        return best, ()
    return best, (f"There are {len(indexes)} indexes; {best} is followed, not {listed(others)}.",)


def select_named(index: WeightIndex, present: Iterable[str]) -> Selection:
    """Return the files that ``index`` names. Raises `MissingFiles`, which lists all that are not among ``present`` keys."""
    present = set(present)
    named = index.files
    missing = [file for file in named if file not in present]
    if missing:
        raise MissingFiles(
            f"Absent are {counted(len(missing), 'file')} of the {len(named):,} that {index.key} names: {listed(missing, most=len(missing))}.",
            "Without them a part of the model would stay at random values.",
            "Upload them, or the index that belongs to the files that are there.",
        )
    others = sorted({key for key in present if key.endswith(WEIGHTS_SUFFIX)} - set(named), key=natural_order)
    families = {family for file in named if (family := _family(file))}
    relatives = [key for key in others if _family(key) in families]
    strangers = [key for key in others if key not in relatives]
    notes = []
    if relatives:
        notes.append(
            f"Not loaded: {listed(relatives)}, of the same numbered family as files that {index.key} names. "
            "Was the index cut, or made for another export?"
        )
    if strangers:
        notes.append(f"Ignored: {listed(strangers)}, which {index.key} does not name.")
    return Selection(named, tuple(notes))


def select_unindexed(
    keys: Iterable[str], folders: Sequence[str], uri: str, selected_key: str | None = None
) -> Selection:
    """Return the safetensors files among ``keys`` (one level) that make the checkpoint.

    Raises `NoWeights` where none do, with what is there instead, and `MissingFiles` where a numbered family has gaps.
    """
    every = sorted(keys, key=natural_order)
    if selected_key is not None:
        if not selected_key.lower().endswith(WEIGHTS_SUFFIX):
            raise _no_weights([selected_key], (), uri)
        return Selection((selected_key,))
    weights = [key for key in every if key.endswith(WEIGHTS_SUFFIX)]
    chosen, notes = weights, []
    rules: tuple[tuple[Callable[[str], bool], str], ...] = (
        (lambda key: not _is_adapter(key), "an adapter is not a part of the model itself"),
        (lambda key: not key.startswith("consolidated"), "the other files hold the same model"),
        (lambda key: _plain_sibling(key, set(weights)) is None, "the files without a variant in their name are taken"),
    )
    for is_kept, why in rules:
        kept = [key for key in chosen if is_kept(key)]
        if kept and len(kept) < len(chosen):
            notes.append(f"Ignored: {listed(key for key in chosen if key not in kept)}; {why}.")
            chosen = kept
    if all(_is_adapter(key) for key in chosen):
        raise _no_weights(every, folders, uri)
    _check_families(chosen)
    return Selection(tuple(chosen), tuple(notes))


def _index_rank(key: str) -> tuple[bool, bool, int, str]:
    return key.startswith("consolidated"), key != _PLAIN_INDEX, key.count("."), key


def _is_adapter(key: str) -> bool:
    return key.startswith("adapter_")


def _plain_sibling(key: str, keys: set[str]) -> str | None:
    """Return the file of which ``key`` is another precision, where that is there too."""
    match = _VARIANT.fullmatch(key)
    if match is None:
        return None
    base = match["base"]
    for other in keys:
        if other == f"{base}{WEIGHTS_SUFFIX}" or _family_stem(other) == base:
            return other
    return None


def _family(key: str) -> tuple[str, str] | None:
    match = _NUMBERED.fullmatch(key)
    return (match["stem"], match["total"]) if match else None


def _family_stem(key: str) -> str | None:
    family = _family(key)
    return family[0] if family else None


def _check_families(files: Sequence[str]) -> None:
    numbers: dict[tuple[str, str], dict[int, int]] = {}
    for file in files:
        match = _NUMBERED.fullmatch(file)
        if match:
            numbers.setdefault((match["stem"], match["total"]), {})[int(match["number"])] = len(match["number"])
    for (stem, total), widths in numbers.items():
        count, width = int(total), max(widths.values())
        expected = range(count) if 0 in widths else range(1, count + 1)
        num_missing = count - sum(number in expected for number in widths)
        if num_missing == 0:
            continue
        # The total comes from a file's name and may be anything: never build a list as long as it says.
        missing = islice((number for number in expected if number not in widths), _MOST_MISSING)
        names = [f"{stem}-{number:0{width}d}-of-{total}{WEIGHTS_SUFFIX}" for number in missing]
        rest = f" and {num_missing - len(names):,} more" if num_missing > len(names) else ""
        raise MissingFiles(
            f"Absent are {num_missing:,} of the {count:,} files {stem}-…-of-{total}{WEIGHTS_SUFFIX}: {listed(names, most=len(names))}{rest}.",
            "Without them a part of the model would stay at random values.",
            "Upload them, with the index that belongs to them.",
        )


def _no_weights(keys: Sequence[str], folders: Sequence[str], uri: str) -> NoWeights:
    what = f"There are no safetensors weights at {uri}."
    pickled = [key for key in keys if key.endswith(_PICKLED)]
    others = [key for key in keys if key.endswith(_OTHER_FORMATS)]
    adapters = [key for key in keys if _is_adapter(key) and key.endswith(WEIGHTS_SUFFIX)]
    if adapters:
        return NoWeights(what, f"An adapter is not a model: {listed(adapters)}.", "Give the uri of the base model.")
    if pickled:
        why = f"What is pickled is never loaded, since unpickling runs code: {listed(pickled)}."
        return NoWeights(what, why, "Convert the model to safetensors, or use the safetensors form of it.")
    if others:
        return NoWeights(
            what,
            f"There are only weights of another format: {listed(others)}.",
            "Use the safetensors form of the model.",
        )
    if folders:
        why = f"Only the folder itself is looked into; it has the sub-folders {listed(folders)}."
        return NoWeights(what, why, "If the weights are in one of them, add its name to the uri.")
    why = f"It holds {listed(keys)}." if keys else "It is empty."
    return NoWeights(what, why, "Check the uri; it must name the folder of the *.safetensors files.")
