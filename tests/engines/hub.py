"""Watches for calls of the hub: whatever would ask it is noted, and fails."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub import HfApi, constants

ENTRY_POINTS = (
    "hf_hub_download",
    "list_repo_files",
    "list_repo_tree",
    "model_info",
    "repo_exists",
    "repo_info",
    "snapshot_download",
)


@contextmanager
def no_hub_calls() -> Iterator[list[str]]:
    """Let no code reach a hub or validate a repository's name within the block, although nothing says that the machine is offline; the block fails if any tried.

    Transformers swallows many errors of the hub, so that calls are noted where they are made. What was noted is yielded.
    """
    calls: list[str] = []

    def refuse(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(f"{name} {args[-1:]} {sorted(kwargs)}")
            raise AssertionError(f"the hub was called: {calls[-1]}")

        return call

    resolve = socket.getaddrinfo

    def local_only(host: Any, *args: Any, **kwargs: Any) -> Any:
        if host not in ("127.0.0.1", "::1", "localhost", None):
            refuse("getaddrinfo")(host)
        return resolve(host, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
            patch.delenv(variable, raising=False)
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        for name in ENTRY_POINTS:
            patch.setattr(HfApi, name, refuse(f"HfApi.{name}"))
        for name in ("send", "stream"):
            patch.setattr(httpx.Client, name, refuse(f"httpx.Client.{name}"))
        patch.setattr("huggingface_hub.utils._validators.validate_repo_id", refuse("validate_repo_id"))
        patch.setattr(huggingface_hub.file_download, "_hf_hub_download_to_cache_dir", refuse("hf_hub_download"))
        patch.setattr(socket, "getaddrinfo", local_only)
        yield calls
    if calls:
        raise AssertionError(f"the hub was called: {calls}")
