"""The routing table, cell by cell, and what must hold of every cell."""

from __future__ import annotations

import itertools
import subprocess
import sys
from dataclasses import replace

import pytest

from headrace.engines import routing
from headrace.engines.routing import LoaderDecision, LoaderRequest, UriKind, choose_loader, route
from headrace.errors import InvalidSetting
from headrace.storage import parse_uri
from headrace.streaming.formats import LoadFormat

ASKED = (None, "modelopt_fp8", "fp8")
STORED = (None, "modelopt", "fp8")
LETTERS = {
    "H": LoadFormat.HEADRACE,
    "R": LoadFormat.RUNAI_STREAMER,
    "S": LoadFormat.SAFETENSORS,
    "M": LoadFormat.MODELOPT,
    "D": LoadFormat.DUMMY,
}
# For each quantization asked for (a group) each that the checkpoint has (a letter), in the orders above; x is refused.
TABLE = {
    (LoadFormat.AUTO, UriKind.LOCAL): "HHH MHx xxH",
    (LoadFormat.AUTO, UriKind.BUCKET): "HHH xHx xxH",
    (LoadFormat.AUTO, UriKind.HTTP): "HHH xHx xxH",
    (LoadFormat.AUTO, UriKind.HUB): "HHH xHx xxH",
    (LoadFormat.HEADRACE, UriKind.LOCAL): "HHH xHx xxH",
    (LoadFormat.HEADRACE, UriKind.BUCKET): "HHH xHx xxH",
    (LoadFormat.HEADRACE, UriKind.HTTP): "HHH xHx xxH",
    (LoadFormat.HEADRACE, UriKind.HUB): "HHH xHx xxH",
    (LoadFormat.RUNAI_STREAMER, UriKind.LOCAL): "RRR xRx xxR",
    (LoadFormat.RUNAI_STREAMER, UriKind.BUCKET): "RRR xRx xxR",
    (LoadFormat.RUNAI_STREAMER, UriKind.HTTP): "xxx xxx xxx",
    (LoadFormat.RUNAI_STREAMER, UriKind.HUB): "xxx xxx xxx",
    (LoadFormat.SAFETENSORS, UriKind.LOCAL): "SSS xSx xxS",
    (LoadFormat.SAFETENSORS, UriKind.BUCKET): "xxx xxx xxx",
    (LoadFormat.SAFETENSORS, UriKind.HTTP): "xxx xxx xxx",
    (LoadFormat.SAFETENSORS, UriKind.HUB): "xxx xxx xxx",
    (LoadFormat.MODELOPT, UriKind.LOCAL): "xxx Mxx xxx",
    (LoadFormat.MODELOPT, UriKind.BUCKET): "xxx xxx xxx",
    (LoadFormat.MODELOPT, UriKind.HTTP): "xxx xxx xxx",
    (LoadFormat.MODELOPT, UriKind.HUB): "xxx xxx xxx",
    (LoadFormat.DUMMY, UriKind.LOCAL): "DDD xDx xxD",
    (LoadFormat.DUMMY, UriKind.BUCKET): "DDD xDx xxD",
    (LoadFormat.DUMMY, UriKind.HTTP): "DDD xDx xxD",
    (LoadFormat.DUMMY, UriKind.HUB): "DDD xDx xxD",
}


def cells() -> list[tuple[LoaderRequest, LoadFormat | None]]:
    found = []
    for (load_format, kind), row in TABLE.items():
        for (asked, stored), letter in zip(itertools.product(ASKED, STORED), row.replace(" ", ""), strict=True):
            request = LoaderRequest(
                load_format=load_format, uri_kind=kind, quantization=asked, stored_quantization=stored
            )
            found.append((request, LETTERS.get(letter)))
    return found


def decide(request: LoaderRequest) -> LoaderDecision | None:
    try:
        return choose_loader(request)
    except InvalidSetting:
        return None


def test_the_table_is_complete() -> None:
    assert set(TABLE) == set(itertools.product(LoadFormat, UriKind))
    assert len(cells()) == 6 * 4 * 3 * 3


@pytest.mark.parametrize(
    ("request_", "expected"),
    cells(),
    ids=lambda value: (
        "-".join(map(str, (value.load_format, value.uri_kind, value.quantization, value.stored_quantization)))
        if isinstance(value, LoaderRequest)
        else None
    ),
)
def test_every_combination(request_: LoaderRequest, expected: LoadFormat | None) -> None:
    decision = decide(request_)
    if expected is None:
        assert decision is None
        return
    wanted = request_.quantization if expected is LoadFormat.MODELOPT else request_.stored_quantization
    assert decision == LoaderDecision(load_format=expected, quantization=wanted)


