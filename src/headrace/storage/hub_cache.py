"""Snapshots in the hub's own cache on this machine (``HF_HOME``): where they are, and whether a model is whole in one. Reads no weights, writes nothing.

Layout: ``models--org--name/refs/<revision>`` holds a commit, ``models--org--name/snapshots/<commit>/`` links to the files of it that were fetched
(huggingface_hub, "Understand caching"). A file gets its name there when it is complete, so what is missing tells an interrupted download.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.file_download import repo_folder_name

from headrace.storage.hub_access import HubRepository
from headrace.storage.model_files import (
    CODE_SOURCES,
    INDEX,
    SIDE_FILES,
    code_of_config,
    files_of_index,
    is_index,
    is_weights,
)

_COMMIT = re.compile(r"[0-9a-f]{40}")
_LARGEST_INDEX_BYTES = 200_000_000


def cache_folder() -> Path:
    """Return the hub's cache."""
    return Path(constants.HF_HUB_CACHE)


def find_snapshot(repository: HubRepository, commit: str | None = None) -> Path | None:
    """Return the folder of a commit; without one that of the commit that the revision was when it was last fetched. None where there is none."""
    folder = cache_folder() / repo_folder_name(repo_id=repository.name, repo_type="model")
    if commit is None:
        commit = repository.revision if repository.is_commit else _read_reference(folder / "refs" / repository.revision)
    if commit is None:
        return None
    snapshot = folder / "snapshots" / commit
    return snapshot if snapshot.is_dir() else None


def missing_weights(root: Path, selected_key: str | None) -> list[str]:
    """Return the keys of weight files that the index below ``root`` names, or that the user named, and that are not there.

    Without an index nothing is known to be missing; whether there are any weights is `has_weights`'s to say.
    """
    present = _files(root)
    index = _choose_index(present, selected_key)
    if index is not None:
        return [key for key in _named_by(root, index) if not (root / key).is_file()]
    return [selected_key] if selected_key is not None and selected_key not in present else []


def has_weights(root: Path) -> bool:
    """Say whether there is any weight file directly in ``root``."""
    return any(is_weights(key) for key in _files(root))


def is_complete(root: Path, published: Mapping[str, int], selected_key: str | None) -> bool:
    """Say whether ``root`` has all that a load needs: weights, configuration, tokenizer and code.

    ``published`` are the keys of the repository's files below the same folder, with their sizes; each that is needed must be there in full size.
    """
    needed = {key for key in SIDE_FILES if key in published}
    index = _choose_index(set(published), selected_key)
    if index is not None:
        named = _named_by(root, index)
        needed |= {index, *named}
        if not named:
            return False
    elif selected_key is not None:
        needed.add(selected_key)
    else:
        needed |= {key for key in published if is_weights(key) and "/" not in key}
    for source in CODE_SOURCES:
        if source in published and (root / source).is_file():
            needed |= {key for key in code_of_config((root / source).read_bytes()) if key in published}
    return any(map(is_weights, needed)) and all(_size_of(root / key) == published.get(key, -1) for key in needed)


def _choose_index(keys: set[str], selected_key: str | None) -> str | None:
    if selected_key is not None:
        return selected_key if is_index(selected_key) else None
    indexes = sorted((key for key in keys if is_index(key) and "/" not in key), key=lambda key: (key != INDEX, key))
    return indexes[0] if indexes else None


def _named_by(root: Path, index: str) -> tuple[str, ...]:
    path = root / index
    size = _size_of(path)
    return files_of_index(path.read_bytes()) if size is not None and size <= _LARGEST_INDEX_BYTES else ()


def _files(root: Path) -> set[str]:
    return {path.name for path in root.iterdir() if path.is_file()} if root.is_dir() else set()


def _size_of(path: Path) -> int | None:
    try:
        return path.stat().st_size if path.is_file() else None
    except OSError:
        return None


def _read_reference(path: Path) -> str | None:
    try:
        text = path.read_text().strip()
    except (OSError, ValueError):
        return None
    return text if _COMMIT.fullmatch(text) else None
