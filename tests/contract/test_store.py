"""What every store does, asserted on each of them: a folder of this machine, a real S3 server, and emulators of Google Cloud Storage and
of Azure Blob Storage."""

from __future__ import annotations

import contextlib
import http.client
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest

from headrace.errors import AccessDenied, InvalidUri, ObjectChanged, ObjectNotFound, StoreUnavailable
from headrace.settings import Settings
from headrace.storage import FileRange, HttpRange, ObjectStore, Refusal, StoredObject, open_store
from headrace.storage.local import file_version

ODD_KEYS = (
    "a b",
    "a+b",
    "a%20b",
    "ü",
    "重",
    "a=b",
    "a#b",
    "a?b",
    "a&b;c",
    "~(x)'!*.txt",
    "a:b@c,d$e",
    "[z]{1}|^`<>",
    "été",
)


class World(Protocol):
    """A place with objects that a test may write, and the uri that leads there."""

    settings: Settings

    def put(self, key: str, content: bytes) -> None: ...

    def delete(self, key: str) -> None: ...

    def uri(self, folder: str) -> str: ...


@dataclass
class Folder:
    root: Path
    settings: Settings

    def put(self, key: str, content: bytes) -> None:
        path = self.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        # As tools replace files: written beside, then renamed.
        path.with_name(path.name + ".new").write_bytes(content)
        path.with_name(path.name + ".new").replace(path)

    def delete(self, key: str) -> None:
        (self.root / key).unlink()

    def uri(self, folder: str) -> str:
        return f"{self.root}/{folder}"


@dataclass
class Bucket:
    client: Any
    name: str
    settings: Settings

    def put(self, key: str, content: bytes) -> None:
        self.client.put_object(Bucket=self.name, Key=key, Body=content)

    def delete(self, key: str) -> None:
        self.client.delete_object(Bucket=self.name, Key=key)

    def uri(self, folder: str) -> str:
        return f"s3://{self.name}/{folder}"


@dataclass
class GcsBucket:
    bucket: Any
    settings: Settings

    def put(self, key: str, content: bytes) -> None:
        self.bucket.blob(key).upload_from_string(content)

    def delete(self, key: str) -> None:
        self.bucket.blob(key).delete()

    def uri(self, folder: str) -> str:
        return f"gs://{self.bucket.name}/{folder}"


@dataclass
class AzureContainer:
    container: Any
    settings: Settings

    def put(self, key: str, content: bytes) -> None:
        self.container.upload_blob(key, content, overwrite=True)

    def delete(self, key: str) -> None:
        self.container.delete_blob(key)

    def uri(self, folder: str) -> str:
        return f"az://{self.container.container_name}/{folder}"


@pytest.fixture(params=["folder", "bucket", "gcs", "azure"])
def world(request: pytest.FixtureRequest, tmp_path: Path, s3_settings: Settings) -> World:
    if request.param == "folder":
        (tmp_path / "root").mkdir()
        return Folder(tmp_path / "root", s3_settings)
    if request.param == "gcs":
        return GcsBucket(request.getfixturevalue("gcs_bucket"), s3_settings)
    if request.param == "azure":
        return AzureContainer(request.getfixturevalue("azure_container"), s3_settings)
    return Bucket(request.getfixturevalue("s3_client"), request.getfixturevalue("bucket"), s3_settings)


@contextlib.contextmanager
def opened(world: World, folder: str = "") -> Iterator[ObjectStore]:
    with contextlib.closing(open_store(world.uri(folder), settings=world.settings)) as store:
        yield store


def carry_out(described: FileRange | HttpRange) -> tuple[int, bytes, Refusal]:
    """Do what a transport does, with nothing of Headrace: one read of a file, or one request."""
    if isinstance(described, FileRange):
        descriptor = os.open(described.path, os.O_RDONLY)
        try:
            fits = file_version(os.fstat(descriptor)) == described.version
            content = os.pread(descriptor, described.stop - described.start, described.start)
        finally:
            os.close(descriptor)
        return (206 if fits else 412), content, Refusal(412, "", {})
    with contextlib.closing(http.client.HTTPConnection(described.host, described.port, timeout=10)) as connection:
        connection.putrequest("GET", described.target, skip_accept_encoding=True)
        for name, value in described.headers:
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        content = answer.read()
        headers = {name.lower(): value for name, value in answer.getheaders()}
        if answer.status == 206:
            if described.etag is not None:
                assert headers["etag"] == described.etag
            if described.version_header is not None:
                name, version = described.version_header
                assert headers[name] == version
            assert described.etag or described.version_header
            assert headers["content-range"].startswith(f"bytes {described.start}-{described.stop - 1}/")
        return answer.status, content, Refusal(answer.status, answer.reason, headers, content)


