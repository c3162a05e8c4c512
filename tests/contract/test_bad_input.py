"""What people get wrong, typed as they type it, against a real S3 server: one message with what, why and a mend, and the right exit code."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from typing import Any

import pytest


def safetensors(num_bytes: int = 64) -> bytes:
    header = json.dumps({"a": {"dtype": "U8", "shape": [num_bytes], "data_offsets": [0, num_bytes]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(num_bytes)


def headrace(*arguments: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headrace", *arguments]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120)


def assert_teaches(done: subprocess.CompletedProcess[str], *words: str, exit_code: int = 1) -> None:
    text = " ".join(done.stderr.split())
    assert done.returncode == exit_code, text
    assert "Traceback" not in text and len(done.stderr) < 4096
    for word in words:
        assert word in text, f"{word!r} is not in: {text}"


OBJECTS: dict[str, dict[str, bytes]] = {
    "pickle": {"pytorch_model.bin": b"PK\x03\x04" + bytes(200), "config.json": b"{}"},
    "text-only": {"README.md": b"a model", "config.json": b"{}"},
    "truncated": {"model.safetensors": safetensors()[:-1]},
    "trailing": {"model.safetensors": safetensors() + b"x"},
    "lfs": {
        "model.safetensors": b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 123456\n"
    },
    "error-page": {"model.safetensors": b"<html><body>AccessDenied</body></html>" * 4},
    "absent-file": {
        "model.safetensors.index.json": json.dumps(
            {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
        ).encode(),
        "one.safetensors": safetensors(),
    },
    "escaping": {
        "model.safetensors.index.json": json.dumps({"weight_map": {"a": "../../etc/passwd"}}).encode(),
        "m.safetensors": safetensors(),
    },
}


@pytest.mark.parametrize(
    ("prefix", "words"),
    [
        ("nothing-here", ["nothing-here", "s3://"]),
        ("pickle", ["pytorch_model.bin", "safetensors"]),
        ("text-only", ["safetensors"]),
        ("truncated", ["model.safetensors", "headrace inspect"]),
        ("trailing", ["model.safetensors", "1"]),
        ("lfs", ["Git LFS pointer"]),
        ("error-page", ["HTML"]),
        ("absent-file", ["two.safetensors"]),
        ("escaping", ["../../etc/passwd"]),
    ],
)
def test_a_prefix_that_holds_no_good_checkpoint(
    prefix: str, words: list[str], bucket: str, s3_client: Any, s3_environment: dict[str, str]
) -> None:
    for key, body in OBJECTS.get(prefix, {}).items():
        s3_client.put_object(Bucket=bucket, Key=f"{prefix}/{key}", Body=body)
    assert_teaches(headrace("load", f"s3://{bucket}/{prefix}", environment=s3_environment), *words)


def test_no_such_bucket(s3_environment: dict[str, str]) -> None:
    done = headrace("load", "s3://no-such-bucket-anywhere/model", environment=s3_environment)
    assert_teaches(done, "no-such-bucket-anywhere", "bucket")


def test_a_wrong_secret_is_refused_and_never_shown(bucket: str, s3_environment: dict[str, str]) -> None:
    wrong = {**s3_environment, "AWS_SECRET_ACCESS_KEY": "not-the-secret-0123456789"}
    done = headrace("load", f"s3://{bucket}/model", environment=wrong)
    assert_teaches(done, bucket)
    assert "not-the-secret" not in done.stderr + done.stdout


def test_no_credentials_at_all(bucket: str, s3_environment: dict[str, str]) -> None:
    without = {name: value for name, value in s3_environment.items() if "KEY" not in name}
    environment = {**without, "AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}
    assert_teaches(headrace("load", f"s3://{bucket}/model", environment=environment), "credentials")


def test_an_endpoint_where_nobody_listens(bucket: str, s3_environment: dict[str, str]) -> None:
    nowhere = {**s3_environment, "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9"}
    assert_teaches(headrace("load", f"s3://{bucket}/model", environment=nowhere), "127.0.0.1:9")


def test_a_path_that_does_not_exist() -> None:
    assert_teaches(headrace("load", "/no/such/folder", environment={}), "/no/such/folder")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["load"], ["URI"]),
        (["load", "/tmp", "--conections", "4"], ["--conections"]),
        (["load", "/tmp", "--connections", "many"], ["--connections", "integer"]),
        (["laod", "/tmp"], ["laod"]),
        (["serve", "/tmp", "--pipeline-parallel-size", "2"], ["--pipeline-parallel-size", "not"]),
    ],
)
def test_a_wrong_command_line(arguments: list[str], words: list[str]) -> None:
    assert_teaches(headrace(*arguments, environment={}), *words, exit_code=2)


def test_serving_without_a_tokenizer(
    bucket: str, s3_client: Any, s3_environment: dict[str, str], tmp_path: Any
) -> None:
    config = json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}).encode()
    for key, body in {"config.json": config, "model.safetensors": safetensors()}.items():
        s3_client.put_object(Bucket=bucket, Key=f"bare/{key}", Body=body)
    done = headrace(
        "serve", f"s3://{bucket}/bare", "--port", "0", "--cache-dir", str(tmp_path), environment=s3_environment
    )
    last = " ".join(done.stderr[-1500:].split())
    assert done.returncode == 1 and "The tokenizer in" in last and "tokenizer.json" in last
    assert "Traceback" not in done.stderr


def test_serving_an_unknown_architecture(
    bucket: str, s3_client: Any, s3_environment: dict[str, str], tmp_path: Any
) -> None:
    config = json.dumps({"architectures": ["LlammaForCausalLM"], "model_type": "llamma"}).encode()
    for key, body in {"config.json": config, "model.safetensors": safetensors()}.items():
        s3_client.put_object(Bucket=bucket, Key=f"odd/{key}", Body=body)
    done = headrace(
        "serve", f"s3://{bucket}/odd", "--port", "0", "--cache-dir", str(tmp_path), environment=s3_environment
    )
    last = " ".join(done.stderr[-1500:].split())
    assert done.returncode == 1 and "llamma" in last and "Transformers" in last
    assert "Traceback" not in done.stderr
