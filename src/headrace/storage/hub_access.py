"""What huggingface_hub is asked: where the hub is, who asks, and which files a revision holds. One request for each store that is opened.

Everything that huggingface_hub reads is honoured, because it reads it: ``HF_ENDPOINT``, ``HF_TOKEN``, ``HF_HOME``, stored logins, ``HF_HUB_OFFLINE``, proxies.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import unquote

from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled
from huggingface_hub.utils import get_token_to_send

from headrace.errors import AccessDenied, HeadraceError, InvalidUri, StorageError, StoreUnavailable
from headrace.settings import TransportSettings
from headrace.storage.hub_refusal import judge_hub
from headrace.storage.refusal import Place, clean
from headrace.storage.store import Refusal, StoredObject, Verdict
from headrace.storage.uri import Uri
from headrace.storage.web import USER_AGENT

DEFAULT_REVISION = "main"

_Answer = TypeVar("_Answer")

_MOST_ATTEMPTS = 4
_MOST_WAIT_S = 30.0
_MOST_FILES = 50_000
"""More than this the hub lists page by page only."""
_OTHER_KINDS = ("datasets", "spaces", "buckets", "kernels")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_HUB_EXCEPTIONS = (HTTPError, OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError)
"""What a call raises: refusals and broken connections; for an answer that is not the hub's, whatever reading it comes to."""


@dataclass(frozen=True, slots=True)
class HubRepository:
    """A model repository and a revision of it as the user named it: branch, tag, pull request (``refs/pr/1``) or commit."""

    name: str
    revision: str = DEFAULT_REVISION

    @classmethod
    def of(cls, uri: Uri) -> HubRepository:
        """Return what an ``hf`` uri names. Raises `InvalidUri` for what is no model repository."""
        name, at, revision = uri.bucket.partition("@")
        if name.partition("/")[0] in _OTHER_KINDS:
            raise InvalidUri(
                f"{uri} is not a model repository.",
                "Only models are read from the hub, not datasets, spaces, buckets or kernels.",
                "Write hf://org/name or hf://org/name@revision.",
            )
        revision = unquote(revision) if at else DEFAULT_REVISION
        if any(part in ("", ".", "..") for part in revision.split("/")):
            raise InvalidUri(
                f"{uri} names no revision.", "A revision has no empty, '.' or '..' parts.", "Write hf://org/name@main."
            )
        return cls(name, revision)

    @property
    def is_commit(self) -> bool:
        """Whether the revision is a commit, which never changes."""
        return _COMMIT.fullmatch(self.revision) is not None


@dataclass(frozen=True, slots=True)
class HubTree:
    """All files of one commit. A version is the SHA-256 of a large file's content, or the id of a small one's git blob."""

    commit: str
    files: tuple[StoredObject, ...]


def is_offline() -> bool:
    """Say whether the hub may not be asked (``HF_HUB_OFFLINE``)."""
    return bool(constants.HF_HUB_OFFLINE)


def find_endpoint() -> str:
    """Return the hub's address (``HF_ENDPOINT``) without a slash at its end."""
    return str(constants.ENDPOINT).rstrip("/")


