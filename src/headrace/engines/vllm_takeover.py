"""Answers for vLLM what it would ask Run:ai's package, and what it would look for in a folder of weights that is not there. Written against vLLM 0.32.0.

vLLM refuses a load format of a plug-in together with a model in a store, and picks ``runai_streamer`` for one by itself. Before any loader runs, it copies side files with Run:ai's
package, and takes decisions from the headers of the safetensors files in that folder, where there are none: whether a head is stored beside a flag that says it is tied, which
layers of an AWQ or GPTQ checkpoint are not packed, which dtype the weights have. All of that is answered here, from one snapshot.

What is replaced in vLLM is listed in `_replacements`, each by its name; every replacement passes on what is not about a model of ours.
"""

from __future__ import annotations

import importlib
import logging
import tempfile
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER

import vllm
from headrace.checkpoint import Checkpoint, SideFiles, open_checkpoint
from headrace.checkpoint.sidelisting import list_side_files
from headrace.checkpoint.survey import survey
from headrace.engines.engine_folder import PinnedSource, make_place, read_source
from headrace.engines.vllm_loader import HeadraceLoader
from headrace.errors import CheckpointError, InvalidSetting, ObjectNotFound
from headrace.settings import Settings
from headrace.storage import Uri, is_object_uri, open_store, parse_uri
from headrace.storage.revision import with_revision

_LOG = logging.getLogger("headrace")

TESTED = ("0.32.0",)
"""The releases of vLLM that the takeover was tested with."""
TAKEN = "runai_streamer"
"""The load format that vLLM picks for a model in a store."""

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")
_LARGEST_BESIDE_BYTES = 1 << 30
"""Small files of weights beside the model's own (a projection, an adapter) are fetched whole; none of them is as large."""


def take_over() -> None:
    """Put Headrace in the place of Run:ai's package in this process. May be called twice. Raises `InvalidSetting` for a vLLM that was not tested."""
    version = str(vllm.__version__)
    if version not in TESTED:
        raise InvalidSetting(
            f"HEADRACE_VLLM=1 does not work with vLLM {version}.",
            f"It replaces parts of vLLM, and was tested with {', '.join(TESTED)}.",
            'Install that, or leave HEADRACE_VLLM out and use --load-format headrace with a local folder of side files and the extra config {"uri": "s3://…"}.',
        )
    if _LOAD_FORMAT_TO_MODEL_LOADER.get(TAKEN) is HeadraceLoader:
        return
    answers = Answers()
    for module, path, make in _replacements(answers):
        _replace(module, path, make)
    # Not through vLLM's own function, which warns that a name is taken.
    _LOAD_FORMAT_TO_MODEL_LOADER[TAKEN] = HeadraceLoader
    _LOG.info(
        "Headrace loads models from s3, gs, az, hf, http and https uris in place of Run:ai Model Streamer (HEADRACE_VLLM=1)."
    )


@dataclass(slots=True)
class _Model:
    """A model in a store that was asked for in this process."""

    source: PinnedSource
    uri: Uri
    """As the user gave it: it may be signed."""
    files: tuple[str, ...] = ()
    """The keys of the weight files; empty where they are not known yet."""
    checkpoint: Checkpoint | None = None
    kept: list[Any] = field(default_factory=list)
    """What must live as long as the folder is used."""


