"""A program that knows Run:ai's package and nothing else: it does what engines do with it, in this process and in one that it spawns, and prints what it found as JSON.

``runai_program.py FOLDER OTHER_FOLDER PULLED``: two folders of safetensors files, as uris or paths, and an empty local folder.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import multiprocessing
import sys
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from runai_model_streamer import ObjectStorageModel, SafetensorsStreamer, list_safetensors, pull_files
from runai_model_streamer.distributed_streamer.distributed_streamer import DistributedStreamer
from runai_model_streamer.file_streamer import FileChunks, FileStreamer
from runai_model_streamer.s3_utils.s3_utils import S3Credentials, is_s3_path
from runai_model_streamer.safetensors_streamer.safetensors_pytorch import create_torch_tensor, prepare_request
from runai_model_streamer.safetensors_streamer.safetensors_streamer import SafetensorsStreamer as TheSame


def digest(tensors: Iterable[tuple[str, Any]]) -> list[list[Any]]:
    import torch

    found = []
    for name, tensor in tensors:
        content = bytes(tensor.reshape(-1).view(torch.uint8).tolist())
        found.append([name, str(tensor.dtype), list(tensor.shape), hashlib.sha256(content).hexdigest()])
    return sorted(found)


def grouped(streamer: Any) -> dict[int, list[str]]:
    return {at: [one.name for one in file] for at, file in streamer.files_to_tensors_metadata.items()}


def stream(folder: str, other: str) -> dict[str, Any]:
    """One streamer for several calls: files of two folders, some tensors, one file with keys."""
    files = sorted(list_safetensors(path=folder)) + sorted(list_safetensors(f"{other}/"))
    with SafetensorsStreamer() as streamer:
        streamer.stream_files(files, device="cpu", is_distributed=False)
        everything = {"groups": grouped(streamer), "size": streamer.total_size, "all": digest(streamer.get_tensors())}
        rest = list(streamer.get_tensors())
        streamer.stream_files(files[::-1], tensor_names={"0.weight", "other.weight"})
        some = {"some groups": grouped(streamer), "some": digest(streamer.get_tensors())}
        streamer.stream_file(files[0], S3Credentials() if is_s3_path(folder) else None, None, False, None, False)
        one = digest((name, tensor.clone()) for name, tensor in streamer.get_tensors())
    return {"files": files, "rest": rest, "one": one, **everything, **some}


def ranges(folder: str) -> dict[str, Any]:
    files = sorted(list_safetensors(folder))
    with DistributedStreamer() as streamer:
        prepared = prepare_request(streamer, files, None)
        requests = [FileChunks.contiguous(at, files[at], one[0], one[2]) for at, one in enumerate(prepared)]
        streamer.stream_files(requests, None, "cpu", False)
        chunks = digest(
            (f"{at} {prepared[at][1][index].name}", create_torch_tensor(chunk, prepared[at][1][index]))
            for at, index, chunk in streamer.get_chunks()
        )
    with FileStreamer() as files_streamer:
        files_streamer.stream_files([FileChunks(7, files[0], [3, 0], [5, 8])], memory_limit=0)
        heads = sorted([at, index, chunk.tolist()] for at, index, chunk in files_streamer.get_chunks())
        listed = [
            sorted(files_streamer.list_files(f"{folder}/", **options))
            for options in (
                {},
                {"is_recursive": False},
                {"allow_patterns": ["*.json"]},
                {"ignore_patterns": ["*/code/*"]},
            )
        ]
    return {"chunks": chunks, "heads": heads, "listed": listed}


def pull(folder: str, pulled: Path) -> dict[str, Any]:
    pull_files(f"{folder}/", str(pulled / "files"), ["*.json", "*.py"], ["*index*"])
    with ObjectStorageModel(model_path=folder, dst=str(pulled / "model")) as model:
        model.pull_files(ignore_pattern=["*.safetensors"])
    return {
        str(path.relative_to(pulled)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(pulled.rglob("*"))
        if path.is_file() and not path.name.startswith(".") and path.suffix != ".lock"
    }


def say(pipe: Any, folder: str, other: str) -> None:
    pipe.send((stream(folder, other), SafetensorsStreamer.__module__))


def main(folder: str, other: str, pulled: str) -> None:
    here, there = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=say, args=(there, folder, other))
    process.start()
    there.close()
    spawned, whose = here.recv()
    process.join()
    found = {
        "is_same_class": SafetensorsStreamer is TheSame,
        "is_found": importlib.util.find_spec("runai_model_streamer") is not None,
        "version": version("runai_model_streamer").partition("+")[0],
        "stream": stream(folder, other),
        "spawned": spawned,
        "ranges": ranges(folder),
        "pulled": pull(folder, Path(pulled)) if is_s3_path(folder) else None,
    }
    print(json.dumps({"modules": [SafetensorsStreamer.__module__, whose], "found": found}))


if __name__ == "__main__":
    main(*sys.argv[1:])
