"""Consumers that fuse stored parts into one parameter, with memory for one or two tensors, from a disk and from a server: whatever comes first is right when the rest has come.

Parts lie in any order and in different files. Freed leases are poisoned, so that a tensor whose memory was used again too early would show.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import headrace
from headrace.checkpoint import Checkpoint
from headrace.quantization.layouts import scheme_of
from headrace.quantization.scheme import Role, StoredPart
from headrace.quantization.slices import slice_weight
from headrace.settings import Settings
from headrace.streaming import DistributedStream, Lockstep, StreamOptions, TensorStream
from tests.support.code_definitions import assert_same
from tests.support.fusing import (
    BLOCK,
    COLUMNS,
    CONSUMERS,
    FORMATS,
    FUSIONS,
    LAYOUTS,
    BlockFp8,
    Consumer,
    EngineModel,
    Format,
    FusedLayer,
    Fusion,
    Tensors,
    copying_rows,
    expanding,
    holding_layers,
    holding_tensors,
    make_tensors,
    module_name,
    save_checkpoint,
)
from tests.support.thread_ranks import ThreadGroup, ThreadLink, on_every_rank

ROLES = {
    "weight": Role.CODES,
    "weight_scale": Role.SCALE,
    "weight_scale_inv": Role.SCALE,
    "weight_scale_2": Role.GLOBAL_SCALE,
    "input_scale": Role.INPUT_SCALE,
}
TENSORS = {format_.name: make_tensors(format_) for format_ in FORMATS}
Place = Callable[[Format, str], str]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tensors this small are slower with several threads of torch's, much slower beside other work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def largest_bytes(format_: Format) -> int:
    return max(tensor.nbytes for tensor in TENSORS[format_.name].values())


# One tensor that is held may lie in the middle: beside it there is room for another in any case where three fit.
LIMITS: Mapping[str, Callable[[Format], int]] = {
    "one tensor": lambda format_: largest_bytes(format_) + 4096,
    "three tensors": lambda format_: 3 * largest_bytes(format_) + 4096,
    "the smallest that works": lambda format_: 0,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Format, str], Path]:
    """Return the folder of a format's checkpoint in a layout, made once."""
    root = tmp_path_factory.mktemp("fusing")

    def get(format_: Format, layout: str) -> Path:
        folder = root / format_.name / layout
        return folder if folder.exists() else save_checkpoint(folder, TENSORS[format_.name], LAYOUTS[layout])

    return get


@pytest.fixture(params=["disk", "s3"])
def place(request: pytest.FixtureRequest, folders: Callable[[Format, str], Path]) -> Place:
    """Return where a format's checkpoint in a layout is to be had."""
    if request.param == "disk":
        return lambda format_, layout: str(folders(format_, layout))
    bucket, client = request.getfixturevalue("bucket"), request.getfixturevalue("s3_client")

    def put(format_: Format, layout: str) -> str:
        prefix = f"{format_.name}/{layout}".replace(" ", "-")
        for path in folders(format_, layout).iterdir():
            client.put_object(Bucket=bucket, Key=f"{prefix}/{path.name}", Body=path.read_bytes())
        return f"s3://{bucket}/{prefix}"

    return put


def settings(limit_bytes: int) -> Settings:
    return Settings.from_environment(
        progress=False, memory_limit_bytes=limit_bytes, read_bytes=16 << 10, num_connections=4, debug_poison=True
    )


def leased(source: str | Checkpoint, limit_bytes: int, **options: Any) -> TensorStream:
    stream = headrace.stream(source, ownership="leased", settings=settings(limit_bytes), **options)
    assert isinstance(stream, TensorStream)
    return stream


def dequantized(layer: FusedLayer, part: str) -> torch.Tensor:
    """Return the float32 values of one part of a filled layer, by Headrace's own readers."""
    tensors = layer.part(part)
    if set(tensors) == {"weight"}:
        return tensors["weight"].float()
    parts = {ROLES[suffix]: tensor for suffix, tensor in tensors.items()}
    stored = {ROLES[suffix]: StoredPart(suffix, it.dtype, tuple(it.shape)) for suffix, it in tensors.items()}
    scheme = scheme_of(part, stored)
    shape = scheme.check(stored, module=part)
    assert shape == (layer.fusion.parts[part], COLUMNS)
    return scheme.dequantize(parts, shape=shape)


@functools.cache
def stored_parts(format_: Format, fusion: Fusion) -> dict[str, Tensors]:
    """Return the stored tensors of each part of a layer, by suffix."""
    tensors = TENSORS[format_.name]
    return {
        part: {
            name.rpartition(".")[2]: tensor
            for name, tensor in tensors.items()
            if name.rpartition(".")[0] == module_name(fusion, part)
        }
        for part in fusion.parts
    }


@functools.cache
def expected_values(format_: Format, fusion: Fusion) -> torch.Tensor:
    """Return the concatenation of the dequantized parts."""
    return torch.cat([format_.expand(tensors) for tensors in stored_parts(format_, fusion).values()])