class Answers:
    """What this process knows of models in stores. Any thread."""

    def __init__(self, make_settings: Callable[[], Settings] = Settings.from_environment) -> None:
        self._make_settings = make_settings
        self._models: dict[str, _Model] = {}
        self._tokenizers: dict[str, tuple[Path, SideFiles]] = {}
        self._beside: dict[tuple[str, str], Path | None] = {}
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._lock = threading.RLock()

    def pull_model(self, text: str, revision: str | None) -> tuple[str, str]:
        """Pin the model at the uri ``text`` and bring its side files; return its folder, and the uri to load the weights from.

        Raises what listing raises, and what is wrong with the choice of files: `NoWeights`, `MissingFiles`, `InvalidIndex`.
        """
        uri = parse_uri(text)
        if uri.scheme == "hf" and "@" not in uri.bucket:
            uri = with_revision(uri, revision)
        settings = self._make_settings()
        with self._lock, closing(open_store(uri, settings=settings)) as store:
            found = survey(store, settings)
            for note in (*found.selection_notes, *found.side_notes):
                _LOG.warning("%s: %s", uri, note)
            source = PinnedSource(uri, found.snapshot.id)
            place = make_place(found.side_files.folder(), source, settings.cache_dir)
            folder = str(place.folder)
            model = self._models.setdefault(folder, _Model(source, uri))
            model.files = tuple(stored.key for stored in found.snapshot.weights)
            model.kept += [place, found.side_files]
        _LOG.info("Headrace: %s is at snapshot %s; its side files are in %s.", uri, source.snapshot_id, folder)
        return folder, uri.text or str(uri)

    def pull_tokenizer(self, text: str) -> str:
        """Bring the side files at the uri ``text``, where there need not be weights; return their folder."""
        uri = parse_uri(text)
        settings = self._make_settings()
        with self._lock, closing(open_store(uri, settings=settings)) as store:
            listing = list_side_files(store, store.list_level())
            if not listing.objects:
                raise ObjectNotFound(f"There is no tokenizer at {uri}.", mend="Check the uri of --tokenizer.")
            files = SideFiles(store, listing.objects, cache_dir=settings.cache_dir)
            folder = files.folder()
            self._tokenizers[text] = folder, files
        _LOG.info("Headrace: the tokenizer's files of %s are in %s.", uri, folder)
        return str(folder)

    def headers(self, folder: str) -> dict[str, Any] | None:
        """Return what vLLM reads from safetensors headers, by tensor: ``dtype`` and ``shape``. None for a folder that is not of ours.

        Files that are no checkpoint to us may be one to another loader (``runai_streamer_sharded``), so that is not an error here; it becomes one where our loader is to read them.
        """
        try:
            checkpoint = self.open(folder)
        except CheckpointError as error:
            _LOG.warning("vLLM's questions about stored tensors cannot be answered. %s", error)
            return {}
        if checkpoint is None:
            return None
        _LOG.info(
            "Headrace: vLLM's questions about the stored tensors of %s are answered from their headers.", checkpoint.uri
        )
        return {name: {"dtype": one.dtype, "shape": list(one.shape)} for name, one in checkpoint.entries.items()}

    def weight_files(self, folder: str) -> list[str] | None:
        """Return the keys of the model's weight files; None for a folder that is not of ours."""
        with self._lock:
            model = self._model(folder)
            if model is None:
                return None
            if not model.files:
                model.files = self._checkpoint(model).files
            return list(model.files)

    def beside(self, folder: str, key: str) -> Path | None:
        """Return a local copy of a small file of weights that is not one of the model's own, such as ``2_Dense/model.safetensors``; None where there is none."""
        if not key.lower().endswith(_WEIGHT_SUFFIXES):
            return None
        with self._lock:
            model = self._model(folder)
            if model is None:
                return None
            if (folder, key) not in self._beside:
                self._beside[folder, key] = self._fetched(model, key)
            return self._beside[folder, key]

    def open(self, folder: str) -> Checkpoint | None:
        """Return the checkpoint that ``folder`` stands for, with its headers read and checked; None for a folder that is not of ours."""
        with self._lock:
            model = self._model(folder)
            return None if model is None else self._checkpoint(model)

    def _checkpoint(self, model: _Model) -> Checkpoint:
        if model.checkpoint is None:
            model.checkpoint = open_checkpoint(
                model.uri, snapshot=model.source.snapshot_id, settings=self._make_settings()
            )
            model.checkpoint.close()  # what is asked of it needs no connection
        return model.checkpoint

    def _model(self, folder: str) -> _Model | None:
        model = self._models.get(folder)
        if model is None:
            source = read_source(folder)  # pulled by another process
            if source is None:
                return None
            model = self._models[folder] = _Model(source, source.uri)
        return model

    def _fetched(self, model: _Model, key: str) -> Path | None:
        folder = replace(model.uri, text=f"{model.uri}/")
        with closing(open_store(folder, settings=self._make_settings())) as store:
            try:
                stored = store.stat(key)
            except ObjectNotFound:
                return None
            if stored.size_bytes > _LARGEST_BESIDE_BYTES:
                return None
            content = store.read_object(stored) if stored.size_bytes else b""
        self._scratch = self._scratch or tempfile.TemporaryDirectory(prefix="headrace-vllm-")
        path = Path(self._scratch.name) / model.source.name / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        _LOG.info("Headrace: %s is fetched beside the model's weights.", store.uri_of(key))
        return path


