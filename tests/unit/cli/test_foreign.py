"""Options of other servers get an answer, however they are spelt; Headrace's own never do."""

from __future__ import annotations

import pytest
import typer.main

from headrace.cli.foreign import FOREIGN_LOAD_FORMATS, REASONS, find_foreign_option, foreign_options
from headrace.cli.main import app
from headrace.cli.values import LOAD_FORMATS


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["serve", "s3://b/m", "--pipeline-parallel-size", "2"], "--pipeline-parallel-size"),
        (["serve", "s3://b/m", "--dp=2"], "--dp"),
        (["serve", "s3://b/m", "-pp", "2"], "-pp"),
        (["serve", "--max-model-len", "4096", "m"], "--max-model-len"),
        (["serve", "m", "--max_model_len=4096"], "--max_model_len"),
        (["serve", "m", "--mem-fraction-static", "0.8"], "--mem-fraction-static"),
        (["serve", "m", "--disable-radix-cache"], "--disable-radix-cache"),
        (["serve", "m", "--hicache-ratio", "2"], "--hicache-ratio"),
        (["serve", "m", "--no-enable-prefix-caching"], "--no-enable-prefix-caching"),
        (["serve", "m", "--compilation-config.mode=3"], "--compilation-config.mode"),
        (["serve", "m", "-cc.mode=3"], "-cc.mode"),
        (["serve", "m", "-O3"], "-O3"),
        (["serve", "m", "--enable-http2"], "--enable-http2"),
        (["serve", "m", "--port", "1", "--seed", "0", "--pp", "2"], "--seed"),
    ],
)
def test_foreign_option_is_named(arguments: list[str], option: str) -> None:
    told = find_foreign_option(arguments)
    assert told is not None
    assert told.startswith(f"{option} is known to vLLM/SGLang, not supported yet by Headrace.")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["serve", "s3://b/m", "--port", "1"],
        ["load", "m", "--dp", "2"],
        ["serve", "--", "--dp"],
        ["serve", "m", "-tp", "2"],
        ["serve", "m", "--memory-limit", "-1"],
        ["serve", "m", "--tensor-paralel-size", "2"],
        ["serve", "m", "--no-progress"],
    ],
)
def test_others_pass(arguments: list[str]) -> None:
    assert find_foreign_option(arguments) is None


def test_there_is_a_reason_where_one_helps() -> None:
    told = find_foreign_option(["serve", "m", "--dp_size", "2"])
    assert told is not None and told.endswith("(--tp), and not otherwise so far.")
    assert set(REASONS) <= foreign_options()


def test_no_option_of_ours_is_called_foreign() -> None:
    serve = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    ours = {option for parameter in serve.params for option in (*parameter.opts, *parameter.secondary_opts)}
    assert "--port" in ours
    assert len(foreign_options()) > 800
    for option in ours:
        assert find_foreign_option(["serve", "m", option]) is None


@pytest.mark.parametrize(
    "option",
    [
        *("--model-path", "--load-format", "--model-loader-extra-config", "--quantization", "--dtype", "--device"),
        *("--revision", "--tokenizer-path", "--served-model-name", "--trust-remote-code", "--skip-tokenizer-init"),
        *("--host", "--port", "--api-key", "--tensor-parallel-size", "-tp", "--tp-size"),
    ],
)
def test_what_users_of_both_know_is_spelt_as_they_know_it(option: str) -> None:
    serve = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    assert option in {name for parameter in serve.params for name in parameter.opts}


def test_no_load_format_of_ours_is_called_foreign() -> None:
    assert not FOREIGN_LOAD_FORMATS & set(LOAD_FORMATS)