def test_one_level_is_listed(world: World) -> None:
    world.put("m/model-2.safetensors", b"12")
    world.put("m/model-10.safetensors", b"1")
    world.put("m/empty.txt", b"")
    world.put("m/original/model.safetensors", b"1234")
    world.put("m/original/deep/er", b"1")
    with opened(world, "m") as store:
        listing = store.list_level()
        inner = store.list_level("original")

    assert [(item.key, item.size_bytes) for item in listing.objects] == [
        ("empty.txt", 0),
        ("model-10.safetensors", 1),
        ("model-2.safetensors", 2),
    ]
    assert listing.folders == ("original",)
    assert [item.key for item in inner.objects] == ["original/model.safetensors"]
    assert inner.folders == ("original/deep",)


@pytest.mark.parametrize("folder", ["m", "m/", "m//"])
def test_a_folder_whose_name_begins_alike_stays_out(world: World, folder: str) -> None:
    world.put("m/a", b"1")
    world.put("m-v2/b", b"2")
    world.put("mm", b"3")
    with opened(world, folder) as store:
        listing = store.list_level()

    assert [item.key for item in listing.objects] == ["a"]
    assert listing.folders == ()


def test_the_root_of_it_all_can_be_a_checkpoint(world: World) -> None:
    world.put("model.safetensors", b"12")
    with opened(world) as store:
        listing = store.list_level()
        content = store.read_object(listing.objects[0])

    assert [item.key for item in listing.objects] == ["model.safetensors"]
    assert content == b"12"


def test_an_absent_folder_below_the_root_is_empty(world: World) -> None:
    world.put("m/a", b"1")
    with opened(world, "m") as store:
        listing = store.list_level("nothing")

    assert listing.objects == ()
    assert listing.folders == ()


def test_odd_keys_are_encoded_once(world: World) -> None:
    """Listed, asked for, read through the SDK and read by a described request, each key gives its own content."""
    for number, key in enumerate(ODD_KEYS):
        world.put(f"m x+y%41/{key}", b"content %02d" % number)
    with opened(world, "m x+y%41") as store:
        listed = {item.key: item for item in store.list_level().objects}
        assert set(listed) == set(ODD_KEYS)
        for number, key in enumerate(ODD_KEYS):
            assert store.stat(key) == listed[key]
            assert store.read_object(listed[key]) == b"content %02d" % number
            status, content, refusal = carry_out(store.describe_range(listed[key], 8, 10))
            assert (status, content) == (206, b"%02d" % number), (key, refusal)
            assert store.uri_of(key) == world.uri(f"m x+y%41/{key}")


def test_pieces_are_read(world: World) -> None:
    world.put("m/a", bytes(range(200)))
    with opened(world, "m") as store:
        stored = store.stat("a")
        assert stored.size_bytes == 200
        assert store.read_object(stored, start=5, stop=9) == bytes([5, 6, 7, 8])
        assert store.read_object(stored, start=190) == bytes(range(190, 200))
        assert store.read_object(stored, start=7, stop=7) == b""
        assert carry_out(store.describe_range(stored, 0, 200))[:2] == (206, bytes(range(200)))
        assert carry_out(store.describe_range(stored, 199, 200))[:2] == (206, bytes([199]))


def test_an_empty_object_is_read(world: World) -> None:
    world.put("m/empty", b"")
    with opened(world, "m") as store:
        stored = store.stat("empty")
        assert stored.size_bytes == 0
        assert store.read_object(stored) == b""


def test_an_absent_object_is_not_found(world: World) -> None:
    world.put("m/a", b"1")
    with opened(world, "m") as store:
        with pytest.raises(ObjectNotFound) as caught:
            store.stat("b")
        assert world.uri("m/b") in str(caught.value)
        assert caught.value.mend
        assert store.stat("a").size_bytes == 1  # The store is still of use.


def test_an_overwritten_object_is_not_read(world: World) -> None:
    world.put("m/a", b"first")
    with opened(world, "m") as store:
        old = store.stat("a")
        world.put("m/a", b"other")
        new = store.stat("a")

        assert new.size_bytes == old.size_bytes
        assert new.version != old.version
        with pytest.raises(ObjectChanged) as caught:
            store.read_object(old)
        assert world.uri("m/a") in str(caught.value)
        with pytest.raises(ObjectChanged):
            store.read_object(old, start=1, stop=3)

        status, _, refusal = carry_out(store.describe_range(old, 1, 3))
        # A generation that was written over is one that does not exist.
        assert status == (404 if isinstance(world, GcsBucket) else 412)
        if not isinstance(world, Folder):
            verdict = store.judge(old, refusal)
            assert type(verdict.error) is ObjectChanged
            assert not verdict.retry
        assert store.read_object(new) == b"other"
        assert carry_out(store.describe_range(new, 1, 3))[:2] == (206, b"th")


