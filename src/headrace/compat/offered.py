"""What the stand-in for ``runai_model_streamer`` holds: its modules, the names in each, and the words for what it does not have. Written against version 0.17.1."""

from __future__ import annotations

import importlib
from importlib.metadata import Distribution, PackagePath
from os import PathLike
from pathlib import Path
from types import ModuleType

from headrace.compat.standin import PACKAGE, VARIABLE

VERSION = "0.17.1+headrace"
"""The version whose names are offered. A comparison takes the part after the plus for nothing."""

_TOP = (
    "DistributedStreamer",
    "FileChunks",
    "FileStreamer",
    "ObjectStorageModel",
    "SafetensorsStreamer",
    "list_safetensors",
    "pull_files",
)
_PATHS = ("is_azure_path", "is_gs_path", "is_s3_path")
_GLOBS = ("azure_glob", "gcs_glob", "s3_glob")
_PULLS = ("azure_pull_files", "gcs_pull_files", "s3_pull_files")

MODULES: dict[str, tuple[str, ...]] = {
    PACKAGE: _TOP,
    f"{PACKAGE}.distributed_streamer": ("DistributedStreamer",),
    f"{PACKAGE}.distributed_streamer.distributed_streamer": ("DistributedStreamer", "FileChunks", "FileStreamer"),
    f"{PACKAGE}.file_streamer": ("FileChunks", "FileStreamer"),
    f"{PACKAGE}.file_streamer.file_streamer": (
        *("FileChunks", "FileStreamer", "RunaiStreamerInvalidInputException", "S3Credentials"),
        *_PATHS,
    ),
    f"{PACKAGE}.file_streamer.requests_iterator": ("FileChunks", "RunaiStreamerMemoryLimitException"),
    f"{PACKAGE}.s3_utils": (),
    f"{PACKAGE}.s3_utils.s3_utils": ("S3Credentials", *_PATHS, *_GLOBS, *_PULLS),
    f"{PACKAGE}.safetensors_streamer": (),
    f"{PACKAGE}.safetensors_streamer.safetensors_pytorch": (
        *("Offsets", "SafetensorMetadata", "create_torch_tensor", "prepare_request"),
    ),
    f"{PACKAGE}.safetensors_streamer.safetensors_streamer": (
        *("DistributedStreamer", "FileChunks", "ObjectStorageModel", "S3Credentials", "SafetensorsStreamer"),
        *("list_safetensors", "pull_files"),
        *_PATHS,
    ),
}
"""Each module's full name, with the names in it."""

_HOMES = {
    "Offsets": "headrace.compat.rangefiles:Offsets",
    "RunaiStreamerInvalidInputException": "headrace.errors:InvalidSetting",
    "RunaiStreamerMemoryLimitException": "headrace.errors:BudgetExceeded",
    "SafetensorMetadata": "headrace.compat.rangefiles:TensorMetadata",
    **{name: f"headrace.compat.listing:{name}" for name in _PATHS},
    **dict.fromkeys(_GLOBS, "headrace.compat.listing:list_folder"),
    **dict.fromkeys(_PULLS, "headrace.compat.pulling:pull_files"),
}
"""Where a name's object is, as ``module:name``; those that are not here are in `headrace.compat.runai`."""


def fill(module: ModuleType) -> None:
    """Put into ``module``, one of `MODULES`, what its name promises."""
    names = MODULES[module.__name__]
    for name in names:
        home, _, own_name = _HOMES.get(name, f"headrace.compat.runai:{name}").partition(":")
        setattr(module, name, getattr(importlib.import_module(home), own_name))
    module.__doc__ = f"Headrace in the place of {module.__name__} ({VARIABLE})."
    module.__dict__["__all__"] = list(names)

    def __getattr__(name: str) -> ModuleType:
        fullname = f"{module.__name__}.{name}"
        if fullname in MODULES:  # that package imports all of its own
            return importlib.import_module(fullname)
        raise AttributeError(explain(fullname))

    module.__dict__["__getattr__"] = __getattr__


def explain(fullname: str) -> str:
    """Return why ``fullname``, which is not offered, is not there, and what to do."""
    parent, _, name = fullname.rpartition(".")
    while parent not in MODULES:
        parent, _, name = parent.rpartition(".")
    inside = [one.rpartition(".")[2] for one in MODULES if one.rpartition(".")[0] == parent]
    known = ", ".join((*MODULES[parent], *inside))
    return (
        f"{parent} has no {name} here. {VARIABLE} is set, and Headrace, which stands in for {PACKAGE}, offers what engines use of it: {known}. "
        f"Use one of these, or unset {VARIABLE} and install the library itself."
    )


class StandInDistribution(Distribution):
    """The stand-in among the installed distributions. It has metadata and no files."""

    def read_text(self, filename: str) -> str | None:
        """Return the metadata; None for any other file."""
        if filename != "METADATA":
            return None
        summary = f"Headrace in the place of Run:ai Model Streamer ({VARIABLE})"
        return f"Metadata-Version: 2.1\nName: runai-model-streamer\nVersion: {VERSION}\nSummary: {summary}\n"

    def locate_file(self, path: str | PathLike[str]) -> Path:
        """Return where a file would lie; there is none."""
        return Path(__file__).parent / path

    @property
    def files(self) -> list[PackagePath] | None:
        """None: nobody knows of files."""
        return None
