"""Finds a model's files where nothing can be listed: asks for each name that it may have, many at once. Knows no HTTP."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from headrace.errors import AccessDenied, ObjectNotFound, StorageError, StoreUnavailable
from headrace.storage.model_files import (
    CODE_SOURCES,
    code_of_config,
    files_of_index,
    imports_of_code,
    is_index,
    is_weights,
)
from headrace.storage.store import StoredObject

_LOG = logging.getLogger("headrace")

_LARGEST_BYTES = 64_000_000
"""Largest index, configuration or file of code that is read for the names in it."""
_MOST_CODE_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class Found:
    """The files that are there, and for the others what the server said."""

    objects: dict[str, StoredObject] = field(default_factory=dict)
    errors: dict[str, StorageError] = field(default_factory=dict)

    @property
    def refusal(self) -> AccessDenied | None:
        """The first refusal of a weight file; one of a name that was only a guess means nothing, since some servers say so of all that is absent."""
        refusals = (error for key, error in self.errors.items() if is_weights(key) and isinstance(error, AccessDenied))
        return next(refusals, None)


class NameSearch:
    """``stat`` and ``read`` are a store's own; they are called from up to ``num_threads`` threads."""

    def __init__(
        self, stat: Callable[[str], StoredObject], read: Callable[[StoredObject], bytes], *, num_threads: int
    ) -> None:
        self._stat = stat
        self._read = read
        self._num_threads = num_threads

    def find(self, keys: Collection[str]) -> Found:
        """Look for all of ``keys``. Raises `StoreUnavailable` where the server does not answer, and what makes weights unusable."""
        found = Found()
        if not keys:
            return found
        with ThreadPoolExecutor(min(self._num_threads, len(keys)), thread_name_prefix="headrace-http") as pool:
            futures = {key: pool.submit(self._look_for, key) for key in keys}
            try:
                for key, future in futures.items():
                    answer = future.result()
                    if isinstance(answer, StoredObject):
                        found.objects[key] = answer
                    else:
                        found.errors[key] = answer
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
        return found

    def find_indexed(self, index: str) -> tuple[str, ...]:
        """Return the files that an index names, which may not be there itself."""
        try:
            return self.read_index(self._stat(index))
        except ObjectNotFound:
            return ()

    def read_index(self, index: StoredObject) -> tuple[str, ...]:
        """Return the files that an index names."""
        return files_of_index(self._content(index))

    def find_code(self, objects: dict[str, StoredObject]) -> dict[str, StoredObject]:
        """Return the files of code that configurations among ``objects`` name, and those that they import in turn."""
        code: dict[str, StoredObject] = {}
        sources = (objects[key] for key in CODE_SOURCES if key in objects)
        names = {name for source in sources for name in code_of_config(self._content(source))}
        for _ in range(_MOST_CODE_ROUNDS):
            fresh = self.find(sorted(names - code.keys())).objects
            if not fresh:
                break
            code |= fresh
            names = {name for stored in fresh.values() for name in imports_of_code(self._content(stored))}
        return code

    def _look_for(self, key: str) -> StoredObject | StorageError:
        try:
            return self._stat(key)
        except (ObjectNotFound, AccessDenied) as error:
            return error
        except StorageError as error:
            if isinstance(error, StoreUnavailable) or is_weights(key) or is_index(key):
                raise
            _LOG.warning("Left out of the side files: %s", error)
            return error

    def _content(self, stored: StoredObject) -> bytes:
        return self._read(stored) if stored.size_bytes <= _LARGEST_BYTES else b""
