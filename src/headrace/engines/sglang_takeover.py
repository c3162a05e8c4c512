"""Answers for SGLang what it would ask Run:ai's package, and what it would look for in files of weights that are not there. Written against SGLang 0.5.23.

SGLang forces the load format ``runai_streamer`` for a model in a store. Before any loader runs, the first process copies side files with Run:ai's package, and each process finds
them by the uri alone; some decisions are taken from the headers of the safetensors files. All of that is answered here, from one snapshot: the folder of side files is named
after it, and the processes that the first one starts are told the folder by a variable of their environment.

What is replaced in SGLang is listed in `replacements`, each by its name; every replacement passes on what is not about a model of ours.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Iterable, MutableMapping
from contextlib import closing
from pathlib import Path
from typing import Any

from headrace.checkpoint import Checkpoint, Entry, SideFiles, open_checkpoint
from headrace.checkpoint.sidelisting import list_side_files
from headrace.checkpoint.survey import survey
from headrace.engines.engine_folder import PinnedSource, make_place, read_source
from headrace.engines.sglang_sources import has_fp8_experts, routed_expert_dtype
from headrace.errors import CheckpointError, NoWeights, ObjectNotFound
from headrace.settings import Settings
from headrace.storage import Uri, is_object_uri, open_store, parse_uri

_LOG = logging.getLogger("headrace")

TAKEN = "runai_streamer"
"""The load format that SGLang forces for a model in a store."""
FOLDERS_VARIABLE = "_HEADRACE_SGLANG_FOLDERS"
"""Tells child processes which folders the first process found, as a JSON object: uri to path. Never holds what is secret in a uri."""

Replacement = Callable[..., Any]
"""Takes what SGLang has under a name, then that one's own arguments."""


class Answers:
    """What this process knows of models in stores. Any thread. ``environment`` is what child processes get."""

    def __init__(
        self,
        make_settings: Callable[[], Settings] = Settings.from_environment,
        environment: MutableMapping[str, str] = os.environ,
    ) -> None:
        self._make_settings = make_settings
        self._environment = environment
        self._checkpoints: dict[str, Checkpoint] = {}
        self._kept: list[Any] = []
        self._lock = threading.RLock()

    def pull(self, text: str) -> str:
        """Pin the model at the uri ``text`` and bring its side files; return their folder, which this process and its children know from now on.

        Raises what listing raises, and what is wrong with the choice of files: `MissingFiles`, `InvalidIndex`. Where there are side files alone, as for a tokenizer, those are
        brought, and the log says so.
        """
        uri = parse_uri(text)
        settings = self._make_settings()
        with self._lock, closing(open_store(uri, settings=settings)) as store:
            try:
                found = survey(store, settings)
            except NoWeights:
                listing = list_side_files(store, store.list_level())
                if not listing.objects:
                    raise
                files = SideFiles(store, listing.objects, cache_dir=settings.cache_dir)
                folder = str(files.folder())
                self._kept.append(files)
                _LOG.warning("Headrace: there are no weights at %s, only side files; they are in %s.", uri, folder)
            else:
                for note in (*found.selection_notes, *found.side_notes):
                    _LOG.warning("%s: %s", uri, note)
                source = PinnedSource(uri, found.snapshot.id)
                place = make_place(found.side_files.folder(), source, settings.cache_dir)
                folder = str(place.folder)
                self._kept += [place, found.side_files]
                _LOG.info("Headrace: %s is at snapshot %s; its side files are in %s.", uri, source.snapshot_id, folder)
            self._environment[FOLDERS_VARIABLE] = json.dumps({**self._folders(), str(uri): folder})
        return folder

    def folder_of(self, text: str) -> str:
        """Return the folder of the model at the uri ``text``: the one that the first process found. Where that is not on this machine it is made, from the same snapshot."""
        uri = parse_uri(text)
        with self._lock:
            folder = self._folders().get(str(uri))
            if folder is None:
                return self.pull(text)
            return folder if Path(folder).exists() else self._make_again(uri, Path(folder))

    def entries(self, text: str) -> Iterable[Entry] | None:
        """Return the stored tensors of a model, by its uri or by its folder, in the order of files and of offsets in each; None for what is not ours."""
        with self._lock:
            checkpoint = self._checkpoint(text)
        return None if checkpoint is None else checkpoint.entries.values()

    def weight_files(self, text: str) -> list[str]:
        """Return the uris of the model's weight files and of those that lie beside them, as Run:ai's package lists them."""
        uri = parse_uri(text)
        with closing(open_store(uri, settings=self._make_settings())) as store:
            keys = [one.key for one in store.list_level().objects if one.key.endswith(".safetensors")]
        return [f"{text.rstrip('/')}/{key}" for key in sorted(keys)]

    def _folders(self) -> dict[str, str]:
        found: dict[str, str] = json.loads(self._environment.get(FOLDERS_VARIABLE) or "{}")
        return found

    def _make_again(self, uri: Uri, folder: Path) -> str:
        """Make the folder on a machine where it is not, since the first process runs elsewhere; return it, which may be in another place."""
        source = PinnedSource(uri, folder.name.rpartition("-")[2])
        settings = self._make_settings()
        if source.name != folder.name:
            raise ObjectNotFound(
                f"The side files of {uri} are not at {folder} on this machine.",
                "They were brought by a process on another one.",
                "Set HEADRACE_CACHE_DIR to a folder that all machines share.",
            )
        with open_checkpoint(uri, snapshot=source.snapshot_id, settings=settings) as checkpoint:
            place = make_place(checkpoint.side_files.folder(), source, settings.cache_dir)
        self._kept += [place, checkpoint]
        if place.folder != folder:
            self._environment[FOLDERS_VARIABLE] = json.dumps({**self._folders(), str(uri): str(place.folder)})
            _LOG.warning("Set HEADRACE_CACHE_DIR to the same folder on every machine: %s is not here.", folder)
        return str(place.folder)

    def _checkpoint(self, text: str) -> Checkpoint | None:
        folder = self.folder_of(text) if is_object_uri(text) else text
        source = read_source(folder)
        if source is None:
            return None
        if folder not in self._checkpoints:
            uri = parse_uri(text) if is_object_uri(text) else source.uri
            checkpoint = open_checkpoint(uri, snapshot=source.snapshot_id, settings=self._make_settings())
            checkpoint.close()  # what is asked of it needs no connection
            self._checkpoints[folder] = checkpoint
        return self._checkpoints[folder]


