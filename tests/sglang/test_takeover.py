"""What the processes of one start know of a model in a store: all the same snapshot, wherever they run. No SGLang is asked."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from headrace.engines.sglang_takeover import FOLDERS_VARIABLE, Answers
from headrace.errors import NoWeights, ObjectChanged, ObjectNotFound
from headrace.settings import Settings
from tests.vllm.models import edit_config, save_llama, upload


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def uri(llama: Path, bucket: str, s3_client: Any) -> str:
    return upload(s3_client, bucket, llama, "llama")


def answers(cache_dir: Path, environment: dict[str, str]) -> Answers:
    return Answers(lambda: Settings(cache_dir=cache_dir, progress=False), environment)


def test_children_have_the_folder_of_the_first_process(
    uri: str, llama: Path, bucket: str, s3_client: Any, tmp_path: Path
) -> None:
    environment: dict[str, str] = {}
    folder = answers(tmp_path, environment).pull(uri)
    assert json.loads((Path(folder) / "config.json").read_text())["model_type"] == "llama"
    assert json.loads(environment[FOLDERS_VARIABLE]) == {uri: folder}

    changed = edit_config(Path(shutil.copytree(llama, tmp_path / "changed")), rope_theta=5.0)
    upload(s3_client, bucket, changed, "llama")
    assert answers(tmp_path, dict(environment)).folder_of(uri) == folder
    assert answers(tmp_path, {}).folder_of(uri) != folder
    assert answers(tmp_path, dict(environment)).folder_of(f"{uri}/") == folder


def test_a_machine_without_the_folder_brings_the_same_snapshot(
    uri: str, llama: Path, bucket: str, s3_client: Any, tmp_path: Path
) -> None:
    environment: dict[str, str] = {}
    folder = Path(answers(tmp_path / "here", environment).pull(uri))
    (tmp_path / "here").rename(tmp_path / "moved")
    there = answers(tmp_path / "there", dict(environment))
    found = Path(there.folder_of(uri))
    assert found.name == folder.name
    assert (found / "config.json").read_bytes() == (llama / "config.json").read_bytes()
    assert there.folder_of(uri) == str(found)

    file = sorted(llama.glob("*.safetensors"))[0]
    s3_client.put_object(Bucket=bucket, Key=f"llama/{file.name}", Body=file.read_bytes()[:-4] + b"\0\0\0\0")
    with pytest.raises(ObjectChanged, match="is not at snapshot"):
        answers(tmp_path / "elsewhere", dict(environment)).folder_of(uri)


def test_a_tokenizer_alone(llama: Path, bucket: str, s3_client: Any, tmp_path: Path) -> None:
    (tmp_path / "only").mkdir()
    (tmp_path / "only" / "tokenizer_config.json").write_text("{}")
    uri = upload(s3_client, bucket, tmp_path / "only", "tokenizer")
    environment: dict[str, str] = {}
    first = answers(tmp_path / "cache", environment)
    folder = first.pull(uri)
    assert (Path(folder) / "tokenizer_config.json").is_file()
    assert answers(tmp_path / "cache", dict(environment)).folder_of(uri) == folder
    assert first.entries(uri) is None
    with pytest.raises((NoWeights, ObjectNotFound)):
        first.pull(f"s3://{bucket}/nothing")


def test_stored_tensors_and_files(uri: str, llama: Path, bucket: str, s3_client: Any, tmp_path: Path) -> None:
    s3_client.put_object(Bucket=bucket, Key="llama/mtp.safetensors", Body=b"beside the index")
    known = answers(tmp_path, {})
    folder = known.pull(uri)
    names = {one.name for one in known.entries(folder) or ()}
    assert "model.embed_tokens.weight" in names
    assert {one.name for one in known.entries(uri) or ()} == names
    assert known.entries(str(llama)) is None  # a folder of the user's is SGLang's
    assert f"{uri}/mtp.safetensors" in known.weight_files(uri)
    assert len(known.weight_files(uri)) == 1 + len(list(llama.glob("*.safetensors")))
