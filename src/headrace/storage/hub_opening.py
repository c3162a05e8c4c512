"""Opens a repository of the hub: from the hub's own cache on this machine where the model is whole in it, else by ranges from the hub."""

from __future__ import annotations

import logging
from pathlib import Path

from headrace.errors import ObjectNotFound, StoreUnavailable
from headrace.settings import Settings
from headrace.storage import hub_cache
from headrace.storage.hub import HubStore
from headrace.storage.hub_access import HubAccess, HubRepository, find_endpoint, is_offline
from headrace.storage.local import LocalStore
from headrace.storage.store import ObjectStore
from headrace.storage.uri import Uri

_LOG = logging.getLogger("headrace")


def open_hub(uri: Uri, *, settings: Settings, selected_key: str | None = None, use_cache: bool = True) -> ObjectStore:
    """Return the store for an ``hf`` uri, at the commit that its revision is now.

    The hub is asked once, which commit that is and which files it has; without ``use_cache`` its files are read from there even where they are on this machine. With ``HF_HUB_OFFLINE``, or where the hub does not answer, only what is whole in
    the cache is used. Raises `ObjectNotFound`, `AccessDenied`, `StoreUnavailable` and `InvalidUri`.
    """
    repository = HubRepository.of(uri)
    if is_offline():
        return _open_cached(uri, repository, selected_key)
    access = HubAccess(uri=uri, repository=repository, endpoint=find_endpoint(), transport=settings.transport)
    try:
        tree = access.fetch_tree()
    except StoreUnavailable as error:
        root = _find_usable(uri, repository, selected_key)
        if root is None:
            raise
        _LOG.warning(
            "%s %s The snapshot in the local cache is used, which may be an older one: %s", error.what, error.why, root
        )
        return _local(root, selected_key)
    except ObjectNotFound as error:
        if ":" in uri.text:
            raise
        raise ObjectNotFound(
            f"{uri.text} is neither a local path nor a repository of the hub that this user can see.",
            error.why,
            f"Check the path. {error.mend}",
        ) from error
    prefix = f"{uri.key}/" if uri.key else ""
    published = {file.key.removeprefix(prefix): file.size_bytes for file in tree.files if file.key.startswith(prefix)}
    snapshot = hub_cache.find_snapshot(repository, tree.commit) if use_cache else None
    if snapshot is not None and hub_cache.is_complete(snapshot / uri.key, published, selected_key):
        _LOG.info("%s is whole in the local cache: %s", uri, snapshot)
        return _local(snapshot / uri.key, selected_key)
    return HubStore(
        uri,
        access,
        tree,
        transport=settings.transport,
        selected_key=selected_key,
        ca_file=settings.ca_file,
        verify_tls=settings.verify_tls,
    )


def _open_cached(uri: Uri, repository: HubRepository, selected_key: str | None) -> LocalStore:
    """Return the store for what is in the cache, which is all that may be used."""
    offline = "The hub may not be asked, since HF_HUB_OFFLINE is set"
    mend = f"Unset HF_HUB_OFFLINE, or fetch the model where the hub can be reached: hf download {repository.name}"
    snapshot = hub_cache.find_snapshot(repository)
    if snapshot is None:
        where = hub_cache.cache_folder()
        raise ObjectNotFound(
            f"{uri} is not on this machine.", f"{offline}, and {where} has no such revision.", f"{mend}."
        )
    missing = hub_cache.missing_weights(snapshot / uri.key, selected_key)
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ObjectNotFound(
            f"{uri} is only in part on this machine, without {missing[0]}{more}.",
            f"{offline}, and the download to {snapshot} was interrupted or left them out.",
            f"{mend}.",
        )
    return _local(snapshot / uri.key, selected_key)


def _find_usable(uri: Uri, repository: HubRepository, selected_key: str | None) -> Path | None:
    snapshot = hub_cache.find_snapshot(repository)
    if snapshot is None:
        return None
    root = snapshot / uri.key
    return root if hub_cache.has_weights(root) and not hub_cache.missing_weights(root, selected_key) else None


def _local(root: Path, selected_key: str | None) -> LocalStore:
    return LocalStore(Uri("file", "", str(root.absolute()), str(root)), selected_key=selected_key)
