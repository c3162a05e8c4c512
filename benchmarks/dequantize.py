"""How fast packed weights become bfloat16 on one core: every scheme beside a copy of its result, a plain conversion, and compressed-tensors' own.

    python benchmarks/dequantize.py                              # every scheme, 4096 x 4096, seven rounds
    python benchmarks/dequantize.py --only FP8 --rounds 3 --shape 2048 2048
    python benchmarks/dequantize.py --results benchmarks/results

The ways of one scheme alternate round by round, so that what else the machine does falls on all of them; the table has medians. GB/s are bytes of the bfloat16 result per second, and
with one thread seconds are those that the processor spent on it, its kernel's share (fresh memory) included.
"new" makes a result in fresh memory, as ``clone()`` does; "into" writes into memory that is there, as ``copy_()`` does: fresh memory of this size costs more than filling it.
"plain" is the textbook conversion in torch: codes to float32, times the scale, to bfloat16. compressed-tensors is measured where it is installed, for the formats
that it has; it computes in bfloat16, and its values differ from the makers' by roundings.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headrace.quantization.codes import e2m1_values, e8m0_values
from headrace.quantization.fp4 import Nvfp4
from headrace.quantization.fp8 import Fp8Block, Fp8Channel, Fp8Tensor
from headrace.quantization.int8 import Int8Channel, Int8Group, Int8Tensor
from headrace.quantization.mx import Mxfp4, Mxfp8
from headrace.quantization.scheme import Role, Scheme

Shape = tuple[int, int]
Run = Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One scheme with the parts of one weight."""

    scheme: Scheme
    parts: dict[Role, torch.Tensor]
    plain: Run | None = None
    peer: Run | None = None

    @property
    def name(self) -> str:
        return self.scheme.describe()


# -- subjects


