"""SGLang's own way from a model's path to a filled model, in this process and without an engine; and what is asked of a filled model."""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Mapping
from typing import Any

import torch


def load(model: str, *, load_format: str = "auto", extra: Mapping[str, Any] | None = None, **arguments: Any) -> Any:
    """Return the model at ``model``, filled by the loader of ``load_format`` as SGLang's worker does it."""
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader.loader import get_model_loader
    from sglang.srt.runtime_context import get_model

    config = configured(model, load_format=load_format, extra=extra, **arguments)
    # The format that SGLang has decided on.
    load_config = LoadConfig(load_format=get_model().load_format, model_loader_extra_config=dict(extra or {}))
    loader = get_model_loader(load_config, config)
    return loader.load_model(model_config=config, device_config=DeviceConfig("cpu", 0))


def configured(
    model: str, *, load_format: str = "auto", extra: Mapping[str, Any] | None = None, **arguments: Any
) -> Any:
    """Resolve the arguments for ``model`` as the first process does, publish them as a worker does, and return SGLang's configuration of the model."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.dp_attention import init_dp_gathered_buffer
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.runtime_context import SpawnRanks, publish

    given = arguments_for(model, load_format=load_format, extra=extra, **arguments)
    publish(given, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
    initialize_moe_config()
    _init_groups(given)
    config = ModelConfig.from_server_args(given)
    init_dp_gathered_buffer(config)
    return config


def arguments_for(
    model: str, *, load_format: str = "auto", extra: Mapping[str, Any] | None = None, **arguments: Any
) -> Any:
    """Return SGLang's resolved arguments for ``model`` on the CPU."""
    from sglang.srt.server_args import ServerArgs

    given = ServerArgs(
        model_path=model,
        load_format=load_format,
        model_loader_extra_config=json.dumps(dict(extra or {})),
        device="cpu",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        skip_tokenizer_init=True,
        disable_cuda_graph=True,
        **arguments,
    )
    given.resolve_once()
    return given


def hashes(model: torch.nn.Module) -> dict[str, str]:
    """Return the SHA-256 of every parameter and buffer, by name, dtype and shape included."""
    return {name: digest(value) for name, value in [*model.named_parameters(), *model.named_buffers()]}


def digest(tensor: torch.Tensor) -> str:
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode() + content).hexdigest()


def _init_groups(arguments: Any) -> None:
    """Make SGLang's process groups of one rank, once in a process."""
    from sglang.srt.distributed.parallel_state import (
        init_distributed_environment,
        initialize_model_parallel,
        model_parallel_is_initialized,
    )
    from sglang.srt.layers.dp_attention import initialize_dp_attention

    if not model_parallel_is_initialized():
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        init_distributed_environment(
            world_size=1,
            rank=0,
            local_rank=0,
            distributed_init_method=f"tcp://127.0.0.1:{port}",
            backend="gloo",
        )
        initialize_model_parallel()
    initialize_dp_attention(server_args=arguments)
