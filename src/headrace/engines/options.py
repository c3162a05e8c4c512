"""The keywords of ``from_pretrained``, sorted by what they are about. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.errors import InvalidSetting

LOADER_OPTIONS = frozenset(
    [
        *(
            "adapter_kwargs",
            "attn_implementation",
            "experts_implementation",
            "fusion_config",
            "kernel_config",
            "use_kernels",
            "allow_all_kernels",
        ),
        *(
            "device_map",
            "device_mesh",
            "distributed_config",
            "max_memory",
            "offload_buffers",
            "offload_folder",
            "tp_plan",
            "tp_size",
        ),
        *("dtype", "torch_dtype", "quantization_config", "generation_config"),
        *("ignore_mismatched_sizes", "key_mapping", "output_loading_info", "weights_only"),
    ]
)
"""Keywords of ``from_pretrained`` that are about loading; all others may be fields of the configuration."""
_MEANINGLESS_OPTIONS = frozenset(
    [
        *("cache_dir", "force_download", "local_files_only", "proxies", "resume_download", "token", "use_auth_token"),
        *("low_cpu_mem_usage", "use_safetensors"),
    ]
)
"""Keywords about the hub and its cache, which this path does not use."""
_REFUSED_OPTIONS = {
    "state_dict": "The weights come from the uri.",
    "gguf_file": "GGUF files are not streamed.",
    "variant": "Name the variant's files by their own uri.",
    "from_tf": "TensorFlow weights are not read.",
    "from_flax": "Flax weights are not read.",
}


def check_options(options: Mapping[str, Any]) -> None:
    """Raise `InvalidSetting` for what has no meaning where weights come from a uri."""
    for name, why in _REFUSED_OPTIONS.items():
        if options.get(name) not in (None, False, ""):
            raise InvalidSetting(f"{name} cannot be used with load_model.", why)


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what ``from_pretrained`` is to be told of loading, and what may be fields of the configuration."""
    own = {name: value for name, value in options.items() if name in LOADER_OPTIONS}
    fields = {name: value for name, value in options.items() if name not in LOADER_OPTIONS | _MEANINGLESS_OPTIONS}
    return own, fields
