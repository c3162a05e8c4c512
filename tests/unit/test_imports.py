"""The arrows between packages point one way, and optional packages are imported only where they belong."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import headrace

ROOT = Path(headrace.__file__).parent

GROUND = {"errors", "lazynames", "process", "processors", "units", "settings", "progress"}
"""Modules at the top that everything may use; among themselves they follow `GROUND_ARROWS`."""

GROUND_ARROWS = {
    "errors": set(),
    "process": {"errors"},
    "units": {"errors"},
    "lazynames": set(),
    "processors": set(),
    "settings": {"errors", "processors", "units"},
    "progress": {"errors", "units"},
}

ARROWS: dict[str, set[str]] = {
    "storage": set(),
    "transport": {"storage"},
    "checkpoint": {"storage", "transport"},
    "quantization": {"storage", "transport", "checkpoint"},
    "streaming": {"storage", "transport", "checkpoint"},
    "doctor": {"storage", "transport", "checkpoint"},
    "engines": {"storage", "transport", "checkpoint", "quantization", "streaming"},
    "compat": {"storage", "transport", "checkpoint", "quantization", "streaming", "engines"},
    "serving": {"storage", "transport", "checkpoint", "quantization", "streaming", "engines"},
    "cli": {"storage", "transport", "checkpoint", "quantization", "streaming", "doctor", "engines", "serving"},
}
"""Package to the packages that it may import, besides itself and the ground."""

OPTIONAL_HOMES = {
    "torch": {"streaming", "quantization", "engines", "compat", "serving", "cli"},
    "boto3": {"storage", "cli"},
    "botocore": {"storage", "cli"},
    "azure": {"storage"},
    "google": {"storage"},
    "huggingface_hub": {"storage", "engines"},
    "requests": {"storage"},
    "urllib3": {"storage"},
    "transformers": {"engines", "serving", "cli"},
    "accelerate": {"engines"},
    "modelopt": {"engines"},
    "fastapi": set(),
    "pydantic": {"serving"},
    "uvicorn": {"serving", "cli"},
    "prometheus_client": {"serving"},
    "openai": {"cli"},
    "typer": {"cli"},
    "runai_model_streamer": {"streaming"},
    "runai_model_streamer_s3": {"streaming"},
    "safetensors": {"streaming"},
    "sglang": {"engines"},
}
"""Package from elsewhere to the packages of ours that may import it. ``safetensors`` maps files, where that is asked for; we read the format ourselves."""


def modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def home_of(path: Path) -> str:
    """Return the package, or the module at the top, that ``path`` belongs to; `__init__` for the root's own."""
    first = path.relative_to(ROOT).parts[0]
    return first.removesuffix(".py")


def imported_names(path: Path, root: Path = ROOT) -> Iterator[tuple[int, str]]:
    """Yield line and full dotted name of everything that a module imports, inside functions and for types too."""
    package = ("headrace", *path.relative_to(root).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            source = ".".join((*base, *([node.module] if node.module else [])))
            yield from ((node.lineno, f"{source}.{alias.name}") for alias in node.names)


def wrong_arrow(home: str, name: str) -> bool:
    parts = name.split(".")
    if parts[0] != "headrace" or len(parts) == 1 or home == "__init__":
        return False
    target = parts[1]
    if target == home:
        return False
    if home == "__main__":
        return target != "cli"
    if home in GROUND:
        return target not in GROUND_ARROWS[home]
    return target not in ARROWS[home] | GROUND


def test_every_package_has_its_place() -> None:
    homes = {home_of(path) for path in modules()}
    assert homes - {"__init__", "__main__"} == set(ARROWS) | GROUND


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_arrows_point_one_way(path: Path) -> None:
    wrong = [f"line {line}: {name}" for line, name in imported_names(path) if wrong_arrow(home_of(path), name)]
    assert wrong == []


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_optional_packages_stay_home(path: Path) -> None:
    home = home_of(path)
    wrong = [
        f"line {line}: {name}"
        for line, name in imported_names(path)
        if home not in OPTIONAL_HOMES.get(name.split(".")[0], {home})
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("home", "name", "wrong"),
    [
        ("storage", "headrace.transport.RangeReader", True),
        ("storage", "headrace.errors.HeadraceError", False),
        ("cli", "headrace.serving.app", False),
        ("units", "headrace.settings.Settings", True),
        ("streaming", "headrace.quantization.detect", True),
        ("quantization", "headrace.streaming.stream", True),
        ("transport", "headrace.load_model", True),
        ("streaming", "headrace.streaming.plan", False),
        ("storage", "json.loads", False),
    ],
)
def test_wrong_arrows_are_seen(home: str, name: str, wrong: bool) -> None:
    assert wrong_arrow(home, name) is wrong


def test_relative_imports_are_resolved(tmp_path: Path) -> None:
    folder = tmp_path / "storage"
    folder.mkdir()
    module = folder / "s3.py"
    module.write_text("from ..serving import app\nfrom . import uri\nfrom .uri import Uri\n")
    names = [name for _, name in imported_names(module, tmp_path)]
    assert names == ["headrace.serving.app", "headrace.storage.uri", "headrace.storage.uri.Uri"]
