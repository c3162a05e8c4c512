"""The loader by itself: where a source's weights come from, in whose memory they lie, and what is said before any of them is touched. No engine runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from headrace.errors import CheckpointError, InvalidSetting, MissingFiles, NoWeights, ObjectChanged
from headrace.settings import Settings
from tests.support.loader_weights import assert_closing_ends_the_reading, assert_same, loaded, stored
from tests.vllm.models import save_llama, upload

pytestmark = pytest.mark.usefixtures("sglang_here")

MARKER = "_sglang_runai_streamer_tensor"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def uri(llama: Path, bucket: str, s3_client: Any) -> str:
    return upload(s3_client, bucket, llama, "llama")


@pytest.fixture
def configured(llama: Path) -> Iterator[Any]:
    """Publishes a configuration as a worker has it; a plain one afterwards, since it is of the process."""
    from tests.sglang import loading

    yield loading.configured
    loading.configured(str(llama), dtype="float32")


class ModelAt:
    """As much of SGLang's configuration of a model as is asked for a source."""

    def __init__(self, model_path: str, model_weights: str | None = None, **hf_config: Any) -> None:
        self.model_path = model_path
        self.revision = None
        self.hf_config = type("Config", (), hf_config)()
        if model_weights is not None:
            self.model_weights = model_weights


def make_loader(load_format: str = "headrace", **extra: Any) -> Any:
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader.loader import get_model_loader

    index = extra.pop("draft_model_idx", None)
    return get_model_loader(LoadConfig(load_format=load_format, model_loader_extra_config=extra, draft_model_idx=index))


def make_source(model: str, **options: Any) -> Any:
    from sglang.srt.model_loader.loader import DefaultModelLoader

    return DefaultModelLoader.Source(model, options.pop("revision", None), **options)


@pytest.mark.parametrize("load_format", ["headrace", "runai_streamer"])
def test_a_source_is_a_uri_or_a_folder(load_format: str, uri: str, llama: Path) -> None:
    assert_same(loaded(make_loader(load_format), make_source(uri)), stored(llama))
    assert_same(loaded(make_loader(load_format), make_source(str(llama))), stored(llama))


def test_a_name_of_the_hub_is_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, llama: Path) -> None:
    from tests.support.fake_hub import fake_hub

    with fake_hub(monkeypatch, tmp_path / "home") as hub:
        commit = hub.publish("org/llama", {path.name: path.read_bytes() for path in llama.iterdir()})
        assert_same(loaded(make_loader(), make_source("org/llama", revision=commit)), stored(llama))


def test_prefix(uri: str, llama: Path) -> None:
    found = loaded(make_loader(), make_source(uri, prefix="tower."))
    assert_same(found, {f"tower.{name}": value for name, value in stored(llama).items()})


def test_the_index_counts(llama: Path, bucket: str, s3_client: Any) -> None:
    uri = upload(s3_client, bucket, llama, "llama")
    content = sorted(llama.glob("*.safetensors"))[0].read_bytes()
    s3_client.put_object(Bucket=bucket, Key="llama/consolidated.safetensors", Body=content)
    assert_same(loaded(make_loader(), make_source(uri)), stored(llama))


def test_patterns_of_the_model_name_files_beside_the_index(
    uri: str, bucket: str, s3_client: Any, tmp_path: Path
) -> None:
    head = {"weight": torch.arange(6.0)}
    save_file(head, tmp_path / "head.safetensors")
    s3_client.put_object(
        Bucket=bucket, Key="llama/tower/head.safetensors", Body=(tmp_path / "head.safetensors").read_bytes()
    )
    found = loaded(make_loader(), make_source(uri, allow_patterns_overrides=["tower/*.safetensors"]))
    assert_same(found, head)
    with pytest.raises(CheckpointError, match=r"match absent/\*\.safetensors\. There is no such file"):
        make_loader()._get_weights_iterator(make_source(uri, allow_patterns_overrides=["absent/*.safetensors"]))


def test_a_file_that_the_index_forgot_is_loaded_where_sglang_does(
    uri: str, llama: Path, bucket: str, s3_client: Any, tmp_path: Path
) -> None:
    extra = {"model.layers.4.eh_proj.weight": torch.arange(8.0)}
    save_file(extra, tmp_path / "mtp.safetensors")
    s3_client.put_object(Bucket=bucket, Key="llama/mtp.safetensors", Body=(tmp_path / "mtp.safetensors").read_bytes())
    glm = {"architectures": ["Glm4MoeForCausalLM"], "num_nextn_predict_layers": 1}
    found = loaded(make_loader(), make_source(uri, model_config=ModelAt(uri, **glm)))
    assert_same(found, stored(llama) | extra)
    plain = ModelAt(uri, architectures=["LlamaForCausalLM"], num_nextn_predict_layers=1)
    assert_same(loaded(make_loader(), make_source(uri, model_config=plain)), stored(llama))