def assert_loaded(model: EngineModel, format_: Format, *, by: Consumer = holding_layers) -> None:
    """Assert that every parameter holds the stored bits of each part in its place, that they stand for the right values, and that the rest is there too."""
    for fusion in FUSIONS:
        layer = model.layers[fusion.name]
        for part, tensors in stored_parts(format_, fusion).items():
            held = layer.part(part)
            assert held.keys() == tensors.keys()
            for suffix, tensor in tensors.items():
                same = torch.equal(bits(held[suffix]), bits(tensor))
                assert same and held[suffix].dtype == tensor.dtype, f"{by.__name__}: {part}.{suffix} of {fusion.name}"
        values = torch.cat([dequantized(layer, part) for part in fusion.parts])
        assert_same(values, expected_values(format_, fusion))
    loose = {name: it for name, it in TENSORS[format_.name].items() if model.find(name) is None}
    assert model.plain.keys() == loose.keys()
    assert all(torch.equal(model.plain[name], tensor) for name, tensor in loose.items())


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def by_name(value: Any) -> str:
    return str(getattr(value, "name", None) or getattr(value, "__name__", value))


formats = pytest.mark.parametrize("format_", FORMATS, ids=by_name)


def each_layout(*, on_disk: Sequence[str], in_bucket: Sequence[str]) -> pytest.MarkDecorator:
    """Every layout from a disk; from a server, which costs more, those that differ most."""
    pairs = [("disk", layout) for layout in on_disk] + [("s3", layout) for layout in in_bucket]
    return pytest.mark.parametrize(("place", "layout"), pairs, indirect=["place"])


@formats
@each_layout(on_disk=list(LAYOUTS), in_bucket=["first parts first", "last parts first", "shuffled"])
def test_fused_parameters_have_the_values_of_their_parts(layout: str, format_: Format, place: Place) -> None:
    """Whatever a consumer puts aside, and for how long, with memory for one tensor."""
    with headrace.open(place(format_, layout), settings=settings(0)) as checkpoint:
        for consumer in CONSUMERS:
            model = EngineModel.empty(format_)
            with leased(checkpoint, LIMITS["one tensor"](format_), on_budget="promote") as stream:
                consumer(iter(stream), model)
            assert_loaded(model, format_, by=consumer)
        with leased(checkpoint, LIMITS["one tensor"](format_)) as stream:
            found = dict(expanding(iter(stream), format_))
    assert found.keys() == {fusion.name for fusion in FUSIONS}
    for fusion in FUSIONS:
        assert_same(found[fusion.name], expected_values(format_, fusion))


@hypothesis_settings(max_examples=12, deadline=None)
@given(data=st.data())
@formats
def test_parts_may_come_in_any_order(
    format_: Format, data: st.DataObject, folders: Callable[[Format, str], Path]
) -> None:
    """In the order of the plan, whatever that is, not of the files."""
    consumer = data.draw(st.sampled_from(CONSUMERS))
    limit_bytes = data.draw(st.sampled_from(list(LIMITS.values())))(format_)
    layout = data.draw(st.sampled_from(["in order", "first parts first", "shuffled"]))
    with headrace.open(folders(format_, layout)) as checkpoint:
        order = data.draw(st.permutations(list(checkpoint.entries.values())))
        model = EngineModel.empty(format_)
        options = StreamOptions(ownership="leased")
        with TensorStream(checkpoint, order, options=options, settings=settings(limit_bytes)) as stream:
            consumer(iter(stream), model)
    assert_loaded(model, format_, by=consumer)


@formats
@pytest.mark.parametrize("load_format", ["runai_streamer", "safetensors"])
def test_other_libraries_transports_give_the_same(
    load_format: str, format_: Format, folders: Callable[[Format, str], Path]
) -> None:
    """Run:ai's library reads into a buffer that it uses again."""
    if load_format == "runai_streamer":
        pytest.importorskip("runai_model_streamer")
    for layout, consumer in itertools.product(("first parts first", "shuffled"), CONSUMERS):
        model = EngineModel.empty(format_)
        limit_bytes = LIMITS["one tensor"](format_)
        with headrace.stream(
            folders(format_, layout), ownership="leased", load_format=load_format, settings=settings(limit_bytes)
        ) as stream:
            consumer(iter(stream), model)
        assert_loaded(model, format_, by=consumer)


@formats
@pytest.mark.parametrize("consumer", CONSUMERS, ids=by_name)
def test_ranks_that_share_the_reading_fuse_alike(
    consumer: Consumer, format_: Format, folders: Callable[[Format, str], Path]
) -> None:
    """Each rank gets what it did not read from another's memory, which is used again as well."""
    folder = folders(format_, "shuffled")
    chosen = settings(LIMITS["three tensors"](format_))

    def load(link: ThreadLink) -> EngineModel:
        model = EngineModel.empty(format_)
        with (
            headrace.open(folder, settings=chosen) as checkpoint,
            DistributedStream(
                checkpoint,
                lockstep=Lockstep(link, beat_s=0.02),
                options=StreamOptions(ownership="leased"),
                settings=chosen,
            ) as stream,
        ):
            consumer(iter(stream), model)
        return model

    models = on_every_rank(ThreadGroup(2).links(), load)
    assert len(models) == 2
    for model in models:
        if isinstance(model, BaseException):
            raise model
        assert_loaded(model, format_, by=consumer)


