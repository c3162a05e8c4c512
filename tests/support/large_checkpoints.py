"""Checkpoints of the real size and with the real names of DeepSeek V3 and Kimi K2.5, of which nothing but headers, index and configuration exists: the tensors are zeros.

    checkpoint = kimi_k25()
    write_sparse(checkpoint, folder)            # files of 595 GB that take 55 MB of a disk
    with SparseS3(checkpoint) as server:        # or from a server that makes up the zeros as they are asked for
        ...

Names, shapes and dtypes follow the public repositories (deepseek-ai/DeepSeek-V3, moonshotai/Kimi-K2.5: config.json and the list of tensors). Within a file the widest dtype comes
first and then the name decides, as the safetensors library (0.8) writes it. Kimi K2.5 has one file for each decoder layer, one for head and embeddings, one for the
projector and one for the vision tower. Which of its 163 files holds which tensor of DeepSeek V3 is not that of the repository: here they are filled evenly, layer by layer.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from headrace.checkpoint.dtypes import DTYPES
from tests.support.kimi import SECTION
from tests.support.scripted_s3 import BUCKET, Answer, Asked, LoopbackServer

NUM_LAYERS = 61
"""Decoder layers of both models."""
_HIDDEN, _EXPERT, _DENSE, _Q_RANK, _KV_RANK, _ROPE, _HEAD = 7168, 2048, 18432, 1536, 512, 64, 128
"""Sizes that both models share: of states, of an expert, of a dense layer, of the two latent spaces, of the rotated and of the plain part of a head."""
_MOST_SERVED_BYTES = 1 << 20
"""Longest answer of `SparseS3`: nobody who plans asks for more."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a header."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return DTYPES[self.dtype].bits * math.prod(self.shape) // 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LargeCheckpoint:
    """All that exists of a checkpoint."""

    headers: dict[str, bytes]
    """File → its first bytes: the length of the header, and the header."""
    sizes: dict[str, int]
    """File → its whole size in bytes."""
    side: dict[str, bytes]
    """config.json and the index."""
    num_tensors: int
    tensor_bytes: int

    @property
    def size_of(self) -> dict[str, int]:
        """Key → size in bytes, of all objects."""
        return self.sizes | {key: len(body) for key, body in self.side.items()}

    def read(self, key: str, start: int, stop: int) -> bytes:
        """Return bytes ``start`` to ``stop`` of an object."""
        body = self.headers.get(key) or self.side[key]
        return body[start:stop].ljust(stop - start, b"\0")


def deepseek_v3(num_layers: int = NUM_LAYERS) -> LargeCheckpoint:
    """Return DeepSeek V3: 91,991 tensors, 689 GB, 163 files; with fewer layers as much less of it, the layer for multi-token prediction always included."""
    tensors = [
        Tensor("model.embed_tokens.weight", "BF16", (129280, _HIDDEN)),
        *(tensor for layer in range(num_layers) for tensor in _deepseek_layer(layer, is_dense=layer < 3)),
        *_deepseek_layer(num_layers, is_dense=False),
        *_prediction_layer(num_layers),
        Tensor("model.norm.weight", "BF16", (_HIDDEN,)),
        Tensor("lm_head.weight", "BF16", (129280, _HIDDEN)),
    ]
    num_files = max(1, round(163 * num_layers / NUM_LAYERS))
    return _checkpoint(_evenly(tensors, num_files), f"-of-{num_files:06d}", _deepseek_config(num_layers))


def kimi_k25(num_layers: int = NUM_LAYERS) -> LargeCheckpoint:
    """Return Kimi K2.5: 208,550 tensors, 595 GB (554 GiB), 64 files; with fewer layers as much less of it, the vision tower always included."""
    language = "language_model."
    files = [list(_kimi_layer(layer, is_dense=layer == 0)) for layer in range(num_layers)]
    files += [
        [
            Tensor(f"{language}lm_head.weight", "BF16", (163840, _HIDDEN)),
            Tensor(f"{language}model.embed_tokens.weight", "BF16", (163840, _HIDDEN)),
            Tensor(f"{language}model.norm.weight", "BF16", (_HIDDEN,)),
        ],
        list(_projector()),
        list(_vision_tower()),
    ]
    return _checkpoint(files, f"-of-{len(files):06d}", _kimi_config(num_layers))


# -- DeepSeek V3


