"""What vLLM decides before any loader runs, from a uri: with our answers it is what it decides from the same folder on a disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save, save_file

from headrace.errors import InvalidIndex, MissingFiles, NoWeights, TruncatedObject
from tests.support.fake_hub import fake_hub
from tests.support.fault_server import FaultServer
from tests.support.quantized import QuantizedCheckpoints
from tests.vllm.models import edit_config, rewrite, save_llama, upload

pytestmark = pytest.mark.usefixtures("vllm_here")


def configured(model: str, **options: Any) -> Any:
    """Return vLLM's whole configuration for ``model``, as each of its front ends makes it."""
    from vllm.engine.arg_utils import EngineArgs

    given = {"skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 64, **options}
    return EngineArgs(model=model, **given).create_engine_config()


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save_llama(tmp_path / "llama")


def test_a_uri_alone_is_enough_and_is_the_same_at_the_next_start(
    llama: Path, bucket: str, s3_client: Any, cache_dir: Path
) -> None:
    uri = upload(s3_client, bucket, llama, "llama")
    first, second = configured(uri), configured(f"{uri}/")
    model = first.model_config
    assert (model.model_weights, first.load_config.load_format) == (uri, "runai_streamer")
    assert model.tokenizer == model.model
    assert Path(model.model).parent == cache_dir / "engines"
    assert json.loads((Path(model.model) / "config.json").read_text())["model_type"] == "llama"
    assert not list(Path(model.model).glob("*.safetensors"))
    # vLLM keys its compile cache by this; the path is a part of it.
    assert second.model_config.model == model.model
    assert configured(uri).compute_hash() == first.compute_hash()

    s3_client.put_object(Bucket=bucket, Key="llama/generation_config.json", Body=b'{"temperature": 0.5}')
    changed = configured(uri).model_config
    assert changed.model != model.model
    assert (Path(model.model) / "generation_config.json").read_bytes() != b'{"temperature": 0.5}'  # as it was


def test_our_own_name_may_be_given_with_a_uri(llama: Path, bucket: str, s3_client: Any) -> None:
    uri = upload(s3_client, bucket, llama, "llama")
    config = configured(uri, load_format="headrace")
    from vllm.model_executor.model_loader import get_model_loader

    assert type(get_model_loader(config.load_config)).__name__ == "HeadraceLoader"
    with pytest.raises(ValueError, match="must be"):  # vLLM's own word on others
        configured(uri, load_format="safetensors")


def test_a_local_folder_stays_vllms(llama: Path) -> None:
    config = configured(str(llama))
    assert (config.load_config.load_format, config.model_config.model) == ("auto", str(llama))
    assert not config.model_config.model_weights


def test_a_head_beside_a_tied_flag_is_seen(llama: Path, bucket: str, s3_client: Any) -> None:
    edit_config(llama, tie_word_embeddings=True)
    uri = upload(s3_client, bucket, llama, "tied")
    assert configured(str(llama)).model_config.word_embeddings_untied_by_checkpoint
    model = configured(uri).model_config
    assert model.word_embeddings_untied_by_checkpoint
    assert not model.hf_config.tie_word_embeddings


def test_the_dtype_comes_from_the_headers(llama: Path, bucket: str, s3_client: Any) -> None:
    def halve(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({name: value.to(torch.bfloat16) for name, value in tensors.items()})

    edit_config(rewrite(llama, halve), dtype=None, torch_dtype=None)
    uri = upload(s3_client, bucket, llama, "bf16")
    assert configured(uri).model_config.dtype is torch.bfloat16
    assert configured(str(llama)).model_config.dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("name", "attribute"),
    [("ar-auto_awq-llama", "modules_to_not_convert"), ("ar-auto_gptq-llama", "modules_in_block_to_quantize")],
)
def test_layers_that_are_not_packed_are_seen(
    name: str, attribute: str, quantized: QuantizedCheckpoints, tmp_path: Path, bucket: str, s3_client: Any
) -> None:
    folder = unpacked_layer(quantized[name].copied(tmp_path))
    uri = upload(s3_client, bucket, folder, name)
    local, ours = (getattr(configured(one).quant_config, attribute) for one in (str(folder), uri))
    assert sorted(ours) == sorted(
        set(local) - {"__metadata__"}
    )  # the free text in a header, which vLLM takes for a tensor
    layer = "model.layers.0.mlp.down_proj"
    assert (layer in ours) is (attribute == "modules_to_not_convert")
    assert len(ours) > 1


def unpacked_layer(folder: Path) -> Path:
    """Leave one layer of a packed checkpoint in half precision, as tools do with sensitive ones, and take the list of such layers out of the configuration."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        layer = "model.layers.0.mlp.down_proj"
        for part in ("qweight", "qzeros", "scales", "g_idx"):
            tensors.pop(f"{layer}.{part}", None)
        generator = torch.Generator().manual_seed(3)
        tensors[f"{layer}.weight"] = (torch.randn(256, 512, generator=generator) * 0.05).to(torch.float16)

    rewrite(folder, change)
    for file in ("config.json", "quantization_config.json"):
        path = folder / file
        if path.exists():
            config = json.loads(path.read_text())
            (config.get("quantization_config") or config).pop("modules_to_not_convert", None)
            path.write_text(json.dumps(config))
    return folder


def test_a_missing_file_ends_the_start_before_any_worker(llama: Path, bucket: str, s3_client: Any) -> None:
    uri = upload(s3_client, bucket, llama, "holes")
    gone = sorted(llama.glob("*.safetensors"))[1].name
    s3_client.delete_object(Bucket=bucket, Key=f"holes/{gone}")
    with pytest.raises(MissingFiles, match=gone):
        configured(uri)


def test_a_truncated_file_ends_the_start_before_any_worker(llama: Path, bucket: str, s3_client: Any) -> None:
    uri = upload(s3_client, bucket, llama, "cut")
    cut = sorted(llama.glob("*.safetensors"))[1]
    s3_client.put_object(Bucket=bucket, Key=f"cut/{cut.name}", Body=cut.read_bytes()[:-100])
    with pytest.raises(TruncatedObject, match=cut.name):
        configured(uri)


def test_a_missing_tensor_that_the_index_names_ends_the_start(llama: Path, bucket: str, s3_client: Any) -> None:
    uri = upload(s3_client, bucket, llama, "lost")
    file = sorted(llama.glob("*.safetensors"))[1]
    s3_client.put_object(Bucket=bucket, Key=f"lost/{file.name}", Body=save({"other": torch.zeros(3)}))
    with pytest.raises(InvalidIndex, match="does not hold"):
        configured(uri)


def test_a_place_without_weights_is_none(llama: Path, bucket: str, s3_client: Any) -> None:
    s3_client.put_object(Bucket=bucket, Key="bare/config.json", Body=(llama / "config.json").read_bytes())
    with pytest.raises(NoWeights):
        configured(f"s3://{bucket}/bare")


def test_a_tokenizer_may_lie_elsewhere(llama: Path, bucket: str, s3_client: Any) -> None:
    s3_client.put_object(Bucket=bucket, Key="words/tokenizer.json", Body=b'{"version": "1.0"}')
    uri = upload(s3_client, bucket, llama, "llama")
    model = configured(uri, tokenizer=f"s3://{bucket}/words").model_config
    assert (Path(model.tokenizer) / "tokenizer.json").read_bytes() == b'{"version": "1.0"}'
    assert not (Path(model.model) / "tokenizer.json").exists()


def test_small_weights_beside_the_model_are_found(llama: Path, bucket: str, s3_client: Any) -> None:
    """Sentence-transformers keep a projection in a folder of its own, and vLLM leaves it out without a word where the file is absent."""
    from vllm.transformers_utils.repo_utils import get_hf_file_bytes

    (llama / "2_Dense").mkdir()
    save_file({"linear.weight": torch.ones(4, 4)}, llama / "2_Dense" / "model.safetensors")
    uri = upload(s3_client, bucket, llama, "dense")
    folder = configured(uri).model_config.model
    expected = (llama / "2_Dense" / "model.safetensors").read_bytes()
    assert get_hf_file_bytes("2_Dense/model.safetensors", folder, None) == expected
    assert get_hf_file_bytes("2_Dense/pytorch_model.bin", folder, None) is None
    assert get_hf_file_bytes("config.json", folder, None) == (llama / "config.json").read_bytes()


def test_mistrals_own_layout_is_recognised_only_where_it_is_the_checkpoint(
    llama: Path, bucket: str, s3_client: Any
) -> None:
    from vllm.transformers_utils.repo_utils import is_mistral_model_repo

    save_file({"norm.weight": torch.ones(4)}, llama / "consolidated.safetensors")
    both = configured(upload(s3_client, bucket, llama, "both")).model_config.model
    assert not is_mistral_model_repo(both)
    for path in llama.glob("model*"):
        path.unlink()
    alone = configured(upload(s3_client, bucket, llama, "alone")).model_config.model
    assert is_mistral_model_repo(alone)


def test_a_web_server_works_too(llama: Path) -> None:
    with FaultServer() as server:
        for path in llama.iterdir():
            server.put(f"llama/{path.name}", path.read_bytes())
        url = f"http://127.0.0.1:{server.port}/llama"
        model = configured(url).model_config
    assert model.model_weights == url
    assert model.hf_config.num_hidden_layers == 4


def test_the_hub_works_too(llama: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files = {path.name: path.read_bytes() for path in llama.iterdir()}
    with fake_hub(monkeypatch, tmp_path / "home") as hub:
        first = hub.publish("org/llama", files)
        hub.publish("org/llama", files | {"config.json": b"{}"})
        model = configured("hf://org/llama", revision=first).model_config
    assert model.model_weights == f"hf://org/llama@{first}"
    assert Path(model.model, "config.json").read_bytes() == files["config.json"]
