"""Files of a disk are read in large pieces, whatever the size of their tensors: on a network file system every read is a round trip."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import headrace
from headrace.settings import Settings
from headrace.streaming.report import LoadReport
from headrace.units import MIB

safetensors = pytest.importorskip("safetensors.torch")

NUM_TENSORS = 1500


@pytest.mark.parametrize("ownership", ["owned", "leased"])
def test_small_tensors_share_large_reads(tmp_path: Path, ownership: str) -> None:
    """1,500 tensors of 16 KiB in one file: none of the reads is smaller than 1 MiB but the last, and there are as few as that allows."""
    tensors = {f"layer.{number:04}": torch.full((4096,), float(number)) for number in range(NUM_TENSORS)}
    safetensors.save_file(tensors, tmp_path / "model.safetensors")
    settings = Settings.from_environment({}, cache_dir=tmp_path / "cache", progress=False, num_connections=2)
    with headrace.stream(tmp_path, ownership=ownership, settings=settings) as stream:  # type: ignore[arg-type]
        num_right = sum(bool((tensor == tensors[name]).all()) for name, tensor in stream)
    assert num_right == NUM_TENSORS
    report: LoadReport = stream.report
    assert report.bytes_read == NUM_TENSORS * 4096 * 4
    assert report.num_requests - 1 <= report.bytes_read // MIB


def test_a_part_of_the_tensors_is_read_in_few_reads_as_well(tmp_path: Path) -> None:
    """Every second tensor: the small gaps between them are read and dropped rather than jumped over."""
    tensors = {f"layer.{number:04}": torch.full((4096,), float(number)) for number in range(NUM_TENSORS)}
    safetensors.save_file(tensors, tmp_path / "model.safetensors")
    settings = Settings.from_environment({}, cache_dir=tmp_path / "cache", progress=False, num_connections=2)
    with headrace.stream(tmp_path, include="*[02468]", settings=settings) as stream:
        assert sum(1 for _ in stream) == NUM_TENSORS // 2
    assert stream.report.num_requests - 1 <= stream.report.bytes_read // MIB
