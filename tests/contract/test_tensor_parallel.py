"""Tensor-parallel models: every rank has Transformers' own slices, asks for little else, and computes what one process does."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

import headrace
from headrace.settings import Settings
from tests.support.fault_server import FaultServer
from tests.support.rank_processes import RankProcesses

from .test_ranks import Place, opened, place_of

NUM_RANKS = 2
SETTINGS = {"progress": False, "gap_bytes": 4096}
TOKENS = torch.arange(1, 12)[None]

CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(
        hidden_size=256, intermediate_size=768, num_hidden_layers=2, vocab_size=1024,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False,
    ),
    "qwen3_moe": Qwen3MoeConfig(
        hidden_size=128, intermediate_size=256, moe_intermediate_size=64, num_hidden_layers=2, vocab_size=512,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=8, num_experts_per_tok=2,
    ),
}  # fmt: skip


def local(tensor: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def digests(model: Any) -> dict[str, str]:
    return {
        name: f"{tuple(local(value).shape)} {hashlib.sha256(local(value).detach().contiguous().numpy().tobytes()).hexdigest()}"
        for name, value in model.state_dict().items()
    }


def load_slices(rank: int, place: Place | str, shared: bool) -> tuple[dict[str, str], list[float], Any, int]:
    """Load this rank's part; return its hashes, the last logits, the report, and the bytes of memory that its parameters keep."""
    from torch.distributed.tensor import DTensor
    from transformers.distributed import DistributedConfig

    settings = Settings.from_environment({}, **SETTINGS)
    reports: list[Any] = []
    source = place if isinstance(place, str) else opened(place)
    model = headrace.load_model(
        source,
        dtype=torch.float32,
        distributed_config=DistributedConfig(tp_size=NUM_RANKS),
        distributed=shared,
        settings=settings,
        on_report=reports.append,
    )
    kept = {
        local(one).untyped_storage().data_ptr(): local(one).untyped_storage().nbytes() for one in model.parameters()
    }
    with torch.no_grad():
        logits = model(TOKENS).logits
    logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
    return digests(model), logits[0, -1].tolist(), reports[0], sum(kept.values())


def load_as_transformers_does(rank: int, folder: str) -> dict[str, str]:
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(tp_size=NUM_RANKS)
    return digests(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, distributed_config=config))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    with RankProcesses(NUM_RANKS, tmp_path_factory.mktemp("group")) as group:
        yield group


@pytest.fixture(scope="module", params=list(CONFIGS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    place: Path = tmp_path_factory.mktemp(request.param)
    AutoModelForCausalLM.from_config(CONFIGS[request.param], dtype=torch.float32).save_pretrained(place)
    return place


@pytest.mark.parametrize("shared", [False, True], ids=["each its slices", "each byte once"])
def test_slices_are_those_of_transformers(ranks: RankProcesses, folder: Path, shared: bool) -> None:
    ours = ranks.run(load_slices, str(folder), shared)
    assert [outcome.error for outcome in ours] == [None] * NUM_RANKS
    theirs = ranks.run(load_as_transformers_does, str(folder))
    assert [outcome.value[0] for outcome in ours] == [outcome.value for outcome in theirs]
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(TOKENS).logits[0, -1]
    for outcome in ours:
        assert torch.allclose(torch.tensor(outcome.value[1]), expected, atol=1e-5)
        report, kept_bytes = outcome.value[2:]
        assert kept_bytes < 0.8 * report.bytes_checkpoint, "slices that keep the whole tensor in memory save none"
        if shared:
            assert report.bytes_read == report.bytes_wanted == report.bytes_checkpoint
    if not shared and "llama" in str(folder):
        # Rows are halved; o_proj and down_proj are split by columns, too short to be asked for one by one.
        whole = sum(value.nbytes for value in _columns_of(folder)) / ours[0].value[2].bytes_checkpoint
        for outcome in ours:
            assert outcome.value[2].bytes_wanted / outcome.value[2].bytes_checkpoint <= 0.5 + whole / 2 + 0.01


def _columns_of(folder: Path) -> list[torch.Tensor]:
    loaded = headrace.load_state_dict(folder, settings=Settings(progress=False))
    return [value for name, value in loaded.items() if name.endswith(("o_proj.weight", "down_proj.weight"))]


def test_only_the_slices_are_asked_for(ranks: RankProcesses, tmp_path: Path) -> None:
    """Against a server that counts: a vocabulary that is most of the model is halved between the ranks."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        vocab_size=16384,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    objects = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with FaultServer() as server:
        for key, content in objects.items():
            server.put(key, content)
        outcomes = ranks.run(load_slices, place_of(server), False)
        assert [outcome.error for outcome in outcomes] == [None] * NUM_RANKS
        sent = sum(one.stop - one.start for one in server.log if one.key == "model.safetensors" and one.status == 206)
    assert sent < 1.1 * len(objects["model.safetensors"]), "both ranks together ask for little more than the file"