def float_subjects(shape: Shape) -> list[Callable[[], Subject]]:
    """Return makers of the schemes of one byte per value and of half a byte."""
    rows, columns = shape
    grid = (-(-rows // 128), -(-columns // 128))

    def spread(scale: torch.Tensor) -> torch.Tensor:
        return scale.float().repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]

    return [
        lambda: bytewise(Fp8Tensor(), shape, (1,), {"strategy": "tensor"}, lambda scale: scale.float()),
        lambda: bytewise(Fp8Channel(), shape, (rows, 1), {"strategy": "channel"}, lambda scale: scale.float()),
        lambda: bytewise(Fp8Block(), shape, grid, {"strategy": "block", "block_structure": [128, 128]}, spread),
        lambda: mxfp8(shape),
        lambda: bytewise(Int8Tensor(), shape, (1,), {"strategy": "tensor"}, lambda scale: scale.float(), torch.int8),
        lambda: bytewise(
            Int8Channel(), shape, (rows, 1), {"strategy": "channel"}, lambda scale: scale.float(), torch.int8
        ),
        lambda: bytewise(Int8Group(), shape, (rows, columns // 128), None, None, torch.int8),
        lambda: nvfp4(shape, 16),
        lambda: nvfp4(shape, 32),
        lambda: mxfp4(shape),
    ]


def bytewise(
    scheme: Scheme,
    shape: Shape,
    scale_shape: tuple[int, ...],
    strategy: dict[str, Any] | None,
    spread: Callable[[torch.Tensor], torch.Tensor] | None,
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> Subject:
    """Return a subject of one byte per value with floating scales; ``spread`` makes them broadcast against the weight."""
    scale = (torch.rand(scale_shape) + 0.5) / 448
    codes = byte_codes(shape, dtype)
    kind = "int" if dtype is torch.int8 else "float"
    return Subject(
        scheme=scheme,
        parts={Role.CODES: codes, Role.SCALE: scale},
        plain=None if spread is None else lambda: (codes.to(torch.float32) * spread(scale)).to(torch.bfloat16),
        peer=None
        if strategy is None
        else decompressor(
            "naive_quantized.base:NaiveQuantizationCompressor",
            {"weight": codes, "weight_scale": scale.bfloat16()},
            {"num_bits": 8, "type": kind, **strategy},
        ),
    )


def mxfp8(shape: Shape) -> Subject:
    """Return MXFP8."""
    codes, scale = byte_codes(shape, torch.float8_e4m3fn), exponents(shape)

    def plain() -> torch.Tensor:
        factors = e8m0_values()[scale.long()].repeat_interleave(32, 1)
        return (codes.to(torch.float32) * factors).to(torch.bfloat16)

    return Subject(
        scheme=Mxfp8(),
        parts={Role.CODES: codes, Role.SCALE: scale},
        plain=plain,
        peer=decompressor(
            "mxfp8.base:MXFP8QuantizationCompressor",
            {"weight": codes, "weight_scale": scale},
            {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32},
        ),
    )


def nvfp4(shape: Shape, group_size: int) -> Subject:
    """Return NVFP4 with compressed-tensors' divisor."""
    codes = half_bytes(shape)
    scale = (torch.rand(shape[0], shape[1] // group_size) * 350 + 50).to(torch.float8_e4m3fn)
    divisor = torch.tensor([3584.0])

    def plain() -> torch.Tensor:
        factors = (scale.to(torch.float32) / divisor).repeat_interleave(group_size, 1)
        return (unpacked(codes) * factors).to(torch.bfloat16)

    return Subject(
        scheme=Nvfp4(group_size=group_size, global_is_divisor=True),
        parts={Role.CODES: codes, Role.SCALE: scale, Role.GLOBAL_SCALE: divisor},
        plain=plain,
        peer=decompressor(
            "nvfp4.base:NVFP4PackedCompressor",
            {"weight_packed": codes, "weight_scale": scale, "weight_global_scale": divisor},
            {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": group_size},
        ),
    )


def mxfp4(shape: Shape) -> Subject:
    """Return MXFP4."""
    codes, scale = half_bytes(shape), exponents(shape)

    def plain() -> torch.Tensor:
        factors = e8m0_values()[scale.long()].repeat_interleave(32, 1)
        return (unpacked(codes) * factors).to(torch.bfloat16)

    return Subject(
        scheme=Mxfp4(),
        parts={Role.CODES: codes, Role.SCALE: scale},
        plain=plain,
        peer=decompressor(
            "mxfp4.base:MXFP4PackedCompressor",
            {"weight_packed": codes, "weight_scale": scale},
            {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
        ),
    )


def integer_subjects(shape: Shape) -> list[Callable[[], Subject]]:
    """Return makers of the schemes of packed integers."""
    from headrace.quantization.awq import Awq
    from headrace.quantization.gptq import Gptq
    from headrace.quantization.int4 import ModeloptInt4, PackedInt

    rows, columns = shape
    groups = columns // 128

    def scales(*size: int) -> torch.Tensor:
        return ((torch.rand(size) + 0.5) / 100).bfloat16()

    def packed(bits: int, group_size: int | None, symmetric: bool) -> Subject:
        count = 1 if group_size is None else columns // group_size
        parts = {Role.CODES: words(rows, columns * bits // 32), Role.SCALE: scales(rows, count)}
        stored = {"weight_packed": parts[Role.CODES], "weight_scale": parts[Role.SCALE]}
        stored["weight_shape"] = torch.tensor(shape)
        if not symmetric:
            parts[Role.ZERO_POINT] = stored["weight_zero_point"] = words(rows * bits // 32, count)
        strategy: dict[str, Any] = (
            {"strategy": "group", "group_size": group_size} if group_size else {"strategy": "channel"}
        )
        return Subject(
            scheme=PackedInt(bits=bits, group_size=group_size, symmetric=symmetric),
            parts=parts,
            peer=decompressor(
                "pack_quantized.base:PackedQuantizationCompressor",
                stored,
                {"num_bits": bits, "type": "int", "symmetric": symmetric, **strategy},
            ),
        )

    def modelopt(fp8_scale: bool) -> Subject:
        parts = {Role.CODES: half_bytes((rows // 2, 2 * columns)), Role.SCALE: scales(rows, groups).float()}
        if fp8_scale:
            parts[Role.GLOBAL_SCALE] = torch.tensor(0.01)
        return Subject(scheme=ModeloptInt4(group_size=128, fp8_scale=fp8_scale), parts=parts)

    def gptq() -> Subject:
        parts = {
            Role.CODES: words(columns // 8, rows),
            Role.ZERO_POINT: words(groups, rows // 8),
            Role.SCALE: scales(groups, rows).half(),
            Role.GROUP_INDEX: (torch.arange(columns) // 128).int(),
        }
        return Subject(scheme=Gptq(group_size=128, symmetric=False), parts=parts)

    def awq() -> Subject:
        parts = {
            Role.CODES: words(columns, rows // 8),
            Role.ZERO_POINT: words(groups, rows // 8),
            Role.SCALE: scales(groups, rows).half(),
        }
        return Subject(scheme=Awq(group_size=128), parts=parts)

    return [
        lambda: packed(4, 32, True),
        lambda: packed(4, 128, False),
        lambda: packed(8, None, True),
        lambda: modelopt(False),
        lambda: modelopt(True),
        gptq,
        awq,
    ]


def byte_codes(shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    """Return codes of a weight whose values are normally distributed, the largest near the format's largest."""
    values = torch.randn(shape) * (30 if dtype is torch.int8 else 90)
    if dtype is torch.int8:
        return values.round().clamp(-128, 127).to(dtype)
    return values.clamp(-448, 448).to(dtype)


def half_bytes(shape: Shape) -> torch.Tensor:
    """Return two codes of four bits in each byte."""
    return torch.randint(0, 256, (shape[0], shape[1] // 2), dtype=torch.uint8)


def exponents(shape: Shape) -> torch.Tensor:
    """Return E8M0 exponents of groups of 32."""
    return torch.randint(110, 122, (shape[0], shape[1] // 32), dtype=torch.uint8)


def words(*size: int) -> torch.Tensor:
    """Return words of random bits."""
    return torch.randint(-(1 << 31), 1 << 31, size, dtype=torch.int64).to(torch.int32)


def unpacked(codes: torch.Tensor) -> torch.Tensor:
    """Return the values of E2M1 codes in float32, the plain way."""
    return e2m1_values()[torch.stack((codes & 15, codes >> 4), -1).flatten(1).long()]


def decompressor(place: str, stored: dict[str, torch.Tensor], arguments: dict[str, Any]) -> Run | None:
    """Return compressed-tensors' decompression of ``stored``, or None where it is not installed or has no such format."""
    try:
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

        module, name = place.split(":")
        compressor = getattr(importlib.import_module(f"compressed_tensors.compressors.{module}"), name)
    except (ImportError, AttributeError):
        return None
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**arguments))

    def run() -> torch.Tensor:
        weight: torch.Tensor = compressor.decompress(dict(stored), scheme)["weight"]
        return weight.to(torch.bfloat16)

    return run


# -- measuring


def measure(subject: Subject, shape: Shape, rounds: int) -> dict[str, float]:
    """Return the median seconds of each way, by its name."""

    def dequantize(out: torch.Tensor | None = None) -> torch.Tensor:
        return subject.scheme.dequantize(subject.parts, shape=shape, dtype=torch.bfloat16, out=out)

    result = dequantize()
    there = torch.empty_like(result)
    ways: dict[str, Callable[[], object]] = {
        "clone": result.clone,
        "new": dequantize,
        "copy": lambda: there.copy_(result),
        "into": lambda: dequantize(there),
    }
    if subject.plain is not None:
        if not torch.equal(subject.plain(), result):
            raise SystemExit(f"{subject.name}: the plain conversion gives another result")
        ways["plain"] = subject.plain
    if subject.peer is not None:
        ways["peer"] = subject.peer
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, run in ways.items():
            start = clock()
            made = run()
            took = clock() - start
            del made
            if number:  # the first round warms up
                seconds[name].append(took)
    return {name: statistics.median(values) for name, values in seconds.items()}


def row(name: str, shape: Shape, got: dict[str, float]) -> str:
    """Return one line of the table."""
    size = 2 * shape[0] * shape[1] / 1e9

    def speed(way: str) -> str:
        return f"{size / got[way]:.2f}" if way in got else "–"

    against_clone, against_copy = got["clone"] / got["new"], got["copy"] / got["into"]
    return f"| {name} | {speed('new')} | {against_clone:.2f} | {speed('into')} | {against_copy:.2f} | {speed('plain')} | {speed('peer')} | {speed('clone')} | {speed('copy')} |"


def describe_machine() -> str:
    """Return the processor and torch, in a line."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    models = (line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name"))
    name = next(models, platform.processor())
    return f"{name}, {os.cpu_count()} CPUs, {torch.get_num_threads()} of them used; torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"


def peer_version() -> str:
    """Return which compressed-tensors is measured, in a sentence."""
    try:
        return f"compressed-tensors {importlib.import_module('compressed_tensors').__version__}."
    except ImportError:
        return "compressed-tensors is not installed here."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", type=int, nargs=2, default=(4096, 4096), help="rows and columns; multiples of 128")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", help="schemes whose name has this in it")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--results", type=Path, help="a folder for the table")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    shape = (arguments.shape[0], arguments.shape[1])
    lines = [
        f"# Packed weights to bfloat16: {shape[0]} × {shape[1]}",
        "",
        f"{describe_machine()}. {peer_version()} `{' '.join(['python', *sys.argv])}`, medians of {arguments.rounds} rounds, GB/s of the result.",
        "",
        "| scheme | new | ÷ clone | into | ÷ copy_ | plain | compressed-tensors | clone | copy_ |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines[4:]), file=sys.stderr, flush=True)
    for make in [*float_subjects(shape), *integer_subjects(shape)]:
        subject = make()
        if arguments.only in subject.name:
            lines.append(row(subject.name, shape, measure(subject, shape, arguments.rounds)))
            print(lines[-1], file=sys.stderr, flush=True)
    text = "\n".join(lines) + "\n"
    print(text)
    if arguments.results:
        name = f"dequantize_{platform.node() or 'machine'}_{datetime.date.today().isoformat()}.md"
        (arguments.results / name).write_text(text)


if __name__ == "__main__":
    main()