def _deepseek_layer(layer: int, *, is_dense: bool) -> Iterator[Tensor]:
    prefix = f"model.layers.{layer}."
    for path, rows, columns in _attention(num_heads=128):
        yield from _block_fp8(f"{prefix}self_attn.{path}", rows, columns)
    yield from _norms(prefix)
    if is_dense:
        for path, rows, columns in _mlp("mlp", _DENSE):
            yield from _block_fp8(prefix + path, rows, columns)
        return
    yield Tensor(f"{prefix}mlp.gate.weight", "BF16", (256, _HIDDEN))
    yield Tensor(f"{prefix}mlp.gate.e_score_correction_bias", "F32", (256,))
    for path in ("mlp.shared_experts", *(f"mlp.experts.{expert}" for expert in range(256))):
        for projection, rows, columns in _mlp(path, _EXPERT):
            yield from _block_fp8(prefix + projection, rows, columns)


def _prediction_layer(layer: int) -> Iterator[Tensor]:
    """Yield what a layer for multi-token prediction has beyond a decoder layer."""
    prefix = f"model.layers.{layer}."
    for name in ("embed_tokens", "shared_head.head"):
        yield Tensor(f"{prefix}{name}.weight", "BF16", (129280, _HIDDEN))
    for name in ("enorm", "hnorm", "shared_head.norm"):
        yield Tensor(f"{prefix}{name}.weight", "BF16", (_HIDDEN,))
    yield Tensor(f"{prefix}eh_proj.weight", "BF16", (_HIDDEN, 2 * _HIDDEN))


