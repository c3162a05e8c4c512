"""What SGLang finds once Headrace is installed beside it, and what changes for it only when it is asked to."""

from __future__ import annotations

import json
import subprocess
from importlib import metadata
from importlib.util import find_spec
from pkgutil import resolve_name
from typing import Any

from packaging.requirements import Requirement

from tests.support.engine_plugins import met_requirements, run_fresh, told

_SEEN = """
import json, sys
import sglang
if len(sys.argv) > 1:
    sglang.__version__ = sys.argv[1]
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import LOAD_FORMAT_CHOICES
from sglang.srt.utils.runai_utils import ObjectStorageModel
original = ObjectStorageModel.__dict__["get_path"]
load_plugins()
from headrace.engines.sglang import register
register()
from sglang.srt.utils import configure_logger
from types import SimpleNamespace
configure_logger(SimpleNamespace(log_level="info"))

def loader(name):
    try:
        found = LoadConfig(load_format=name).load_format
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return getattr(found, "__name__", str(found))

print(json.dumps({
    "choices": LOAD_FORMAT_CHOICES.count("headrace"),
    "loaders": {name: loader(name) for name in ("headrace", "runai_streamer", "auto")},
    "is_untouched": ObjectStorageModel.__dict__["get_path"] is original,
}))
"""


def asked(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return run_fresh(_SEEN, *arguments, unset="HEADRACE_SGLANG", **variables)


def seen(*arguments: str, **variables: str) -> dict[str, Any]:
    found: dict[str, Any] = told(asked(*arguments, **variables))
    return found


def test_being_installed_adds_a_load_format_and_changes_nothing() -> None:
    found = seen()
    assert found["choices"] == 1
    assert found["loaders"] == {
        "headrace": "HeadraceLoader",
        "runai_streamer": "LoadFormat.RUNAI_STREAMER",
        "auto": "LoadFormat.AUTO",
    }
    assert found["is_untouched"]


def test_the_takeover_is_said_and_has_one_name() -> None:
    done = asked(HEADRACE_SGLANG="1")
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["loaders"] == {
        "headrace": "HeadraceLoader",
        "runai_streamer": "HeadraceLoader",
        "auto": "LoadFormat.AUTO",
    }
    assert not found["is_untouched"]
    said = next(line for line in done.stderr.splitlines() if "in place of Run:ai Model Streamer" in line)
    assert "ObjectStorageModel.download_and_get_path" in said
    assert "runai_streamer" in said


def test_another_sglang_is_refused_by_name() -> None:
    done = asked("0.99.1", HEADRACE_SGLANG="1")
    assert done.returncode == 1
    assert "InvalidSetting: Headrace does not load into SGLang 0.99.1." in done.stderr
    assert "tested with 0.5.23" in done.stderr

    # Nobody asked for it, so SGLang goes on; what is refused is the load format.
    loaders = seen("0.99.1")["loaders"]
    assert loaders["auto"] == "LoadFormat.AUTO"
    assert "does not load into SGLang 0.99.1" in loaders["headrace"]


def test_a_variable_that_says_neither_ends_the_start() -> None:
    done = asked(HEADRACE_SGLANG="maybe")
    assert done.returncode == 1
    assert "HEADRACE_SGLANG is 'maybe'" in done.stderr


def test_everything_that_the_takeover_replaces_is_there(sglang_here: Any) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    from headrace.engines.sglang_takeover import Answers, replacements

    for path in replacements(Answers()):
        assert path in HookRegistry._patched, path
        found = resolve_name(path)
        while hasattr(found, "__wrapped__"):
            assert callable(found)
            found = found.__wrapped__
        assert "sglang" in found.__code__.co_filename, path


def test_runai_is_not_installed_here() -> None:
    assert find_spec("runai_model_streamer") is None


def test_installing_headrace_moves_no_package_of_sglang() -> None:
    """SGLang's own pins are for CUDA, and partly not what is installed here; Headrace must agree with both."""
    pins = {
        pin.name: next(iter(pin.specifier)).version
        for pin in map(Requirement, metadata.requires("sglang") or ())
        if str(pin.specifier).startswith("==") and (pin.marker is None or pin.marker.evaluate({"extra": ""}))
    }
    assert {"torch", "transformers"} <= set(pins)
    for one in met_requirements():
        assert one.name not in pins or one.specifier.contains(pins[one.name]), f"{one} against {pins[one.name]}"
