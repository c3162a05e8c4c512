"""What to say when a read is given up. Pure: makes errors out of what is known, decides nothing."""

from __future__ import annotations

import http.client
import ssl
import traceback
from collections.abc import Iterator

from headrace.errors import HeadraceError, ReadFailed, ReadStalled, WrongRange
from headrace.storage import Refusal, Verdict
from headrace.transport.patience import TooSlow
from headrace.transport.reader import RangeRead
from headrace.transport.retry import Attempts

_LONGEST_REASON = 60


class Refused(Exception):
    """The store refused one attempt, and ``verdict`` says what that means. Never leaves this package."""

    def __init__(self, refusal: Refusal, verdict: Verdict) -> None:
        reason = "".join(character for character in refusal.reason if character.isprintable())[:_LONGEST_REASON]
        super().__init__(f"HTTP {refusal.status} {reason}".rstrip())
        self.status = refusal.status
        self.verdict = verdict


Failure = Refused | WrongRange | OSError | http.client.HTTPException
"""What may end one attempt and be mended by another."""

FAILURES = (Refused, WrongRange, OSError, http.client.HTTPException)


def give_up(
    uri: str, endpoint: str, read: RangeRead, attempts: Attempts, num_filled: int, last: Failure
) -> HeadraceError:
    """Return the error for a read whose attempts are over, ``last`` being the last failure.

    A refusal and a wrong answer keep their own kind of error; silence is `ReadStalled`, all else `ReadFailed`.
    """
    times = "1 attempt" if attempts.num_in_all == 1 else f"{attempts.num_in_all} attempts"
    account = f"bytes {read.start} to {read.stop} of {uri} from {endpoint}: {num_filled} of {read.size_bytes} bytes came in {times}"
    if isinstance(last, Refused):
        error = last.verdict.error
        return type(error)(
            error.what, _sentences(error.why, f"The read of {account}, the last answer was {last}."), error.mend
        )
    if isinstance(last, WrongRange):
        return WrongRange(last.what, _sentences(last.why, f"The read of {account}."), last.mend)
    what = f"Cannot read {account}."
    why = f"The last one failed: {describe(last)}."
    if isinstance(last, TimeoutError):
        return ReadStalled(
            what, why, "Check the network to the store, or raise idle_timeout_s, connect_timeout_s and total_timeout_s."
        )
    return ReadFailed(what, why, "Check that the store can be reached from this machine, or raise max_attempts.")


def describe(failure: Failure) -> str:
    """Return one failure in words that hold nothing of a request: ``http.client`` quotes what it could not parse."""
    if isinstance(failure, Refused | TooSlow):
        return str(failure)
    if isinstance(failure, http.client.HTTPException) and not isinstance(failure, OSError):
        return f"the answer is not HTTP ({type(failure).__name__})"
    if isinstance(failure, ssl.SSLError):
        return f"TLS failed ({getattr(failure, 'reason', None) or type(failure).__name__})"
    if isinstance(failure, TimeoutError):
        return "the connection could not be made in time" if not failure.strerror else failure.strerror
    text = failure.strerror if isinstance(failure, OSError) and failure.strerror else str(failure)
    return f"{type(failure).__name__}, {text}" if text else type(failure).__name__


def _sentences(*parts: str) -> str:
    return " ".join(part for part in parts if part)


def strip_frames(failure: Failure) -> Failure:
    """Return ``failure`` without its traceback, nor those of its causes.

    Frames refer to the memory of the read, and the frame that keeps the failure is among them: only the garbage collector would undo that circle.
    """
    for one in _chain_of(failure):
        one.__traceback__ = None
    return failure


def clear_frames(error: BaseException) -> None:
    """Clear the local variables of the frames that ``error`` and its causes remember, and keep the line numbers: the read is over, its memory is not ours."""
    for one in _chain_of(error):
        traceback.clear_frames(one.__traceback__)


def _chain_of(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            yield one
            waiting += [one.__cause__, one.__context__]