def test_a_removed_object_counts_as_changed(world: World) -> None:
    world.put("m/a", b"first")
    with opened(world, "m") as store:
        stored = store.stat("a")
        world.delete("m/a")
        with pytest.raises(ObjectChanged, match="gone"):
            store.read_object(stored)
        if not isinstance(world, Folder):
            _, _, refusal = carry_out(store.describe_range(stored, 0, 2))
            assert refusal.status == (412 if isinstance(world, AzureContainer) else 404)
            verdict = store.judge(stored, refusal)
            assert type(verdict.error) is ObjectChanged
            assert not verdict.retry


def test_a_shorter_object_is_not_read(world: World) -> None:
    world.put("m/a", b"first")
    with opened(world, "m") as store:
        old = store.stat("a")
        world.put("m/a", b"1")
        with pytest.raises(ObjectChanged):
            store.read_object(old, start=3)
        if not isinstance(world, Folder):
            verdict = store.judge(old, carry_out(store.describe_range(old, 3, 5))[2])
            assert type(verdict.error) is ObjectChanged


@pytest.mark.parametrize("key", ["../secret", "a/../../secret", "/etc/passwd", "a//b", "", "a\0b", "."])
def test_keys_that_lead_elsewhere_are_refused(world: World, key: str) -> None:
    world.put("secret", b"secret")
    world.put("m/a", b"1")
    stored = StoredObject(key, 6, "x")
    with opened(world, "m") as store:
        for ask in (
            lambda: store.stat(key),
            lambda: store.read_object(stored),
            lambda: store.describe_range(stored, 0, 1),
        ):
            with pytest.raises(InvalidUri):
                ask()


def test_a_single_file_is_selected(world: World) -> None:
    world.put("m/Model.SafeTensors", b"1234")
    with opened(world, "m/Model.SafeTensors") as store:
        assert store.selected_key == "Model.SafeTensors"
        assert str(store.uri) == world.uri("m")
        assert store.stat("Model.SafeTensors").size_bytes == 4
    with opened(world, "m") as store:
        assert store.selected_key is None


def test_a_folder_may_be_named_like_a_file(world: World) -> None:
    world.put("m.safetensors/a", b"1")
    with opened(world, "m.safetensors/") as store:
        assert store.selected_key is None
        assert [item.key for item in store.list_level().objects] == ["a"]


def test_a_file_given_as_a_folder_is_refused(world: World) -> None:
    world.put("m/weights", b"1234")
    with opened(world, "m/weights") as store, pytest.raises(ObjectNotFound) as caught:
        store.list_level()
    assert world.uri("m/weights") in caught.value.what
    assert world.uri("m") in caught.value.mend


