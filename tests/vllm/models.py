"""Small models with random weights for vLLM's CPU build, whose attention wants heads of 32, and a bucket to serve them from."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

PROMPT = [1, 5, 9, 33, 7]


def save_llama(
    folder: Path, *, seed: int = 0, num_layers: int = 4, most_file_size: str = "200KB", **fields: Any
) -> Path:
    """Save a random Llama of ``num_layers`` layers in float32, in several files with an index, and return its folder."""
    import torch
    import transformers

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        **{
            "vocab_size": 320,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": num_layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 256,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "tie_word_embeddings": False,
            **fields,
        }
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for value in model.state_dict().values():
            value.copy_(torch.randn(value.shape) * 0.05)
    model.save_pretrained(folder, max_shard_size=most_file_size)
    return folder


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Apply ``change`` to all tensors of a saved model and write them back as one file without an index."""
    tensors: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
        path.unlink()
    for path in folder.glob("*.index.json"):
        path.unlink()
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def edit_config(folder: Path, **fields: Any) -> Path:
    """Change fields of a saved config.json; None removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.update(fields)
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


def upload(client: Any, bucket: str, folder: Path, prefix: str) -> str:
    """Put the files of ``folder`` under ``prefix``, and return the uri."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            client.put_object(Bucket=bucket, Key=f"{prefix}/{path.relative_to(folder)}", Body=path.read_bytes())
    return f"s3://{bucket}/{prefix}"


@contextmanager
def running(model: str, **options: Any) -> Iterator[Any]:
    """An engine in this process, as small as it gets."""
    import gc

    from vllm import LLM

    given = {"enforce_eager": True, "max_model_len": 64, "max_num_seqs": 2, "dtype": "float32", **options}
    engine = LLM(model, skip_tokenizer_init=True, **given)
    try:
        yield engine
    finally:
        engine.llm_engine.engine_core.shutdown()
        del engine
        gc.collect()


def greedy(engine: Any, num_tokens: int = 12) -> list[int]:
    """Return the tokens that ``engine`` adds to `PROMPT`, the likeliest each time."""
    from vllm import SamplingParams

    how = SamplingParams(temperature=0, max_tokens=num_tokens, detokenize=False, ignore_eos=True)
    return list(engine.generate([{"prompt_token_ids": PROMPT}], how, use_tqdm=False)[0].outputs[0].token_ids)


def parameters(engine: Any) -> dict[str, Any]:
    """Return copies of the model's parameters as they are in the engine."""

    def copied(model: Any) -> dict[str, Any]:
        return {name: value.detach().clone() for name, value in model.named_parameters()}

    found: list[dict[str, Any]] = engine.apply_model(copied)
    return found[0]