def test_what_is_streamed_never_reaches_the_modelopt_workflow() -> None:
    """Nor does what is quantized already, so nothing has to ask a hub whether it is."""
    reached = [
        request for request, _ in cells() if (decision := decide(request)) and decision.load_format == "modelopt"
    ]
    assert reached
    for request in reached:
        assert request.uri_kind is UriKind.LOCAL and request.stored_quantization is None
        assert request.load_format not in (LoadFormat.HEADRACE, LoadFormat.RUNAI_STREAMER)


def test_a_decision_is_never_auto_and_always_has_the_stored_quantization() -> None:
    decisions = [(request, decision) for request, _ in cells() if (decision := decide(request))]
    assert len(decisions) > 70
    for request, decision in decisions:
        assert decision.load_format is not LoadFormat.AUTO
        if request.stored_quantization:
            assert decision.quantization == request.stored_quantization


@pytest.mark.parametrize("kind", UriKind)
@pytest.mark.parametrize("load_format", LoadFormat)
def test_a_route_is_refused_only_where_the_whole_row_is(load_format: LoadFormat, kind: UriKind) -> None:
    outcomes = [letter for letter in TABLE[load_format, kind] if letter in LETTERS]
    if outcomes:
        assert route(load_format, kind) is LETTERS[outcomes[0]]
    else:
        with pytest.raises(InvalidSetting, match=f"{load_format} cannot read a {kind}"):
            route(load_format, kind)


@pytest.mark.parametrize(
    ("uri", "kind"),
    [
        ("s3://bucket/llama", UriKind.BUCKET),
        ("S3://bucket/llama", UriKind.BUCKET),
        ("gs://bucket", UriKind.BUCKET),
        ("az://container/llama", UriKind.BUCKET),
        ("https://host/llama", UriKind.HTTP),
        ("http://127.0.0.1:8000/llama", UriKind.HTTP),
        ("hf://org/name@main", UriKind.HUB),
        ("org/name", UriKind.HUB),
        ("/models/llama", UriKind.LOCAL),
        ("./org/name", UriKind.LOCAL),
        ("file:///models/llama", UriKind.LOCAL),
    ],
)
def test_kinds_of_uris(uri: str, kind: UriKind) -> None:
    assert UriKind.of(parse_uri(uri)) is kind


@pytest.mark.parametrize(
    ("asked", "stored", "good"),
    [
        ("modelopt", "modelopt", True),
        ("modelopt_fp4", "modelopt", True),
        ("ModelOpt_FP8", "modelopt", True),
        ("petit_nvfp4", "modelopt", True),
        ("gptq_marlin", "gptq", True),
        ("awq_marlin", "awq", True),
        ("compressed_tensors", "compressed-tensors", True),
        ("w8a8_int8", "compressed-tensors", True),
        ("moe_wna16", "gptq", True),
        ("gptq", "awq", False),
        ("modelopt_fp8", "fp8", False),
        ("fp8", "modelopt", False),
        ("moe_wna16", "fp8", False),
        ("w8a8_int8", "fp8", False),
    ],
)
def test_spellings_of_one_method(asked: str, stored: str, good: bool) -> None:
    request = LoaderRequest(uri_kind=UriKind.BUCKET, quantization=asked, stored_quantization=stored)
    if good:
        assert choose_loader(request).quantization == stored
    else:
        with pytest.raises(
            InvalidSetting, match=f"{asked} was asked for, and the checkpoint is quantized with {stored}"
        ):
            choose_loader(request)


def test_only_modelopts_own_names_ask_for_its_workflow() -> None:
    plain = LoaderRequest(uri_kind=UriKind.LOCAL, quantization="modelopt_fp4")
    assert choose_loader(plain).load_format is LoadFormat.MODELOPT
    with pytest.raises(InvalidSetting, match="not supported yet"):
        choose_loader(replace(plain, quantization="petit_nvfp4"))


def test_the_choice_imports_nothing_that_could_ask_a_hub() -> None:
    code = (
        f"import sys; import {routing.__name__}; "
        "print(sorted({'transformers', 'huggingface_hub', 'boto3', 'httpx', 'requests'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
