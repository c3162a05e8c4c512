"""What the documentation says can be done: its Python runs, its commands and options exist, its tables are complete."""

from __future__ import annotations

import inspect
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer.main

from headrace import errors
from headrace.cli.main import app
from headrace.settings import Settings, TransportSettings

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLE_URI = "s3://bucket/llama"
"""Stands for the reader's own model; where an example runs here, a small model on the disk takes its place."""


def blocks(language: str) -> list[Any]:
    """Return every code block of ``language`` in all pages, with the page's name."""
    found = []
    for page in PAGES:
        for number, match in enumerate(
            re.finditer(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
        ):
            found.append(pytest.param(match[1], id=f"{page.relative_to(ROOT)}-{number}"))
    return found


def command_lines() -> Iterator[list[str]]:
    """Yield the words of every command in the pages' shell blocks, comments left out."""
    for block in blocks("bash"):
        for line in block.values[0].replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words:
                yield words


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=32,
    )
    folder = tmp_path_factory.mktemp("llama")
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("block", blocks("python"))
def test_python_runs(block: str, small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("HEADRACE_PROGRESS", "0")
    assert EXAMPLE_URI in block
    names: dict[str, Any] = {}
    exec(block.replace(EXAMPLE_URI, str(small_model)), names)  # noqa: S102  The project's own examples.
    if "load_state_dict" in block:
        assert len(names["state_dict"]) == 12
    if "load_model" in block:
        assert type(names["model"]).__name__ == "LlamaForCausalLM"


def test_headrace_commands_exist() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    seen = set()
    for words in command_lines():
        if words[0] != "headrace":
            continue
        command = commands[words[1]]
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        given = {word.partition("=")[0] for word in words[2:] if word.startswith("-")}
        assert given <= known, f"{' '.join(words)}: {sorted(given - known)}"
        seen.add(words[1])
    assert {"inspect", "load", "serve"} <= seen


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    used = {word for words in command_lines() if words[0] == "make" for word in words[1:] if "=" not in word}
    assert {"demo", "test"} <= used <= targets


def test_extras_exist() -> None:
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    used = {
        name
        for words in command_lines()
        if words[0] == "pip"
        for name in re.findall(r"[a-z0-9]+", words[-1].partition("[")[2])
    }
    assert used
    assert used <= extras
    listed = set(re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/guide/quickstart.md").read_text(), re.MULTILINE))
    assert listed == extras - {"all"}


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.relative_to(ROOT)}: {target}"


def test_command_reference_names_every_option() -> None:
    text = (ROOT / "docs/reference/cli.md").read_text()
    sections = dict(re.findall(r"^## headrace (\w+).*?\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert set(sections) == set(commands)
    for name, command in commands.items():
        options = {
            option
            for parameter in command.params
            for option in (*parameter.opts, *parameter.secondary_opts)
            if option.startswith("-")
        }
        assert set(re.findall(r"`(--?[a-z-]+)`", sections[name])) - {"--pipeline-parallel-size"} == options


def test_settings_reference_is_complete() -> None:
    text = (ROOT / "docs/reference/settings.md").read_text().partition("\n## ")[0]
    rows = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    own = {field.name for kind in (Settings, TransportSettings) for field in fields(kind)}
    assert rows == own - {"transport", "sources"}
    source = (ROOT / "src/headrace/settings.py").read_text()
    read = set(re.findall(r'^    "([A-Z_]+)": \(', source, re.MULTILINE))
    assert "HEADRACE_CACHE_DIR" in read
    assert read <= set(re.findall(r"`([A-Z_]+)`", text))


def test_error_reference_is_complete() -> None:
    text = (ROOT / "docs/reference/errors.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (?:`(\w+)`)? ?\|", text, re.MULTILINE))
    classes = {
        name: kind
        for name, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, errors.HeadraceError)
    }
    assert rows == {
        name: "" if kind is errors.HeadraceError else kind.__bases__[0].__name__ for name, kind in classes.items()
    }
