"""SGLang's own model classes, filled by our stream out of the memory of one tensor: bit for bit what its own loader makes of the same files. No engine runs.

Of the families that are asked for here, the only classes that cannot be imported without compiled kernels are those of Qwen3.5 and Qwen4; `test_what_can_be_imported` holds that fast.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.errors import PlacementError, UnsupportedQuantization
from tests.sglang.checkpoints import MAKERS
from tests.sglang.loading import hashes, load
from tests.support.fake_hub import fake_hub
from tests.support.fault_server import FaultServer
from tests.support.quantized import QuantizedCheckpoints
from tests.vllm.models import rewrite, save_llama, upload

pytestmark = pytest.mark.usefixtures("sglang_here")

ONE_TENSOR = {"memory_limit": 0}
IMPORTED = {
    "llama": "LlamaForCausalLM",
    "llama4": "Llama4ForCausalLM",
    "mllama4": "Llama4ForConditionalGeneration",
    "deepseek_v2": "DeepseekV3ForCausalLM",
    "deepseek_v4": "DeepseekV4ForCausalLM",
    "deepseek_nextn": "DeepseekV3ForCausalLMNextN",
    "kimi_k25": "KimiK25ForConditionalGeneration",
    "kimi_k3": "KimiK3ForConditionalGeneration",
    "kimi_linear": "KimiLinearForCausalLM",
    "kimi_vl": "KimiVLForConditionalGeneration",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
}
NOT_IMPORTED = {"qwen3_5": "fused_sigmoid_mul_cpu", "qwen4_exp": "fused_sigmoid_mul_cpu"}
"""Module to the kernel that its import asks for."""


def test_what_can_be_imported() -> None:
    for module, name in IMPORTED.items():
        assert hasattr(importlib.import_module(f"sglang.srt.models.{module}"), name)
    for module, kernel in NOT_IMPORTED.items():
        with pytest.raises(AttributeError, match=kernel):
            importlib.import_module(f"sglang.srt.models.{module}")


@pytest.mark.parametrize("architecture", MAKERS)
def test_our_stream_fills_a_model_as_its_own_loader_does(
    architecture: str, tmp_path: Path, bucket: str, s3_client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    folder = MAKERS[architecture](tmp_path / "model")
    uri = upload(s3_client, bucket, folder, "model")
    expected = load(str(folder), dtype="bfloat16")
    assert type(expected).__name__ == architecture
    with caplog.at_level("INFO"):
        found = load(uri, extra=ONE_TENSOR, dtype="bfloat16")
    assert type(found) is type(expected)
    assert len(set(hashes(expected).values())) > 10
    assert hashes(found) == hashes(expected)
    report = next(text for text in caplog.messages if "handed out" in text)
    assert "leased" in report
    assert "beyond the limit" not in report


@pytest.mark.parametrize(
    ("name", "dtype", "kind"),
    [
        ("modelopt-mxfp8-llama", torch.bfloat16, "Fp8Config"),
        ("modelopt-fp8-kvfp8-llama", torch.bfloat16, "ModelOptFp8Config"),
        ("ar-auto_awq-llama", torch.float16, "AWQConfig"),
    ],
)
def test_quantized_checkpoints_arrive_as_with_its_own_loader(
    name: str,
    dtype: torch.dtype,
    kind: str,
    quantized: QuantizedCheckpoints,
    bucket: str,
    s3_client: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As they arrive: what SGLang makes of them afterwards takes kernels, which are not here for all of them."""
    from sglang.srt.model_loader.loader import DefaultModelLoader

    monkeypatch.setattr(DefaultModelLoader, "postprocess_weights", staticmethod(lambda model, target_device: None))
    folder = quantized[name].folder
    uri = upload(s3_client, bucket, folder, "quantized")
    text = str(dtype).removeprefix("torch.")
    expected = load(str(folder), dtype=text)
    assert type(expected.quant_config).__name__ == kind
    assert {value.dtype for value in expected.state_dict().values()} - {torch.float32, dtype}
    assert hashes(load(uri, extra=ONE_TENSOR, dtype=text)) == hashes(expected)


