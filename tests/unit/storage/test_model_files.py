from __future__ import annotations

import json

import pytest

from headrace.storage.model_files import code_of_config, files_of_index, imports_of_code, is_index, is_weights


@pytest.mark.parametrize(
    ("raw", "files"),
    [
        (
            {"weight_map": {"a": "m-2.safetensors", "b": "m-1.safetensors", "c": "m-2.safetensors"}},
            ("m-1.safetensors", "m-2.safetensors"),
        ),
        ({"weight_map": {"a": "sub/m.safetensors"}}, ("sub/m.safetensors",)),
        ({"weight_map": {"a": "../m.safetensors", "b": "/m.safetensors", "c": "a//m.safetensors", "d": "x.bin"}}, ()),
        ({"weight_map": {"a": "a\\m.safetensors"}}, ()),
        ({"weight_map": {"a": 1}}, ()),
        ({"weight_map": []}, ()),
        ([], ()),
    ],
)
def test_an_index_names_files_below_its_folder(raw: object, files: tuple[str, ...]) -> None:
    assert files_of_index(json.dumps(raw).encode()) == files


@pytest.mark.parametrize("raw", [b"", b"\x80\x04", b"<html>", b"[" * 100_000])
def test_what_cannot_be_read_names_nothing(raw: bytes) -> None:
    assert files_of_index(raw) == ()
    assert code_of_config(raw) == ()
    assert imports_of_code(raw) == ()


def test_a_configuration_names_its_code() -> None:
    auto_map = {
        "AutoConfig": "configuration_x.XConfig",
        "AutoTokenizer": ["tokenization_x.XTokenizer", None],
        "AutoModel": "models.modeling_x.XModel",
        "AutoProcessor": "other/repository--processing_y.YProcessor",
        "AutoFeatureExtractor": "no_class",
    }
    raw = json.dumps({"auto_map": auto_map}).encode()
    assert code_of_config(raw) == ("configuration_x.py", "models/modeling_x.py", "tokenization_x.py")
    assert code_of_config(b'{"auto_map": "configuration_x.XConfig"}') == ("configuration_x.py",)
    assert code_of_config(b'{"auto_map": {"A": "....X", "B": "a\\\\b.X"}}') == ()


def test_code_names_the_files_beside_it() -> None:
    code = b"import torch\nfrom transformers import AutoModel\nfrom .configuration_x import XConfig\nif True:\n    from . import ops, kernels\nfrom ..above import y\n"
    assert imports_of_code(code) == ("configuration_x.py", "kernels.py", "ops.py")


def test_names_tell_what_they_are() -> None:
    assert is_index("model.safetensors.index.json")
    assert not is_index("model.safetensors")
    assert is_weights("Model.SafeTensors")
    assert not is_weights("model.safetensors.index.json")
