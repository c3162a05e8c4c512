"""Azure Blob Storage against its emulator: models load from it with every kind of credentials, and what goes wrong is told."""

from __future__ import annotations

import contextlib
import gzip
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

import headrace
from headrace.errors import AccessDenied, HeadraceError, ObjectChanged, ObjectNotFound, StoreUnavailable
from headrace.settings import AzureSettings, Settings, TransportSettings
from headrace.storage import open_store
from tests.support.azurite import ACCOUNT, AzuriteServer

QUICK = TransportSettings(
    max_attempts=2, connect_timeout_s=5, idle_timeout_s=10, backoff_first_s=0.01, backoff_most_s=0.05
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of about 12 MB in two files, with sizes that are no multiple of anything."""
    folder = tmp_path_factory.mktemp("checkpoint")
    generator = torch.Generator().manual_seed(0)
    for number in (1, 2):
        tensors = {f"{number}.{name}": torch.randn(777, 1001, generator=generator) for name in "ab"}
        tensors[f"{number}.scale"] = torch.tensor(0.5 * number)
        save_file(tensors, folder / f"model-0000{number}-of-00002.safetensors")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def put(container: Any, folder: Path, prefix: str = "models/llama") -> None:
    for path in folder.iterdir():
        container.upload_blob(f"{prefix}/{path.name}", path.read_bytes(), overwrite=True)


def check_tensors(found: dict[str, torch.Tensor], folder: Path) -> None:
    """Compare with a plain read, bit for bit."""
    expected = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].contiguous().flatten().view(torch.uint8), tensor.flatten().view(torch.uint8)), (
            name
        )


def settings_for(server: AzuriteServer, tmp_path: Path, **given: Any) -> Settings:
    azure = AzureSettings(account=ACCOUNT, endpoint=server.endpoint, **given)
    return Settings(azure=azure, cache_dir=tmp_path / "cache", progress=False, transport=QUICK)


@pytest.mark.parametrize("credentials", ["key", "sas", "connection string"])
def test_a_model_loads_as_a_plain_read_does(
    azurite: AzuriteServer, azure_container: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, credentials: str
) -> None:  # fmt: skip
    """With what the variables say, and with nothing of azure-identity, whose chain would ask metadata services."""
    put(azure_container, folder)
    for name in azurite.environment():
        monkeypatch.delenv(name)
    for name, value in azurite.environment(credentials).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, "azure.identity", None)
    name = azure_container.container_name
    settings = Settings.from_environment(cache_dir=tmp_path / "cache", progress=False, read_bytes=1 << 20)
    for uri in (
        f"az://{name}/models/llama",
        f"az://{ACCOUNT}/{name}/models/llama",
        f"abfs://{name}@{ACCOUNT}/models/llama",
    ):
        check_tensors(headrace.load_state_dict(uri, settings=settings), folder)
    with headrace.open(f"{azurite.endpoint}/{name}/models/llama", settings=settings) as checkpoint:
        assert (checkpoint.side_files.folder() / "config.json").read_text() == '{"model_type": "llama"}'


def test_a_url_with_its_sas_loads(azurite: AzuriteServer, azure_container: Any, folder: Path, tmp_path: Path) -> None:
    put(azure_container, folder)
    settings = settings_for(azurite, tmp_path)
    uri = f"{azurite.endpoint}/{azure_container.container_name}/models/llama"
    check_tensors(headrace.load_state_dict(f"{uri}?{azurite.make_sas()}", settings=settings), folder)
    file = next(folder.glob("model-00001*"))
    found = headrace.load_state_dict(f"{uri}/{file.name}?{azurite.make_sas()}", settings=settings)
    assert found.keys() == load_file(file).keys()


def test_an_object_that_is_replaced_during_a_load_is_named_with_both_versions(
    azurite: AzuriteServer, azure_container: Any, folder: Path, tmp_path: Path
) -> None:
    put(azure_container, folder)
    uri = f"az://{azure_container.container_name}/models/llama"
    key = "model-00002-of-00002.safetensors"
    with headrace.open(uri, settings=settings_for(azurite, tmp_path, account_key=azurite.key)) as checkpoint:
        old = next(item.version for item in checkpoint.snapshot.weights if item.key == key)
        azure_container.upload_blob(f"models/llama/{key}", (folder / key).read_bytes(), overwrite=True)
        new = azure_container.get_blob_client(f"models/llama/{key}").get_blob_properties().etag
        with pytest.raises(ObjectChanged) as caught:
            headrace.load_state_dict(checkpoint)
    assert f"{uri}/{key}" in caught.value.what
    assert old in caught.value.why
    assert new in caught.value.why
    assert old != new


def test_a_snapshot_is_not_to_be_had_where_versions_are_not_kept(
    azurite: AzuriteServer, azure_container: Any, folder: Path, tmp_path: Path
) -> None:
    """The emulator keeps none; what it is asked is what Azure is asked."""
    put(azure_container, folder)
    uri, settings = (
        f"az://{azure_container.container_name}/models/llama",
        settings_for(azurite, tmp_path, account_key=azurite.key),
    )
    with headrace.open(uri, settings=settings) as checkpoint:
        now = checkpoint.snapshot.id
    headrace.open(uri, settings=settings, snapshot=now).close()
    with pytest.raises(ObjectChanged, match="is not at snapshot 0123456789ab") as caught:
        headrace.open(uri, settings=settings, snapshot="0123456789ab")
    assert now in caught.value.why


def test_weights_that_are_stored_encoded_are_refused_and_side_files_decoded(
    azurite: AzuriteServer, azure_container: Any, folder: Path, tmp_path: Path
) -> None:
    from azure.storage.blob import ContentSettings

    encoded = ContentSettings(content_encoding="gzip")
    weights = next(folder.glob("model-00001*")).read_bytes()
    azure_container.upload_blob("m/config.json", gzip.compress(b'{"model_type": "gpt2"}'), content_settings=encoded)
    azure_container.upload_blob("m/model.safetensors", weights, content_settings=encoded)
    name = azure_container.container_name
    with contextlib.closing(
        open_store(f"az://{name}/m", settings=settings_for(azurite, tmp_path, account_key=azurite.key))
    ) as store:
        assert store.read_object(store.stat("config.json")) == b'{"model_type": "gpt2"}'
    with pytest.raises(HeadraceError) as caught:
        headrace.load_state_dict(f"az://{name}/m", settings=settings_for(azurite, tmp_path, account_key=azurite.key))
    assert "model.safetensors" in caught.value.what
    assert "Content-Encoding" in str(caught.value)


def test_directories_of_a_hierarchical_namespace_are_folders(
    azurite: AzuriteServer, azure_container: Any, tmp_path: Path
) -> None:
    for name in ("hdi_isfolder", "Hdi_isfolder"):
        azure_container.upload_blob(f"m/{name}-folder", b"", metadata={name: "true"})
    azure_container.upload_blob("m/with-content", b"", metadata={"hdi_isfolder": "true"})
    azure_container.upload_blob("m/with-content/a", b"1")
    azure_container.upload_blob("m/empty.txt", b"", metadata={"owner": "x"})
    uri = f"az://{azure_container.container_name}/m"
    settings = settings_for(azurite, tmp_path, account_key=azurite.key)
    with contextlib.closing(open_store(uri, settings=settings)) as store:
        listing = store.list_level()
    assert [item.key for item in listing.objects] == ["empty.txt"]
    assert listing.folders == ("Hdi_isfolder-folder", "hdi_isfolder-folder", "with-content")


@pytest.mark.parametrize(
    ("secret", "says"),
    [
        ({"account_key": "bm90IHRoZSBrZXkgb2YgdGhpcyBhY2NvdW50"}, "the account key of AZURE_STORAGE_KEY"),
        ({"permissions": "r"}, "sp=rl"),
        ({"lasts": timedelta(hours=-1)}, "expired"),
    ],
)
def test_what_is_not_allowed_is_denied(
    azurite: AzuriteServer, azure_container: Any, tmp_path: Path, secret: dict[str, Any], says: str
) -> None:
    given = secret if "account_key" in secret else {"sas_token": azurite.make_sas(**secret)}
    azure_container.upload_blob("m/a", b"1")
    uri = f"az://{azure_container.container_name}/m"
    with contextlib.closing(open_store(uri, settings=settings_for(azurite, tmp_path, **given))) as store:
        with pytest.raises(AccessDenied) as caught:
            store.list_level()
        assert says in str(caught.value)
        assert uri in caught.value.what
        assert azurite.endpoint in caught.value.why
        for value in given.values():
            assert value.partition("sig=")[2][:30] not in f"{caught.value!r}" or value.partition("sig=")[2] == ""


def test_an_absent_container_is_not_found(azurite: AzuriteServer, tmp_path: Path) -> None:
    settings = settings_for(azurite, tmp_path, account_key=azurite.key)
    with contextlib.closing(open_store("az://no-such-container/m", settings=settings)) as store:
        for ask in (store.list_level, lambda: store.stat("a")):
            with pytest.raises(ObjectNotFound, match="container that does not exist") as caught:
                ask()
            assert f"the container 'no-such-container' of the account '{ACCOUNT}'" in caught.value.why


def test_an_absent_prefix_is_empty(azurite: AzuriteServer, azure_container: Any, tmp_path: Path) -> None:
    settings = settings_for(azurite, tmp_path, account_key=azurite.key)
    with contextlib.closing(open_store(f"az://{azure_container.container_name}/absent", settings=settings)) as store:
        assert store.list_level().objects == ()


def test_a_public_container_needs_no_credentials(azurite: AzuriteServer, azure_container: Any, tmp_path: Path) -> None:
    azure_container.set_container_access_policy(signed_identifiers={}, public_access="container")
    azure_container.upload_blob("m/a", b"12")
    azure = AzureSettings(account=ACCOUNT, endpoint=azurite.endpoint, account_key="unused")
    settings = Settings(azure=azure, azure_anonymous=True, transport=QUICK)
    with contextlib.closing(open_store(f"az://{azure_container.container_name}/m", settings=settings)) as store:
        stored = store.list_level().objects[0]
        assert store.read_object(stored) == b"12"
        assert "Authorization" not in dict(store.describe_range(stored, 0, 1).headers)  # type: ignore[union-attr]


def test_many_blobs_come_in_pages(
    azurite: AzuriteServer, azure_container: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from azure.storage.blob import ContainerClient

    for number in range(7):
        azure_container.upload_blob(f"m/{number}", b"1")
    walk = ContainerClient.walk_blobs
    monkeypatch.setattr(ContainerClient, "walk_blobs", lambda *args, **given: walk(*args, **given, results_per_page=2))
    settings = settings_for(azurite, tmp_path, account_key=azurite.key)
    with contextlib.closing(open_store(f"az://{azure_container.container_name}/m", settings=settings)) as store:
        assert [item.key for item in store.list_level().objects] == [str(number) for number in range(7)]


# Tokens, over TLS


@pytest.fixture(scope="module")
def tls_azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[AzuriteServer, Path]]:
    """The emulator over TLS, where it takes tokens, and the folder with the certificates of its private authority."""
    pytest.importorskip("azure.storage.blob")
    from tests.support.certificates import make_certificates

    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder)
    arguments = ("--oauth", "basic", "--cert", str(folder / "server.pem"), "--key", str(folder / "server.key"))
    with AzuriteServer(*arguments, scheme="https") as server:
        yield server, folder


class Identity:
    """Stands for azure-identity's default chain: its tokens are such as Azurite takes; ``ends_in_s`` says how long, one number for each token."""

    ends_in_s: ClassVar[list[float]] = []
    num_asked: ClassVar[int] = 0

    def __init__(self, **_: Any) -> None:
        pass

    def get_token(self, *_: str, **__: Any) -> Any:
        import jwt
        from azure.core.credentials import AccessToken

        ends_in_s = Identity.ends_in_s.pop(0) if len(Identity.ends_in_s) > 1 else Identity.ends_in_s[0]
        Identity.num_asked += 1
        now = int(time.time())
        claims = {
            "aud": "https://storage.azure.com",
            "iss": "https://sts.windows.net/tenant/",
            "jti": str(Identity.num_asked),
        }
        claims |= {"iat": now - 7200, "nbf": now - 7200, "exp": now + int(ends_in_s)}  # type: ignore[dict-item]
        # The service may say that a token lives longer than it does.
        return AccessToken(jwt.encode(claims, "s" * 32, algorithm="HS256"), now + 3600)


@pytest.mark.parametrize("ends_in_s", [[3600], [-60, 3600]])
def test_a_model_loads_with_tokens(
    tls_azurite: tuple[AzuriteServer, Path], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends_in_s: list[float]
) -> None:  # fmt: skip
    """One token serves listing and all ranged reads; one that has expired is answered by another one."""
    server, certificates = tls_azurite
    monkeypatch.setattr("azure.identity.DefaultAzureCredential", Identity)
    monkeypatch.setattr(Identity, "ends_in_s", list(ends_in_s))
    monkeypatch.setattr(Identity, "num_asked", 0)
    with server.make_client(connection_verify=str(certificates / "ca.pem")) as client:
        container = client.get_container_client("models")
        if not container.exists():
            container.create_container()
        put(container, folder)
    azure = AzureSettings(account=ACCOUNT, endpoint=server.endpoint)
    settings = Settings(
        azure=azure, ca_file=str(certificates / "ca.pem"), cache_dir=tmp_path / "c", progress=False, transport=QUICK
    )
    check_tensors(headrace.load_state_dict("az://models/models/llama", settings=settings), folder)
    assert Identity.num_asked == len(ends_in_s)


def test_a_token_that_expires_between_listing_and_reading(
    tls_azurite: tuple[AzuriteServer, Path], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, certificates = tls_azurite
    monkeypatch.setattr("azure.identity.DefaultAzureCredential", Identity)
    monkeypatch.setattr(Identity, "ends_in_s", [2.0, 3600])
    monkeypatch.setattr(Identity, "num_asked", 0)
    with server.make_client(connection_verify=str(certificates / "ca.pem")) as client:
        container = client.create_container("short-lived")
        put(container, folder)
    azure = AzureSettings(account=ACCOUNT, endpoint=server.endpoint)
    settings = Settings(
        azure=azure, ca_file=str(certificates / "ca.pem"), cache_dir=tmp_path / "c", progress=False, transport=QUICK
    )
    with headrace.open("az://short-lived/models/llama", settings=settings) as checkpoint:
        time.sleep(3)
        check_tensors(headrace.load_state_dict(checkpoint), folder)
    assert Identity.num_asked == 2


def test_a_private_authority_must_be_named(tls_azurite: tuple[AzuriteServer, Path]) -> None:
    server, _ = tls_azurite
    azure = AzureSettings(account=ACCOUNT, endpoint=server.endpoint, account_key=server.key)
    settings = Settings(azure=azure, transport=TransportSettings(max_attempts=1))
    with (
        contextlib.closing(open_store("az://models/m", settings=settings)) as store,
        pytest.raises(StoreUnavailable) as caught,
    ):
        store.list_level()
    assert "certificate" in caught.value.why
    assert "REQUESTS_CA_BUNDLE" in caught.value.mend


# The emulator itself


def test_it_keeps_to_loopback_and_dies_with_its_parent(azurite: AzuriteServer, tmp_path: Path) -> None:
    listening = [
        item.laddr.ip for item in psutil.Process(azurite.pid).net_connections() if item.status == psutil.CONN_LISTEN
    ]
    assert set(listening) == {"127.0.0.1"}
    program = """
import time
from tests.support.azurite import AzuriteServer
with AzuriteServer() as server:
    print(server.pid, flush=True)
    time.sleep(120)
"""
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    root = Path(__file__).resolve().parents[2]
    parent = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment, cwd=root
    )
    with parent:
        try:
            assert parent.stdout is not None
            pid = int(parent.stdout.readline())
            assert psutil.pid_exists(pid)
        finally:
            parent.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 20
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)
