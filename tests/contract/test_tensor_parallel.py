"""Tensor-, expert- and pipeline-parallel models: every rank has Transformers' own slices, asks for little else, and computes what one process does."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen3MoeConfig

import headrace
from headrace.errors import HeadraceError, InvalidSetting, ModelError, StreamError
from headrace.settings import Settings
from tests.support.fault_server import FaultServer
from tests.support.quantized import QuantizedCheckpoints
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

KINDS: dict[str, tuple[str, ...]] = {
    "tensor": ("tp_size",),
    "expert": ("tp_size", "ep_size"),
    "pipeline": ("pp_size",),
    "data": ("fsdp_size",),
}


def local(tensor: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor of any type; numpy has no FP8."""
    return tensor.reshape(-1).clone().view(torch.uint8).numpy().tobytes()


def digests(model: Any) -> dict[str, str]:
    return {
        name: f"{tuple(local(value).shape)} {hashlib.sha256(bytes_of(local(value).detach())).hexdigest()}"
        for name, value in model.state_dict().items()
    }


def distributed_config(kind: str) -> Any:
    from transformers.distributed import DistributedConfig

    return DistributedConfig(**dict.fromkeys(KINDS[kind], torch.distributed.get_world_size()))


def load_slices(
    rank: int, place: Place | str, shared: bool, kind: str = "tensor", dequantize: bool = False
) -> tuple[dict[str, str], list[float], Any, int]:
    """Load this rank's part; return its hashes, the last logits, the report, and the bytes of memory that its parameters keep."""
    from torch.distributed.tensor import DTensor

    settings = Settings.from_environment({}, **SETTINGS)
    reports: list[Any] = []
    source = place if isinstance(place, str) else opened(place)
    model = headrace.load_model(
        source,
        dtype=torch.float32,
        distributed_config=distributed_config(kind),
        distributed=shared,
        dequantize=dequantize,
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


def load_as_transformers_does(rank: int, folder: str, kind: str = "tensor") -> dict[str, str]:
    config = distributed_config(kind)
    return digests(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, distributed_config=config))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    with RankProcesses(NUM_RANKS, tmp_path_factory.mktemp("group")) as group:
        yield group


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {name: tmp_path_factory.mktemp(name) for name in CONFIGS}
    for name, place in found.items():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32).save_pretrained(place)
    return found


@pytest.mark.parametrize("shared", [False, True], ids=["each its own", "each byte once"])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("llama", "tensor"),
        ("llama", "pipeline"),
        ("qwen3_moe", "tensor"),
        ("qwen3_moe", "expert"),
        ("qwen3_moe", "pipeline"),
    ],
)
def test_slices_are_those_of_transformers(
    ranks: RankProcesses, folders: dict[str, Path], name: str, kind: str, shared: bool
) -> None:
    folder = folders[name]
    if shared and kind == "pipeline":
        for outcome in ranks.run(load_slices, str(folder), shared, kind):
            assert isinstance(outcome.error, StreamError) and "asked for other tensors" in str(outcome.error)
        return
    ours = ranks.run(load_slices, str(folder), shared, kind)
    assert [outcome.error for outcome in ours] == [None] * NUM_RANKS
    theirs = ranks.run(load_as_transformers_does, str(folder), kind)
    assert [outcome.value[0] for outcome in ours] == [outcome.value for outcome in theirs]
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(TOKENS).logits[0, -1]
    for outcome in ours:
        assert torch.allclose(torch.tensor(outcome.value[1]), expected, atol=1e-5)
        report, kept_bytes = outcome.value[2:]
        assert kept_bytes < 0.8 * report.bytes_checkpoint, "slices that keep the whole tensor in memory save none"
        if shared:
            assert report.bytes_read == report.bytes_wanted == report.bytes_checkpoint
    if shared:
        return
    wanted, total = [outcome.value[2].bytes_wanted for outcome in ours], ours[0].value[2].bytes_checkpoint
    if kind == "pipeline":
        assert sum(wanted) == total and max(wanted) < 0.6 * total
    else:
        # Rows are halved, and so are experts; what is split by columns is too short here to be asked for run by run.
        assert max(wanted) <= (0.5 + _whole_bytes(folder, kind) / total / 2 + 0.01) * total


@pytest.mark.parametrize("name", ["qwenfp8-qwen3", "ct-w4a16-asym-g128-llama", "modelopt-nvfp4-awqlite-llama"])
def test_packed_weights_are_expanded_from_their_slices(ranks: RankProcesses, tmp_path: Path, name: str) -> None:
    folder = QuantizedCheckpoints(tmp_path)[name].folder
    with torch.no_grad():
        whole = headrace.load_model(folder, dtype=torch.float32, dequantize=True, settings=Settings(progress=False))
        expected = whole(TOKENS).logits[0, -1]
    for outcome in ranks.run(load_slices, str(folder), False, "tensor", True):
        assert outcome.error is None, outcome.error
        _, logits, report, kept_bytes = outcome.value
        assert torch.allclose(torch.tensor(logits), expected, atol=1e-4)
        assert kept_bytes < 0.8 * sum(parameter.nbytes for parameter in whole.parameters())
        assert report.bytes_wanted < 0.8 * report.bytes_checkpoint


def test_what_is_not_loaded_by_parts_is_said(ranks: RankProcesses, folders: dict[str, Path]) -> None:
    for outcome in ranks.run(load_slices, str(folders["llama"]), False, "data"):
        assert isinstance(outcome.error, InvalidSetting) and "fsdp_size" in str(outcome.error)


@pytest.mark.parametrize(
    ("config", "error", "words"),
    [
        (GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=128), ModelError, "GPT2Model has none."),
        (
            LlamaConfig(
                hidden_size=64, intermediate_size=64, num_hidden_layers=1, vocab_size=128, num_attention_heads=2
            ),
            InvalidSetting,
            "and there are 1.",
        ),
    ],
    ids=["layers of another name", "fewer layers than stages"],
)
def test_stages_that_cannot_be_are_refused(
    ranks: RankProcesses, tmp_path: Path, config: Any, error: type[HeadraceError], words: str
) -> None:
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    for outcome in ranks.run(load_slices, str(tmp_path), False, "pipeline"):
        assert isinstance(outcome.error, error)
        assert words in str(outcome.error) and "No weight byte was read." in str(outcome.error)


def test_experts_that_ranks_cannot_share_equally_are_refused(ranks: RankProcesses, tmp_path: Path) -> None:
    config = copy.deepcopy(CONFIGS["qwen3_moe"])
    config.num_experts = 7
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    for outcome in ranks.run(load_slices, str(tmp_path), False, "expert"):
        assert isinstance(outcome.error, InvalidSetting)
        assert "shard 7 experts" in str(outcome.error) and "No weight byte was read." in str(outcome.error)


def _whole_bytes(folder: Path, kind: str) -> int:
    """Return how many bytes every rank reads."""
    loaded = headrace.load_state_dict(folder, settings=Settings(progress=False))
    if kind == "expert":
        return sum(value.nbytes for name, value in loaded.items() if "experts" not in name)
    return sum(value.nbytes for name, value in loaded.items() if name.endswith(("o_proj.weight", "down_proj.weight")))


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
