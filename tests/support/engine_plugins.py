"""What tests of Headrace as another engine's plug-in share, whichever engine it is: the switch of the takeover, what a fresh process sees, and what is asked of installed packages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement


@contextmanager
def takeover_of(variable: str, cache_dir: Path) -> Iterator[Path]:
    """Switch the takeover on by its ``variable``, for this process and its children, with ``cache_dir`` as the cache of side files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADRACE_CACHE_DIR", str(cache_dir))
        patch.setenv(variable, "1")
        yield cache_dir


def pass_warnings_of_others(items: Iterable[pytest.Item], folder: Path) -> None:
    """Let the tests in ``folder`` pass over warnings of the engine and what it imports, which are not ours to mend; those of our own modules stay errors."""
    for item in items:
        if folder in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore:::(?!headrace)"))


def run_fresh(code: str, *arguments: str, unset: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a process of its own, since what a plug-in replaces stays replaced; ``unset`` is left out of the environment, ``variables`` are added."""
    environment = {name: value for name, value in os.environ.items() if name != unset}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *arguments],
        env=environment | variables,
        capture_output=True,
        text=True,
        check=False,
    )


def told(done: subprocess.CompletedProcess[str]) -> Any:
    """Return what a process has printed as JSON in its last line. It must have ended well."""
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def met_requirements() -> list[Requirement]:
    """Return the requirements of Headrace and of its extra for S3, having asserted that what is installed meets them: pip changes an installed package only where one is not met."""
    wanted = [Requirement(text) for text in metadata.requires("headrace") or ()]
    plain = [one for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})]
    assert {one.name for one in plain} >= {"torch", "numpy"}
    assert not [one for one in plain if one.name == "transformers"]
    with_s3 = [one for one in wanted if one.marker is not None and one.marker.evaluate({"extra": "s3"})]
    for one in (*plain, *with_s3):
        assert one.specifier.contains(metadata.version(one.name), prereleases=True), f"{one} is not met"
    return [*plain, *with_s3]


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as the demo writes it: 269 MB of bf16 in four files."""
    folder = os.environ.get("SMOLLM2_FOLDER")
    if not folder:
        pytest.skip("SMOLLM2_FOLDER names no folder; `make test-vllm` and `make test-sglang` make one")
    return Path(folder)