def replacements(answers: Answers) -> dict[str, Replacement]:
    """Return what is replaced, by its full name in SGLang, each for a hook around it."""

    def download_and_get_path(original: Any, cls: Any, model_path: str) -> str:
        return answers.pull(model_path) if is_object_uri(model_path) else original(cls, model_path)

    def get_path(original: Any, cls: Any, model_path: str) -> str:
        return answers.folder_of(model_path) if is_object_uri(model_path) else original(cls, model_path)

    def is_runai_obj_uri(original: Any, model_or_path: str | Path) -> bool:
        return bool(original(model_or_path)) or is_object_uri(model_or_path)

    def list_safetensors(original: Any, path: str = "") -> list[str]:
        return answers.weight_files(path) if is_object_uri(path) else original(path)

    def has_fp8_weights_in_checkpoint(original: Any, model_path: str) -> bool:
        entries = _asked(answers, model_path)
        return original(model_path) if entries is None else has_fp8_experts(entries)

    def probe_routed_expert_weight_dtype(original: Any, model_path: str) -> str | None:
        entries = _asked(answers, model_path)
        return original(model_path) if entries is None else routed_expert_dtype(entries)

    return {
        "sglang.srt.utils.runai_utils.ObjectStorageModel.download_and_get_path": download_and_get_path,
        "sglang.srt.utils.runai_utils.ObjectStorageModel.get_path": get_path,
        "sglang.srt.utils.runai_utils.is_runai_obj_uri": is_runai_obj_uri,
        "sglang.srt.utils.runai_utils.list_safetensors": list_safetensors,
        "sglang.srt.utils.common.has_fp8_weights_in_checkpoint": has_fp8_weights_in_checkpoint,
        "sglang.srt.model_loader.weight_utils.probe_routed_expert_weight_dtype": probe_routed_expert_weight_dtype,
    }


def _asked(answers: Answers, model_path: str) -> Iterable[Entry] | None:
    """Return the stored tensors of a model of ours. Headers that cannot be read become an error once the weights are: SGLang takes a failure here for a no."""
    try:
        entries = answers.entries(model_path)
    except CheckpointError as error:
        _LOG.warning("SGLang's question about stored tensors cannot be answered. %s", error)
        return []
    if entries is not None:
        _LOG.info(
            "Headrace: SGLang's question about the stored tensors of %s is answered from their headers.", model_path
        )
    return entries
