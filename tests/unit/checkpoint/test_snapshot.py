from __future__ import annotations

from headrace.checkpoint.snapshot import Snapshot
from headrace.storage import StoredObject

WEIGHTS = (StoredObject("a.safetensors", 10, '"1"'), StoredObject("b.safetensors", 20, '"2"'))
SIDE = (StoredObject("config.json", 5, '"3"'),)


def test_id_is_the_same_on_every_machine_and_in_every_order() -> None:
    ids = {
        Snapshot("s3://b/m", WEIGHTS, SIDE).id,
        Snapshot("s3://b/m", WEIGHTS[::-1], SIDE).id,
        Snapshot("s3://other/name", WEIGHTS, SIDE).id,
    }
    assert ids == {"572b830eb52a"}


def test_id_differs_with_every_key_size_and_version() -> None:
    others = [
        (StoredObject("c.safetensors", 10, '"1"'), WEIGHTS[1]),
        (StoredObject("a.safetensors", 11, '"1"'), WEIGHTS[1]),
        (StoredObject("a.safetensors", 10, '"0"'), WEIGHTS[1]),
        WEIGHTS[:1],
        # Parts of one text must not pass for parts of its neighbour.
        (StoredObject("a.safetensors1", 0, '"1"'), WEIGHTS[1]),
        (StoredObject("a.safetensors", 1, '0"1"'), WEIGHTS[1]),
    ]
    ids = {Snapshot("s3://b/m", weights, SIDE).id for weights in (WEIGHTS, *others)}
    ids.add(Snapshot("s3://b/m", WEIGHTS, ()).id)
    assert len(ids) == len(others) + 2


def test_names_that_are_not_utf8_have_an_id_too() -> None:
    assert len(Snapshot("/m", (StoredObject("a\udcff.safetensors", 1, "1"),), ()).id) == 12
