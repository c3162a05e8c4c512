"""Errors, requests and verdicts as JSON, for the channel to a reader process. Pure.

An error is told by its kind and its text, and made again from the kinds that are known here. One that the load itself raised while it answered a reader has a number,
by which it is found again when the reader's read fails with it.
"""

from __future__ import annotations

import builtins
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from headrace.errors import HeadraceError
from headrace.storage import HttpRange, Refusal

_BUILTIN = ("OSError", "TimeoutError", "ConnectionError", "ValueError", "TypeError", "MemoryError", "AssertionError")
_NUMBER = "told_as_number"


class ReaderTrouble(Exception):
    """What a reader process said was the cause of an error; its text begins with the kind."""


def tell_error(error: BaseException) -> dict[str, Any]:
    """Return an error as JSON: its kind, its parts and what caused it."""
    told: dict[str, Any] = {"number": getattr(error, _NUMBER, None)}
    if isinstance(error, HeadraceError):
        kind: type = next(one for one in type(error).__mro__ if one in _kinds().values())
        told |= {"kind": kind.__name__, "parts": [error.what, error.why, error.mend]}
    else:
        kind = next((one for one in type(error).__mro__ if one.__name__ in _BUILTIN), RuntimeError)
        text = str(error) if kind is not RuntimeError else f"{type(error).__name__}: {error}"
        told |= {"kind": kind.__name__, "parts": [text]}
    cause = error.__cause__
    # The text of one that is not the system's may quote what it could not parse.
    told["cause"] = (
        None if cause is None else f"{type(cause).__name__}: {cause}" if _is_plain(cause) else type(cause).__name__
    )
    return told


def _kinds() -> dict[str, type[HeadraceError]]:
    """Return every kind of error in our tree by its name."""
    found, waiting = {}, [HeadraceError]
    while waiting:
        kind = waiting.pop()
        if kind.__module__ == HeadraceError.__module__:
            found[kind.__name__] = kind
            waiting += kind.__subclasses__()
    return found


def _is_plain(error: BaseException) -> bool:
    return isinstance(error, OSError | HeadraceError)


def error_of(told: Mapping[str, Any], *, number: int | None = None) -> BaseException:
    """Return the error that was told, marked with ``number`` where it is to be found again."""
    kind = told["kind"]
    found: type[Exception] = _kinds().get(kind, RuntimeError)
    if kind in _BUILTIN:
        found = getattr(builtins, kind)
    error = found(*told["parts"])
    if told["cause"] is not None:
        error.__cause__ = ReaderTrouble(told["cause"])
    if number is not None:
        setattr(error, _NUMBER, number)
    return error


def tell_range(asked: HttpRange) -> dict[str, Any]:
    """Return a request as JSON. It may hold secrets."""
    return asdict(asked)


def range_of(told: Mapping[str, Any]) -> HttpRange:
    """Return the request that was told."""
    pairs = {"headers": tuple((name, value) for name, value in told["headers"])}
    if told["version_header"] is not None:
        pairs["version_header"] = tuple(told["version_header"])
    return HttpRange(**{**told, **pairs})


def tell_refusal(refusal: Refusal) -> dict[str, Any]:
    """Return a refusal as JSON, but for its body."""
    return {"status": refusal.status, "reason": refusal.reason, "headers": dict(refusal.headers)}


def refusal_of(told: Mapping[str, Any], body: bytes) -> Refusal:
    """Return the refusal that was told."""
    return Refusal(told["status"], told["reason"], told["headers"], body)
