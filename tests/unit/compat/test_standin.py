"""Headrace in the place of the package `runai_model_streamer`: which modules and names are there, what is said of others, and what it costs who does not ask for it."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import headrace
from headrace.compat import offered, standin
from headrace.compat.offered import MODULES
from headrace.compat.standin import PACKAGE, STARTUP_FILE
from headrace.errors import InvalidSetting, UsageError
from headrace.streaming.runai import import_library

STARTUP_LINE = (Path(headrace.__file__).parents[1] / STARTUP_FILE).read_text()


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process as if nothing had imported the package or its stand-in yet."""
    monkeypatch.setattr(sys, "meta_path", [one for one in sys.meta_path if not isinstance(one, standin._Finder)])
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == PACKAGE}
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        del sys.modules[name]
    sys.modules.update(kept)


@pytest.fixture
def installed(apart: None) -> None:
    standin.install()


# -- what is there


@pytest.mark.usefixtures("installed")
def test_every_module_holds_its_names_and_they_are_one_object_each() -> None:
    objects: dict[str, object] = {}
    for name, names in MODULES.items():
        module = importlib.import_module(name)
        assert standin.is_ours(module)
        assert module.__all__ == list(names)
        for one in names:
            assert getattr(module, one) is objects.setdefault(one, getattr(module, one))
    assert objects["SafetensorsStreamer"] is importlib.import_module("headrace.compat.runai").SafetensorsStreamer


@pytest.mark.usefixtures("installed")
def test_the_package_alone_leads_to_its_modules() -> None:
    package = importlib.import_module(PACKAGE)
    assert package.safetensors_streamer.safetensors_streamer.SafetensorsStreamer is package.SafetensorsStreamer
    assert not hasattr(package, "libstreamer")
    found: dict[str, object] = {}
    exec(f"from {PACKAGE} import *", found)  # noqa: S102
    assert set(MODULES[PACKAGE]) < set(found)


def parameters(function: object) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]  # type: ignore[arg-type]


def test_names_and_parameters_are_those_of_the_library(apart: None) -> None:
    """In its own modules, with the same parameters in the same order; ours may have more after them."""
    theirs = {name: vars(pytest.importorskip(name)).copy() for name in MODULES}
    assert set(theirs[PACKAGE]["__all__"]) == set(MODULES[PACKAGE])
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        del sys.modules[name]
    standin.install()
    num_compared = 0
    for module, names in MODULES.items():
        for name in names:
            one, other = getattr(importlib.import_module(module), name), theirs[module][name]
            assert inspect.isclass(one) == inspect.isclass(other), name
            pairs = [(one, other)]
            if (
                inspect.isclass(other)
                and not issubclass(other, Exception)
                and name not in ("Offsets", "SafetensorMetadata")
            ):
                shared = [key for key, value in vars(other).items() if inspect.isfunction(value) and hasattr(one, key)]
                pairs += [(getattr(one, key), getattr(other, key)) for key in shared if not key.startswith("_")]
            elif inspect.isclass(other):
                continue
            for ours, original in pairs:
                wanted = parameters(original)
                assert parameters(ours)[: len(wanted)] == wanted, (module, name, ours)
                num_compared += 1
    assert num_compared > 60


# -- what is not


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    "code",
    [
        f"from {PACKAGE} import Nope",
        f"import {PACKAGE}.libstreamer.libstreamer",
        f"from {PACKAGE}.libstreamer.libstreamer import runai_start",
        f"from {PACKAGE}.s3_utils.s3_utils import get_s3_files_module",
        f"from {PACKAGE}.distributed_streamer.distributed_streamer import _distributedStreamerParams",
    ],
)
def test_what_is_not_offered_is_an_import_error_that_says_what_is(code: str) -> None:
    with pytest.raises(
        ImportError, match=r"has no (Nope|libstreamer|get_s3_files_module|_dist\w+) here\..*offers .*: "
    ):
        exec(code)  # noqa: S102


@pytest.mark.usefixtures("installed")
def test_an_attribute_that_is_not_offered_says_what_is() -> None:
    package = importlib.import_module(PACKAGE)
    with pytest.raises(AttributeError, match=r"runai_model_streamer has no Nope here.*SafetensorsStreamer.*or unset"):
        _ = package.Nope
    with pytest.raises(AttributeError, match=r"\.s3_utils has no Nope here.*S3Credentials"):
        _ = package.s3_utils.s3_utils.Nope


# -- being found


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", ["runai_model_streamer", "runai-model-streamer", "Runai.Model-Streamer"])
def test_its_version_has_an_answer(name: str) -> None:
    from packaging.specifiers import SpecifierSet

    version = importlib.metadata.version(name)
    assert version == "0.17.1+headrace"
    assert SpecifierSet(">=0.15.7").contains(version)
    assert SpecifierSet("==0.17.1").contains(version)
    distribution = importlib.metadata.distribution(name)
    assert (distribution.metadata["Name"], distribution.requires, distribution.files) == (
        "runai-model-streamer",
        None,
        None,
    )