def test_threads_share_a_store(world: World) -> None:
    for number in range(16):
        world.put(f"m/{number}", b"%d" % number)
    with opened(world, "m") as store:

        def ask(number: int) -> tuple[bytes, bytes, int]:
            stored = store.stat(str(number))
            described = carry_out(store.describe_range(stored, 0, stored.size_bytes))
            return store.read_object(stored), described[1], len(store.list_level().objects)

        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(ask, range(16)))
    assert answers == [(b"%d" % number, b"%d" % number, 16) for number in range(16)]


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_can_use_it(world: World) -> None:
    world.put("m/a", b"12")
    with opened(world, "m") as store:
        stored = store.stat("a")
        child = os.fork()
        if child == 0:
            good = store.read_object(stored) == b"12" and len(store.list_level().objects) == 1
            os._exit(0 if good else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert store.read_object(stored) == b"12"


def test_closing_twice_is_harmless(world: World) -> None:
    world.put("m/a", b"1")
    store = open_store(world.uri("m"), settings=world.settings)
    store.list_level()
    store.close()
    store.close()
    assert store.uri_of("a") == world.uri("m/a")


def test_an_absent_local_root_is_not_found(tmp_path: Path, s3_settings: Settings) -> None:
    store = open_store(tmp_path / "absent", settings=s3_settings)
    with pytest.raises(ObjectNotFound) as caught:
        store.list_level()
    assert str(tmp_path / "absent") in caught.value.what
    assert caught.value.mend


def test_an_absent_prefix_is_empty(bucket: str, s3_settings: Settings) -> None:
    with contextlib.closing(open_store(f"s3://{bucket}/absent", settings=s3_settings)) as store:
        assert store.list_level().objects == ()


def test_an_absent_bucket_is_not_found(s3_environment: dict[str, str], s3_settings: Settings) -> None:
    with contextlib.closing(open_store("s3://no-such-bucket-here/m", settings=s3_settings)) as store:
        with pytest.raises(ObjectNotFound, match="bucket"):
            store.list_level()
        with pytest.raises(ObjectNotFound):
            store.stat("a")


def test_markers_of_folders_are_dropped(s3_client: Any, bucket: str, s3_settings: Settings) -> None:
    for key in ("m/", "m/sub/", "m/sub/x", "m/marked", "m/marked/y", "m/empty.txt"):
        s3_client.put_object(Bucket=bucket, Key=key, Body=b"1" if key.endswith(("x", "y")) else b"")
    with contextlib.closing(open_store(f"s3://{bucket}/m", settings=s3_settings)) as store:
        listing = store.list_level()

    assert [item.key for item in listing.objects] == ["empty.txt"]
    assert listing.folders == ("marked", "sub")


def test_an_upload_in_parts_has_one_version(s3_client: Any, bucket: str, s3_settings: Settings) -> None:
    """Listing, HEAD and ranged answers agree on the ETag, so that If-Match holds."""
    place = {"Bucket": bucket, "Key": "m/a"}
    upload = s3_client.create_multipart_upload(**place)["UploadId"]
    parts = []
    for number, content in enumerate((b"a" * (5 << 20), b"b" * 100), 1):
        answer = s3_client.upload_part(**place, UploadId=upload, PartNumber=number, Body=content)
        parts.append({"PartNumber": number, "ETag": answer["ETag"]})
    s3_client.complete_multipart_upload(**place, UploadId=upload, MultipartUpload={"Parts": parts})

    with contextlib.closing(open_store(f"s3://{bucket}/m", settings=s3_settings)) as store:
        stored = store.stat("a")
        assert store.list_level().objects == (stored,)
        border = 5 << 20
        status, content, _ = carry_out(store.describe_range(stored, border - 2, border + 2))
        assert (status, content) == (206, b"aabb")
        assert store.read_object(stored, start=border - 1, stop=border + 1) == b"ab"


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("AWS_ACCESS_KEY_ID", "UNKNOWNKEY", "access key"),
        ("AWS_SECRET_ACCESS_KEY", "not-the-secret-of-this-key", "secret key"),
    ],
)
def test_wrong_keys_are_denied(
    s3_client: Any,
    bucket: str,
    s3_settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    value: str,
    says: str,
) -> None:
    s3_client.put_object(Bucket=bucket, Key="m/a", Body=b"1")
    monkeypatch.setenv(variable, value)
    with contextlib.closing(open_store(f"s3://{bucket}/m", settings=s3_settings)) as store:
        with pytest.raises(AccessDenied) as caught:
            store.list_level()
        assert says in caught.value.mend
        assert bucket in caught.value.what
        assert store.endpoint in caught.value.why
        assert value not in str(caught.value)
        with pytest.raises(AccessDenied):
            store.stat("a")
        stored = StoredObject("a", 1, '"x"')
        _, _, refusal = carry_out(store.describe_range(stored, 0, 1))
        verdict = store.judge(stored, refusal)
        assert type(verdict.error) is AccessDenied
        assert not verdict.retry
        assert says in verdict.error.mend


def test_without_keys_it_is_said_so(bucket: str, s3_settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with contextlib.closing(open_store(f"s3://{bucket}/m", settings=s3_settings)) as store:
        with pytest.raises(AccessDenied, match="no credentials"):
            store.list_level()
        with pytest.raises(AccessDenied, match="no credentials"):
            store.describe_range(StoredObject("a", 1, '"x"'), 0, 1)


def test_settings_for_other_stores_do_not_lead_away(
    s3_client: Any, bucket: str, seaweed: Any, s3_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variables of the server, over those of somebody who works with Amazon's S3 behind a proxy."""
    s3_client.put_object(Bucket=bucket, Key="m/a", Body=b"12")
    others = {
        "AWS_SESSION_TOKEN": "other",
        "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "true",
        "HTTP_PROXY": "http://127.0.0.1:9",
    }
    for name, value in (others | seaweed.environment()).items():
        monkeypatch.setenv(name, value)
    with contextlib.closing(open_store(f"s3://{bucket}/m", settings=s3_settings)) as store:
        stored = store.stat("a")
        assert carry_out(store.describe_range(stored, 0, 2))[:2] == (206, b"12")


def test_a_server_that_is_not_there_is_named(s3_settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("ENDPOINT_URL_S3", "http://127.0.0.1:9"), ("ACCESS_KEY_ID", "a"), ("SECRET_ACCESS_KEY", "b")):
        monkeypatch.setenv(f"AWS_{name}", value)
    store = open_store("s3://some-bucket/m", settings=s3_settings)
    with contextlib.closing(store), pytest.raises(StoreUnavailable) as caught:
        store.list_level()
    assert "http://127.0.0.1:9" in str(caught.value)
    assert "s3://some-bucket/m" in str(caught.value)