def test_a_hub_and_a_web_server_are_stores_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = rewrite(save_llama(tmp_path / "llama"), lambda tensors: None)
    expected = hashes(load(str(folder), dtype="float32"))
    content = {path.name: path.read_bytes() for path in folder.iterdir()}
    with FaultServer() as server:
        for name, body in content.items():
            server.put(f"m/{name}", body)
        assert hashes(load(f"http://127.0.0.1:{server.port}/m", dtype="float32")) == expected
    with fake_hub(monkeypatch, tmp_path / "home") as hub:
        hub.publish("org/llama", content)
        assert hashes(load("hf://org/llama", dtype="float32")) == expected


def test_a_model_that_is_to_be_quantized_while_it_is_loaded_is_refused(tmp_path: Path) -> None:
    folder = save_llama(tmp_path / "llama")
    with pytest.raises(UnsupportedQuantization, match="--quantization modelopt_fp8 quantizes the model"):
        load(str(folder), load_format="headrace", quantization="modelopt_fp8", dtype="bfloat16")


@pytest.mark.parametrize(
    ("lost", "says"),
    [
        ("model.layers.2.mlp.down_proj.weight", r"layers\.2\.mlp\.down_proj\.weight \(nothing of it\)"),
        ("model.layers.1.self_attn.v_proj.weight", r"layers\.1\.self_attn\.qkv_proj\.weight \(75 % of it\)"),
        ("model.embed_tokens.weight", r"embed_tokens\.weight \(nothing of it\)"),
    ],
)
def test_a_missing_tensor_ends_the_load(lost: str, says: str, tmp_path: Path, bucket: str, s3_client: Any) -> None:
    """SGLang's own loaders serve what was in memory."""
    folder = rewrite(save_llama(tmp_path / "llama"), lambda tensors: tensors.pop(lost))
    load(str(folder), dtype="float32")
    uri = upload(s3_client, bucket, folder, "lost")
    with pytest.raises(PlacementError, match=rf"checkpoint {uri} does not fill the model.*{says}"):
        load(uri, dtype="float32")


def test_rows_that_only_pad_a_vocabulary_need_not_come(tmp_path: Path) -> None:
    folder = save_llama(tmp_path / "llama", vocab_size=301)
    model = load(str(folder), load_format="headrace", dtype="float32")
    assert model.lm_head.weight.shape[0] == 320
    assert hashes(model) == hashes(load(str(folder), dtype="float32"))


def test_a_missing_tensor_may_be_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lost = "model.layers.0.mlp.up_proj.weight"
    folder = rewrite(save_llama(tmp_path / "llama"), lambda tensors: tensors.pop(lost))
    load(str(folder), load_format="headrace", extra={"check_weights": False}, dtype="float32")
    assert any("gate_up_proj.weight (50 % of it)" in text for text in caplog.messages)


def test_what_sglang_looks_for_in_headers_is_answered(tmp_path: Path, bucket: str, s3_client: Any) -> None:
    """A DeepSeek may be FP8 and not say so; the folder of side files has no headers to look into."""
    from sglang.srt.model_loader.weight_utils import probe_routed_expert_weight_dtype
    from sglang.srt.utils.common import has_fp8_weights_in_checkpoint
    from sglang.srt.utils.runai_utils import ObjectStorageModel

    def as_fp8(tensors: dict[str, torch.Tensor]) -> None:
        for name in [one for one in tensors if "experts." in one]:
            tensors[name] = tensors[name].to(torch.float8_e4m3fn)

    plain = MAKERS["DeepseekV3ForCausalLM"](tmp_path / "plain")
    fp8 = rewrite(MAKERS["DeepseekV3ForCausalLM"](tmp_path / "fp8"), as_fp8)
    for folder, dtype in ((plain, "BF16"), (fp8, "F8_E4M3")):
        uri = upload(s3_client, bucket, folder, folder.name)
        side_files = ObjectStorageModel.download_and_get_path(uri)
        for place in (str(folder), uri, side_files):
            assert has_fp8_weights_in_checkpoint(place) is (dtype == "F8_E4M3")
        for place in (str(folder), side_files):
            assert probe_routed_expert_weight_dtype(place) == dtype
