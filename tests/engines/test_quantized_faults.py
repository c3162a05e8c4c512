"""Real quantized checkpoints with one thing wrong: what contradicts itself is refused before the first weight byte, by name; what has one safe reading is read, with a warning."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace
from headrace.checkpoint import Entry
from headrace.engines.quantized import detect_quantization
from headrace.errors import ModelError, PlacementError, UnsupportedQuantization
from headrace.quantization import CheckpointQuantization, QuantizedModule, Role
from headrace.settings import Settings
from tests.support.quantized import QuantizedCheckpoint, QuantizedCheckpoints, readable_names
from tests.support.weight_files import add_tensor, change_tensor, edit_json, read_tensors, remove_tensor

NAMES = readable_names()
NVFP4 = "modelopt-nvfp4-kvfp8-llama"
QUIET = Settings.from_environment({}, progress=False)


def load(folder: Path, **options: Any) -> Any:
    return headrace.load_model(str(folder), dtype=torch.float32, settings=QUIET, **options).eval()


def detected(folder: Path) -> CheckpointQuantization:
    with headrace.open(str(folder)) as checkpoint:
        found = detect_quantization(folder, checkpoint.entries, source=str(folder))
    assert found is not None
    return found


def copies_by_part(
    checkpoint: QuantizedCheckpoint, target: Path, roles: Iterable[Role]
) -> Iterator[tuple[Path, Entry]]:
    """Yield for each of ``roles`` that this format has a copy of the folder, and the first packed module's entry in that role."""
    entries = first_module(checkpoint.folder).entries
    for role in roles:
        if role in entries:
            yield checkpoint.copied(target / role), entries[role]


def first_module(folder: Path) -> QuantizedModule:
    return next(iter(detected(folder).modules.values()))


def refused(folder: Path, *named: str) -> ModelError:
    """Assert that ``folder`` cannot be loaded, neither packed nor dequantized, and that the error names everything in ``named``. Return it."""
    for options in ({"dequantize": True}, {}):
        with pytest.raises((UnsupportedQuantization, PlacementError)) as caught:
            load(folder, **options)
        for name in named:
            assert name in str(caught.value)
        assert caught.value.mend
    return caught.value


def module_of(name: str) -> str:
    return name.rpartition(".")[0]


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_part_is_named(quantized: QuantizedCheckpoints, name: str, tmp_path: Path) -> None:
    roles = [Role.CODES, Role.SCALE, Role.GLOBAL_SCALE]
    if "W4A8" in first_module(quantized[name].folder).weight.scheme.describe():
        roles.remove(Role.GLOBAL_SCALE)  # without its second scale it is a sound INT4 AWQ
    for folder, entry in copies_by_part(quantized[name], tmp_path, roles):
        remove_tensor(folder, entry.name)
        refused(folder, module_of(entry.name))


@pytest.mark.parametrize("name", NAMES)
def test_a_part_of_the_wrong_shape_is_named(quantized: QuantizedCheckpoints, name: str, tmp_path: Path) -> None:
    for folder, entry in copies_by_part(quantized[name], tmp_path, set(Role) - {Role.CODES}):
        change_tensor(folder, entry.name, lambda stored: torch.stack([stored.tensor()] * 3))
        refused(folder, entry.name, str([3, *entry.shape]))


@pytest.mark.parametrize("name", NAMES)
def test_a_scale_of_the_wrong_dtype_is_named(quantized: QuantizedCheckpoints, name: str, tmp_path: Path) -> None:
    roles = (Role.SCALE, Role.GLOBAL_SCALE, Role.ZERO_POINT, Role.INPUT_SCALE, Role.PRE_SCALE)
    for folder, entry in copies_by_part(quantized[name], tmp_path, roles):
        change_tensor(folder, entry.name, lambda stored: torch.zeros(stored.shape, dtype=torch.int64))
        refused(folder, module_of(entry.name))


@pytest.mark.parametrize("name", NAMES)
def test_codes_of_the_wrong_dtype_are_named(quantized: QuantizedCheckpoints, name: str, tmp_path: Path) -> None:
    """Whole numbers that no layout has are no plain weight either."""
    for folder, entry in copies_by_part(quantized[name], tmp_path, [Role.CODES]):
        change_tensor(folder, entry.name, lambda stored: torch.zeros(stored.shape, dtype=torch.int64))
        refused(folder, module_of(entry.name))


