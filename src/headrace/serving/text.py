"""From tokens to text as it may be sent: whole characters, and nothing that belongs to a stop string.

Pure: tokens and text in, text out. What is returned once is never taken back, so the pieces joined are the text. It
does not know who sends them.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

_REPLACEMENT = "�"
_LONGEST_WINDOW = 16
"""Tokens that are decoded again for each new one, before the window is cut although its end is not a whole character."""
_KEPT_WINDOW = 8
"""Tokens that such a cut leaves: an unfinished character is three bytes at most, so three tokens, and the rest is
context."""


class Decoder(Protocol):
    """What turns tokens into text: a tokenizer."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of ``tokens``, special tokens left out; bytes that are no UTF-8 as U+FFFD."""
        ...

    def byte_of(self, token: int) -> int | None:
        """Return the byte that ``token`` stands for in a vocabulary with byte fallback (``<0x0A>``), else None."""
        ...


class Detokenizer:
    """The text of one growing sequence of tokens, in pieces that only append.

    A character whose bytes have not all come is held back until they have, or until `finish`. For a byte-level
    vocabulary the pieces joined equal ``decode`` of all tokens, malformed UTF-8 included. Byte-fallback tokens are
    joined here, since `tokenizers` decodes a run of them as all or nothing: a run of well-formed characters gives what
    ``decode`` gives, and one malformed byte does not undo the characters before it.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        # The last tokens. A token's text depends on what stands before it (sentencepiece drops the space of the first
        # one), so some context stays.
        self._window: list[int] = []
        self._sent = 0  # characters of the window's text that were returned, or are context
        self._num_new = 0  # tokens in the window since its last cut
        self._run: list[int] = []  # byte-fallback tokens since the last other one
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Take one token and return the text that is now certain; often empty."""
        byte = self._decoder.byte_of(token)
        if byte is not None:
            self._run.append(token)
            return self._held_text() + self._utf8.decode(bytes((byte,)))
        text = self._end_run()
        self._window.append(token)
        self._num_new += 1
        decoded = self._decoder.decode(self._window)
        certain = len(decoded) - decoded.endswith(_REPLACEMENT)
        text += decoded[self._sent : certain]
        self._sent = max(self._sent, certain)
        self._cut_window(decoded, certain)
        return text

    def finish(self) -> str:
        """Return what is still held back; an unfinished character is U+FFFD."""
        return self._held_text() + self._end_run()

    def _held_text(self) -> str:
        """Return the tail of the window that was held back, once nothing can complete it any more."""
        decoded = self._decoder.decode(self._window) if self._window else ""
        text = decoded[self._sent :]
        self._sent += len(text)
        return text

    def _end_run(self) -> str:
        """Return what is left of a run of byte tokens, which then becomes the context of what follows."""
        if not self._run:
            return ""
        text = self._utf8.decode(b"", final=True)
        self._window, self._run, self._num_new = self._run, [], 0
        self._sent = len(self._decoder.decode(self._window))
        return text

    def _cut_window(self, decoded: str, certain: int) -> None:
        if certain == len(decoded):
            kept = self._window[-self._num_new :]
        elif len(self._window) > _LONGEST_WINDOW:
            kept = self._window[-_KEPT_WINDOW:]
        else:
            return
        context = self._decoder.decode(kept)
        if not context:
            return  # Special tokens alone are no context: what follows would look like the beginning of the text.
        self._window, self._num_new = kept, 0
        self._sent = len(context) - (len(decoded) - certain)


class StopScanner:
    """Finds the first stop string in a text that comes in pieces, and holds back only what may be the beginning of one.

    First is the one that is complete first; of those that end at the same place, the longest. So the result does not
    depend on how the text is cut.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        """Take the next piece and return what may be sent.

        Once a stop string was met, `stopped` is set and nothing comes any more.
        """
        if self.stopped or not self._stops:
            return "" if self.stopped else text
        text = self._held + text
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        size = longest_prefix_at_end(text, self._stops)
        self._held = text[len(text) - size :]
        return text[: len(text) - size]

    def flush(self) -> str:
        """Return what was held back, when the text has ended without completing a stop string."""
        held, self._held = self._held, ""
        return held


def longest_prefix_at_end(text: str, markers: Sequence[str]) -> int:
    """Return the length of the longest end of ``text`` that is a proper beginning of one of ``markers``."""
    longest = 0
    for marker in markers:
        for size in range(min(len(marker) - 1, len(text)), longest, -1):
            if text.endswith(marker[:size]):
                longest = size
                break
    return longest
