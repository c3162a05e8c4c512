from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from headrace.errors import AccessDenied, Cancelled, HeadraceError, ObjectChanged, ReadFailed
from headrace.transport import FileReader, RangeRead
from headrace.transport.file import MOST_OPEN_FILES, STEP_BYTES

from .fakes import FolderStore

PAYLOAD = bytes(range(256)) * 64


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    (tmp_path / "f").write_bytes(PAYLOAD)
    return FolderStore(tmp_path)


def _open_files() -> set[str]:
    return {
        os.readlink(f"/proc/self/fd/{number}")
        for number in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{number}")
    }


def _read(
    reader: FileReader, store: FolderStore, start: int, stop: int, sizes: tuple[int, ...] = (), key: str = "f"
) -> bytes:
    memory = bytearray(stop - start)
    pieces, place = [], 0
    for size in (*sizes, stop - start - sum(sizes)):
        pieces.append(memoryview(memory)[place : place + size])
        place += size
    reader.read(RangeRead(store.stat(key), start, stop), pieces)
    return bytes(memory)


def test_reads_into_pieces_and_keeps_the_file_open(store: FolderStore) -> None:
    reader = FileReader(store)
    assert _read(reader, store, 0, len(PAYLOAD)) == PAYLOAD
    assert _read(reader, store, 5, 5000, sizes=(1, 0, 700, 3)) == PAYLOAD[5:5000]
    assert _read(reader, store, len(PAYLOAD) - 1, len(PAYLOAD)) == PAYLOAD[-1:]
    assert reader.counters.num_requests == 3
    assert str(store.folder / "f") in _open_files()
    reader.close()
    reader.close()
    assert str(store.folder / "f") not in _open_files()


def test_reads_that_return_few_bytes_are_continued_across_pieces(store: FolderStore) -> None:
    def short(descriptor: int, rooms: list[memoryview], offset: int) -> int:
        return os.preadv(descriptor, [rooms[0][:1000]], offset)

    reader = FileReader(store, preadv=short)
    assert _read(reader, store, 3, 10_000, sizes=(10, 2500)) == PAYLOAD[3:10_000]
    assert reader.counters.num_requests == 1 + 3 + 8
    assert reader.counters.bytes_received == 9997
    reader.close()


def test_more_pieces_than_one_call_takes(store: FolderStore) -> None:
    reader = FileReader(store)
    assert _read(reader, store, 0, 5000, sizes=(1,) * 4000) == PAYLOAD[:5000]
    assert reader.counters.num_requests == 4
    reader.close()


def test_calls_are_short_enough_to_be_stopped_between(store: FolderStore) -> None:
    (store.folder / "large").write_bytes(bytes(2 * STEP_BYTES + 1))
    sizes: list[int] = []

    def noted(descriptor: int, rooms: list[memoryview], offset: int) -> int:
        sizes.append(sum(len(room) for room in rooms))
        if len(sizes) == 2:
            reader.cancel()
        return os.preadv(descriptor, rooms, offset)

    reader = FileReader(store, preadv=noted)
    with pytest.raises(Cancelled):
        _read(reader, store, 0, 2 * STEP_BYTES + 1, key="large")
    assert sizes == [STEP_BYTES, STEP_BYTES]
    with pytest.raises(Cancelled):
        _read(reader, store, 0, 1)
    assert reader.doing == "no read"
    assert str(store.folder / "large") not in _open_files()
    reader.close()


def test_offsets_beyond_four_gigabytes(store: FolderStore) -> None:
    place = (1 << 32) + 12345
    with open(store.folder / "sparse", "wb") as file:
        file.seek(place)
        file.write(b"weights")
    reader = FileReader(store)
    assert _read(reader, store, place - 1, place + 7, key="sparse") == b"\0weights"
    reader.close()


def test_a_file_that_was_written_to_since_it_was_pinned_is_refused(store: FolderStore) -> None:
    reader, pinned = FileReader(store), store.stat("f")
    with open(store.folder / "f", "r+b") as file:
        file.write(b"other")
    os.utime(store.folder / "f", ns=(1, 1))
    memory = bytearray(10)
    with pytest.raises(ObjectChanged, match="was replaced while it was being read"):
        reader.read(RangeRead(pinned, 0, 10), [memoryview(memory)])
    assert memory == bytes(10)
    assert str(store.folder / "f") not in _open_files()


