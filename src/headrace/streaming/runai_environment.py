"""The environment variables by which Run:ai Model Streamer is configured: which values our settings come to, and how long they are set.

That library takes its configuration from the environment of the process, and its reading threads look it up when each makes its client, in the middle of a load
(traced with 0.15.9 and 0.17.1, 2026-11-29). So what its clients read is set for as long as a stream lives, and what is read at the start only then.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from headrace.errors import InvalidSetting, StreamError
from headrace.settings import Settings, TransportSettings
from headrace.streaming.memory import available_memory_bytes, default_memory_limit
from headrace.units import UNLIMITED

if TYPE_CHECKING:
    from headrace.storage.s3_keys import LentAccess

Variables = Mapping[str, str | None]
"""Variable to value; None for one that must not be set."""

CONCURRENCY = "RUNAI_STREAMER_CONCURRENCY"
MEMORY_LIMIT = "RUNAI_STREAMER_MEMORY_LIMIT"
_RETRY_S = "RUNAI_STREAMER_S3_TIMEOUT"
_RETRIES = "RUNAI_STREAMER_S3_MAX_RETRIES"
_IDLE_MS = "RUNAI_STREAMER_S3_REQUEST_TIMEOUT_MS"

_ANONYMOUS: Variables = {
    "RUNAI_STREAMER_S3_UNSIGNED": "1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    **dict.fromkeys(
        (
            "AWS_ACCESS_KEY_ID",
            "AWS_SECRET_ACCESS_KEY",
            "AWS_SESSION_TOKEN",
            "AWS_PROFILE",
            "AWS_DEFAULT_PROFILE",
            "AWS_ROLE_ARN",
            "AWS_WEB_IDENTITY_TOKEN_FILE",
            "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
            "AWS_CONTAINER_CREDENTIALS_FULL_URI",
        )
    ),
}
"""Anonymous requests. 0.17.1 does not look at the first one, whatever its manual says (traced 2026-11-29), but sends no signature where it finds no keys."""
_LONGEST_START_S = 600.0


def start_variables(settings: Settings, environment: Mapping[str, str], *, largest_bytes: int) -> dict[str, str | None]:
    """Return what the library reads when a stream starts. A variable of its own that ``environment`` has stays where our setting has its default.

    ``largest_bytes`` is the largest tensor's size: the library refuses a limit below it, and we load it all the same.
    """
    transport, default = settings.transport, TransportSettings()
    values: dict[str, str | None] = {}
    if _is_said(settings, "num_connections") or CONCURRENCY not in environment:
        values[CONCURRENCY] = str(settings.rank_transport.num_connections)
    limit = settings.memory_limit_bytes
    if limit is None:
        limit = default_memory_limit(available_memory_bytes())
    if limit not in (UNLIMITED, 0):
        limit = max(limit // settings.local_ranks, largest_bytes)
    if settings.memory_limit_bytes is not None or MEMORY_LIMIT not in environment:
        values[MEMORY_LIMIT] = str(limit)
    if transport.total_timeout_s != default.total_timeout_s or _RETRY_S not in environment:
        values[_RETRY_S] = str(max(1, math.ceil(transport.total_timeout_s)))
    if _is_said(settings, "read_bytes"):
        values["RUNAI_STREAMER_CHUNK_BYTESIZE"] = str(transport.read_bytes)
    return values


def _is_said(settings: Settings, name: str) -> bool:
    """Whether a setting of the transport is another than the default, or was read from a variable, which may be one of that library's own."""
    return name in settings.sources or getattr(settings.transport, name) != getattr(TransportSettings(), name)


