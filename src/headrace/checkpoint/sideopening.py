"""Opens what is not weights at a uri, for whoever needs no weights: a tokenizer of another model, a model with random parameters."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager

from headrace.checkpoint.sidefiles import SideFiles
from headrace.checkpoint.sidelisting import SideLimits, list_side_files
from headrace.errors import ObjectNotFound
from headrace.settings import Settings
from headrace.storage import Uri, open_store

_LOG = logging.getLogger("headrace")


@contextmanager
def open_side_files(uri: str | os.PathLike[str] | Uri, *, settings: Settings) -> Iterator[SideFiles]:
    """Yield the side files at ``uri``, whether weights lie beside them or not; the same mirror as a checkpoint's is used.

    Raises `ObjectNotFound` where there is none, and what the store raises.
    """
    with closing(open_store(uri, settings=settings)) as store:
        # The folder of a local store is used as it is, and need not be known in depth.
        limits = SideLimits(depth=0) if store.uri.scheme == "file" else None
        listing = list_side_files(store, store.list_level(), limits)
        for note in listing.notes:
            _LOG.warning("%s: %s", store.uri, note)
        if not listing.objects:
            raise ObjectNotFound(
                f"There are no side files at {store.uri}.",
                "Neither configuration nor tokenizer lies there.",
                "Check the uri; it must name the folder that holds config.json.",
            )
        with closing(SideFiles(store, listing.objects, cache_dir=settings.cache_dir)) as files:
            yield files
