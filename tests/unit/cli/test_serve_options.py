"""What is typed after `headrace serve` arrives where the work is done, and what cannot be is refused before that."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.cli.main import app
from headrace.cli.serve import ServeOptions, serve

EXTRA = '{"concurrency": 16, "memory_limit": 1000000}'


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what `serve` is called with for a command line, and the exit code and output."""
    seen: list[ServeOptions] = []

    def record(options: ServeOptions) -> int:
        seen.append(options)
        return 0

    monkeypatch.setattr("headrace.cli.serve.serve", record)

    def run(*arguments: str) -> tuple[ServeOptions | None, int, str]:
        seen.clear()
        result = CliRunner().invoke(app, ["serve", *arguments], env={"COLUMNS": "200"})
        return (seen[0] if seen else None), result.exit_code, result.output

    return run


def test_defaults(typed: Any) -> None:
    options, code, _ = typed("s3://bucket/llama")
    assert code == 0
    assert (options.uri, options.load_format, options.extra_config, options.quantization) == (
        "s3://bucket/llama",
        "auto",
        None,
        None,
    )
    assert options.tokenizer_path is None and options.skip_tokenizer_init is False


@pytest.mark.parametrize("dash", ["-", "_"])
def test_every_option_arrives(typed: Any, dash: str) -> None:
    arguments = [
        *("--model-path", "s3://bucket/llama", "--load-format", "runai_streamer"),
        *("--model-loader-extra-config", EXTRA, "--quantization", "modelopt_fp4", "--dtype", "half"),
        *("--device", "cpu", "--tokenizer-path", "s3://bucket/tokenizer", "--served-model-name", "my_llama"),
        *("--trust-remote-code", "--host", "0.0.0.0", "--port", "1", "--api-key", "k-1_2"),
    ]
    spelt = [
        "--" + argument[2:].replace("-", dash) if argument.startswith("--") else argument for argument in arguments
    ]
    options, code, output = typed(*spelt)
    assert code == 0, output
    assert options.uri == "s3://bucket/llama"
    assert options.load_format == "runai_streamer"
    assert options.extra_config == EXTRA
    assert options.quantization == "modelopt_fp4"
    assert (options.dtype, options.device) == ("half", "cpu")
    assert options.tokenizer_path == "s3://bucket/tokenizer"
    assert options.served_model_name == "my_llama"
    assert options.trust_remote_code is True
    assert (options.host, options.port, options.api_key) == ("0.0.0.0", 1, "k-1_2")


def test_snapshot_and_bandwidth_limit_arrive(typed: Any) -> None:
    options, code, output = typed("s3://b/m", "--snapshot", "0123456789ab", "--bandwidth-limit", "100MB")
    assert code == 0, output
    assert options.snapshot == "0123456789ab"
    assert options.settings.transport.bandwidth_bytes_per_s == 100_000_000
    options, _, _ = typed("s3://b/m")
    assert (options.snapshot, options.settings.transport.bandwidth_bytes_per_s) == (None, 0)


def test_who_reads_arrives(typed: Any) -> None:
    assert typed("m", "--readers", "4")[0].settings.transport.readers == 4
    assert typed("m", "--readers", "AUTO")[0].settings.transport.readers == "auto"
    assert typed("m")[0].settings.transport.readers == "auto"


@pytest.mark.parametrize("option", ["--tp", "-tp", "--tp-size", "--tp_size", "--tensor-parallel-size"])
def test_the_number_of_ranks_arrives(typed: Any, option: str) -> None:
    assert typed("m", option, "4")[0].num_ranks == 4
    assert typed("m")[0].num_ranks == 1
    options, code, output = typed("m", option, "0")
    assert options is None and code == 2 and "greater than or equal to 1" in output


def test_short_and_other_spellings(typed: Any) -> None:
    options, _, _ = typed("--model", "m", "-q", "fp8", "--tokenizer", "t", "--dtype", "float")
    assert (options.uri, options.quantization, options.tokenizer_path, options.dtype) == ("m", "fp8", "t", "float")
    assert typed("m", "--skip-tokenizer-init")[0].skip_tokenizer_init is True


def test_an_option_of_its_own_wins_over_the_extra_configuration(typed: Any) -> None:
    options, _, _ = typed("m", "--model-loader-extra-config", EXTRA, "--connections", "3")
    assert json.loads(options.extra_config) == {"memory_limit": 1000000}
    assert options.settings.transport.num_connections == 3
    options, _, _ = typed("m", "--model-loader-extra-config", EXTRA, "--memory-limit", "1MiB")
    assert json.loads(options.extra_config) == {"concurrency": 16}
    assert options.settings.memory_limit_bytes == 1 << 20


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--load-format", "pt"], "pt is known to vLLM/SGLang, not supported yet"),
        (["--load-format", "runai"], "'runai' is not a load format"),
        (["--load-format", "AUTO"], "'AUTO' is not a load format"),
        (["--model-loader-extra-config", "{concurrency: 3}"], "is not JSON"),
        (["--model-loader-extra-config", "[3]"], "is not a JSON object"),
        (["--model-loader-extra-config", "3"], "is not a JSON object"),
        (["--tokenizer-pth", "t"], "No such option"),
        (["--bandwidth-limit", "fast"], "'fast' is not a size"),
        (["--readers", "many"], "'many' is neither auto nor a number of processes"),
        (["--readers", "-1"], "'-1' is neither auto nor a number of processes"),
    ],
)
def test_what_is_no_value_exits_2(typed: Any, arguments: list[str], said: str) -> None:
    options, code, output = typed("m", *arguments)
    assert code == 2 and options is None
    assert said in " ".join(output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tokenizer_path": "t", "skip_tokenizer_init": True}, "contradict"),
        ({"tokenizer_path": "nope://x"}, "nope"),
        ({"dtype": "int4"}, "--dtype 'int4'"),
        ({"snapshot": "0" * 12, "load_format": "dummy"}, "--snapshot cannot be used with --load-format dummy"),
    ],
)
def test_what_contradicts_itself_exits_1(
    options: dict[str, Any],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,
) -> None:
    monkeypatch.setattr("headrace.cli.serve.configure_logging", lambda **_: None)
    assert serve(ServeOptions(uri="s3://bucket/x", termination_log=tmp_path / "log", **options)) == 1
    assert words in capsys.readouterr().err
