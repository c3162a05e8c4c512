"""Bytes at a uri: stores that list objects, pin their versions and say how a byte range is read. Knows no tensors."""

from headrace.storage.opening import open_store
from headrace.storage.store import FileRange, HttpRange, Listing, ObjectStore, Refusal, StoredObject, Verdict
from headrace.storage.uri import Uri, is_object_uri, parse_uri

__all__ = [
    "FileRange",
    "HttpRange",
    "Listing",
    "ObjectStore",
    "Refusal",
    "StoredObject",
    "Uri",
    "Verdict",
    "is_object_uri",
    "open_store",
    "parse_uri",
]
