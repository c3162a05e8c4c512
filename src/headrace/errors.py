"""Every error that Headrace raises on purpose, in one tree.

    HeadraceError
    ├── UsageError              the caller asked for something that cannot be
    │   ├── InvalidUri          not a uri that any store understands
    │   ├── InvalidSetting      a setting with a wrong name, type or value
    │   └── MissingDependency   an optional package is not installed
    ├── StorageError            the store refused, changed or vanished
    │   ├── ObjectNotFound      no such object, folder or bucket
    │   ├── AccessDenied        credentials are absent, wrong, expired or not allowed
    │   ├── ObjectChanged       an object is not the version that was pinned
    │   └── StoreUnavailable    the store could not be reached, or kept failing
    ├── TransportError          bytes did not arrive as they were promised
    │   ├── ReadFailed          a read was given up after its last attempt
    │   ├── ReadStalled         too few bytes, or none, came for too long
    │   ├── WrongRange          the answer is not the range that was asked for
    │   └── Cancelled           the read was stopped by its owner; not a failure of its own
    ├── CheckpointError         the stored files are not a usable checkpoint
    │   ├── NoWeights           nothing here that can be loaded
    │   ├── MissingFiles        the index names files that are absent
    │   ├── InvalidIndex        the index is not one, or names what it must not
    │   ├── InvalidHeader       a file's header breaks a rule of the format
    │   ├── TruncatedObject     a file is shorter than its header says
    │   ├── TrailingBytes       a file is longer than its header says
    │   └── UnsupportedDtype    a stored type that this torch cannot represent
    ├── CacheError              the mirror of side files cannot be used
    ├── StreamError             the stream was used in a way that cannot work
    │   ├── StreamClosed        a tensor was asked for after the stream had ended
    │   ├── BudgetExceeded      what is asked does not fit into the memory that was allowed
    │   └── RankFailed          another rank of the group failed, stopped or vanished
    ├── ModelError              the checkpoint and the model do not fit
    │   ├── UnknownArchitecture no class for what config.json names
    │   ├── UnsupportedQuantization the weights are packed in a way that cannot be read here
    │   └── PlacementError      missing, doubled, unexpected or mismatched tensors
    └── ServingError            the server could not start or keep its promise

Each error has three parts: ``what`` happened, ``why``, and how to ``mend`` it. They are the positional arguments of the
exception, so an error survives pickling on its way out of another process. No part may hold a secret or a signed URL.
"""

from __future__ import annotations


class HeadraceError(Exception):
    """Root of all errors of this package: ``HeadraceError(what, why, mend)``, each a full sentence or empty."""

    def __init__(self, what: str, why: str = "", mend: str = "") -> None:
        super().__init__(what, why, mend)
        self.what = what
        self.why = why
        self.mend = mend

    def __str__(self) -> str:
        return " ".join(part for part in (self.what, self.why, self.mend) if part)


class UsageError(HeadraceError):
    """The caller asked for something that cannot be."""


class InvalidUri(UsageError):
    """Not a uri that any store understands."""


class InvalidSetting(UsageError):
    """A setting with a wrong name, type or value."""


class MissingDependency(UsageError):
    """An optional package is not installed, or does not import; the message names the extra that brings it."""


class StorageError(HeadraceError):
    """The store refused, changed or vanished."""


class ObjectNotFound(StorageError):
    """No such object, folder or bucket."""


class AccessDenied(StorageError):
    """Credentials are absent, wrong, expired or not allowed."""


class ObjectChanged(StorageError):
    """An object is not the version that was pinned when the checkpoint was opened."""


class StoreUnavailable(StorageError):
    """The store could not be reached, or kept failing."""


class TransportError(HeadraceError):
    """Bytes did not arrive as they were promised."""


class ReadFailed(TransportError):
    """A read was given up after its last attempt."""


class ReadStalled(TransportError):
    """Too few bytes, or none, came for too long."""


class WrongRange(TransportError):
    """The answer is not the range that was asked for."""


class Cancelled(TransportError):
    """The read was stopped by its owner; not a failure of its own."""


class CheckpointError(HeadraceError):
    """The stored files are not a usable checkpoint."""


class NoWeights(CheckpointError):
    """Nothing here that can be loaded."""


class MissingFiles(CheckpointError):
    """The index names files that are absent."""


class InvalidIndex(CheckpointError):
    """The index is not one, or names what it must not."""


class InvalidHeader(CheckpointError):
    """A file's header breaks a rule of the safetensors format."""


class TruncatedObject(CheckpointError):
    """A file is shorter than its header says."""


class TrailingBytes(CheckpointError):
    """A file is longer than its header says."""


class UnsupportedDtype(CheckpointError):
    """A stored type that the installed torch cannot represent."""


class CacheError(HeadraceError):
    """The mirror of side files cannot be used."""


class StreamError(HeadraceError):
    """The stream was used in a way that cannot work."""


class StreamClosed(StreamError):
    """A tensor was asked for after the stream had ended."""


class BudgetExceeded(StreamError):
    """What is asked does not fit into the memory that was allowed."""


class RankFailed(StreamError):
    """Another rank of the group failed, stopped or vanished; ``why`` is what it said.

    ``rank`` is its number in the group, -1 where it is not known which one vanished.
    """

    def __init__(self, what: str, why: str = "", mend: str = "", rank: int = -1) -> None:
        super().__init__(what, why, mend)
        self.rank = rank
        self.args = (what, why, mend, rank)  # what an unpickled copy is made of


def distance_from_cause(rank: int, error: BaseException) -> int:
    """Return how far ``error``, which is what ``rank`` came to, is from what began the failure of a group; of several, the one with the least says most. Pure.

    An error that teaches is a cause, and so is that the rank itself ended without a word. What another library raises may come of that: a connection that its peer has closed.
    A rank's word on another says less than the other's own, and least where it cannot name it.
    """
    if isinstance(error, RankFailed):
        if error.rank == rank:
            return 1
        return 3 if error.rank >= 0 else 4
    return 0 if isinstance(error, HeadraceError) else 2


class ModelError(HeadraceError):
    """The checkpoint and the model do not fit."""


class UnknownArchitecture(ModelError):
    """No class for what config.json names."""


class UnsupportedQuantization(ModelError):
    """The weights are packed in a way that cannot be read here."""


class PlacementError(ModelError):
    """Missing, doubled, unexpected or mismatched tensors."""


class ServingError(HeadraceError):
    """The server could not start or keep its promise."""
