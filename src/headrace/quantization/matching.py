"""Which pattern of a configuration's list means a module: one matcher for what is excluded, what is targeted, and what is listed layer by layer.

A list is written by one tool, with one version's names, and read beside files that may carry others. These spellings are understood, most exact first:

1. A dotted name: the module itself and everything under it, on whole parts (``mlp.gate`` is not ``mlp.gate_proj``). Wrappers in front
   (``model.``, ``language_model.``, in either order, or none: `canonical_name`) and ``.weight`` behind may differ. A name that starts at no root
   (``mlp.gate``, ``lm_head``) is found anywhere in a module's name.
2. A glob (``lm_head*``, ``*.self_attn*``), as ModelOpt writes them: ``*`` stands for dots too. What is under a module that matches, matches.
3. ``re:`` and a regular expression, matched from the start of the name as compressed-tensors does.
4. A class: ``Linear``, ``Embedding``. No class is known here, so the caller says what the module's tensors look like (`module_kind`).

A module that holds several (``qkv_proj``) is meant where it is named or all its parts are; a part is meant where its whole is. Nothing here scans a list for each
name: dotted names are looked up, and what an expression without a digit says of one layer or expert it says of all, so it is asked once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import translate

from headrace.errors import UnsupportedQuantization

WRAPPERS = frozenset({"model", "language_model", "text_model", "llm", "thinker"})
"""What multimodal and causal classes put in front of a decoder's names. Two lists rarely agree on it."""