@pytest.mark.parametrize("name", NAMES)
def test_a_weight_that_was_expanded_but_kept_its_scales_is_plain(
    quantized: QuantizedCheckpoints, name: str, tmp_path: Path
) -> None:
    folder = quantized[name].copied(tmp_path)
    before = detected(folder)
    module = first_module(folder)
    codes = module.entries[Role.CODES]
    if codes.name != f"{module.name}.weight":
        pytest.skip("its packed weights have a name of their own")
    if Role.PRE_SCALE in module.entries:
        pytest.skip("a plain weight has no pre-scale")
    change_tensor(folder, codes.name, lambda _: torch.ones(module.weight.shape, dtype=torch.bfloat16))
    found = detected(folder)
    assert found.modules.keys() == before.modules.keys() - {module.name}
    left = {entry.name for role, entry in module.entries.items() if role is not Role.CODES}
    assert set(found.unused) == left
    assert all(any(name in warning for warning in found.warnings) for name in left)


@pytest.mark.parametrize("name", NAMES)
def test_a_weight_of_another_size_than_the_models_is_named(
    quantized: QuantizedCheckpoints, name: str, tmp_path: Path
) -> None:
    """The packed parts fit each other; the model is another one."""
    folder = quantized[name].copied(tmp_path)
    edit_json(folder / "config.json", grow)
    error = refused(folder)
    assert any(module in str(error) for module in detected(folder).modules) or " × " in str(error)


def grow(config: dict[str, Any]) -> None:
    own = config.get("text_config", config)
    for key in ("intermediate_size", "moe_intermediate_size"):
        if key in own:
            own[key] *= 2