@pytest.mark.usefixtures("installed")
def test_other_packages_are_found_as_before() -> None:
    assert importlib.metadata.version("torch")
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("runai-model-streamer-elsewhere")
    assert "0.17.1+headrace" not in {one.version for one in importlib.metadata.distributions()}
    assert importlib.util.find_spec("runai_model_streamer_elsewhere") is None
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None
    assert isinstance(spec.loader, standin._Finder)
    assert PACKAGE not in sys.modules  # to ask is not to import


# -- being put in place


@pytest.mark.parametrize(("value", "wanted"), [("", False), ("0", False), ("no", False), ("1", True), (" True ", True)])
def test_the_variable_decides(apart: None, value: str, wanted: bool) -> None:
    assert standin.install_if_asked({"HEADRACE_AS_RUNAI": value}) is wanted
    assert standin.is_installed() is wanted


def test_the_variable_says_yes_or_no(apart: None) -> None:
    assert not standin.install_if_asked({})
    with pytest.raises(InvalidSetting, match="HEADRACE_AS_RUNAI is 'maybe'"):
        standin.install_if_asked({"HEADRACE_AS_RUNAI": "maybe"})
    assert not standin.is_installed()


def test_it_is_put_in_place_once_and_first(apart: None) -> None:
    standin.install()
    standin.install()
    importlib.import_module(PACKAGE)
    standin.install()
    assert [isinstance(one, standin._Finder) for one in sys.meta_path].index(True) == 0
    assert sum(isinstance(one, standin._Finder) for one in sys.meta_path) == 1


def test_it_comes_too_late_after_the_library_itself(apart: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, PACKAGE, ModuleType(PACKAGE))
    with pytest.raises(UsageError, match="has been imported in this process"):
        standin.install()
    assert not standin.is_installed()


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("is_beside", [True, False])
def test_the_log_says_once_what_is_used(
    is_beside: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    beside = SimpleNamespace(origin="/somewhere/else.py") if is_beside else None
    monkeypatch.setattr(standin, "PathFinder", SimpleNamespace(find_spec=lambda name: beside))
    monkeypatch.setattr(importlib.metadata.MetadataPathFinder, "find_distributions", lambda context: [])
    with caplog.at_level(logging.INFO, "headrace"):
        for name in MODULES:
            importlib.import_module(name)
    said = [(one.levelname, one.getMessage()) for one in caplog.records if "stands in" in one.getMessage()]
    standing_in = "Headrace stands in for runai_model_streamer (HEADRACE_AS_RUNAI)"
    if is_beside:
        assert said == [("WARNING", f"{standing_in}; /somewhere/else.py is not used.")]
    else:
        assert said == [("INFO", f"{standing_in}.")]


@pytest.mark.usefixtures("installed")
def test_a_stand_in_that_does_not_import_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Engines take an import error for the package's absence, and say that it should be installed."""
    monkeypatch.setitem(offered._HOMES, "SafetensorsStreamer", "headrace.compat.absent:SafetensorsStreamer")
    with pytest.raises(ImportError, match="absent"):
        importlib.import_module(PACKAGE)
    assert "Headrace cannot stand in for runai_model_streamer" in caplog.text
    assert "absent" in caplog.text


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("needs_s3", [True, False])
def test_headrace_does_not_load_with_itself_under_the_librarys_name(needs_s3: bool) -> None:
    with pytest.raises(InvalidSetting, match="HEADRACE_AS_RUNAI is set: Headrace stands in for that library"):
        import_library(needs_s3=needs_s3)


# -- what it costs


SHOW = "; import sys; print(sorted({'headrace', 'headrace.compat', 'torch'} & set(sys.modules)))"


@pytest.mark.parametrize(
    ("value", "imported"),
    [(None, []), ("", []), ("0", []), (" No ", []), ("1", ["headrace", "headrace.compat"])],
)
def test_the_start_up_file_imports_nothing_unless_it_is_asked(value: str | None, imported: list[str]) -> None:
    """It is one line, which Python runs whenever it starts."""
    assert STARTUP_LINE.startswith("import os; ")
    assert STARTUP_LINE.count("\n") == 1
    environment = {name: text for name, text in os.environ.items() if name != "HEADRACE_AS_RUNAI"}
    environment |= {} if value is None else {"HEADRACE_AS_RUNAI": value}
    done = subprocess.run(
        [sys.executable, "-c", STARTUP_LINE.strip() + SHOW], env=environment, capture_output=True, text=True, check=True
    )
    assert (done.stdout.strip(), done.stderr) == (str(imported), "")