def client_variables(
    settings: Settings, environment: Mapping[str, str], access: LentAccess | None, *, keys_too: bool
) -> dict[str, str | None]:
    """Return what the library's S3 clients read, for ``access``; nothing for local files.

    Versions before 0.16 ignore keys that they are given (tried with 0.15.7 and 0.15.9): ``keys_too`` puts them into the environment.
    Raises `InvalidSetting` for what the library cannot do.
    """
    if access is None:
        return {}
    if not access.verify_tls:
        raise InvalidSetting(
            "verify_tls is off, and Run:ai Model Streamer always checks certificates.",
            mend="Name the server's certificate in AWS_CA_BUNDLE, or use load_format headrace.",
        )
    if settings.transport.bandwidth_bytes_per_s:
        raise InvalidSetting(
            "A bandwidth limit is set, and Run:ai Model Streamer cannot be held to one.",
            mend="Use load_format headrace.",
        )
    transport, default = settings.transport, TransportSettings()
    keys = access.keys
    values: dict[str, str | None] = {
        "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0" if access.addresses_by_path else "1",
        "RUNAI_STREAMER_S3_UNSIGNED": None,
    }
    if access.ca_file is not None:
        values["AWS_CA_BUNDLE"] = access.ca_file
    if transport.idle_timeout_s != default.idle_timeout_s or _IDLE_MS not in environment:
        values[_IDLE_MS] = str(max(1, round(transport.idle_timeout_s * 1000)))
    if transport.max_attempts != default.max_attempts or _RETRIES not in environment:
        values[_RETRIES] = str(max(1, transport.max_attempts - 1))  # 0 is the SDK's own number, and it is large
    if keys.endpoint is None:
        values["AWS_ENDPOINT_URL"] = None
    elif "AWS_EC2_METADATA_DISABLED" not in environment:
        values["AWS_EC2_METADATA_DISABLED"] = "true"  # or it asks Amazon's machines, where this is none of them
    if not keys.access_key_id:
        values.update(_ANONYMOUS)
    elif keys_too:
        values["AWS_ACCESS_KEY_ID"] = keys.access_key_id
        values["AWS_SECRET_ACCESS_KEY"] = keys.secret_access_key
        values["AWS_SESSION_TOKEN"] = keys.session_token
    return values


class EnvironmentLoan:
    """Sets variables of the process for a while. Holders of the same values share; other values at the same time are an error, since a wait could last for ever."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._starting = threading.Lock()
        self._values: Variables = {}
        self._before: dict[str, str | None] = {}
        self._num_holders = 0

    @contextmanager
    def held(self, values: Variables) -> Iterator[None]:
        """Have ``values`` set for the length of a block. Raises `StreamError` where another block holds others."""
        with self._lock:
            if self._num_holders and values != self._values:
                raise StreamError(
                    "Another stream of Run:ai Model Streamer with other settings is open in this process.",
                    "That library takes its settings from the process's environment, so there can be one set at a time.",
                    "Close the other stream first, or use load_format headrace.",
                )
            if not self._num_holders:
                self._values, self._before = values, _replace(values)
            self._num_holders += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_holders -= 1
                if not self._num_holders:
                    _restore(self._before, self._values)

    @contextmanager
    def briefly(self, values: Variables) -> Iterator[None]:
        """Have ``values`` set for the length of a short block; others that want to do this wait."""
        if not self._starting.acquire(timeout=_LONGEST_START_S):
            raise StreamError(
                "Another stream of Run:ai Model Streamer does not get beyond its start.",
                "Streams of that library start one after the other.",
                "Look for an unreachable store.",
            )
        try:
            before = _replace(values)
            try:
                yield
            finally:
                _restore(before, values)
        finally:
            self._starting.release()


ENVIRONMENT = EnvironmentLoan()
"""The one of this process."""


def _replace(values: Variables) -> dict[str, str | None]:
    before = {name: os.environ.get(name) for name in values}
    for name, value in values.items():
        _set(name, value)
    return before


def _restore(before: Variables, values: Variables) -> None:
    for name, value in before.items():
        if os.environ.get(name) == values[name]:  # else somebody set it meanwhile, and means it
            _set(name, value)


def _set(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
