"""The texts that a model reads while it is calibrated, and their tokens. Knows nothing of how scales are found."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from headrace.errors import InvalidSetting

Calibration = Sequence[str] | os.PathLike[str] | None
"""Texts, or a file of them; None for our own."""

OWN_FILE = "calibration.txt"
MOST_TOKENS = 512
"""Of one sequence: as many as ModelOpt's example takes of each text (``hf_ptq.py`` of 0.47)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationTexts:
    """Texts, at least one, none of them blank."""

    texts: tuple[str, ...]
    origin: str
    """Where they are from, in words that fit behind "on": ``Headrace's own texts``, ``texts.txt``."""
    is_own: bool = False
    """Whether they are those that come with Headrace."""


def read_texts(calibration: Calibration | str) -> CalibrationTexts:
    """Return the texts of ``calibration``: a sequence of them, or the path of a UTF-8 file with one text in each line that is not blank. None is `OWN_FILE`.

    A plain string is a path. Raises `InvalidSetting` for a file that cannot be read as such, for what is no text, and where there is none.
    """
    if calibration is None:
        own = files("headrace.engines").joinpath(OWN_FILE).read_text("utf-8")
        return CalibrationTexts(texts=_lines(own), origin="Headrace's own texts", is_own=True)
    if isinstance(calibration, (str, os.PathLike)):
        path = Path(calibration)
        return CalibrationTexts(texts=_checked(_lines(_read(path)), str(path)), origin=str(path))
    wrong = [type(text).__name__ for text in calibration if not isinstance(text, str)]
    if wrong:
        raise InvalidSetting(
            f"A calibration text is of type {wrong[0]}.", "Texts are strings.", "Give strings, or the path of a file."
        )
    given = tuple(text for text in calibration if text.strip())
    return CalibrationTexts(texts=_checked(given, "The calibration"), origin="the texts that were given")


def to_sequences(texts: CalibrationTexts, tokenizer: Any, *, longest: int | None = None) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of each text, with what the tokenizer puts around it; a text of more than ``longest`` (at most `MOST_TOKENS`) tokens is cut into several sequences.

    They are not filled up to one length: what they would be filled with goes through the layers as well, and would count for the scales.
    Raises `InvalidSetting` where no token comes out.
    """
    most = min(longest or MOST_TOKENS, MOST_TOKENS)
    sequences: list[tuple[int, ...]] = []
    for text in texts.texts:
        tokens = [int(token) for token in tokenizer(text)["input_ids"]]
        sequences.extend(tuple(tokens[start : start + most]) for start in range(0, len(tokens), most))
    if not sequences:
        raise InvalidSetting(
            f"Calibration on {texts.origin} is not possible.",
            "The model's tokenizer makes no token of them.",
            "Give texts in a language that the model reads.",
        )
    return tuple(sequences)


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = (
            f"It is not UTF-8: {error.reason}"
            if isinstance(error, UnicodeDecodeError)
            else error.strerror or str(error)
        )
        raise InvalidSetting(
            f"The calibration texts in {path} cannot be read.",
            f"{why}.",
            "Give the path of a UTF-8 file with one text in each line, or in Python a list of texts.",
        ) from error


def _lines(content: str) -> tuple[str, ...]:
    # Not splitlines: a form feed or a line separator within a text does not end it.
    return tuple(line.strip() for line in content.split("\n") if line.strip())


def _checked(texts: tuple[str, ...], name: str) -> tuple[str, ...]:
    if not texts:
        raise InvalidSetting(
            f"{name} has no text.",
            "Scales are found by running texts through the model.",
            "Give some, or leave it out.",
        )
    return texts