Make = Callable[[Any], Callable[..., Any]]
"""Takes what vLLM has under a name and returns what is put there."""


def _replacements(answers: Answers) -> list[tuple[str, str, Make]]:
    """Return what is replaced: module, name in it, and how."""

    def pull(original: Any) -> Callable[..., Any]:
        def maybe_pull_model_tokenizer_for_runai(config: Any, model: str, tokenizer: str) -> None:
            if config.model_weights:
                return
            if is_object_uri(model):
                config.model, config.model_weights = answers.pull_model(model, config.revision)
                if tokenizer == model:
                    config.tokenizer = config.model
                    return
            if is_object_uri(tokenizer):
                config.tokenizer = answers.pull_tokenizer(tokenizer)

        return maybe_pull_model_tokenizer_for_runai

    def headers(original: Any) -> Callable[..., Any]:
        def _read_safetensors_metadata_in_dir(local_dir: Path) -> dict[str, Any]:
            found = answers.headers(str(local_dir))
            return original(local_dir) if found is None else found

        return _read_safetensors_metadata_in_dir

    def listing(original: Any) -> Callable[..., Any]:
        def list_repo_files(repo_id: str, **options: Any) -> list[str]:
            files = answers.weight_files(str(repo_id))
            return original(repo_id, **options) if files is None else [*original(repo_id, **options), *files]

        return list_repo_files

    def local_file(original: Any) -> Callable[..., Any]:
        def try_get_local_file(model: str | Path, file_name: str, revision: str | None = "main") -> Any:
            if not (Path(model) / file_name).is_file():
                beside = answers.beside(str(model), file_name)
                if beside is not None:
                    return beside
            return original(model, file_name, revision)

        return try_get_local_file

    def object_uri(original: Any) -> Callable[..., Any]:
        def is_runai_obj_uri(model_or_path: str) -> bool:
            return bool(original(model_or_path)) or is_object_uri(model_or_path)

        return is_runai_obj_uri

    def verify(original: Any) -> Callable[..., Any]:
        def try_verify_and_update_config(config: Any) -> None:
            model_config, load_config = config.model_config, config.load_config
            is_ours = model_config is not None and is_object_uri(model_config.model_weights)
            if is_ours and load_config.load_format == "headrace":
                load_config.load_format = TAKEN  # the same loader, under the name that vLLM allows here
            original(config)
            if is_ours and load_config.load_format == TAKEN:
                _LOG.info("Headrace loads the weights of %s; %s is its name here.", model_config.model_weights, TAKEN)
                # What is wrong with the files is said here, in the first process, and not by each worker.
                answers.open(model_config.model)

        return try_verify_and_update_config

    return [
        ("vllm.config.model", "ModelConfig.maybe_pull_model_tokenizer_for_runai", pull),
        ("vllm.config.vllm", "VllmConfig.try_verify_and_update_config", verify),
        ("vllm.config.vllm", "is_runai_obj_uri", object_uri),
        ("vllm.engine.arg_utils", "is_cloud_storage", object_uri),
        ("vllm.transformers_utils.config", "_read_safetensors_metadata_in_dir", headers),
        ("vllm.transformers_utils.repo_utils", "list_repo_files", listing),
        ("vllm.transformers_utils.repo_utils", "try_get_local_file", local_file),
    ]


def _replace(module: str, path: str, make: Make) -> None:
    owner: Any = importlib.import_module(module)
    *owners, name = path.split(".")
    for one in owners:
        owner = getattr(owner, one)
    setattr(owner, name, make(getattr(owner, name)))
