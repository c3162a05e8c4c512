"""Random weights: a model with its own architecture, sizes, dtypes and quantization, for which no weight byte is read."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from headrace.engines.conversion import LoadWeights, unfilled_names
from headrace.engines.packing import packed_modules
from headrace.engines.placement import Placement, check_ledger
from headrace.progress import LoadProgress
from headrace.streaming.formats import LoadFormat
from headrace.streaming.report import LoadReport

_SEED = 0
_SCALE = 0.01
"""What the floating-point parameters beside packed ones are set to: a scale, small enough that nothing overflows on its way through many layers."""
_SCALE_EXPONENT = 120
"""The same for scales of one byte, which are exponents of two with a bias of 127, or FP8."""


class RandomWeights:
    """What fills a model in place of a stream: the class's own initialisation, from a fixed seed. After `close` the caller's random state is as it was."""

    def __init__(self, *, source: str, progress: LoadProgress) -> None:
        self._source = source
        self._progress = progress
        self._undo = ExitStack()

    @property
    def values(self) -> Mapping[str, Any]:
        return {}

    def fill(self, model: Any, load_config: Any, load_weights: LoadWeights) -> tuple[Any, Any]:
        """Load nothing: what is missing will be initialised by the class, and Transformers is kept from listing it."""
        devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
        self._undo.enter_context(torch.random.fork_rng(devices=devices))
        torch.manual_seed(_SEED)
        self._undo.callback(transformers_logging.set_verbosity, transformers_logging.get_verbosity())
        transformers_logging.set_verbosity_error()
        with self._progress.during("weights"):
            return load_weights(model, {}, load_config)

    def settle(self, model: Any) -> None:
        """Fill what the class's initialisation does not know, and check that nothing is without memory."""
        with self._progress.during("finishing"):
            if getattr(model, "hf_quantizer", None) is not None:
                fill_packed(model)
            nothing = Placement(order=(), targets={})
            check_ledger(taken=(), placement=nothing, unfilled=unfilled_names(model), source=self._source)

    def close(self) -> None:
        self._undo.close()

    def report(self) -> LoadReport:
        return LoadReport(
            uri=self._source,
            snapshot_id="none",
            load_format=LoadFormat.DUMMY,
            num_files=0,
            num_tensors=0,
            bytes_checkpoint=0,
            bytes_wanted=0,
            bytes_read=0,
            num_requests=0,
            num_retries=0,
            num_connections=0,
            seconds=0.0,
            phases=dict(self._progress.phases),
            peak_staging_bytes=0,
        )


@torch.no_grad()
def fill_packed(model: torch.nn.Module) -> None:
    """Fill the modules of a quantizer's own: codes at random, scales with a small number, and what lists positions with zeros."""
    generator = torch.Generator().manual_seed(_SEED)
    for module in packed_modules(model):
        for name, value in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if value.dtype.itemsize == 1 and "scale" in name:
                value.view(torch.uint8).fill_(_SCALE_EXPONENT)
            elif value.dtype.is_floating_point and value.dtype.itemsize > 1:
                value.fill_(_SCALE)
            elif value.dim() < 2:
                value.zero_()
            else:
                value.view(torch.uint8).copy_(_codes(value, generator))


def _codes(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return random bytes in the shape of ``value.view(uint8)``, none of which makes a NaN of an 8-bit float."""
    shape = (*value.shape[:-1], value.shape[-1] * value.dtype.itemsize)
    most = 256 if not value.dtype.is_floating_point else 0x70
    return torch.randint(0, most, shape, dtype=torch.uint8, generator=generator)
