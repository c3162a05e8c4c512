"""Opening one uri from many processes at once, on one node."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

_OPEN = """
import json, sys
import headrace
from headrace.settings import Settings

uri = sys.argv[1]
settings = Settings.from_environment(progress=False)
sys.stdin.readline()  # all start together
with headrace.open(uri, settings=settings) as checkpoint:
    folder = checkpoint.side_files.folder()
    print(json.dumps([str(folder), checkpoint.snapshot.id, (folder / "config.json").read_text(), sorted(p.name for p in folder.iterdir() if not p.name.startswith("."))]))
"""


def test_eight_processes_that_open_one_uri_at_once_share_one_mirror(
    bucket: str, s3_client: Any, s3_environment: dict[str, str], tmp_path: Path
) -> None:
    """origin A3: the cache is safe for processes that start together, and filled for all of them."""
    header = json.dumps({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
    objects = {
        "model.safetensors": struct.pack("<Q", len(header)) + header + b"x",
        "config.json": b'{"model_type": "llama"}',
        "tokenizer.json": json.dumps({"vocabulary": ["word"] * 100_000}).encode(),
        "chat_template.jinja": b"{{ messages }}",
    }
    for key, body in objects.items():
        s3_client.put_object(Bucket=bucket, Key=f"model/{key}", Body=body)
    cache = tmp_path / "cache"
    environment = {**os.environ, **s3_environment, "HEADRACE_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", _OPEN, f"s3://{bucket}/model/"]
    processes = [
        subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(8)
    ]
    outputs = []
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        output, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        outputs.append(output)
    assert len(set(outputs)) == 1, "one folder, one snapshot, one content"
    folder, _, config, names = json.loads(outputs[0])
    assert config == objects["config.json"].decode()
    assert set(names) == {"config.json", "tokenizer.json", "chat_template.jinja"}, "no weights (origin A2, A4)"
    assert Path(folder).parent == cache / "side_files"
    left = [path.name for path in (cache / "side_files").iterdir()]
    assert left == [Path(folder).name], "nothing partial is left"