@pytest.mark.parametrize("format_", [it for it in FORMATS if "ModelOpt" in it.name], ids=by_name)
def test_parts_that_differ_keep_their_own_scales(format_: Format, place: Place) -> None:
    """None is the largest of them, none is lost."""
    model = EngineModel.empty(format_)
    with leased(place(format_, "shuffled"), LIMITS["one tensor"](format_)) as stream:
        holding_layers(iter(stream), model)
    for fusion in FUSIONS:
        parameters = model.layers[fusion.name].parameters
        for suffix in set(parameters) - set(format_.rows_of):
            stored = [tensors[suffix] for tensors in stored_parts(format_, fusion).values()]
            assert parameters[suffix].tolist() == [float(it) for it in stored]
            assert len(set(parameters[suffix].tolist())) == len(fusion.parts), (
                "the parts' scales differ, or nothing is tested"
            )


def test_whole_blocks_can_be_read_as_one_weight_and_others_cannot(place: Place) -> None:
    """Where every part but the last has whole blocks, the fused weight is one weight with one grid of scales. Where a block is cut in the middle, reading it so is wrong, though
    the shapes may fit: each part has its own grid."""
    format_ = BlockFp8()
    model = EngineModel.empty(format_)
    with leased(place(format_, "last parts first"), LIMITS["one tensor"](format_)) as stream:
        holding_tensors(iter(stream), model)
    num_whole = 0
    for fusion in FUSIONS:
        layer = model.layers[fusion.name]
        shape = (fusion.num_rows, COLUMNS)
        stored = {
            ROLES[suffix]: StoredPart(suffix, it.dtype, tuple(it.shape)) for suffix, it in layer.parameters.items()
        }
        parts = {ROLES[suffix]: tensor for suffix, tensor in layer.parameters.items()}
        scheme = scheme_of(fusion.name, stored, block=(BLOCK, BLOCK))
        fits = len(layer.parameters["weight_scale_inv"]) == -(-fusion.num_rows // BLOCK)
        if not fits:
            with pytest.raises(headrace.HeadraceError, match="weight_scale_inv"):
                scheme.check(stored, module=fusion.name)
            continue
        whole = scheme.dequantize(parts, shape=shape)
        is_whole = not any(rows % BLOCK for rows in list(fusion.parts.values())[:-1])
        assert torch.equal(whole, expected_values(format_, fusion)) is is_whole, fusion.name
        if is_whole:
            num_whole += 1
            start = 0
            for part, tensors in stored_parts(format_, fusion).items():
                rows = (start, start + fusion.parts[part])
                cut = slice_weight(scheme, parts, shape=shape, rows=rows)
                assert_same(cut.scheme.dequantize(cut.parts, shape=cut.shape), format_.expand(tensors))
                start = rows[1]
    assert num_whole == 1


# -- what the tests above rest on


@formats
def test_a_consumer_that_copies_stays_within_the_limit(format_: Format, place: Place) -> None:
    """Memory is used again: without that nothing above is tested."""
    model = EngineModel.empty(format_)
    limit_bytes = LIMITS["three tensors"](format_)
    addresses: list[tuple[int, int]] = []

    def noted(stream: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in stream:
            addresses.append((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes))
            yield name, tensor
            del tensor

    with leased(place(format_, "first parts first"), limit_bytes, on_budget="error") as stream:
        copying_rows(noted(stream), model)
    assert_loaded(model, format_)
    assert stream.report.num_promotions == 0
    assert stream.report.peak_staging_bytes <= limit_bytes < stream.report.bytes_wanted / 2
    covered = max(stop for _, stop in addresses) - min(start for start, _ in addresses)
    assert covered <= limit_bytes + 4096


@formats
def test_a_consumer_that_holds_is_given_more(format_: Format, place: Place) -> None:
    model = EngineModel.empty(format_)
    with leased(place(format_, "first parts first"), LIMITS["three tensors"](format_)) as stream:
        holding_layers(iter(stream), model)
    assert stream.report.num_promotions > 0
    assert_loaded(model, format_)


@formats
def test_a_stream_that_used_memory_again_would_be_noticed(format_: Format, place: Place) -> None:
    """By every consumer that puts something aside; one that copies at once would never know."""
    scratch = torch.empty(largest_bytes(format_), dtype=torch.uint8)

    def reusing(stream: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in stream:
            view = scratch[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            yield name, view.copy_(tensor)

    with headrace.open(place(format_, "first parts first"), settings=settings(0)) as checkpoint:
        for consumer in CONSUMERS:
            model = EngineModel.empty(format_)
            with leased(checkpoint, LIMITS["one tensor"](format_)) as stream:
                consumer(reusing(stream), model)
            if consumer is copying_rows:
                assert_loaded(model, format_)
            else:
                with pytest.raises(AssertionError):
                    assert_loaded(model, format_)
