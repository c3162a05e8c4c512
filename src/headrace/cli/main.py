"""The command line: what can be typed, and which exit code it gives. The work of each command is imported when it is asked for.

Exit codes: 0, 1 for anything that failed, 2 for a command line that is not one, 130 for Ctrl-C.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.console import reported
from headrace.cli.foreign import find_foreign_option
from headrace.cli.values import LOAD_FORMATS, json_object, load_format, without_keys
from headrace.errors import HeadraceError, InvalidSetting
from headrace.settings import Settings, TransportSettings, parse_readers
from headrace.units import parse_memory_limit, parse_rate

EXIT_USAGE = 2

app = typer.Typer(
    name="headrace",
    help="Streams LLM weights from object storage or a disk straight into an inference engine, and serves the model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def run() -> None:
    """Run the command that the process was started with, and exit."""
    if hasattr(sys.stdout, "reconfigure"):
        # A terminal that cannot show a character gets its escape rather than a traceback.
        sys.stdout.reconfigure(errors="backslashreplace")
    foreign = find_foreign_option(sys.argv[1:])
    if foreign is not None:
        print(foreign, file=sys.stderr)
        raise SystemExit(EXIT_USAGE)
    app(prog_name="headrace")


def _memory_limit(text: str) -> int:
    try:
        return parse_memory_limit(text)
    except InvalidSetting as error:
        raise typer.BadParameter(str(error)) from error


def _bandwidth(text: str) -> int:
    try:
        return parse_rate(text)
    except InvalidSetting as error:
        raise typer.BadParameter(str(error)) from error


def _readers(text: str) -> int | str:
    try:
        readers = parse_readers(text)
        TransportSettings(readers=readers)
    except (InvalidSetting, ValueError):
        raise typer.BadParameter(f"{text!r} is neither auto nor a number of processes.") from None
    return readers


def _number_range(text: str) -> str:
    """Return the text of a range of whole numbers, as it is."""
    match = re.fullmatch(r"(\d{1,6}):(\d{1,6})", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise typer.BadParameter(f"{text!r} is not a range. Write the first number and the one after the last: 0:12.")
    return text


def _show_version(wanted: bool) -> None:
    if not wanted:
        return
    try:
        print(f"headrace {version('headrace')}")
    except PackageNotFoundError:
        print("headrace, run from a checkout that is not installed")
    raise typer.Exit


Uri = Annotated[
    str, typer.Argument(metavar="URI", help="s3://bucket/prefix or a path: a folder of safetensors files, or one file.")
]
Connections = Annotated[
    int | None, typer.Option(min=1, help="Connections (or file readers) at once.", show_default="8")
]
MemoryLimit = Annotated[
    int | None,
    typer.Option(
        parser=_memory_limit,
        metavar="SIZE",
        help="Most memory for tensors on their way: 512MiB, 4GiB; -1 for any.",
        show_default="chosen",
    ),
]
Readers = Annotated[
    str | None,
    typer.Option(
        parser=_readers,
        metavar="NUMBER",
        help="Processes that read from a remote store, for each rank: auto; 0 for threads alone.",
        show_default="auto",
    ),
]
CacheDir = Annotated[
    Path | None,
    typer.Option(help="Where side files (config, tokenizer) are kept.", show_default="~/.cache/headrace"),
]
BandwidthLimit = Annotated[
    int | None,
    typer.Option(
        parser=_bandwidth,
        metavar="SIZE",
        help="Most bytes a second from a remote store, all connections together: 100MB, 1GiB; 0 for any.",
        show_default="none",
    ),
]
Snapshot = Annotated[
    str | None,
    typer.Option(
        metavar="ID",
        help="Take exactly this snapshot, or nothing; of a hub repository, a commit will do.",
        show_default="what is there now",
    ),
]
NoProgress = Annotated[bool, typer.Option("--no-progress", help="Show no progress.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show where an error comes from.")]


@app.callback()
def _common(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


# vLLM takes underscores for dashes in its options, and people type them so.
@app.command("serve", context_settings={"token_normalize_func": lambda token: token.replace("_", "-")})
def _serve(
    uri: Annotated[
        str | None, typer.Argument(metavar="URI", help="What to serve: s3://bucket/prefix, or a folder.")
    ] = None,
    model_path: Annotated[
        str | None, typer.Option("--model-path", "--model", metavar="URI", help="The same, as an option.")
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="The name that requests use.", show_default="the uri's last part")
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port to listen on; 0 for any that is free.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="HEADRACE_API_KEY",
            help="What requests must bear. The variable is safer: others can read a command line.",
        ),
    ] = None,
    wanted_format: Annotated[
        str,
        typer.Option(
            "--load-format",
            parser=load_format,
            metavar="FORMAT",
            help=f"How weights come: {', '.join(LOAD_FORMATS)}. auto streams every uri.",
        ),
    ] = "auto",
    extra_config: Annotated[
        str | None,
        typer.Option(
            "--model-loader-extra-config",
            parser=json_object,
            metavar="JSON",
            help="concurrency, memory_limit (bytes), distributed, as one JSON object; other options win.",
        ),
    ] = None,
    quantization: Annotated[
        str | None,
        typer.Option(
            "--quantization",
            "-q",
            metavar="METHOD",
            help="Insist on this method; or quantize a plain local model: modelopt_fp8, modelopt_nvfp4.",
            show_default="the checkpoint's",
        ),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            "--calibration",
            metavar="FILE",
            help="Texts, one a line, to find the scales of a plain model with.",
            show_default="a few of our own",
        ),
    ] = None,
    dequantize: Annotated[
        bool, typer.Option("--dequantize", help="Expand packed weights into plain ones as they arrive.")
    ] = False,
    weight_only: Annotated[
        bool,
        typer.Option("--weight-only", help="Leave inputs, keys and values unrounded where the checkpoint rounds them."),
    ] = False,
    language_only: Annotated[
        bool,
        typer.Option("--language-only", help="Leave out the encoders of a multimodal model: text in, text out."),
    ] = False,
    tp: Annotated[
        int,
        typer.Option(
            "--tp",
            "-tp",
            "--tp-size",
            "--tensor-parallel-size",
            min=1,
            max=64,
            help="Processes of this machine that compute the model together; each has its part of every layer.",
        ),
    ] = 1,
    dtype: Annotated[str, typer.Option(help="What to compute in: auto, bfloat16, float16, float32.")] = "auto",
    device: Annotated[str, typer.Option(help="Where to compute: auto, cpu, cuda, cuda:1.")] = "auto",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that the checkpoint brings.")
    ] = False,
    revision: Annotated[str | None, typer.Option(help="A hub repository's revision.")] = None,
    tokenizer_path: Annotated[
        str | None,
        typer.Option(
            "--tokenizer-path",
            "--tokenizer",
            metavar="URI",
            help="Take the tokenizer from the side files there.",
            show_default="the model's",
        ),
    ] = None,
    skip_tokenizer_init: Annotated[
        bool, typer.Option("--skip-tokenizer-init", help="Do without a tokenizer: token ids in, token ids out.")
    ] = False,
    load_deadline: Annotated[
        float | None,
        typer.Option(min=0, metavar="SECONDS", help="Give up where loading takes longer.", show_default="none"),
    ] = None,
    load_stall: Annotated[
        float | None,
        typer.Option(
            min=0, metavar="SECONDS", help="Give up where loading stands still for longer.", show_default="none"
        ),
    ] = None,
    drain: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="How long requests may go on after SIGTERM.")
    ] = 25.0,
    max_waiting: Annotated[
        int, typer.Option(min=1, help="Requests that may wait for their turn; more are refused.")
    ] = 128,
    snapshot: Snapshot = None,
    connections: Connections = None,
    memory_limit: MemoryLimit = None,
    bandwidth_limit: BandwidthLimit = None,
    readers: Readers = None,
    cache_dir: CacheDir = None,
    no_progress: NoProgress = False,
    debug: Debug = False,
) -> None:
    """Load a model by streaming, and serve it with the OpenAI API."""
    if (uri is None) == (model_path is None):
        raise typer.BadParameter("Give the uri once: as URI, or with --model-path.")
    with reported(debug=debug):
        from headrace.cli.serve import ServeOptions, serve

        options = ServeOptions(
            uri=uri or model_path or "",
            served_model_name=served_model_name,
            host=host,
            port=port,
            api_key=api_key,
            load_format=wanted_format,
            extra_config=without_keys(extra_config, concurrency=connections, memory_limit=memory_limit),
            quantization=quantization,
            calibration=calibration,
            dequantize=dequantize,
            weight_only=weight_only,
            language_only=language_only,
            dtype=dtype,
            device=device,
            trust_remote_code=trust_remote_code,
            revision=revision,
            tokenizer_path=tokenizer_path,
            skip_tokenizer_init=skip_tokenizer_init,
            load_deadline_s=load_deadline,
            load_stall_s=load_stall,
            drain_s=drain,
            max_waiting=max_waiting,
            num_ranks=tp,
            snapshot=snapshot,
            settings=_settings(
                connections,
                memory_limit,
                bandwidth_limit,
                readers=readers,
                no_progress=no_progress,
                cache_dir=cache_dir,
            ),
        )
        raise SystemExit(serve(options))


@app.command("load")
def _load(
    uri: Uri,
    keep: Annotated[
        bool, typer.Option("--keep/--discard", help="Hold all tensors until the end, or drop each as it comes.")
    ] = False,
    include: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Load only tensors with such names.")
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Leave out tensors with such names.")
    ] = None,
    wanted_format: Annotated[
        str,
        typer.Option(
            "--load-format",
            parser=load_format,
            metavar="FORMAT",
            help="Who moves the bytes: auto, headrace, runai_streamer, safetensors (local files).",
        ),
    ] = "auto",
    extra_config: Annotated[
        str | None,
        typer.Option(
            "--model-loader-extra-config",
            parser=json_object,
            metavar="JSON",
            help="concurrency, memory_limit (bytes), distributed, as one JSON object; other options win.",
        ),
    ] = None,
    ranks: Annotated[
        int, typer.Option(min=1, max=64, help="Processes that load together: each byte is read once, all get it.")
    ] = 1,
    json: Json = False,
    snapshot: Snapshot = None,
    connections: Connections = None,
    memory_limit: MemoryLimit = None,
    bandwidth_limit: BandwidthLimit = None,
    readers: Readers = None,
    no_progress: NoProgress = False,
    debug: Debug = False,
) -> None:
    """Stream a checkpoint into memory and say what that took."""
    with reported(debug=debug, after=_advice_on(uri)):
        from headrace.cli.load import LoadOptions, load, unsaid

        wanted = LoadOptions(
            uri=uri,
            snapshot=snapshot,
            settings=_settings(connections, memory_limit, bandwidth_limit, readers=readers, no_progress=no_progress),
            include=include or (),
            exclude=exclude or (),
            load_format=wanted_format,
            extra_config=unsaid(extra_config, connections=connections, memory_limit=memory_limit),
            keep=keep,
            json=json,
            num_ranks=ranks,
        )
        load(wanted)


@app.command("inspect")
def _inspect(
    uri: Uri,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    plan: Annotated[
        bool, typer.Option("--plan", help="Say what a load asks for, and how long that takes at least.")
    ] = False,
    ranks: Annotated[int, typer.Option(min=1, help="With --plan: ranks of one node that share the load.")] = 1,
    include: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="With --plan: load only tensors with such names.")
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="With --plan: leave out tensors with such names.")
    ] = None,
    as_model: Annotated[
        bool, typer.Option("--as-model", help="With --plan: load what the model takes, as Transformers builds it.")
    ] = False,
    language_only: Annotated[
        bool, typer.Option("--language-only", help="With --plan: leave out the encoders of a multimodal model.")
    ] = False,
    layers: Annotated[
        str | None,
        typer.Option(parser=_number_range, metavar="FIRST:STOP", help="With --plan: only these decoder layers."),
    ] = None,
    experts: Annotated[
        str | None,
        typer.Option(parser=_number_range, metavar="FIRST:STOP", help="With --plan: only these experts of each layer."),
    ] = None,
    snapshot: Snapshot = None,
    connections: Connections = None,
    memory_limit: MemoryLimit = None,
    bandwidth_limit: BandwidthLimit = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Say what a checkpoint holds, from its headers alone: no weight is read."""
    if not plan and (ranks > 1 or include or exclude or as_model or language_only or layers or experts):
        raise typer.BadParameter("--ranks, and what says which tensors to load, go with --plan.")
    with reported(debug=debug, after=_advice_on(uri)):
        from headrace.cli.inspect import PlanOptions, inspect

        planned = PlanOptions(
            num_ranks=ranks,
            include=include or (),
            exclude=exclude or (),
            as_model=as_model,
            language_only=language_only,
            layers=layers,
            experts=experts,
        )
        settings = _settings(connections, memory_limit, bandwidth_limit, no_progress=False)
        inspect(uri, settings=settings, snapshot=snapshot, tensors=tensors, json=json, plan=planned if plan else None)


