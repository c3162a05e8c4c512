"""What vLLM finds once Headrace is installed beside it, and what changes for it only when it is asked to."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Any

import pytest

from headrace.errors import InvalidSetting
from tests.support.engine_plugins import met_requirements, run_fresh, told

_SEEN = """
import json
import vllm.config.model
from vllm.plugins import load_general_plugins
import vllm.model_executor.model_loader as loaders
names = ("headrace", "runai_streamer", "runai_streamer_sharded", "auto")
pull = vllm.config.model.ModelConfig.maybe_pull_model_tokenizer_for_runai
load_general_plugins()
from headrace.engines.vllm import register
register()
register()
print(json.dumps({
    "loaders": {name: loaders._LOAD_FORMAT_TO_MODEL_LOADER[name].__name__ for name in names},
    "is_untouched": vllm.config.model.ModelConfig.maybe_pull_model_tokenizer_for_runai is pull,
}))
"""


def seen(**variables: str) -> dict[str, Any]:
    found: dict[str, Any] = told(run_fresh(_SEEN, unset="HEADRACE_VLLM", **variables))
    return found


def test_being_installed_adds_a_load_format_and_changes_nothing() -> None:
    found = seen()
    assert found["loaders"]["headrace"] == "HeadraceLoader"
    assert found["loaders"]["runai_streamer"] == "RunaiModelStreamerLoader"
    assert found["is_untouched"]


def test_the_takeover_has_one_name_and_leaves_the_others() -> None:
    found = seen(HEADRACE_VLLM="1")
    assert found["loaders"] == {
        "headrace": "HeadraceLoader",
        "runai_streamer": "HeadraceLoader",
        "runai_streamer_sharded": "ShardedStateLoader",
        "auto": "DefaultModelLoader",
    }
    assert not found["is_untouched"]


def test_another_vllm_is_refused_by_name(vllm_here: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.engines.vllm_takeover import take_over

    monkeypatch.setattr(vllm_here, "__version__", "0.99.1")
    with pytest.raises(InvalidSetting, match=r"does not work with vLLM 0\.99\.1.*tested with 0\.32\.0"):
        take_over()


def test_everything_that_the_takeover_replaces_is_there(vllm_here: Any) -> None:
    from headrace.engines.vllm_takeover import Answers, _replacements

    for module, path, _ in _replacements(Answers()):
        owner: Any = sys.modules[module]
        for name in path.split("."):
            owner = getattr(owner, name)
        assert owner.__closure__ is not None, (module, path)
        assert "headrace" in owner.__code__.co_filename, (module, path)


def test_runai_is_not_installed_here() -> None:
    assert find_spec("runai_model_streamer") is None


def test_installing_headrace_moves_no_package_of_vllm() -> None:
    assert "boto3" in {one.name for one in met_requirements()}
