"""vLLM's engine in this process: the same tokens as from a disk, a start that fails where something is wrong, and weights that change under a running engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from headrace.errors import ObjectChanged, PlacementError
from tests.support.quantized import QuantizedCheckpoints
from tests.vllm.models import edit_config, greedy, parameters, rewrite, running, save_llama, upload
from tests.vllm.test_configuration import unpacked_layer

pytestmark = [pytest.mark.usefixtures("vllm_here"), pytest.mark.slow]


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save_llama(tmp_path / "llama")


def tokens(model: str, **options: Any) -> list[int]:
    with running(model, **options) as engine:
        return greedy(engine)


def test_the_tokens_are_those_from_a_disk(llama: Path, bucket: str, s3_client: Any, tmp_path: Path) -> None:
    uri = upload(s3_client, bucket, llama, "llama")
    expected = tokens(str(llama))
    assert len(set(expected)) > 3
    assert tokens(uri) == expected

    # Without the takeover: side files that somebody has copied, and the uri beside them.
    side_files = tmp_path / "side"
    side_files.mkdir()
    (side_files / "config.json").write_bytes((llama / "config.json").read_bytes())
    given = {"load_format": "headrace", "model_loader_extra_config": {"uri": uri, "concurrency": 2}}
    assert tokens(str(side_files), **given) == expected


def test_a_reload_takes_what_is_in_the_store_then(llama: Path, bucket: str, s3_client: Any, tmp_path: Path) -> None:
    uri = upload(s3_client, bucket, llama, "llama")
    other = save_llama(tmp_path / "other", seed=1)
    third = save_llama(tmp_path / "third", seed=2)
    with running(uri) as engine:
        before = greedy(engine)
        upload(s3_client, bucket, other, "llama")
        engine.collective_rpc("reload_weights")
        engine.reset_prefix_cache()
        after = greedy(engine)
        found = parameters(engine)
        elsewhere = upload(s3_client, bucket, third, "third")
        engine.collective_rpc("reload_weights", kwargs={"weights_path": elsewhere})
        moved = parameters(engine)
    assert after != before
    assert_holds(found, other)
    assert_holds(moved, third)


def assert_holds(found: dict[str, torch.Tensor], folder: Path) -> None:
    """Compare what the engine keeps as it is stored: norms and embedding."""
    stored = {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}
    names = [name for name in found if name in stored and ("norm" in name or "embed" in name)]
    assert len(names) >= 10
    assert all(torch.equal(found[name][: len(stored[name])], stored[name]) for name in names)


def test_a_head_beside_a_tied_flag_is_used(llama: Path, bucket: str, s3_client: Any, tmp_path: Path) -> None:
    expected = tokens(str(llama))  # the head and the embedding differ
    edit_config(llama, tie_word_embeddings=True)
    uri = upload(s3_client, bucket, llama, "tied")
    assert tokens(uri) == expected

    # Where vLLM had only side files to look at, it would drop the head: that is said.
    side_files = tmp_path / "side"
    side_files.mkdir()
    (side_files / "config.json").write_bytes((llama / "config.json").read_bytes())
    given = {"load_format": "headrace", "model_loader_extra_config": {"uri": uri}}
    with pytest.raises(PlacementError, match="--hf-overrides"):
        tokens(str(side_files), **given)
    assert tokens(str(side_files), **given, hf_overrides={"tie_word_embeddings": False}) == expected


def test_awq_with_a_layer_in_half_precision(
    quantized: QuantizedCheckpoints, tmp_path: Path, bucket: str, s3_client: Any
) -> None:
    folder = unpacked_layer(quantized["ar-auto_awq-llama"].copied(tmp_path))
    uri = upload(s3_client, bucket, folder, "awq")
    assert tokens(uri, dtype="float16") == tokens(str(folder), dtype="float16")

    side_files = tmp_path / "side"
    side_files.mkdir()
    for name in ("config.json", "quantization_config.json"):
        (side_files / name).write_bytes((folder / name).read_bytes())
    with pytest.raises((PlacementError, KeyError, ValueError)):  # never random values
        tokens(str(side_files), dtype="float16", load_format="headrace", model_loader_extra_config={"uri": uri})


@pytest.mark.parametrize(
    ("lost", "says"),
    [
        ("model.layers.2.mlp.down_proj.weight", r"layers\.2\.mlp\.down_proj\.weight \(nothing of it\)"),
        ("model.layers.1.self_attn.v_proj.weight", r"layers\.1\.self_attn\.qkv_proj\.weight \(75 % of it\)"),
        ("model.layers.3.input_layernorm.weight", r"vLLM says: .*layers\.3\.input_layernorm"),
    ],
)
def test_a_missing_tensor_ends_the_start(lost: str, says: str, llama: Path, bucket: str, s3_client: Any) -> None:
    """vLLM's own check says nothing of the first two."""
    rewrite(llama, lambda tensors: tensors.pop(lost))
    uri = upload(s3_client, bucket, llama, "lost")
    with pytest.raises(PlacementError, match=rf"checkpoint {uri} does not fill the model.*{says}"):
        tokens(uri)


def test_an_object_that_changes_before_it_is_loaded_ends_the_start(
    llama: Path, bucket: str, s3_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The configuration was read from one snapshot; a worker must not load another."""
    from headrace.engines.vllm_loader import HeadraceLoader

    uri = upload(s3_client, bucket, llama, "llama")
    load_model = HeadraceLoader.load_model
    file = sorted(llama.glob("*.safetensors"))[0]

    def late(self: Any, *arguments: Any, **options: Any) -> Any:
        s3_client.put_object(Bucket=bucket, Key=f"llama/{file.name}", Body=file.read_bytes()[:-4] + b"\0\0\0\0")
        return load_model(self, *arguments, **options)

    monkeypatch.setattr(HeadraceLoader, "load_model", late)
    with pytest.raises(ObjectChanged, match="is not at snapshot"):
        tokens(uri)


def test_a_draft_model_comes_from_its_own_uri(llama: Path, bucket: str, s3_client: Any, tmp_path: Path) -> None:
    uri = upload(s3_client, bucket, llama, "llama")
    small = upload(s3_client, bucket, save_llama(tmp_path / "small", seed=5, num_layers=1), "small")
    how = {"model": small, "num_speculative_tokens": 2, "method": "draft_model"}
    assert tokens(uri, speculative_config=how) == tokens(str(llama))
