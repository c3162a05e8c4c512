"""`gs://` from a uri to tensors, against an emulator of Google Cloud Storage; and what only that store has: generations, transcoding, folder markers."""

from __future__ import annotations

import contextlib
import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import HeadraceError, ObjectChanged, ObjectNotFound, StorageError, StoreUnavailable
from headrace.settings import Settings
from headrace.storage import HttpRange, ObjectStore, open_store
from headrace.transport.http import HttpReader
from headrace.transport.reader import RangeRead


@contextlib.contextmanager
def opened(uri: str, settings: Settings) -> Iterator[ObjectStore]:
    with contextlib.closing(open_store(uri, settings=settings)) as store:
        yield store


def read_through_transport(store: ObjectStore, stored: Any, start: int, stop: int, settings: Settings) -> bytes:
    """Read a range as weights are read, with all of the transport's checks."""
    memory = bytearray(stop - start)
    reader = HttpReader(store, settings.transport)
    try:
        reader.read(RangeRead(stored, start, stop), [memoryview(memory)])
    finally:
        reader.close()
    return bytes(memory)


def test_a_checkpoint_is_loaded_bit_for_bit(gcs_bucket: Any, s3_settings: Settings, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    reference = pytest.importorskip("safetensors.torch")
    import headrace

    torch.manual_seed(0)
    tensors = {
        "layers.0.weight": torch.randn(257, 129).to(torch.bfloat16),
        "layers.1.weight": torch.randn(64, 1024),
        "norm": torch.randn(3, dtype=torch.float16),
        "steps": torch.arange(100),
        "empty": torch.empty(0, 4),
    }
    for number, names in enumerate((("layers.0.weight", "norm"), ("layers.1.weight", "steps", "empty"))):
        path = tmp_path / f"model {number}.safetensors"
        reference.save_file({name: tensors[name] for name in names}, path)
        gcs_bucket.blob(f"models/my model/{path.name}").upload_from_filename(str(path))
    gcs_bucket.blob("models/my model/config.json").upload_from_string(b'{"model_type": "llama"}')

    loaded = headrace.load_state_dict(f"gs://{gcs_bucket.name}/models/my model", settings=s3_settings)
    with headrace.open(f"gs://{gcs_bucket.name}/models/my model", settings=s3_settings) as checkpoint:
        config = (checkpoint.side_files.folder() / "config.json").read_bytes()

    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        assert loaded[name].view(torch.uint8).equal(tensor.view(torch.uint8)), name
    assert config == b'{"model_type": "llama"}'


def test_weights_that_are_stored_gzip_encoded_are_refused(
    gcs_bucket: Any, s3_settings: Settings, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    reference = pytest.importorskip("safetensors.torch")
    import headrace

    content = reference.save({"a": torch.zeros(1000)})
    blob = gcs_bucket.blob("m/model.safetensors")
    blob.content_encoding = "gzip"
    blob.upload_from_string(gzip.compress(content))
    uri = f"gs://{gcs_bucket.name}/m"
    with pytest.raises(HeadraceError, match="'gzip'") as caught:
        headrace.load_state_dict(uri, settings=s3_settings)
    assert f"{uri}/model.safetensors" in caught.value.what

    with opened(uri, s3_settings) as store:
        stored = store.stat("model.safetensors")
        with pytest.raises(HeadraceError, match="'gzip'"):
            read_through_transport(store, stored, 0, 10, s3_settings)
        assert store.read_object(stored) == content  # As a side file it would be decoded.


def test_a_generation_that_the_bucket_keeps_is_read_to_the_end(gcs_bucket: Any, s3_settings: Settings) -> None:
    """With object versioning, an upload during a load does no harm."""
    gcs_bucket.versioning_enabled = True
    gcs_bucket.patch()
    gcs_bucket.blob("m/a").upload_from_string(b"first")
    with opened(f"gs://{gcs_bucket.name}/m", s3_settings) as store:
        old = store.stat("a")
        gcs_bucket.blob("m/a").upload_from_string(b"other")
        assert store.stat("a").version != old.version
        assert store.read_object(old) == b"first"
        assert read_through_transport(store, old, 1, 4, s3_settings) == b"irs"


def test_a_change_during_a_read_names_object_and_both_generations(gcs_bucket: Any, s3_settings: Settings) -> None:
    gcs_bucket.blob("m/a").upload_from_string(b"first")
    with opened(f"gs://{gcs_bucket.name}/m", s3_settings) as store:
        old = store.stat("a")
        gcs_bucket.blob("m/a").upload_from_string(b"other")
        new = store.stat("a")
        with pytest.raises(ObjectChanged) as caught:
            read_through_transport(store, old, 1, 4, s3_settings)
    assert f"gs://{gcs_bucket.name}/m/a" in caught.value.what
    assert old.version in caught.value.why
    assert new.version in caught.value.why


def test_a_server_that_looks_at_no_condition_is_seen_through(
    gcs_bucket: Any, s3_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The emulator ignores ifGenerationMatch; without the generation itself, its answers are another version's."""
    gcs_bucket.blob("m/a").upload_from_string(b"first")
    with opened(f"gs://{gcs_bucket.name}/m", s3_settings) as store:
        old = store.stat("a")
        gcs_bucket.blob("m/a").upload_from_string(b"other")
        describe = store.describe_range

        def describe_without_generation(*arguments: Any) -> HttpRange:
            from dataclasses import replace

            described = describe(*arguments)
            assert isinstance(described, HttpRange)
            return replace(described, target=described.target.replace(f"&generation={old.version}", ""))

        monkeypatch.setattr(store, "describe_range", describe_without_generation)
        with pytest.raises(ObjectChanged, match=f"x-goog-generation.* was {old.version}"):
            read_through_transport(store, old, 1, 4, s3_settings)


def test_markers_of_folders_are_dropped(gcs_bucket: Any, s3_settings: Settings) -> None:
    for key in ("m/", "m/sub/", "m/sub/x", "m/marked", "m/marked/y", "m/empty.txt"):
        gcs_bucket.blob(key).upload_from_string(b"1" if key.endswith(("x", "y")) else b"")
    with opened(f"gs://{gcs_bucket.name}/m", s3_settings) as store:
        listing = store.list_level()
    assert [item.key for item in listing.objects] == ["empty.txt"]
    assert listing.folders == ("marked", "sub")


def test_an_absent_prefix_is_empty_and_an_absent_bucket_is_not_found(gcs_bucket: Any, s3_settings: Settings) -> None:
    with opened(f"gs://{gcs_bucket.name}/absent", s3_settings) as store:
        assert store.list_level().objects == ()
    with opened("gs://no-such-bucket-here/m", s3_settings) as store:
        with pytest.raises(ObjectNotFound, match="bucket"):
            store.list_level()
        with pytest.raises(ObjectNotFound):
            store.stat("a")


def test_a_server_that_is_not_there_is_named(s3_settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:9")
    with opened("gs://some-bucket/m", s3_settings) as store, pytest.raises(StoreUnavailable) as caught:
        store.list_level()
    assert "http://127.0.0.1:9" in caught.value.why
    assert "refused" in caught.value.why
    assert "gs://some-bucket/m" in caught.value.what
    assert isinstance(caught.value, StorageError)