def _block_fp8(path: str, rows: int, columns: int) -> Iterator[Tensor]:
    yield Tensor(f"{path}.weight", "F8_E4M3", (rows, columns))
    yield Tensor(f"{path}.weight_scale_inv", "F32", (-(-rows // 128), -(-columns // 128)))


def _deepseek_config(num_layers: int) -> dict[str, Any]:
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        **_shared_config(num_layers),
        "first_k_dense_replace": 3,
        "max_position_embeddings": 163840,
        "n_group": 8,
        "n_routed_experts": 256,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        },
        "rms_norm_eps": 1e-06,
        "rope_scaling": _yarn(40),
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "topk_group": 4,
        "torch_dtype": "bfloat16",
        "vocab_size": 129280,
    }


# -- Kimi K2.5


def _kimi_layer(layer: int, *, is_dense: bool) -> Iterator[Tensor]:
    prefix = f"language_model.model.layers.{layer}."
    plain = [(f"self_attn.{path}", rows, columns) for path, rows, columns in _attention(num_heads=64)]
    plain += _mlp("mlp" if is_dense else "mlp.shared_experts", _DENSE if is_dense else _EXPERT)
    for path, rows, columns in plain:
        yield Tensor(f"{prefix}{path}.weight", "BF16", (rows, columns))
    yield from _norms(prefix)
    if is_dense:
        return
    yield Tensor(f"{prefix}mlp.gate.weight", "BF16", (384, _HIDDEN))
    yield Tensor(f"{prefix}mlp.gate.e_score_correction_bias", "F32", (384,))
    for expert in range(384):
        for path, rows, columns in _mlp(f"mlp.experts.{expert}", _EXPERT):
            yield Tensor(f"{prefix}{path}.weight_packed", "I32", (rows, columns // 8))
            yield Tensor(f"{prefix}{path}.weight_scale", "BF16", (rows, columns // 32))
            yield Tensor(f"{prefix}{path}.weight_shape", "I32", (2,))


def _projector() -> Iterator[Tensor]:
    yield from _biased("mm_projector.pre_norm", 1152)
    yield from _biased("mm_projector.proj.0", 4608, 4608)
    yield from _biased("mm_projector.proj.2", _HIDDEN, 4608)


def _vision_tower() -> Iterator[Tensor]:
    yield from _biased("vision_tower.patch_embed.proj", 1152, 3, 14, 14)
    yield Tensor("vision_tower.patch_embed.pos_emb.weight", "BF16", (64, 64, 1152))
    for block in range(27):
        prefix = f"vision_tower.encoder.blocks.{block}."
        yield from _biased(f"{prefix}norm0", 1152)
        yield from _biased(f"{prefix}norm1", 1152)
        yield from _biased(f"{prefix}wqkv", 3456, 1152)
        yield from _biased(f"{prefix}wo", 1152, 1152)
        yield from _biased(f"{prefix}mlp.fc0", 4304, 1152)
        yield from _biased(f"{prefix}mlp.fc1", 1152, 4304)
    yield from _biased("vision_tower.encoder.final_layernorm", 1152)


def _biased(path: str, *shape: int) -> Iterator[Tensor]:
    yield Tensor(f"{path}.weight", "BF16", shape)
    yield Tensor(f"{path}.bias", "BF16", shape[:1])


def _kimi_config(num_layers: int) -> dict[str, Any]:
    text = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        **_shared_config(num_layers),
        "dtype": "bfloat16",
        "first_k_dense_replace": 1,
        "max_position_embeddings": 262144,
        "n_group": 1,
        "n_routed_experts": 384,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "num_nextn_predict_layers": 0,
        "quantization_config": SECTION,
        "rms_norm_eps": 1e-05,
        "rope_scaling": _yarn(64),
        "rope_theta": 50000.0,
        "routed_scaling_factor": 2.827,
        "topk_group": 1,
        "vocab_size": 163840,
    }
    vision = {
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "merge_kernel_size": [2, 2],
        "merge_type": "sd2_tpool",
        "mm_hidden_size": 1152,
        "mm_projector_type": "patchmerger",
        "model_type": "",
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
        "pos_emb_height": 64,
        "pos_emb_time": 4,
        "pos_emb_width": 64,
        "text_hidden_size": _HIDDEN,
        "vt_hidden_size": 1152,
    }
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "dtype": "bfloat16",
        "image_token_id": 163605,
        "media_placeholder_token_id": 163605,
        "model_type": "kimi_k25",
        "pad_token_id": 163839,
        "projection_hidden_size": 1152,
        "text_config": text,
        "tie_word_embeddings": False,
        "vision_config": vision,
    }


# -- what both have


def _attention(num_heads: int) -> list[tuple[str, int, int]]:
    return [
        ("q_a_proj", _Q_RANK, _HIDDEN),
        ("q_b_proj", num_heads * (_HEAD + _ROPE), _Q_RANK),
        ("kv_a_proj_with_mqa", _KV_RANK + _ROPE, _HIDDEN),
        ("kv_b_proj", num_heads * 2 * _HEAD, _KV_RANK),
        ("o_proj", _HIDDEN, num_heads * _HEAD),
    ]


def _norms(prefix: str) -> Iterator[Tensor]:
    yield Tensor(f"{prefix}self_attn.q_a_layernorm.weight", "BF16", (_Q_RANK,))
    yield Tensor(f"{prefix}self_attn.kv_a_layernorm.weight", "BF16", (_KV_RANK,))
    yield Tensor(f"{prefix}input_layernorm.weight", "BF16", (_HIDDEN,))
    yield Tensor(f"{prefix}post_attention_layernorm.weight", "BF16", (_HIDDEN,))


def _mlp(path: str, inner: int) -> list[tuple[str, int, int]]:
    return [
        (f"{path}.gate_proj", inner, _HIDDEN),
        (f"{path}.up_proj", inner, _HIDDEN),
        (f"{path}.down_proj", _HIDDEN, inner),
    ]


def _shared_config(num_layers: int) -> dict[str, Any]:
    return {
        "attention_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "hidden_act": "silu",
        "hidden_size": _HIDDEN,
        "intermediate_size": _DENSE,
        "kv_lora_rank": _KV_RANK,
        "moe_intermediate_size": _EXPERT,
        "moe_layer_freq": 1,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 8,
        "num_hidden_layers": num_layers,
        "q_lora_rank": _Q_RANK,
        "qk_nope_head_dim": _HEAD,
        "qk_rope_head_dim": _ROPE,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_method": "noaux_tc",
        "use_cache": True,
        "v_head_dim": _HEAD,
    }


def _yarn(factor: int) -> dict[str, Any]:
    return {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": factor,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    }


# -- files


def _evenly(tensors: list[Tensor], num_files: int) -> list[list[Tensor]]:
    """Return ``tensors`` in their order, in ``num_files`` files of about the same size."""
    total = sum(tensor.size_bytes for tensor in tensors)
    files: list[list[Tensor]] = [[] for _ in range(num_files)]
    before = 0
    for tensor in tensors:
        files[(before + tensor.size_bytes // 2) * num_files // total].append(tensor)
        before += tensor.size_bytes
    assert all(files)
    return files


def _checkpoint(files: Iterable[list[Tensor]], ending: str, config: dict[str, Any]) -> LargeCheckpoint:
    headers, sizes, weight_map = {}, {}, {}
    num_tensors = tensor_bytes = 0
    for number, inside in enumerate(files, start=1):
        key = f"model-{number:05d}{ending}.safetensors"
        headers[key], data_bytes = _header(inside)
        sizes[key] = len(headers[key]) + data_bytes
        weight_map.update({tensor.name: key for tensor in inside})
        num_tensors += len(inside)
        tensor_bytes += data_bytes
    index = {"metadata": {"total_size": tensor_bytes}, "weight_map": weight_map}
    side = {"config.json": json.dumps(config), "model.safetensors.index.json": json.dumps(index, indent=2)}
    return LargeCheckpoint(
        headers=headers,
        sizes=sizes,
        side={key: text.encode() for key, text in side.items()},
        num_tensors=num_tensors,
        tensor_bytes=tensor_bytes,
    )


def _header(tensors: list[Tensor]) -> tuple[bytes, int]:
    """Return the start of a file that holds ``tensors``, and the bytes of all of them."""
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in sorted(tensors, key=lambda tensor: (-DTYPES[tensor.dtype].bits, tensor.name)):
        stop = position + tensor.size_bytes
        described[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [position, stop],
        }
        position = stop
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, position


def write_sparse(checkpoint: LargeCheckpoint, folder: Path) -> None:
    """Write the checkpoint into ``folder``: whole files to whoever asks, of which the disk keeps the headers."""
    folder.mkdir(parents=True, exist_ok=True)
    for key, body in (checkpoint.headers | checkpoint.side).items():
        (folder / key).write_bytes(body)
        os.truncate(folder / key, checkpoint.size_of[key])


class SparseS3(LoopbackServer):
    """An S3 server with the objects of a checkpoint below ``model/`` in `BUCKET`. Zeros are made as they are asked for; a long read is refused, since it is no header's."""

    uri = f"s3://{BUCKET}/model"

    def __init__(self, checkpoint: LargeCheckpoint) -> None:
        super().__init__()
        self._checkpoint = checkpoint
        self._sizes = checkpoint.size_of

    @property
    def bytes_asked(self) -> int:
        """Bytes of weight files that were asked for."""
        return sum(stop - start for asked in self.reads for start, stop in [_range_of(asked)])

    @property
    def reads(self) -> list[Asked]:
        """The reads of weight files."""
        return [asked for asked in self.asked if asked.path.endswith(".safetensors") and asked.is_read]

    def environment(self) -> dict[str, str]:
        """Return the variables with which the server is found; no credentials are needed."""
        return {
            "AWS_ENDPOINT_URL_S3": self.url,
            "AWS_DEFAULT_REGION": "us-east-1",
            "HEADRACE_S3_ANONYMOUS": "1",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }

    def answer(self, asked: Asked) -> Answer:
        _, _, key = unquote(asked.path).removeprefix("/").partition("/model/")
        if not key:
            return 200, {"Content-Type": "application/xml"}, self._listing().encode()
        if key not in self._sizes:
            return 404, {}, b"<Error><Code>NoSuchKey</Code></Error>"
        size = self._sizes[key]
        about = {"ETag": _etag(size), "Accept-Ranges": "bytes"}
        if not asked.is_read:
            return 200, {**about, "Content-Length": str(size)}, self._body(key, 0, size)
        start, stop = _range_of(asked)
        stop = min(stop, size)
        return 206, {**about, "Content-Range": f"bytes {start}-{stop - 1}/{size}"}, self._body(key, start, stop)

    def _body(self, key: str, start: int, stop: int) -> bytes:
        is_allowed = key in self._checkpoint.side or stop - start <= _MOST_SERVED_BYTES
        return self._checkpoint.read(key, start, stop) if is_allowed else b""

    def _listing(self) -> str:
        contents = (
            f"<Contents><Key>{quote(f'model/{key}')}</Key><ETag>{_etag(size).replace(chr(34), '&quot;')}</ETag><Size>{size}</Size></Contents>"
            for key, size in sorted(self._sizes.items())
        )
        about = (
            f"<EncodingType>url</EncodingType><IsTruncated>false</IsTruncated><KeyCount>{len(self._sizes)}</KeyCount>"
        )
        return f"<ListBucketResult>{about}{''.join(contents)}</ListBucketResult>"


def _range_of(asked: Asked) -> tuple[int, int]:
    match = re.fullmatch(r"bytes=(\d+)-(\d+)", asked.headers["range"])
    assert match is not None
    return int(match[1]), int(match[2]) + 1


def _etag(size: int) -> str:
    return f'"{size:032x}"'