def test_a_file_that_is_written_to_during_a_read_is_refused(store: FolderStore) -> None:
    def meddled(descriptor: int, rooms: list[memoryview], offset: int) -> int:
        os.utime(store.folder / "f", ns=(2, 2))
        return os.preadv(descriptor, rooms, offset)

    reader = FileReader(store, preadv=meddled)
    with pytest.raises(ObjectChanged):
        _read(reader, store, 0, 10)
    reader.close()


def test_a_file_that_is_cut_during_a_read_is_refused_and_does_not_hang(store: FolderStore) -> None:
    def cut(descriptor: int, rooms: list[memoryview], offset: int) -> int:
        os.truncate(store.folder / "f", 1000)
        return os.preadv(descriptor, rooms, offset)

    reader = FileReader(store, preadv=cut)
    with pytest.raises(ObjectChanged):
        _read(reader, store, 500, 2000)
    reader.close()


def test_an_end_before_the_size_that_the_system_states(store: FolderStore) -> None:
    reader = FileReader(store, preadv=lambda descriptor, rooms, offset: 0)
    with pytest.raises(ReadFailed, match="ends at byte 7; bytes 7 to 20 were wanted"):
        _read(reader, store, 7, 20)
    reader.close()


def test_a_file_replaced_by_renaming_stays_readable_where_it_is_open_and_changed_where_it_is_not(
    store: FolderStore,
) -> None:
    pinned, first, second = store.stat("f"), FileReader(store), FileReader(store)
    memory = bytearray(4)
    first.read(RangeRead(pinned, 0, 4), [memoryview(memory)])
    (store.folder / "new").write_bytes(bytes(len(PAYLOAD)))
    os.replace(store.folder / "new", store.folder / "f")
    first.read(RangeRead(pinned, 4, 8), [memoryview(memory)])
    assert memory == PAYLOAD[4:8]  # The pinned version still exists for whoever holds it open.
    with pytest.raises(ObjectChanged):
        second.read(RangeRead(pinned, 4, 8), [memoryview(memory)])
    first.close()
    second.close()


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (FileNotFoundError(2, "gone"), ObjectChanged),
        (PermissionError(13, "no"), AccessDenied),
        (OSError(5, "I/O error"), ReadFailed),
    ],
)
def test_errors_of_the_system(store: FolderStore, raised: OSError, kind: type[HeadraceError]) -> None:
    def failing(descriptor: int, rooms: list[memoryview], offset: int) -> int:
        raise raised

    reader = FileReader(store, preadv=failing)
    with pytest.raises(HeadraceError) as caught:
        _read(reader, store, 0, 10)
    assert type(caught.value) is kind
    assert caught.value.__cause__ is raised
    assert str(store.folder / "f") in str(caught.value)
    assert str(store.folder / "f") not in _open_files()


def test_a_file_that_is_gone(store: FolderStore) -> None:
    pinned = store.stat("f")
    (store.folder / "f").unlink()
    with pytest.raises(ObjectChanged, match="is gone"):
        FileReader(store).read(RangeRead(pinned, 0, 1), [memoryview(bytearray(1))])


def test_few_files_are_kept_open(store: FolderStore) -> None:
    reader = FileReader(store)
    for number in range(3 * MOST_OPEN_FILES):
        (store.folder / f"f{number}").write_bytes(b"x")
        assert _read(reader, store, 0, 1, key=f"f{number}") == b"x"
    assert sum(name.startswith(str(store.folder)) for name in _open_files()) == MOST_OPEN_FILES
    reader.close()


def test_doing_says_what_is_read(store: FolderStore) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def slow(descriptor: int, rooms: list[memoryview], offset: int) -> int:
        inside.set()
        assert go_on.wait(10)
        return os.preadv(descriptor, rooms, offset)

    reader = FileReader(store, preadv=slow)
    thread = threading.Thread(target=_read, args=(reader, store, 3, 10))
    thread.start()
    assert inside.wait(10)
    assert f"{store.folder / 'f'} bytes 3 to 10 from this machine, attempt 1" in reader.doing
    go_on.set()
    thread.join(10)
    assert reader.doing == "no read"
    reader.close()
