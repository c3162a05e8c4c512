"""What all tests share: an environment without cloud settings of this machine, and real servers for those that ask for them."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.seaweed import SeaweedServer
from headrace.errors import MissingDependency
from headrace.settings import Settings, TransportSettings
from tests.support.azurite import AzuriteServer
from tests.support.gcs_server import GcsServer

_CLOUD_VARIABLES = (
    "AWS_",
    "AZURE_",
    "CLOUDSDK_",
    "GCE_",
    "GCLOUD_",
    "GOOGLE_",
    "HEADRACE_",
    "RUNAI_",
    "STORAGE_EMULATOR_HOST",
)


@pytest.fixture(scope="session", autouse=True)
def isolated_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No variable, profile, proxy or metadata service of the machine reaches a test."""
    absent = tmp_path_factory.mktemp("no-aws")
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(_CLOUD_VARIABLES) or name.lower() in ("http_proxy", "https_proxy", "all_proxy"):
                patch.delenv(name)
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patch.setenv("NO_GCE_CHECK", "true")
        patch.setenv("CLOUDSDK_CONFIG", str(absent / "gcloud"))
        # What leads azure-identity to a managed identity, which no test may ask for.
        for name in (
            "IDENTITY_ENDPOINT",
            "IDENTITY_HEADER",
            "MSI_ENDPOINT",
            "MSI_SECRET",
            "REQUESTS_CA_BUNDLE",
            "SSL_CERT_FILE",
        ):
            patch.delenv(name, raising=False)
        patch.setenv("AWS_CONFIG_FILE", str(absent / "config"))
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(absent / "credentials"))
        yield


@pytest.fixture(scope="session")
def seaweed() -> Iterator[SeaweedServer]:
    """The S3 server of this run."""
    try:
        server = SeaweedServer()
    except MissingDependency as error:
        pytest.skip(str(error))
    with server:
        yield server


@pytest.fixture(scope="session")
def s3_client(seaweed: SeaweedServer) -> Iterator[Any]:
    """A botocore client for the server, to put objects there."""
    with contextlib.closing(seaweed.make_client()) as client:
        yield client


@pytest.fixture
def s3_environment(seaweed: SeaweedServer, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The server as the store behind every ``s3://`` uri of this test; the variables are returned, for child processes."""
    for name, value in seaweed.environment().items():
        monkeypatch.setenv(name, value)
    return seaweed.environment()


@pytest.fixture
def bucket(s3_client: Any, s3_environment: dict[str, str]) -> Iterator[str]:
    """A new, empty bucket on the server, which ``s3://`` uris reach."""
    name = f"test-{secrets.token_hex(6)}"
    s3_client.create_bucket(Bucket=name)
    yield name
    for page in s3_client.get_paginator("list_objects_v2").paginate(Bucket=name):
        for item in page.get("Contents", ()):
            s3_client.delete_object(Bucket=name, Key=item["Key"])
    s3_client.delete_bucket(Bucket=name)


@pytest.fixture(scope="session")
def fake_gcs() -> Iterator[GcsServer]:
    """The emulator of Google Cloud Storage of this run."""
    pytest.importorskip("google.cloud.storage")
    with GcsServer() as server:
        yield server


@pytest.fixture
def gcs_environment(fake_gcs: GcsServer, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The emulator as the store behind every ``gs://`` uri of this test; the variables are returned, for child processes."""
    for name, value in fake_gcs.environment().items():
        monkeypatch.setenv(name, value)
    return fake_gcs.environment()


@pytest.fixture
def gcs_bucket(fake_gcs: GcsServer, gcs_environment: dict[str, str]) -> Iterator[Any]:
    """The SDK's object for a new, empty bucket of the emulator, which ``gs://`` uris reach."""
    with contextlib.closing(fake_gcs.make_client()) as client:
        bucket = client.create_bucket(f"test-{secrets.token_hex(6)}")
        yield bucket
        for blob in list(client.list_blobs(bucket)):
            blob.delete()
        bucket.delete()


@pytest.fixture(scope="session")
def azurite() -> Iterator[AzuriteServer]:
    """The emulator of Azure Blob Storage of this run."""
    pytest.importorskip("azure.storage.blob")
    with AzuriteServer() as server:
        yield server


@pytest.fixture
def azure_environment(azurite: AzuriteServer, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The emulator as the account behind every ``az://`` uri of this test; the variables are returned, for child processes."""
    for name, value in azurite.environment().items():
        monkeypatch.setenv(name, value)
    return azurite.environment()


@pytest.fixture
def azure_container(azurite: AzuriteServer, azure_environment: dict[str, str]) -> Iterator[Any]:
    """The SDK's client for a new, empty container of the emulator, which ``az://`` uris reach."""
    with azurite.make_client() as client:
        container = client.create_container(f"test-{secrets.token_hex(6)}")
        yield container
        container.delete_container()


@pytest.fixture
def s3_settings(tmp_path: Path) -> Settings:
    """Settings for a server on this machine: failures show soon, nothing is written outside the test's folder."""
    transport = TransportSettings(
        num_connections=4,
        connect_timeout_s=5.0,
        idle_timeout_s=10.0,
        total_timeout_s=60.0,
        max_attempts=3,
        backoff_first_s=0.01,
        backoff_most_s=0.05,
    )
    return Settings(cache_dir=tmp_path / "cache", progress=False, transport=transport)
