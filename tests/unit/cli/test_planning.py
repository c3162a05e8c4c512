"""`headrace inspect --plan`: the figures of a load that has not begun, as rows and as JSON, with the selections that loads know."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from headrace.cli.inspect import PlanOptions, inspect
from headrace.cli.load import LoadOptions, load
from headrace.cli.main import app
from headrace.cli.planning import print_forecast
from headrace.errors import InvalidSetting
from headrace.settings import Settings
from headrace.streaming.forecast import Forecast, RankForecast

SETTINGS = Settings.from_environment({}, num_connections=8, progress=False)
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "float32",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "tie_word_embeddings": True,
}


@pytest.fixture
def llama_folder(tmp_path: Path) -> Path:
    """A Llama of two layers, and a tensor that its class does without."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (32, 16), "model.norm.weight": (16,)}
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}self_attn.{name}_proj.weight": (16, 16) for name in "qkvo"}
        shapes |= {f"{prefix}mlp.{name}_proj.weight": (24, 16) for name in ("gate", "up")}
        shapes |= {f"{prefix}mlp.down_proj.weight": (16, 24)}
        shapes |= {f"{prefix}{name}_layernorm.weight": (16,) for name in ("input", "post_attention")}
    folder = tmp_path / "llama"
    folder.mkdir()
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    save_file({**tensors, "model.rotary_emb.inv_freq": torch.zeros(1000)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return folder


def plan_of(folder: Path, capsys: pytest.CaptureFixture[str], **options: Any) -> dict[str, Any]:
    inspect(str(folder), settings=SETTINGS, json=True, plan=PlanOptions(**options))
    plan: dict[str, Any] = json.loads(capsys.readouterr().out)["plan"]
    return plan


@pytest.mark.parametrize("selection", [{}, {"include": ("*.weight",), "exclude": ("packed.*",)}])
def test_json_says_what_load_then_reports(
    checkpoint_folder: Path, capsys: pytest.CaptureFixture[str], selection: dict[str, Any]
) -> None:
    plan = plan_of(checkpoint_folder, capsys, **selection)
    load(LoadOptions(uri=str(checkpoint_folder), settings=SETTINGS, json=True, **selection))
    report = json.loads(capsys.readouterr().out)
    names = ("num_tensors", "num_requests", "bytes_read", "bytes_wanted", "bytes_skipped", "bytes_checkpoint")
    assert {name: plan[name] for name in names} == {name: report[name] for name in names}
    assert [link["link_bits_per_s"] for link in plan["links"]] == [10**9, 10**10, 10**11]
    assert plan["links"][0]["least_seconds"] == pytest.approx(report["bytes_read"] * 8 / 1e9)


def test_ranks_divide_the_bytes(checkpoint_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_of(checkpoint_folder, capsys, num_ranks=2)
    assert len(plan["ranks"]) == 2
    assert sum(rank["bytes_read"] for rank in plan["ranks"]) == plan["bytes_read"] == 112
    assert [rank["num_connections"] for rank in plan["ranks"]] == [4, 4]


def test_a_plain_inspection_has_no_plan(checkpoint_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inspect(str(checkpoint_folder), settings=SETTINGS, json=True)
    assert "plan" not in json.loads(capsys.readouterr().out)
    inspect(str(checkpoint_folder), settings=SETTINGS)
    assert "Gbit/s" not in capsys.readouterr().out


def test_table_from_the_command_line(checkpoint_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--plan", "--ranks", "2", "--connections", "8", "--exclude", "norm.*"]
    app(["inspect", str(checkpoint_folder), *options], standalone_mode=False)
    shown = capsys.readouterr().out
    assert "80 B in 2 tensors are asked for" in shown
    assert "32 B are never asked for" in shown
    assert "4 readers of each rank" in shown
    assert "100 Gbit/s" in shown
    assert "read by others" in shown


def test_requests_and_latency_are_said_of_a_store(capsys: pytest.CaptureFixture[str]) -> None:
    rank = RankForecast(bytes_read=10**9, bytes_received=0, num_requests=120, num_connections=1)
    found = Forecast(
        num_tensors=7,
        bytes_checkpoint=10**9,
        bytes_wanted=10**9 - 10**6,
        read_bytes=16 << 20,
        ranks=(rank,),
        is_local=False,
        request_latency_s=0.1,
    )
    print_forecast(found)
    shown = capsys.readouterr().out
    assert "1 GB in 120 requests, 1 MB of it between wanted tensors" in shown
    assert "1 connection, reads of 16.8 MB at most, 100 ms to an answer's first byte" in shown
    (line,) = [line for line in shown.splitlines() if line.startswith("1 Gbit/s")]
    assert line.split() == ["1", "Gbit/s", "8.00", "s", "20.0", "s"]


def test_a_model_is_asked_what_it_takes(llama_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    every = plan_of(llama_folder, capsys)
    assert every["bytes_skipped"] == 0
    model = plan_of(llama_folder, capsys, as_model=True)
    assert (model["num_tensors"], model["bytes_skipped"]) == (every["num_tensors"] - 1, 4000)
    first = plan_of(llama_folder, capsys, layers="0:1")
    # Nine tensors of the other layer, and the last norm; the embeddings are tied to a head that is not here.
    assert first["num_tensors"] == model["num_tensors"] - 10


def test_globs_and_models_do_not_mix(llama_folder: Path) -> None:
    with pytest.raises(InvalidSetting, match="--include"):
        inspect(str(llama_folder), settings=SETTINGS, plan=PlanOptions(as_model=True, include=("*",)))
    with pytest.raises(InvalidSetting, match="has none"):
        inspect(str(llama_folder), settings=SETTINGS, plan=PlanOptions(experts="0:2"))


@pytest.mark.parametrize(("options", "imported"), [([], []), (["--plan", "--ranks", "2"], ["numpy"])])
def test_what_is_heavy_is_imported_where_it_is_needed(
    llama_folder: Path, options: list[str], imported: list[str]
) -> None:
    """Neither torch nor Transformers, unless a model is asked what it takes; and no locks, where none is taken."""
    code = (
        "import sys\nfrom headrace.cli.main import app\n"
        f"app(['inspect', {str(llama_folder)!r}, *{options!r}], standalone_mode=False)\n"
        "print(sorted({'numpy', 'torch', 'boto3', 'transformers', 'filelock'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == str(imported)
