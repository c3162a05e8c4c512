"""Which loader carries out a load. One table over load format, kind of uri, the quantization that was asked for, and the one that the checkpoint has.

Pure: it opens nothing and asks nobody, so nothing here can take an object uri for the name of a hub repository. What has to be known about the checkpoint is
told to it by who has read the side files.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from headrace.errors import InvalidSetting
from headrace.quantization.section import canonical_method
from headrace.storage.uri import BUCKET_SCHEMES, Uri
from headrace.streaming.formats import LoadFormat


class UriKind(StrEnum):
    """Where a uri leads, as far as it matters for the choice."""

    LOCAL = "local path"
    BUCKET = "bucket"
    """``s3``, ``gs``, ``az``."""
    HTTP = "web server"
    HUB = "hub repository"
    """``hf://org/name``, or ``org/name`` where no such path exists."""

    @classmethod
    def of(cls, uri: Uri) -> UriKind:
        if uri.scheme in BUCKET_SCHEMES:
            return cls.BUCKET
        return {"file": cls.LOCAL, "hf": cls.HUB}.get(uri.scheme, cls.HTTP)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderRequest:
    """What the choice depends on."""

    load_format: LoadFormat = LoadFormat.AUTO
    uri_kind: UriKind
    quantization: str | None = None
    """What the caller asked for, in any spelling of vLLM's or SGLang's; None for whatever the checkpoint has."""
    stored_quantization: str | None = None
    """The method by which the checkpoint is quantized already; None for one that is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderDecision:
    """The loader, and what the model's construction must be told."""

    load_format: LoadFormat
    """Never ``auto``."""
    quantization: str | None = None
    """The method of the checkpoint's own quantization, whose configuration the construction gets; for ``modelopt`` what to quantize to."""


_TRANSPORTS = "Streaming takes every kind of uri: use auto."
_REFUSED = {
    LoadFormat.RUNAI_STREAMER: "Run:ai Model Streamer reads buckets and local files only, and no hub is asked on its behalf.",
    LoadFormat.SAFETENSORS: "It maps files into memory, and only local files can be mapped.",
    LoadFormat.MODELOPT: "ModelOpt's own workflow reads local folders only.",
}
"""Format to why it does not go with the kinds of uri that `_ROUTES` lacks."""
_ROUTES: dict[LoadFormat, dict[UriKind, LoadFormat]] = {
    LoadFormat.AUTO: dict.fromkeys(UriKind, LoadFormat.HEADRACE),
    LoadFormat.HEADRACE: dict.fromkeys(UriKind, LoadFormat.HEADRACE),
    LoadFormat.RUNAI_STREAMER: dict.fromkeys((UriKind.LOCAL, UriKind.BUCKET), LoadFormat.RUNAI_STREAMER),
    LoadFormat.SAFETENSORS: {UriKind.LOCAL: LoadFormat.SAFETENSORS},
    LoadFormat.MODELOPT: {UriKind.LOCAL: LoadFormat.MODELOPT},
    LoadFormat.DUMMY: dict.fromkeys(UriKind, LoadFormat.DUMMY),
}
_MODELOPT = "modelopt"
_KERNELS = {"w8a8_fp8": ("compressed-tensors",), "w8a8_int8": ("compressed-tensors",), "moe_wna16": ("gptq", "awq")}
"""Names of SGLang's and vLLM's that are a way to compute, to the methods that it goes with."""


def route(load_format: LoadFormat, uri_kind: UriKind) -> LoadFormat:
    """Return what ``load_format`` means for such a uri, before anything is known of the checkpoint. Raises `InvalidSetting` where they do not go together."""
    found = _ROUTES[load_format].get(uri_kind)
    if found is None:
        raise InvalidSetting(
            f"The load format {load_format} cannot read a {uri_kind}.", _REFUSED[load_format], _TRANSPORTS
        )
    return found


def choose_loader(request: LoaderRequest) -> LoaderDecision:
    """Return the loader for ``request``. Raises `InvalidSetting` where what was asked for cannot be.

    Only an unquantized local folder that is to be quantized reaches the ModelOpt workflow. A checkpoint that is quantized already never does: it streams like
    any other, and its configuration goes to the model's construction.
    """
    found = route(request.load_format, request.uri_kind)
    asked, stored = request.quantization, request.stored_quantization
    if stored is not None:
        _check_stored(request, stored)
        return LoaderDecision(load_format=found, quantization=stored)
    if asked is None:
        if found is LoadFormat.MODELOPT:
            raise InvalidSetting(
                "The load format modelopt was not told what to quantize to.",
                mend="Add quantization (--quantization modelopt_fp8, for example), or use auto to load the model as it is.",
            )
        return LoaderDecision(load_format=found)
    _check_workflow(request, asked)
    return LoaderDecision(load_format=LoadFormat.MODELOPT, quantization=asked.lower())


def _check_stored(request: LoaderRequest, stored: str) -> None:
    """Refuse another quantization than the checkpoint's, and to quantize it again."""
    asked = request.quantization
    if asked is not None and canonical_method(asked) != stored and stored not in _KERNELS.get(asked.lower(), ()):
        raise InvalidSetting(
            f"The quantization {asked} was asked for, and the checkpoint is quantized with {stored}.",
            "What is packed in one way cannot be read in another.",
            "Leave quantization out: it is read from the checkpoint.",
        )
    if request.load_format is LoadFormat.MODELOPT:
        raise InvalidSetting(
            f"The checkpoint is quantized with {stored} already.",
            "The load format modelopt quantizes a model that is not; what is quantized is streamed.",
            "Use auto.",
        )


def _check_workflow(request: LoaderRequest, asked: str) -> None:
    """Refuse to quantize while loading where the ModelOpt workflow does not do it."""
    if not asked.lower().startswith(_MODELOPT):
        raise InvalidSetting(
            f"The quantization {asked} was asked for, and the checkpoint is not quantized.",
            "Quantizing while loading is not supported yet.",
            "Leave quantization out, or give the uri of a checkpoint that is quantized so.",
        )
    if request.uri_kind is not UriKind.LOCAL or request.load_format not in (LoadFormat.AUTO, LoadFormat.MODELOPT):
        raise InvalidSetting(
            f"The quantization {asked} was asked for, and the checkpoint is not quantized.",
            f"Only ModelOpt's own workflow quantizes, from a local folder; a {request.uri_kind} with the load format {request.load_format} is streamed as it is.",
            "Leave quantization out, or give a local folder and the load format auto.",
        )
