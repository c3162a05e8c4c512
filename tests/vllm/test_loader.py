"""The loader by itself: where a source's weights come from, which of them are asked for, and in whose memory they lie. No engine runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from headrace.errors import CheckpointError, InvalidSetting, NoWeights, UnsupportedQuantization
from headrace.settings import Settings
from tests.support.fault_server import FaultServer
from tests.support.loader_weights import assert_closing_ends_the_reading, assert_same, loaded, stored
from tests.vllm.models import save_llama, upload

pytestmark = pytest.mark.usefixtures("vllm_here")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def uri(llama: Path, bucket: str, s3_client: Any) -> str:
    return upload(s3_client, bucket, llama, "llama")


def make_loader(**extra: Any) -> Any:
    from vllm.config import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader

    return get_model_loader(LoadConfig(load_format="headrace", model_loader_extra_config=extra, use_tqdm_on_load=False))


def make_source(model: str, **options: Any) -> Any:
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    return DefaultModelLoader.Source(model, options.pop("revision", None), **options)


def test_a_source_is_a_uri_or_a_folder(uri: str, llama: Path) -> None:
    assert_same(loaded(make_loader(), make_source(uri)), stored(llama))
    assert_same(loaded(make_loader(), make_source(str(llama))), stored(llama))


def test_prefix_and_subfolder(llama: Path, bucket: str, s3_client: Any) -> None:
    upload(s3_client, bucket, llama, "whole/towers/audio")
    found = loaded(make_loader(), make_source(f"s3://{bucket}/whole", subfolder="towers/audio", prefix="audio."))
    assert_same(found, {f"audio.{name}": value for name, value in stored(llama).items()})


def test_the_index_counts(llama: Path, bucket: str, s3_client: Any) -> None:
    """The built-in loader takes every safetensors file that lies there."""
    uri = upload(s3_client, bucket, llama, "llama")
    s3_client.put_object(
        Bucket=bucket, Key="llama/consolidated.safetensors", Body=sorted(llama.glob("*.safetensors"))[0].read_bytes()
    )
    assert_same(loaded(make_loader(), make_source(uri)), stored(llama))


def test_patterns_of_the_model_name_files_beside_the_index(
    llama: Path, bucket: str, s3_client: Any, tmp_path: Path
) -> None:
    uri = upload(s3_client, bucket, llama, "llama")
    head = {"weight": torch.arange(6.0)}
    save_file(head, tmp_path / "head.safetensors")
    for key in ("joint_head.safetensors", "transformer/head.safetensors", "vae/head.safetensors"):
        s3_client.put_object(Bucket=bucket, Key=f"llama/{key}", Body=(tmp_path / "head.safetensors").read_bytes())
    joint = make_source(uri, allow_patterns_overrides=["joint_head.safetensors"], prefix="pooler.head.")
    assert_same(loaded(make_loader(), joint), {"pooler.head.weight": head["weight"]})
    nested = make_source(uri, allow_patterns_overrides=["absent*.safetensors", "[tv]*er/*.safetensors"])
    assert_same(loaded(make_loader(), nested), head)

    s3_client.put_object(Bucket=bucket, Key="llama/sparse_linear.pt", Body=b"pickled")
    for pattern, why in (("sparse_linear.pt", "not a safetensors file"), ("none.safetensors", "no such file")):
        with pytest.raises(CheckpointError, match=why):
            loaded(make_loader(), make_source(uri, allow_patterns_overrides=[pattern]))


def test_what_is_not_needed_is_not_asked_for(tmp_path: Path) -> None:
    """Of 8 experts 2 are here, a tower's weights are nobody's, and the language model is elsewhere."""
    big = 1 << 18
    tensors = {f"experts.{number}.w.weight": torch.full((big,), float(number)) for number in range(8)}
    tensors = {f"layers.0.mlp.{name}": value for name, value in tensors.items()}
    tensors |= {
        "layers.0.mlp.experts.7.w.weight_scale": torch.ones(1),  # some kernels want every expert's scale
        "layers.0.norm.weight": torch.ones(4),
        "mtp.fc.weight": torch.ones(big),
        "language_model.up.weight": torch.ones(big),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    with FaultServer() as server:
        server.put("m/model.safetensors", (tmp_path / "model.safetensors").read_bytes())
        server.put("m/config.json", b"{}")
        loader = make_loader()
        loader.local_expert_ids = {2, 3}
        loader._encoder_only_lm_prefixes = ("language_model.",)
        source = make_source(f"http://127.0.0.1:{server.port}/m", is_unused_weight=lambda name: name.startswith("mtp."))
        found = loaded(loader, source)
        body_bytes = sum(sent.bytes_sent for sent in server.log if sent.key == "m/model.safetensors")
    wanted = {
        "layers.0.mlp.experts.2.w.weight",
        "layers.0.mlp.experts.3.w.weight",
        "layers.0.mlp.experts.7.w.weight_scale",
        "layers.0.norm.weight",
    }
    assert_same(found, {name: tensors[name] for name in wanted})
    assert body_bytes < 2.5 * 4 * big  # two experts, the header, and the little that lies between


def test_nothing_of_a_source_may_be_needed(uri: str) -> None:
    assert loaded(make_loader(), make_source(uri, is_unused_weight=lambda name: True)) == {}


def test_tensors_are_lent_and_may_be_kept(uri: str, llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    loader = make_loader(memory_limit=300_000)
    kept = dict(loader._get_weights_iterator(make_source(uri)))
    assert_same(kept, stored(llama))  # nothing was overwritten under a tensor that somebody holds
    caplog.clear()
    for _ in loader._get_weights_iterator(make_source(uri)):
        pass
    staging = next(text for text in caplog.messages if "staging" in text)
    assert "leased" in staging
    assert "beyond the limit" not in staging


def test_a_name_of_the_hub_is_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, llama: Path) -> None:
    from tests.support.fake_hub import fake_hub

    with fake_hub(monkeypatch, tmp_path / "home") as hub:
        commit = hub.publish("org/llama", {path.name: path.read_bytes() for path in llama.iterdir()})
        assert_same(loaded(make_loader(), make_source("org/llama", revision=commit)), stored(llama))


def test_a_folder_of_side_files_with_its_uri(uri: str, llama: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())
    loader = make_loader(uri=uri, concurrency=2)
    model = ModelAt(str(tmp_path))
    assert_same(dict(loader.get_all_weights(model, torch.nn.Module())), stored(llama))
    loader.download_model(model)
    with pytest.raises(InvalidSetting, match="Only one of them can be meant"):
        loader._check_folder(ModelAt(str(llama)))
    with pytest.raises(NoWeights):
        dict(make_loader().get_all_weights(model, torch.nn.Module()))


class ModelAt:
    """As much of vLLM's configuration of a model as is asked for a source."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.model_weights = ""
        self.revision = None


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"concurency": 4}, "Did you mean concurrency"),
        ({"concurrency": 0}, "at least 1"),
        ({"concurrency": True}, "whole number"),
        ({"memory_limit": "4GB"}, "whole number"),
        ({"distributed": "yes"}, "true or false"),
        ({"uri": "/models/llama"}, "in which store"),
        ({"num_threads": 4}, "calls it concurrency"),
        ({"enable_weights_track": 1}, "true or false"),
    ],
)
def test_the_extra_config_is_checked_when_the_loader_is_made(extra: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidSetting, match=says):
        make_loader(**extra)


