"""Finds the snapshot that was asked for: what is there now, or what a bucket still keeps of what was there before. Moves no weight bytes.

An id says nothing of where its objects are: it is a hash. So the states that the store still knows are gone through, from the newest on, and for each of them it is worked
out which objects a checkpoint would have been made of, by the same rules as for what is there now. Only the index is read for that, each version of it once.
"""

from __future__ import annotations

import logging

from headrace.checkpoint.snapshot import check_snapshot_id
from headrace.checkpoint.survey import Indexes, Survey, survey
from headrace.errors import AccessDenied, CheckpointError, HeadraceError, ObjectChanged, ObjectNotFound
from headrace.settings import Settings
from headrace.storage import ObjectStore, Uri
from headrace.storage.opening import open_past
from headrace.storage.past import PastStore

_LOG = logging.getLogger("headrace")

_UNUSABLE = (CheckpointError, ObjectNotFound)
"""What a store that holds no whole checkpoint raises: an upload was in progress, or the model had been removed."""


def survey_at(wanted: str, store: ObjectStore, settings: Settings, uri: Uri) -> Survey:
    """Return the survey of ``store`` whose snapshot has the id ``wanted``; its ``store`` reads the objects of that snapshot.

    ``uri`` is what ``store`` was opened by. Where the survey's store is neither ``store`` nor a `PastStore` over it, it is the caller's to close.
    Raises `ObjectChanged`, which says what is there now, where the snapshot is not to be had, and `InvalidSetting` for what is no id.
    """
    check_snapshot_id(wanted)
    indexes: Indexes = {}
    present: str
    try:
        found = survey(store, settings, indexes)
        if found.snapshot.id == wanted:
            return found
        present = f"Snapshot {found.snapshot.id} is there now"
    except _UNUSABLE as error:
        present = f"What is there now is no checkpoint ({error.what.rstrip('.')})"
    num_states = 0
    try:
        for past in open_past(uri, store, settings):
            num_states += 1
            older = _survey_or_none(past, settings, indexes)
            if older is not None and older.snapshot.id == wanted:
                _LOG.info("%s: snapshot %s is read from the versions that the store keeps.", store.uri, wanted)
                return older
            if not isinstance(past, PastStore):
                past.close()
    except AccessDenied as error:
        raise _absent(wanted, store, present, f"older ones may not be looked at: {error.why}", _RIGHTS) from error
    kept = f"none of the {num_states:,} states that the store still knows is it" if num_states else _NO_PAST
    raise _absent(wanted, store, present, f"{kept}.", _MEND)


_NO_PAST = "old versions are found only in S3, Google Cloud Storage and Azure, where versioning is on, and on the hub"
_MEND = "Leave the snapshot out to take what is there, or upload that version of the model again. Buckets keep old versions where versioning is on."
_RIGHTS = "Allow s3:ListBucketVersions on the bucket and s3:GetObjectVersion on its objects (Azure: read and list for versions), or leave the snapshot out to take what is there."


def _survey_or_none(past: ObjectStore, settings: Settings, indexes: Indexes) -> Survey | None:
    try:
        return survey(past, settings, indexes)
    except _UNUSABLE:
        return None


def _absent(wanted: str, store: ObjectStore, present: str, kept: str, mend: str) -> HeadraceError:
    return ObjectChanged(f"{store.uri} is not at snapshot {wanted}.", f"{present}, and {kept}", mend)
