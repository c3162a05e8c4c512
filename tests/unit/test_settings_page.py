"""The page of settings and the code say the same: every setting, every variable in its order, every default."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

import headrace
from headrace.settings import AzureSettings, Settings, TransportSettings, known_variables
from headrace.units import parse_bytes

PAGE = Path(headrace.__file__).parents[2] / "docs" / "reference" / "settings.md"
SIZES = ("bytes", "bytes/s")
NUMBERS = ("seconds", "connections", "processes", "attempts")


def tables() -> list[list[list[str]]]:
    """Return the rows of each table, without the head, cell by cell."""
    found: list[list[list[str]]] = []
    for block in re.findall(r"(?:^\|.*\n)+", PAGE.read_text("utf-8"), re.MULTILINE):
        rows = [[cell.strip() for cell in line[1:].removesuffix("|").split("|")] for line in block.splitlines()]
        found.append(rows[2:])
    return found


def names_in(cell: str) -> tuple[str, ...]:
    return tuple(re.findall(r"`([^`]+)`", cell))


@pytest.fixture(scope="module")
def rows() -> dict[str, list[str]]:
    return {names_in(row[0])[0]: row for row in tables()[0]}


def test_every_setting_has_its_row_and_none_is_invented(rows: dict[str, list[str]]) -> None:
    own = {item.name for item in fields(Settings)} - {"transport", "sources"}
    inner = {item.name for item in fields(TransportSettings)}
    azure = {f"azure.{item.name}" for item in fields(AzureSettings)}
    assert set(rows) == own | inner | azure
    assert all(len(row) == 6 for row in rows.values())


def test_every_variable_is_there_in_its_order_and_none_is_invented(rows: dict[str, list[str]]) -> None:
    listed = {name: names_in(row[1]) for name, row in rows.items() if names_in(row[1])}
    assert listed == known_variables()


def test_defaults_and_units_are_those_of_the_code(rows: dict[str, list[str]]) -> None:
    everything = (*fields(Settings), *fields(TransportSettings))
    defaults = {item.name: item.default for item in everything if item.default is not MISSING}
    num_checked = 0
    for name, (_, _, said, unit, *_) in rows.items():
        default = defaults.get(name)
        if unit in SIZES and default is not None:
            assert parse_bytes(said) == default, name
        elif unit in NUMBERS and default is not None:
            assert float(said) == default, name
        elif unit.startswith("switch"):
            assert said == str(int(default)), name  # type: ignore[call-overload]
        else:
            continue
        num_checked += 1
        assert name.endswith("_s") == (unit in ("seconds", "bytes/s")), name
    assert num_checked == len([name for name, default in defaults.items() if isinstance(default, (bool, int, float))])


def test_whose_a_variable_is_is_said_where_it_is_not_ours(rows: dict[str, list[str]]) -> None:
    for name, row in rows.items():
        foreign = [variable for variable in names_in(row[1]) if not variable.startswith("HEADRACE_")]
        assert bool(row[4]) == bool(foreign), name
        if any(variable.startswith("RUNAI_") for variable in foreign):
            assert "Run:ai Model Streamer" in row[4]


HOMES = {
    "botocore": "botocore",
    "google-auth": "google.auth",
    "google-cloud-storage": "google.cloud.storage",
    "azure-identity": "azure.identity",
    "huggingface_hub": "huggingface_hub",
}


@pytest.mark.parametrize("row", tables()[1], ids=lambda row: names_in(row[0])[0])
def test_a_variable_of_a_library_is_in_that_library(row: list[str]) -> None:
    """Or in the name that it builds others from: botocore makes that of a service's endpoint."""
    spec = importlib.util.find_spec(HOMES[row[1]])
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"needs {row[1]}")
    texts = [path.read_text("utf-8") for place in spec.submodule_search_locations for path in Path(place).rglob("*.py")]
    for name in names_in(row[0]):
        known = name.removesuffix("_S3") if name.startswith("AWS_ENDPOINT_URL") else name
        assert any(re.search(rf"""['"]{known}['"]""", text) for text in texts), name