def test_the_extra_config_counts(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CONNECTIONS", "5")
    monkeypatch.setenv("HEADRACE_PROGRESS", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    settings: Settings = make_loader(concurrency=3, memory_limit=1 << 20, enable_weights_track=True)._settings()
    assert (settings.transport.num_connections, settings.memory_limit_bytes) == (3, 1 << 20)
    assert not settings.progress  # use_tqdm_on_load is off
    assert make_loader()._settings().transport.num_connections == 5
    assert make_loader(enable_weights_track=True).enable_weights_track is True


def test_torchao_is_refused(uri: str) -> None:
    loader = make_loader()
    loader.load_config.safetensors_load_strategy = "torchao"  # as vLLM sets it
    with pytest.raises(UnsupportedQuantization, match="torchao"):
        loader._get_weights_iterator(make_source(uri))


def test_closing_early_ends_the_reading(uri: str) -> None:
    assert_closing_ends_the_reading(make_loader(), make_source(uri))


def test_the_folder_of_side_files_is_made_where_it_is_missing(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker on another machine gets the path of the first process, which is not there."""
    from headrace.engines.vllm_takeover import Answers

    folder, _ = Answers().pull_model(uri, None)
    pinned = Path(folder).name
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path))
    model = ModelAt(str(tmp_path / "engines" / pinned))
    model.model_weights = uri
    loader = make_loader()
    loader._load.config = model
    loader._bring_side_files(model)
    assert json.loads((Path(model.model) / "config.json").read_text())["model_type"] == "llama"