@pytest.mark.parametrize("name", NAMES)
def test_an_exclude_list_that_names_what_is_packed_is_overruled(
    quantized: QuantizedCheckpoints, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = quantized[name].copied(tmp_path)
    before = detected(folder)
    packed = next(iter(before.modules))
    key = exclude_everywhere(folder, packed)
    if key is None:
        pytest.skip("this configuration has no such list")
    found = detected(folder)
    assert found.modules.keys() == before.modules.keys()
    (warning,) = set(found.warnings) - set(before.warnings)
    assert packed in warning
    assert "excludes modules that are stored quantized" in warning
    with caplog.at_level(logging.WARNING, logger="headrace"):
        load(folder, weight_only=True)
    assert warning in caplog.text


def exclude_everywhere(folder: Path, packed: str) -> str | None:
    """Add ``packed`` to the lists of modules that are left out; return the key, or None where there is none."""
    keys = []

    def extend(content: dict[str, Any]) -> None:
        for holder in (
            content,
            content.get("quantization_config"),
            content.get("text_config"),
            content.get("quantization"),
        ):
            section = holder.get("quantization_config", holder) if isinstance(holder, dict) else {}
            for key in ("ignore", "exclude_modules", "modules_to_not_convert"):
                if key in section and packed not in section[key]:
                    section[key].append(packed)
                    keys.append(key)

    for file in ("config.json", "hf_quant_config.json"):
        if (folder / file).exists():
            edit_json(folder / file, extend)
    return keys[0] if keys else None


@pytest.mark.parametrize("name", NAMES)
def test_scales_of_a_plain_weight_are_warned_of(quantized: QuantizedCheckpoints, name: str, tmp_path: Path) -> None:
    """Of a head that is left out: with scales it is still plain, and says so."""
    folder = quantized[name].copied(tmp_path)
    before = detected(folder)
    head = next((key for key in read_tensors(folder) if key.endswith("lm_head.weight")), None)
    if head is None:
        pytest.skip("its head is tied")
    scale = f"{module_of(head)}.input_scale"
    add_tensor(folder, scale, torch.tensor(0.5))
    found = detected(folder)
    assert found.unused == (scale,)
    assert found.modules.keys() == before.modules.keys()
    (warning,) = set(found.warnings) - set(before.warnings)
    assert scale in warning


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_static_scale_of_inputs_is_warned_of(
    quantized: QuantizedCheckpoints, name: str, tmp_path: Path
) -> None:
    folder = quantized[name].copied(tmp_path)
    before = detected(folder)
    packed = next(iter(before.modules.values()))
    if Role.INPUT_SCALE not in packed.entries:
        pytest.skip("it has no scales of inputs")
    remove_tensor(folder, packed.entries[Role.INPUT_SCALE].name)
    found = detected(folder)
    after = found.modules[packed.name].weight
    assert after.scheme == packed.weight.scheme
    if packed.weight.inputs is None:
        assert found.warnings == before.warnings
        return
    if after.inputs is not None:
        # NVFP4 finds its groups' steps by itself; the stored one only makes them finer.
        assert after.inputs.format == "nvfp4"
        return
    (warning,) = set(found.warnings) - set(before.warnings)
    assert packed.name in warning


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_scale_of_keys_is_warned_of(quantized: QuantizedCheckpoints, name: str, tmp_path: Path) -> None:
    folder = quantized[name].copied(tmp_path)
    kv = detected(folder).kv
    if kv is None:
        pytest.skip("keys and values are not rounded")
    attention, (key, value) = next(iter(kv.scales.items()))
    assert key is not None and value is not None
    remove_tensor(folder, key.name)
    remove_tensor(folder, value.name)
    found = detected(folder)
    assert found.kv is not None and attention not in found.kv.scales
    (warning,) = found.warnings
    assert attention in warning


@pytest.mark.parametrize("name", NAMES)
def test_packed_weights_that_no_file_explains_are_refused(
    quantized: QuantizedCheckpoints, name: str, tmp_path: Path
) -> None:
    folder = quantized[name].copied(tmp_path)
    first = next(iter(detected(folder).modules))
    for file in ("hf_quant_config.json", "quantization_config.json"):
        (folder / file).unlink(missing_ok=True)
    edit_json(folder / "config.json", forget)
    refused(folder, first)


def forget(config: dict[str, Any]) -> None:
    for holder in (config, config.get("text_config", {})):
        holder.pop("quantization_config", None)


def with_algorithm(checkpoint: QuantizedCheckpoint) -> bool:
    return "quant_algo" in json.dumps(checkpoint.config())


@pytest.mark.parametrize("name", NAMES)
def test_an_algorithm_that_the_tensors_are_not_is_warned_of(
    quantized: QuantizedCheckpoints, name: str, tmp_path: Path
) -> None:
    if not with_algorithm(quantized[name]):
        pytest.skip("its configuration names no algorithm")
    folder = quantized[name].copied(tmp_path)
    before = detected(folder)
    named = "NVFP4" if "NVFP4" not in str(before.section.algorithm) else "FP8"
    edit_json(folder / "config.json", lambda config: config["quantization_config"].update(quant_algo=named))
    found = detected(folder)
    assert {key: module.weight.scheme for key, module in found.modules.items()} == {
        key: module.weight.scheme for key, module in before.modules.items()
    }
    assert any(f"says {named}, but the tensors are" in warning for warning in found.warnings)
    # The two files now contradict each other as well.
    assert any("hf_quant_config.json" in warning for warning in found.warnings)


@pytest.mark.parametrize("says_so", [False, True], ids=["tensors", "configuration"])
def test_svdquant_is_refused(quantized: QuantizedCheckpoints, tmp_path: Path, says_so: bool) -> None:
    """Without its branch the model would answer wrongly."""
    if NVFP4 not in NAMES:
        pytest.skip(f"there is no {NVFP4} here")
    folder = quantized[NVFP4].copied(tmp_path)
    first = first_module(folder).name
    if says_so:
        for file in ("config.json", "hf_quant_config.json"):
            edit_json(folder / file, lambda content: section_of(content).update(quant_algo="NVFP4_SVD"))
        refused(folder, "NVFP4_SVD")
        return
    for half, shape in (("a", (8, 512)), ("b", (256, 8))):
        add_tensor(folder, f"{first}.weight_quantizer._svdquant_lora_{half}", torch.ones(shape, dtype=torch.bfloat16))
    refused(folder, first, "SVDQuant")


def section_of(content: dict[str, Any]) -> dict[str, Any]:
    section: dict[str, Any] = content["quantization" if "quantization" in content else "quantization_config"]
    return section
