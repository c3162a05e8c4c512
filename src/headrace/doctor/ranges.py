"""Whether a piece of an object can be read exactly, and whether one that was replaced meanwhile is refused."""

from __future__ import annotations

from dataclasses import replace

from headrace.doctor.asking import NETWORK_FAILURES, Reply, ask_store, explain, words_for
from headrace.doctor.finding import Finding, failed, failed_with, ok, skipped, warning
from headrace.doctor.world import World
from headrace.errors import HeadraceError, ObjectChanged
from headrace.settings import TransportSettings
from headrace.storage import FileRange, ObjectStore, StoredObject
from headrace.transport import fetch
from headrace.transport.answer import end_of_answer
from headrace.units import KIB

READ = "range read"
CONDITION = "conditional read"

_READ_BYTES = 4 * KIB
_CONDITIONS = ("if-match", "if-unmodified-since")
_WRONG_DATE = "Thu, 01 Jan 1970 00:00:01 GMT"


def examine_range(store: ObjectStore, stored: StoredObject, transport: TransportSettings, world: World) -> Finding:
    """Read a few bytes from the middle of an object, and look at status and Content-Range as a read does."""
    start, stop = middle_of(stored.size_bytes)
    details = [("object", store.uri_of(stored.key)), ("bytes", f"{start} to {stop} of {stored.size_bytes:,}")]
    if isinstance(store.describe_range(stored, start, stop), FileRange):
        try:
            fetch(store, stored, start, stop, transport, world.surroundings)
        except HeadraceError as error:
            return failed_with(READ, error, details)
        return ok(READ, "A piece of the file was read.", details)
    try:
        reply = ask_store(store, stored, start, stop, transport, world.surroundings)
    except HeadraceError as error:
        return failed_with(READ, error, details)
    except NETWORK_FAILURES as error:
        return _unanswered(store, stored, error, details)
    details += rows_of(reply)
    if reply.status not in (200, 206):
        return failed_with(READ, explain(store, stored, reply), details)
    try:
        end = end_of_answer(reply.asked, stored, store.uri_of(stored.key), reply.status, reply.refusal.headers)
    except HeadraceError as error:
        return failed_with(READ, error, details)
    if len(reply.refusal.body) < end - start:
        return failed(
            READ,
            f"{store.uri_of(stored.key)} breaks off.",
            f"{len(reply.refusal.body)} of {end - start} bytes came.",
            "Check the server, and the proxies before it.",
            details,
        )
    if end < stop:
        return warning(
            READ,
            f"{store.endpoint} sends less than is asked for.",
            f"{end - start} of {stop - start} bytes came in one answer; a load asks for the rest again and again.",
            "Take away the limit on answers at the server or its proxy.",
            details,
        )
    return ok(READ, f"The bytes that were asked for came, and no others ({reply.status}).", details)


def examine_condition(store: ObjectStore, stored: StoredObject, transport: TransportSettings, world: World) -> Finding:
    """Ask for a version that is not there. A store that honours the condition refuses; one that does not sends what it has."""
    start, stop = middle_of(stored.size_bytes)
    wrong = replace(stored, version=other_version(stored.version))
    asked = store.describe_range(wrong, start, stop)
    if isinstance(asked, FileRange):
        return ok(CONDITION, "Number, date and size of a file are compared before and after each read.")
    if store.uri.scheme == "hf":
        return skipped(
            CONDITION, "Files of one commit never change, and each redirect names the content that it leads to."
        )
    if not stored.version:
        return skipped(CONDITION, "The store gives no version that could be asked for.")
    sends_condition = asked.version_header is not None and "generation=" in asked.target.lower()
    sends_condition = sends_condition or any(name.lower() in _CONDITIONS for name, _ in asked.headers)
    if not sends_condition:
        return _unconditional(store, stored, [("version", stored.version)])
    try:
        reply = ask_store(store, wrong, start, stop, transport, world.surroundings)
    except ObjectChanged:
        return ok(CONDITION, "A version that is not there is refused.")
    except HeadraceError as error:
        return failed_with(CONDITION, error)
    except NETWORK_FAILURES as error:
        return _unanswered(store, stored, error, [], step=CONDITION)
    details = [("version", stored.version), *rows_of(reply)]
    if reply.status in (200, 206):
        return _ignored(store, reply, details)
    refusal = explain(store, wrong, reply)
    if isinstance(refusal, ObjectChanged):
        return ok(CONDITION, f"A version that is not there is refused ({reply.status}).", details)
    return failed_with(CONDITION, refusal, details)


def middle_of(size_bytes: int) -> tuple[int, int]:
    """Return a range in the middle of so many bytes, so that neither the whole nor the beginning can be taken for it."""
    start = max(0, size_bytes // 2 - _READ_BYTES // 2)
    start = max(start, min(1, size_bytes - 1))
    return start, min(size_bytes, start + _READ_BYTES)


def other_version(version: str) -> str:
    """Return a version of the same kind that no object has: ETag, generation, date."""
    if version.startswith("modified "):
        return f"modified {_WRONG_DATE}"
    if version.isdigit():
        return "1"
    weak = "W/" if version.startswith("W/") else ""
    return f'{weak}"00000000000000000000000000000000"'


def rows_of(reply: Reply) -> list[tuple[str, str]]:
    """Return what an answer says of itself. Only such headers are shown as hold no secret."""
    rows = [("answer", f"{reply.status} {reply.refusal.reason}".strip())]
    for name in ("content-range", "etag", "x-cache", "via"):
        value = reply.refusal.headers.get(name)
        if value:
            rows.append((name, value))
    return rows


def _ignored(store: ObjectStore, reply: Reply, details: list[tuple[str, str]]) -> Finding:
    says_version = bool(reply.refusal.headers.get("etag")) or (
        reply.asked.version_header is not None and reply.asked.version_header[0] in reply.refusal.headers
    )
    return warning(
        CONDITION,
        f"{store.endpoint} sends a file although another version of it was asked for.",
        _instead(says_version),
        "Give each version of a model a folder of its own, and replace no file in place.",
        details,
    )


def _unconditional(store: ObjectStore, stored: StoredObject, details: list[tuple[str, str]]) -> Finding:
    return warning(
        CONDITION,
        f"{store.endpoint} gives weak versions only, for which nothing can be refused.",
        _instead(True),
        "Give each version of a model a folder of its own, and replace no file in place.",
        details,
    )


def _instead(says_version: bool) -> str:
    """Return what is done where the store does not look at the condition."""
    if says_version:
        return (
            "It does not refuse what changed during a load. Headrace compares the version that each answer names instead, and ends with "
            "ObjectChanged; a change between that answer's head and its last byte goes unseen."
        )
    return (
        "It does not refuse what changed during a load, and its answers name no version. Headrace compares the size of each file instead: "
        "one that was replaced by another of the same size goes unseen."
    )


def _unanswered(
    store: ObjectStore, stored: StoredObject, error: Exception, details: list[tuple[str, str]], *, step: str = READ
) -> Finding:
    return failed(
        step,
        f"{store.uri_of(stored.key)} cannot be read.",
        f"A request to {store.endpoint} got no answer: {words_for(error)}.",
        "Listing works and reading does not: check a proxy or firewall between them, and the host that the store redirects to.",
        details,
    )