@app.command("doctor")
def _doctor(
    uri: Uri,
    revision: Annotated[str | None, typer.Option(help="A hub repository's revision.")] = None,
    throughput: Annotated[
        bool,
        typer.Option("--throughput/--no-throughput", help="Read weights for a few seconds to see how fast they come."),
    ] = True,
    connections: Connections = None,
    cache_dir: CacheDir = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Check everything between this machine and a model's files, and say what is wrong and what to do."""
    with reported(debug=debug):
        from headrace.cli.doctor import DoctorOptions, doctor

        options = DoctorOptions(
            uri=uri,
            read_settings=lambda: _named_settings(connections, cache_dir),
            revision=revision,
            measures=throughput,
            json=json,
            debug=debug,
        )
        raise SystemExit(doctor(options, os.environ))


@app.command("demo")
def _demo(
    cache_dir: CacheDir = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the server up until Ctrl-C.")] = False,
    debug: Debug = False,
) -> None:
    """Serve a small model from an object store on this machine, ask it a question, and show what loading took."""
    with reported(debug=debug):
        from headrace.cli.demo import DemoOptions, demo

        settings = Settings.from_environment(cache_dir=cache_dir)
        raise SystemExit(demo(DemoOptions(cache_dir=settings.cache_dir, keep=keep)))


def _named_settings(connections: int | None, cache_dir: Path | None) -> Settings:
    """Return the settings, which remember what was given on the command line: the doctor says where each value comes from."""
    settings = Settings.from_environment()
    if connections is not None:
        settings = settings.changed("--connections", num_connections=connections)
    return settings if cache_dir is None else settings.changed("--cache-dir", cache_dir=cache_dir)


def _advice_on(uri: str) -> Callable[[HeadraceError], None]:
    """Return what prints the doctor's words below an error of a load from ``uri``."""

    def advise(error: HeadraceError) -> None:
        from headrace.cli.doctor import print_advice

        print_advice(error, uri)

    return advise


def _settings(
    connections: int | None,
    memory_limit: int | None,
    bandwidth_limit: int | None,
    *,
    no_progress: bool,
    readers: int | str | None = None,
    cache_dir: Path | None = None,
) -> Settings:
    return Settings.from_environment(
        num_connections=connections,
        memory_limit_bytes=memory_limit,
        bandwidth_bytes_per_s=bandwidth_limit,
        readers=readers,
        progress=False if no_progress else None,
        cache_dir=cache_dir,
    )
