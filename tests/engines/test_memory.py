"""Memory at a size where a second copy would show: 600 MB, in processes of their own, from a real S3 server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

pytestmark = pytest.mark.slow

_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
}
_MEASURE = """
import json, os, re, sys
import torch, transformers, headrace, headrace.engines.transformers, headrace.storage.s3
from headrace.settings import Settings
uri, limit = sys.argv[1], int(sys.argv[2]) or None
settings = Settings.from_environment(progress=False, memory_limit_bytes=limit)
def peak():  # not ru_maxrss: a child inherits that of the process that spawned it
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
transformers.LlamaForCausalLM(transformers.LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=8))
before, reports = peak(), []
"""
_LOAD_MODEL = "model = headrace.load_model(uri, settings=settings, on_report=reports.append); kept = sum(p.nbytes for p in model.parameters())\n"
_LOAD_CAST = "model = headrace.load_model(uri, dtype=torch.float32, settings=settings, on_report=reports.append); kept = sum(p.nbytes for p in model.parameters())\n"
_LOAD_AWAY = (
    "state = headrace.load_state_dict(uri, device='meta', settings=settings, on_report=reports.append); kept = 0\n"
)
_STREAM_SECOND = """
kept_tensors = []
with headrace.stream(uri, settings=settings) as stream:
    for place, (name, tensor) in enumerate(stream):
        if place % 2: kept_tensors.append(tensor)
reports.append(stream.report); kept = sum(t.nbytes for t in kept_tensors)
"""
_END = "print(json.dumps({'peak': peak() - before, 'kept': kept, 'wanted': reports[0].bytes_wanted, 'staging': reports[0].peak_staging_bytes}))"


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory, seaweed: Any, s3_client: Any) -> str:
    """A 600 MB checkpoint in a bucket."""
    folder = tmp_path_factory.mktemp("large")
    hidden, inner, vocabulary = 2048, 5632, 32000
    shapes = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "lm_head.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(4):
        prefix = f"model.layers.{layer}."
        shapes |= {
            f"{prefix}self_attn.{name}_proj.weight": (hidden if name in "qo" else 512, hidden) for name in "qkvo"
        }
        shapes |= {
            f"{prefix}mlp.gate_proj.weight": (inner, hidden),
            f"{prefix}mlp.up_proj.weight": (inner, hidden),
            f"{prefix}mlp.down_proj.weight": (hidden, inner),
        }
        shapes |= {f"{prefix}{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    save_file(
        {name: torch.randn(shape).to(torch.bfloat16) for name, shape in shapes.items()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    s3_client.create_bucket(Bucket="large")
    for path in folder.iterdir():
        with path.open("rb") as body:
            s3_client.put_object(Bucket="large", Key=f"model/{path.name}", Body=body)
    (folder / "model.safetensors").unlink()
    return "s3://large/model"


def measure(program: str, uri: str, environment: dict[str, str], cache: Path, *, limit: int = 0) -> dict[str, int]:
    """Run a program in a process of its own; return its peak resident memory beyond the imports, and what the load reports."""
    import os

    command = [sys.executable, "-c", _MEASURE + program + _END, uri, str(limit)]
    done = subprocess.run(
        command,
        env={**os.environ, **environment, "HEADRACE_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    assert result["wanted"] > 500_000_000
    return result


def test_a_model_in_its_stored_dtype_peaks_at_its_size(
    uri: str, s3_environment: dict[str, str], tmp_path: Path
) -> None:
    result = measure(_LOAD_MODEL, uri, s3_environment, tmp_path)
    assert result["kept"] == result["wanted"]
    assert result["wanted"] < result["peak"] < result["wanted"] + 150_000_000


def test_a_cast_adds_the_budget_and_the_largest_tensor(
    uri: str, s3_environment: dict[str, str], tmp_path: Path
) -> None:
    result = measure(_LOAD_CAST, uri, s3_environment, tmp_path, limit=64 << 20)
    assert result["kept"] == 2 * result["wanted"]
    largest, read = 32000 * 2048 * 2, 16 << 20
    assert result["staging"] <= (64 << 20) + largest + read
    assert result["peak"] < result["kept"] + (64 << 20) + largest + 150_000_000


def test_tensors_that_go_to_another_device_leave_host_memory_within_the_budget(
    uri: str, s3_environment: dict[str, str], tmp_path: Path
) -> None:
    result = measure(_LOAD_AWAY, uri, s3_environment, tmp_path, limit=64 << 20)
    largest, read = 32000 * 2048 * 2, 16 << 20
    assert result["staging"] <= (64 << 20) + largest + read
    assert result["peak"] < (64 << 20) + largest + read + 60_000_000


def test_what_the_consumer_drops_is_freed(uri: str, s3_environment: dict[str, str], tmp_path: Path) -> None:
    result = measure(_STREAM_SECOND, uri, s3_environment, tmp_path, limit=64 << 20)
    assert result["peak"] < result["kept"] + (64 << 20) + 32000 * 2048 * 2 + 60_000_000 < result["wanted"]
