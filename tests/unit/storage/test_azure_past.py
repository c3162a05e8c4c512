"""What a container of Azure held before, read off the versions of its blobs, and how they are read."""

from __future__ import annotations

from xml.sax.saxutils import escape

import pytest

from headrace.errors import AccessDenied, StorageError
from headrace.storage import azure as module
from headrace.storage.azure import AzureStore
from headrace.storage.store import HttpRange, StoredObject

from .azure_stub import SAS, blob, error, opened
from .s3_stub import Answer, Asked, S3Stub


def version(name: str, written: str, *, current: bool = False, more: str = "") -> str:
    """One blob of a listing with versions; ``written`` is the seconds of its id."""
    return (
        f"<Blob><Name>{escape(name)}</Name><VersionId>2026-01-01T10:00:{written}Z</VersionId>"
        f"{'<IsCurrentVersion>true</IsCurrentVersion>' if current else ''}"
        f"<Properties><Etag>e{written}</Etag><Content-Length>10</Content-Length><BlobType>BlockBlob</BlobType></Properties>{more}</Blob>"
    )


def plain(name: str, second: str) -> str:
    """A blob that was written while versioning was off."""
    return (
        f"<Blob><Name>{escape(name)}</Name><Properties><Last-Modified>Thu, 01 Jan 2026 10:00:{second} GMT</Last-Modified>"
        f"<Etag>p{second}</Etag><Content-Length>10</Content-Length><BlobType>BlockBlob</BlobType></Properties></Blob>"
    )


def page(*items: str, token: str = "") -> Answer:
    text = (
        '<?xml version="1.0" encoding="utf-8"?><EnumerationResults ServiceEndpoint="http://x/" ContainerName="container">'
        f"<Blobs>{''.join(items)}</Blobs><NextMarker>{token}</NextMarker></EnumerationResults>"
    )
    return Answer(200, text.encode(), {"Content-Type": "application/xml"})


def states_of(store: AzureStore) -> list[dict[str, str]]:
    return [{stored.key: stored.version for stored in past.list_level().objects} for past in store.open_past()]


def test_states_follow_from_versions_over_pages() -> None:
    """A version ends as the next one begins; a blob without a current one was removed after all else."""
    folder = "<Metadata><hdi_isfolder>true</hdi_isfolder></Metadata>"
    pages = {
        "": page(
            version("m/a b", "00.0000000"),
            version("m/a b", "02.5000000", current=True),
            version("m/folder", "00.5", current=True, more=folder),
            token="next",
        ),
        "next": page(version("m/c", "01.0000001"), plain("m/d", "00"), version("n", "09.0", current=True)),
    }
    with S3Stub(lambda asked: pages[asked.query.get("marker", "")]) as stub, opened(stub.endpoint) as store:
        assert states_of(store) == [
            {"a b": '"e02.5000000"', "d": '"p00"'},
            {"a b": '"e02.5000000"', "c": '"e01.0000001"', "d": '"p00"'},
            {"a b": '"e00.0000000"', "c": '"e01.0000001"', "d": '"p00"'},
            {"a b": '"e00.0000000"', "d": '"p00"'},
            {"a b": '"e00.0000000"'},
        ]
        asked = stub.asked[0].query
        assert set(asked["include"].split(",")) == {"versions", "metadata"} and asked["prefix"] == "m/"
        assert "delimiter" not in asked


def test_each_version_is_read_by_its_id() -> None:
    def answer(asked: Asked) -> Answer:
        if asked.query.get("comp") == "list":
            return page(version("m/a", "00.0000000"), version("m/a", "01.0000000", current=True))
        assert asked.query == {"versionid": "2026-01-01T10:00:00.0000000Z"}
        return blob(b"0123456789", etag='"e00.0000000"')

    with S3Stub(answer) as stub, opened(stub.endpoint) as store:
        *_, oldest = store.open_past()
        stored = oldest.stat("a")
        assert oldest.read_object(stored) == b"0123456789"
        described = oldest.describe_range(stored, 2, 5)
        assert isinstance(described, HttpRange)
        assert described.target.endswith("/container/m/a?versionid=2026-01-01T10%3A00%3A00.0000000Z")
        assert described.version_header == ("x-ms-version-id", "2026-01-01T10:00:00.0000000Z")
        assert ("If-Match", '"e00.0000000"') in described.headers


def test_a_signature_follows_the_version() -> None:
    old, new = StoredObject("a", 10, '"e"', "2026-01-01T10:00:00.0000000Z"), StoredObject("a", 10, '"e"')
    with opened("http://127.0.0.1:1", sas_token=SAS) as store:
        targets = [store.describe_range(stored, 0, 1).target for stored in (old, new)]  # type: ignore[union-attr]
    assert "/m/a?versionid=2026-01-01T10%3A00%3A00.0000000Z&sv=" in targets[0]
    assert "/m/a?sv=" in targets[1]


def test_a_container_that_may_not_be_listed_says_so() -> None:
    with (
        S3Stub(lambda asked: error(403, "AuthorizationPermissionMismatch")) as stub,
        opened(stub.endpoint) as store,
        pytest.raises(AccessDenied),
    ):
        list(store.open_past())


def test_too_many_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_CHANGES", 1)
    answer = page(version("m/a", "00.0"), version("m/b", "01.0"), token="more")
    with S3Stub(lambda asked: answer) as stub, opened(stub.endpoint) as store:
        with pytest.raises(StorageError, match="cannot be looked through"):
            list(store.open_past())
        assert len(stub.asked) == 1