def test_one_of_several_draft_layers(bucket: str, s3_client: Any, tmp_path: Path) -> None:
    tensors = {f"model.mtp.layers.{layer}.proj.weight": torch.full((4,), float(layer)) for layer in range(3)}
    save_file(tensors | {"model.norm.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    s3_client.put_object(Bucket=bucket, Key="mtp/model.safetensors", Body=(tmp_path / "model.safetensors").read_bytes())
    found = loaded(make_loader(draft_model_idx=2), make_source(f"s3://{bucket}/mtp"))
    assert_same(found, {"model.mtp.layers.0.proj.weight": torch.full((4,), 2.0), "model.norm.weight": torch.ones(2)})


def test_tensors_are_marked_and_so_are_their_storages(uri: str) -> None:
    from sglang.srt.model_loader.utils import should_async_load

    seen = 0
    for _, tensor in make_loader(memory_limit=0)._get_weights_iterator(make_source(uri, prefix="x.")):
        assert getattr(tensor, MARKER, False)
        assert getattr(tensor[:1].untyped_storage(), MARKER, False)
        assert not should_async_load(tensor)  # SGLang copies it before it asks for the next
        seen += 1
    assert seen == 39


def test_tensors_are_lent_and_may_be_kept(uri: str, llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = dict(make_loader(memory_limit=300_000)._get_weights_iterator(make_source(uri)))
    assert_same(kept, stored(llama))  # nothing was overwritten under a tensor that somebody holds
    caplog.clear()
    for _ in make_loader(memory_limit=300_000)._get_weights_iterator(make_source(uri)):
        pass
    staging = next(text for text in caplog.messages if "staging" in text)
    assert "leased" in staging
    assert "beyond the limit" not in staging


def test_what_is_wrong_is_said_before_a_weight_is_touched(uri: str, llama: Path, bucket: str, s3_client: Any) -> None:
    """SGLang then keeps the weights that it has: an update fails, and the engine serves on."""
    name = sorted(llama.glob("*.safetensors"))[-1].name
    s3_client.delete_object(Bucket=bucket, Key=f"llama/{name}")
    with pytest.raises(MissingFiles, match=name):
        make_loader()._get_weights_iterator(make_source(uri))


def test_closing_early_ends_the_reading(uri: str) -> None:
    assert_closing_ends_the_reading(make_loader(), make_source(uri))


def test_a_folder_of_side_files_with_its_uri(uri: str, llama: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())
    source = make_source(str(tmp_path), model_config=ModelAt(str(tmp_path)))
    loader = make_loader(uri=uri, concurrency=2)
    assert_same(loaded(loader, source), stored(llama))
    with pytest.raises(InvalidSetting, match="Only one of them can be meant"):
        loader._get_weights_iterator(make_source(str(llama)))
    with pytest.raises(NoWeights):
        make_loader()._get_weights_iterator(source)


def test_the_folder_of_the_takeover_is_of_one_snapshot(uri: str, llama: Path, bucket: str, s3_client: Any) -> None:
    """As in a worker: SGLang's configuration has the folder and, beside it, the uri."""
    from sglang.srt.utils.runai_utils import ObjectStorageModel

    folder = ObjectStorageModel.download_and_get_path(uri)
    source = make_source(folder, model_config=ModelAt(folder, uri))
    assert_same(loaded(make_loader("runai_streamer"), source), stored(llama))

    file = sorted(llama.glob("*.safetensors"))[0]
    s3_client.put_object(Bucket=bucket, Key=f"llama/{file.name}", Body=file.read_bytes()[:-4] + b"\0\0\0\0")
    with pytest.raises(ObjectChanged, match="is not at snapshot"):
        make_loader("runai_streamer")._get_weights_iterator(source)
    # An update names the uri, with what was said of the model before still there; it takes what is in the store now.
    after = make_source(uri, model_config=ModelAt(uri, uri))
    assert not torch.equal(
        torch.cat([value.flatten() for value in loaded(make_loader(), after).values()]),
        torch.cat([stored(llama)[name].flatten() for name in loaded(make_loader(), after)]),
    )


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"concurency": 4}, "Did you mean concurrency"),
        ({"concurrency": 0}, "at least 1"),
        ({"memory_limit": "4GB"}, "whole number"),
        ({"uri": "/models/llama"}, "in which store"),
        ({"num_threads": 4}, "calls it concurrency"),
    ],
)
def test_the_extra_config_is_checked_when_the_loader_is_made(extra: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidSetting, match=says):
        make_loader(**extra)


def test_the_extra_config_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CONNECTIONS", "5")
    settings: Settings = make_loader(concurrency=3, memory_limit=1 << 20)._settings()
    assert (settings.transport.num_connections, settings.memory_limit_bytes) == (3, 1 << 20)
    assert make_loader()._settings().transport.num_connections == 5


def test_an_update_loads_as_the_start_did(configured: Any, llama: Path) -> None:
    """SGLang makes the loader for it from a configuration without extras."""
    configured(str(llama), load_format="headrace", extra={"concurrency": 3, "check_weights": False}, dtype="float32")
    loader = make_loader()
    assert loader._settings().transport.num_connections == 3
    assert loader.options.check_weights is False
    assert make_loader(concurrency=2)._settings().transport.num_connections == 2
    configured(str(llama), load_format="auto", extra={"num_threads": 3}, dtype="float32")
    assert make_loader().options.extra.concurrency is None


def test_checksums_of_files_are_refused(configured: Any, uri: str, llama: Path) -> None:
    configured(str(llama), load_format="headrace", model_checksum="sums.json", dtype="float32")
    with pytest.raises(InvalidSetting, match="model_checksum cannot be used"):
        make_loader()._get_weights_iterator(make_source(uri))


def test_an_adapter_is_read_by_sglang_itself(configured: Any, llama: Path, tmp_path: Path) -> None:
    """SGLang reads adapters with the model's configuration, whose load format and extras are ours."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.lora.lora import LoRAAdapter

    configured(str(llama), dtype="float32")
    tensors = {"base_model.model.layers.0.q_proj.lora_A.weight": torch.arange(6.0)}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    adapter = LoRAAdapter.__new__(LoRAAdapter)
    torch.nn.Module.__init__(adapter)
    adapter.load_config = LoadConfig(load_format="runai_streamer", model_loader_extra_config={"concurrency": 2})
    adapter.config = SimpleNamespace(path=str(tmp_path), hf_config=None)
    found: dict[str, torch.Tensor] = {}
    adapter._process_weight = found.__setitem__
    adapter._normalize_weights = lambda: None
    adapter.initialize_weights()
    assert_same(found, tensors)
