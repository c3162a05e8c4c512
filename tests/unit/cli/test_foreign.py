"""Options of other servers get an answer; Headrace's own never do."""

from __future__ import annotations

import pytest
import typer.main

from headrace.cli.foreign import FOREIGN_OPTIONS, find_foreign_option
from headrace.cli.main import app


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["serve", "s3://b/m", "--tensor-parallel-size", "2"], "--tensor-parallel-size"),
        (["serve", "s3://b/m", "--tp=2"], "--tp"),
        (["serve", "--max-model-len", "4096", "m"], "--max-model-len"),
    ],
)
def test_foreign_option_is_named(arguments: list[str], option: str) -> None:
    told = find_foreign_option(arguments)
    assert told is not None
    assert told.startswith(f"{option} is known to vLLM/SGLang, not supported yet by Headrace.")


@pytest.mark.parametrize(
    "arguments", [[], ["serve", "s3://b/m", "--port", "1"], ["load", "m", "--tp", "2"], ["serve", "--", "--tp"]]
)
def test_others_pass(arguments: list[str]) -> None:
    assert find_foreign_option(arguments) is None


def test_no_option_of_ours_is_called_foreign() -> None:
    serve = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    ours = {option for parameter in serve.params for option in (*parameter.opts, *parameter.secondary_opts)}
    assert "--port" in ours
    assert not ours & set(FOREIGN_OPTIONS)