@dataclass(frozen=True, slots=True, kw_only=True)
class HubAccess:
    """How one repository is asked for."""

    uri: Uri
    """The user's, for messages."""
    repository: HubRepository
    endpoint: str
    transport: TransportSettings
    sleep: Callable[[float], object] = field(default=time.sleep, repr=False)
    clock: Callable[[], float] = field(default=time.time, repr=False)

    @property
    def page(self) -> str:
        """The repository's page, for people."""
        return f"{self.endpoint}/{self.repository.name}"

    def authorization(self) -> str | None:
        """Return the header's value as of now; None for anonymous requests. Never in a repr or a message."""
        try:
            token = get_token_to_send(None)
        except (OSError, ValueError, RuntimeError) as error:
            raise AccessDenied(
                f"{self.uri} cannot be read.",
                f"The login for the hub cannot be used: {clean(str(error)).rstrip('.')}.",
                "Log in again with: hf auth login (or set HF_TOKEN).",
            ) from error
        return None if token is None else f"Bearer {token}"

    def fetch_tree(self) -> HubTree:
        """Return the commit that the revision is now, and its files. Raises `ObjectNotFound`, `AccessDenied` or `StoreUnavailable`."""
        return self._persist(self._ask_tree)

    def _persist(self, ask: Callable[[], _Answer]) -> _Answer:
        """Ask until there is an answer, or no hope of one."""
        most = min(self.transport.max_attempts, _MOST_ATTEMPTS)
        for number in range(1, most + 1):
            try:
                return ask()
            except _HUB_EXCEPTIONS as error:
                verdict = self._explain(error)
                if not verdict.retry or number == most:
                    raise verdict.error from error
            backoff_s = random.random() * self.transport.backoff_first_s * 2.0 ** (number - 1)
            self.sleep(min(_MOST_WAIT_S, backoff_s if verdict.wait_s is None else verdict.wait_s))
        raise AssertionError("unreachable")

    def fetch_commits(self) -> tuple[str, ...]:
        """Return the commits that led to the revision, the newest first, itself included. Raises what `fetch_tree` raises."""
        return self._persist(self._ask_commits)

    def judge(self, refusal: Refusal, place: Place) -> Verdict:
        """Say what a refusal of the hub, or of a store that it redirects to, means."""
        return judge_hub(refusal, place, self.page, now=self.clock())

    def _ask_tree(self) -> HubTree:
        api = HfApi(endpoint=self.endpoint, library_name=USER_AGENT)
        name, revision = self.repository.name, self.repository.revision
        found = api.model_info(name, revision=revision, files_metadata=True, timeout=self.transport.idle_timeout_s)
        commit, siblings = found.sha, found.siblings or []
        if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
            raise ValueError("the answer names no commit")
        if len(siblings) < _MOST_FILES and all(file.size is not None for file in siblings):
            files = tuple(_stored(file.rfilename, file) for file in siblings)
        else:
            listed = api.list_repo_tree(name, recursive=True, revision=commit)
            files = tuple(_stored(file.path, file) for file in listed if hasattr(file, "blob_id"))
        return HubTree(commit, files)

    def _ask_commits(self) -> tuple[str, ...]:
        api = HfApi(endpoint=self.endpoint, library_name=USER_AGENT)
        found = api.list_repo_commits(self.repository.name, revision=self.repository.revision)
        return tuple(str(commit.commit_id) for commit in found)

    def _explain(self, error: Exception) -> Verdict:
        """Return our error for ``error``, and whether trying again can help."""
        place = Place(str(self.uri), self.endpoint)
        what = f"{self.uri} cannot be read."
        if isinstance(error, HfHubHTTPError):
            headers = {name.lower(): value for name, value in error.response.headers.items()}
            return self.judge(Refusal(error.response.status_code, error.response.reason_phrase, headers), place)
        if isinstance(error, OfflineModeIsEnabled):
            return Verdict(StoreUnavailable(what, "HF_HUB_OFFLINE is set.", "Unset it, or use a local folder."))
        if isinstance(error, (HTTPError, OSError)):
            why = f"{self.endpoint} cannot be reached: {_said(error)}."
            mend = "Check the network and HF_ENDPOINT; for a private certificate authority set SSL_CERT_FILE."
            return Verdict(StoreUnavailable(what, why, mend), retry=True)
        answer: HeadraceError = StorageError(
            what, f"{self.endpoint} does not answer as the hub does ({type(error).__name__}).", "Check HF_ENDPOINT."
        )
        return Verdict(answer)


def _stored(path: str, file: Any) -> StoredObject:
    """Return one file of a listing: its key in the repository, its size, and the hash of its content."""
    version = file.blob_id if file.lfs is None else file.lfs.sha256
    if not isinstance(file.size, int) or not isinstance(version, str):
        raise TypeError("a file without size or hash")
    return StoredObject(path, file.size, version)


def _said(error: Exception) -> str:
    return clean(str(error)).rstrip(".") or type(error).__name__