FUSED: dict[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "w13": ("w1", "w3"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}
"""Last part of a module's name to the parts that other classes keep apart."""

_WHOLES = {part: whole for whole, parts in FUSED.items() for part in parts}
_FRONTS = ("model.", "language_model.", "language_model.model.", "model.language_model.")
"""Under which a regular expression is tried as well, in front of the canonical name."""
_ROOTS = frozenset({"layers"})
_DIGITS = str.maketrans("123456789", "000000000")
_CLASS = re.compile(r"[A-Z][A-Za-z0-9_]*")
_EXPERT = re.compile(r"experts?\.\d")
_EXPERTS = ".experts."
_WORD = re.compile(r"(?<![A-Za-z_])[A-Za-z_]+(?![A-Za-z_*])")
_NOT_JOINABLE = re.compile(r"\\[1-9]|\(\?(?![:=!<])|\(\?<(?![=!])")
"""Back references, named groups and flags: an expression that means something else as a branch of a larger one."""


def canonical_name(name: str) -> str:
    """Return ``name`` without wrappers in front and without ``.weight`` behind; at least one part is left."""
    name = name.removesuffix(".weight")
    head, dot, rest = name.partition(".")
    while dot and head in WRAPPERS:
        name = rest
        head, dot, rest = name.partition(".")
    return name


def _without_expert(name: str) -> str:
    """Return ``name`` with signs in place of the number of an expert, as many as it has digits."""
    head, experts, rest = name.partition(_EXPERTS)
    number, dot, tail = rest.partition(".")
    return f"{head}{experts}{'#' * len(number)}{dot}{tail}" if number.isdecimal() else name


def module_kind(name: str, num_dims: int) -> str:
    """Return which class a module would have, told from its name and the dimensions of its weight: ``Linear``, ``Embedding``, ``Router``, or "" for anything else.

    A router is a matrix that tools call a class of its own, or no class at all; they leave it as it is.
    """
    last = name.rpartition(".")[2]
    if num_dims != 2 or "norm" in last:
        return ""
    if "embed" in last or last in ("wte", "wpe"):
        return "Embedding"
    return "Router" if last in ("gate", "router") else "Linear"


class NamePatterns:
    """The patterns of one list. Immutable but for what it remembers; one thread at a time."""

    def __init__(self, patterns: Iterable[str], *, place: str) -> None:
        """``place`` says in errors where the list was found. Raises `UnsupportedQuantization` for what is not text or no regular expression."""
        self.patterns = tuple(patterns)
        self._place = place
        self._names: dict[str, str] = {}
        self._canonical: dict[str, str] = {}
        self._floating: dict[str, list[tuple[tuple[str, ...], str]]] = {}
        self._prefixes: dict[int, dict[str, str]] = {}
        self._classes: dict[str, str] = {}
        self._tells_experts_apart = False
        self._remembered: dict[str, str | None] = {}
        self._remembered_looks: dict[str, str | None] = {}
        same: list[_Expression] = []
        others: list[_Expression] = []
        for pattern in self.patterns:
            if not isinstance(pattern, str):
                raise UnsupportedQuantization(
                    f"{place} holds {pattern!r}, which is not a name or a pattern.",
                    "Each must be text.",
                    "Take the file from where the model was made.",
                )
            expression = self._add(pattern)
            if expression is not None:
                (same if expression.is_same_for_all_digits else others).append(expression)
        self._same = _Alternatives(same)
        self._others = _Alternatives(others)

    def __bool__(self) -> bool:
        return bool(self.patterns)

    def find(self, name: str, *, kind: str = "Linear") -> str | None:
        """Return the pattern that means the module ``name``, the most exact where several do; None where none does. ``kind`` is `module_kind`'s answer.

        Raises `UnsupportedQuantization` where ``name`` is a fused module of which the list means some parts, and some not.
        """
        name = name.removesuffix(".weight")
        key = name if self._tells_experts_apart else _without_expert(name)
        if key not in self._remembered:
            self._remembered[key] = self._find_whole(name, self._find_name)
        found = self._remembered[key]
        if found is None and self._others:
            found = self._find_whole(name, self._others.find)
        return found if found is not None else self._classes.get(kind)

    def _find_whole(self, name: str, find: Callable[[str], str | None]) -> str | None:
        """Return what ``find`` finds for ``name``, else for the fused module that it is a part of, else for all the parts that it has."""
        found = find(name)
        if found is not None:
            return found
        parent, dot, last = name.rpartition(".")
        if last in _WHOLES:
            return find(f"{parent}{dot}{_WHOLES[last]}")
        if last not in FUSED:
            return None
        parts = {part: find(f"{parent}{dot}{part}") for part in FUSED[last]}
        meant = [part for part, pattern in parts.items() if pattern is not None]
        if meant and len(meant) < len(parts):
            missing = [part for part in parts if part not in meant]
            raise UnsupportedQuantization(
                f"{self._place} names {', '.join(meant)} of {parent}, but not {', '.join(missing)}.",
                f"{name} is stored as one tensor, which cannot be quantized in part.",
                "Name all of its parts or none, or take the configuration from where the model was made.",
            )
        return parts[meant[0]] if meant else None

    def _find_name(self, name: str) -> str | None:
        """Return what the dotted names say, and the expressions that say the same of all digits."""
        canonical = canonical_name(name)
        found = _longest(self._names, name) or _longest(self._canonical, canonical) or self._floats_in(canonical)
        found = found or self._starts(name) or (self._starts(canonical) if canonical != name else None)
        if found is not None or not self._same:
            return found
        masked = name.translate(_DIGITS)
        if masked not in self._remembered_looks:
            self._remembered_looks[masked] = self._same.find(masked)
        return self._remembered_looks[masked]

    def _floats_in(self, canonical: str) -> str | None:
        if not self._floating:
            return None
        parts = tuple(canonical.split("."))
        for start, part in enumerate(parts):
            for wanted, pattern in self._floating.get(part, ()):
                if parts[start : start + len(wanted)] == wanted:
                    return pattern
        return None

    def _starts(self, name: str) -> str | None:
        for length, prefixes in self._prefixes.items():
            if name[:length] in prefixes:
                return prefixes[name[:length]]
        return None

    def _add(self, pattern: str) -> _Expression | None:
        if pattern.startswith("re:"):
            return _Expression.of_regex(pattern, place=self._place)
        text = pattern.rstrip(".")
        if not text:
            return None
        self._tells_experts_apart |= _EXPERT.search(text) is not None or text[0].isdigit()
        if text.endswith("*") and not set("*?[") & set(text[:-1]):
            self._add_prefix(text[:-1], pattern)
            return None
        if set("*?[") & set(text):
            return _Expression.of_glob(pattern)
        if _CLASS.fullmatch(text):
            self._classes.setdefault(text.removesuffix("Base") if text == "LinearBase" else text, pattern)
        text = text.removesuffix(".weight")
        canonical = canonical_name(text)
        self._names.setdefault(text, pattern)
        if canonical not in WRAPPERS:
            self._canonical.setdefault(canonical, pattern)
        first = canonical.partition(".")[0]
        if canonical == text and first not in WRAPPERS | _ROOTS:
            self._floating.setdefault(first, []).append((tuple(canonical.split(".")), pattern))
        return None

    def _add_prefix(self, prefix: str, pattern: str) -> None:
        canonical = canonical_name(prefix)
        # Of "model.*" nothing is left but a wrapper: it means what is under it, and not everything.
        for form in {prefix, canonical if canonical else prefix}:
            self._prefixes.setdefault(len(form), {}).setdefault(form, pattern)


@dataclass(frozen=True, slots=True)
class _Expression:
    """One glob or regular expression, ready to be matched."""

    pattern: str
    on_name: re.Pattern[str]
    on_canonical: re.Pattern[str]
    is_regex: bool

    @classmethod
    def of_glob(cls, pattern: str) -> _Expression:
        return cls(pattern, _glob(pattern), _glob(canonical_name(pattern)), False)

    @classmethod
    def of_regex(cls, pattern: str, *, place: str) -> _Expression:
        try:
            compiled = re.compile(pattern.removeprefix("re:"))
        except (re.error, RecursionError, OverflowError) as error:
            raise UnsupportedQuantization(
                f"{place} holds {pattern!r}, which is not a regular expression.",
                f"Python says: {error}.",
                "Take the file from where the model was made.",
            ) from error
        return cls(pattern, compiled, compiled, True)

    @property
    def is_same_for_all_digits(self) -> bool:
        """Whether it cannot tell one digit from another: it holds none, nor a reference to what matched before. A range of characters whose ends
        are no digits holds all ten of them or none."""
        has_digits = any(char.isdigit() for char in self.pattern)
        return not has_digits and "(?P=" not in self.pattern and "(?(" not in self.pattern

    @property
    def required_word(self) -> str | None:
        """Return a word that every name has that this matches, other than a wrapper; None where the pattern is not simple enough to tell."""
        text = self.pattern.removeprefix("re:").replace(r"\.", ".")
        if set("|([?{+\\") & set(text):
            return None
        # The last letter before a star may be absent, and behind a word that ends so there is none that counts.
        words = [word for word in _WORD.findall(text) if word not in WRAPPERS and word != "weight"]
        return max(words, key=len, default=None)

    def matches(self, name: str, canonical: str) -> bool:
        if not self.is_regex:
            return bool(self.on_name.match(name) or self.on_canonical.match(canonical))
        return any(self.on_name.match(form) for form in _forms(name, canonical, self.pattern))


class _Alternatives:
    """Several expressions, asked as one where that is possible."""

    def __init__(self, expressions: Sequence[_Expression]) -> None:
        self._expressions = expressions
        self._filter = _join(expressions)
        self._text = " ".join(each.pattern for each in expressions if each.is_regex)
        words = {each.required_word for each in expressions}
        self._words = () if None in words else tuple(word for word in words if word)

    def __bool__(self) -> bool:
        return bool(self._expressions)

    def find(self, name: str) -> str | None:
        if self._words and not any(word in name for word in self._words):
            return None
        canonical = canonical_name(name)
        forms = _forms(name, canonical, self._text) if self._text else (name, canonical)
        if self._filter is not None and not any(self._filter.match(form) for form in forms):
            return None
        return next((each.pattern for each in self._expressions if each.matches(name, canonical)), None)


def _forms(name: str, canonical: str, pattern: str) -> Iterable[str]:
    forms = dict.fromkeys((name, canonical, *(front + canonical for front in _FRONTS)))
    if "weight" in pattern:
        # Lists of tensors' names instead of modules'.
        return (*forms, *(f"{form}.weight" for form in forms))
    return forms


def _join(expressions: Sequence[_Expression]) -> re.Pattern[str] | None:
    """Return one expression that matches wherever one of ``expressions`` does (or more), or None where they cannot be joined."""
    branches = [branch.pattern for each in expressions for branch in (each.on_name, each.on_canonical)]
    if len(expressions) < 2 or any(
        each.is_regex and _NOT_JOINABLE.search(each.on_name.pattern) for each in expressions
    ):
        return None
    return re.compile("|".join(f"(?:{branch})" for branch in dict.fromkeys(branches)))


def _glob(pattern: str) -> re.Pattern[str]:
    """Return the expression of a glob, which also matches what is under a module that the glob matches."""
    pattern = pattern.rstrip(".").removesuffix(".weight")
    return re.compile(f"(?:{translate(pattern)})|(?:{translate(pattern + '.*')})")


def _longest(table: dict[str, str], name: str) -> str | None:
    """Return what ``table`` holds of ``name`` or of the nearest module that it is under."""
    if not table:
        return None
    while name not in table:
        name, dot, _ = name.rpartition(".")
        if not dot:
            return None
    return table[name]
