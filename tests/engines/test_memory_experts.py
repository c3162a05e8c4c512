"""Memory of models that are nearly all experts, plain and packed, in processes of their own: stacks are filled where they stay, and packed weights stay packed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

pytestmark = pytest.mark.slow

HIDDEN, INNER, EXPERTS, LAYERS, VOCABULARY = 1024, 512, 32, 6, 2048
_CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "dtype": "bfloat16",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "moe_intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": False,
}
NVFP4 = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "ignore": ["lm_head", "*self_attn*", "*mlp.gate"],
    "config_groups": {
        "group_0": {
            "weights": {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False},
            "input_activations": {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False},
            "targets": ["Linear"],
        }
    },
}
_MEASURE = """
import json, re, sys
import torch, transformers, headrace, headrace.engines.transformers, headrace.engines.weights
from headrace.settings import Settings
folder, options = sys.argv[1], json.loads(sys.argv[2])
from headrace.streaming import TensorStream
blocks = {}
found = TensorStream.block
def block(self, name):
    memory = found(self, name)
    if memory is not None: blocks[name] = memory.data_ptr()
    return memory
TensorStream.block = block
def peak():  # not ru_maxrss: a child inherits that of the process that spawned it
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
tiny = transformers.LlamaForCausalLM(transformers.LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=8))
tiny.generate(torch.tensor([[1, 2]]), max_new_tokens=1, do_sample=False, pad_token_id=0)
before, reports = peak(), []
settings = Settings.from_environment(progress=False, memory_limit_bytes=64 << 20)
model = headrace.load_model(folder, settings=settings, on_report=reports.append, **options)
loaded = peak() - before
model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=1, do_sample=False, pad_token_id=0)
state = dict(model.named_parameters())
print(json.dumps({
    "loaded": loaded, "generated": peak() - before, "kept": sum(p.nbytes for p in state.values()),
    "wanted": reports[0].bytes_wanted, "stacks": len(blocks),
    "in_place": sum(state[name].data_ptr() == pointer for name, pointer in blocks.items()),
}))
"""


def experts() -> Iterator[tuple[str, int, int]]:
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            prefix = f"model.layers.{layer}.mlp.experts.{expert}"
            yield f"{prefix}.gate_proj", INNER, HIDDEN
            yield f"{prefix}.up_proj", INNER, HIDDEN
            yield f"{prefix}.down_proj", HIDDEN, INNER


def other_tensors() -> dict[str, torch.Tensor]:
    shapes = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "lm_head.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}self_attn.{name}_proj.weight": (256, HIDDEN) for name in "kv"}
        shapes |= {f"{prefix}self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qo"}
        shapes |= {f"{prefix}self_attn.{name}_norm.weight": (128,) for name in "qk"}
        shapes |= {f"{prefix}{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
        shapes[f"{prefix}mlp.gate.weight"] = (EXPERTS, HIDDEN)
    return {name: (torch.randn(shape) * 0.02).to(torch.bfloat16) for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    weights = {f"{name}.weight": torch.randn(rows, columns).to(torch.bfloat16) for name, rows, columns in experts()}
    save_file(other_tensors() | weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    return folder


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed-experts")
    tensors = other_tensors()
    for name, rows, columns in experts():
        tensors[f"{name}.weight"] = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
        tensors[f"{name}.weight_scale"] = (torch.rand(rows, columns // 16) + 0.5).to(torch.float8_e4m3fn)
        tensors[f"{name}.weight_scale_2"] = torch.tensor(0.01)
        tensors[f"{name}.input_scale"] = torch.tensor(0.01)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**_CONFIG, "quantization_config": NVFP4}))
    return folder


def measure(folder: Path, **options: object) -> dict[str, int]:
    """Load in a process of its own, and generate a token; return peaks of resident memory beyond the imports."""
    command = [sys.executable, "-c", _MEASURE, str(folder), json.dumps(options)]
    done = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return result


LARGEST_OTHER = VOCABULARY * HIDDEN * 2


def test_stacks_are_filled_in_place_and_no_second_copy_is_made(plain: Path) -> None:
    result = measure(plain)
    assert result["kept"] == result["wanted"] > 600_000_000
    assert result["stacks"] == result["in_place"] == 2 * LAYERS
    assert result["loaded"] <= result["kept"] + (64 << 20) + LARGEST_OTHER


def test_packed_experts_stay_packed_until_after_the_first_token(packed: Path) -> None:
    result = measure(packed)
    assert result["kept"] == result["wanted"] < 260_000_000
    assert result["stacks"] == result["in_place"] == 3 * 4 * LAYERS
    assert result["generated"] <= result["wanted"] + (64 << 20) + 100_000_000


def test_expanding_takes_the_expanded_model_and_the_budget(packed: Path) -> None:
    result = measure(packed, dequantize=True)
    assert result["kept"] > 600_000_000 > result["wanted"]
    assert result["loaded"] <= result["kept"] + (64 << 20) + 100_000_000
