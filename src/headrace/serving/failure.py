"""The last words of a server that could not start or go on: short, the cause at the end, no secrets.

Pure but for the one file that it writes.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path

from headrace.errors import HeadraceError

MOST_BYTES = 4096
"""Kubernetes keeps as much of a termination message."""

TERMINATION_LOG = Path("/dev/termination-log")
"""Where Kubernetes reads a container's last message from. Absent or not writable elsewhere."""

_HIDDEN = "***"
_SECRETS = (
    (
        re.compile(r"(?i)(https?://[^\s?#'\"]+)\?[^\s'\"]+"),
        rf"\1?{_HIDDEN}",
    ),  # signed URLs carry their signature in the query
    (re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*://)[^\s/@'\"]+@"), rf"\1{_HIDDEN}@"),
    (re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"), _HIDDEN),
    (re.compile(r"\bhf_[A-Za-z0-9]{16,}"), _HIDDEN),
    (re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}"), rf"\1 {_HIDDEN}"),
    (
        re.compile(
            r"(?i)\b([a-z_-]*(?:secret|token|password|api[_-]?key|signature|credential|authorization)[a-z_-]*"
            r"['\"]?\s*[=:]\s*['\"]?)(?!bearer|basic)[^\s'\",;&]{6,}"
        ),
        rf"\1{_HIDDEN}",
    ),
)


def redact(text: str, secrets: Sequence[str] = ()) -> str:
    """Return ``text`` without ``secrets`` and without what looks like one: signed URLs, keys, tokens."""
    for secret in secrets:
        if secret:
            text = text.replace(secret, _HIDDEN)
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    return text


def last_words(error: BaseException, *, secrets: Sequence[str] = ()) -> str:
    """Return what happened, its cause, and how to mend it, in at most `MOST_BYTES` bytes of UTF-8.

    The order is from the outcome to its root, so that whoever reads the end of a log reads the cause: an error of ours
    says its own; of any other the chain of causes follows, the first of all last.
    """
    lines = ["headrace: the model is not served."]
    if isinstance(error, HeadraceError):
        lines += [f"{type(error).__name__}: {error.what}", *(part for part in (error.why, error.mend) if part)]
    else:
        lines += [_describe(cause) for cause in _chain(error)]
        lines.append("This is not an error that Headrace expects; the traceback above says where it comes from.")
    text = redact("\n".join(line.strip() for line in lines), secrets)
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= MOST_BYTES:
        return text
    # The middle goes: the beginning says what this is, the end how to mend it.
    half = (MOST_BYTES - 16) // 2
    return f"{encoded[:half].decode('utf-8', 'ignore')}\n[…]\n{encoded[-half:].decode('utf-8', 'ignore')}"


def write_termination_log(text: str, path: Path = TERMINATION_LOG) -> bool:
    """Write ``text`` where an orchestrator looks for it; return whether that was possible. Creates no file."""
    try:
        with path.open("r+", encoding="utf-8") as file:
            file.truncate(0)
            file.write(text)
    except OSError:
        return False
    return True


class RedactingFilter(logging.Filter):
    """Takes secrets out of what is logged, tracebacks included."""

    def __init__(self, secrets: Sequence[str] = ()) -> None:
        super().__init__()
        self._secrets = tuple(secrets)

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = redact(record.getMessage(), self._secrets), ()
        if record.exc_info:
            record.exc_text = redact(logging.Formatter().formatException(record.exc_info), self._secrets)
        return True


def _chain(error: BaseException) -> list[BaseException]:
    """Return ``error`` and its causes, the root last."""
    found: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in found:
        found.append(current)
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return found


def _describe(error: BaseException) -> str:
    first_lines = " ".join(str(error).strip().splitlines()[:6])
    return f"{type(error).__name__}: {first_lines[:1000]}"
