"""Credentials that end in the middle of a load, and those that must never cause a question to anybody."""

from __future__ import annotations

import ssl
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import headrace
from headrace.errors import AccessDenied, StoreUnavailable
from headrace.settings import Settings
from tests.support.certificates import make_certificates
from tests.support.checkpoints import assert_equal, make_files, make_tensors
from tests.support.scripted_s3 import BUCKET, Asked, CredentialServer, ScriptedS3, SilentService

TENSORS = make_tensors(8, rows=40)
URI = f"s3://{BUCKET}/llama"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedS3]:
    with ScriptedS3({f"llama/{key}": body for key, body in make_files(TENSORS).items()}) as one:
        for name, value in one.environment().items():
            monkeypatch.setenv(name, value)
        yield one


@pytest.fixture
def service(tmp_path: Path, server: ScriptedS3) -> Iterator[CredentialServer]:
    """The giver of keys that last ten seconds; the store refuses all others, with the code that S3 has for old ones."""
    with CredentialServer(tmp_path / "token") as one:
        server.refuse = lambda asked: None if one.is_good(asked.access_key) else (400, "ExpiredToken")
        yield one


@pytest.fixture
def many_reads(tmp_path: Path) -> Settings:
    """Reads of 64 KiB one after the other, so that a load has a middle."""
    return Settings.from_environment(
        {},
        cache_dir=tmp_path / "cache",
        progress=False,
        num_connections=1,
        read_bytes=64 << 10,
        max_attempts=3,
        backoff_first_s=0.01,
        backoff_most_s=0.02,
    )


@pytest.mark.parametrize("kind", ["web_identity", "container"])
def test_a_token_file_that_is_rewritten_in_the_middle_of_a_load(
    server: ScriptedS3,
    service: CredentialServer,
    many_reads: Settings,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    """A pod's token is rotated by whoever runs the pod: the new one is read from the file, and the load goes on to its end."""
    for name, value in getattr(service, kind)().items():
        monkeypatch.setenv(name, value)

    def rotate(number: int) -> None:
        if number in (6, 12):
            service.rotate()

    server.before_read = rotate
    assert_equal(headrace.load_state_dict(URI, settings=many_reads), TENSORS)
    assert service.num_rotations == 2
    used = {asked.access_key for asked in server.reads}
    assert "" not in used and len(used) >= 3
    tokens = {asked.headers["x-amz-security-token"] for asked in server.reads}
    assert tokens == {"of-token-0", "of-token-1", "of-token-2"}


@pytest.mark.parametrize("kind", ["web_identity", "container"])
def test_keys_that_end_are_fetched_anew_while_the_token_stays(
    server: ScriptedS3,
    service: CredentialServer,
    many_reads: Settings,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    """The service says that its keys last an hour, and the store refuses them all the same after some reads."""
    for name, value in getattr(service, kind)().items():
        monkeypatch.setenv(name, value)
    service.life_s = 3600
    ended: set[str] = set()

    def refuse(asked: Asked) -> tuple[int, str] | None:
        return (403, "ExpiredToken") if asked.access_key in ended or not service.is_good(asked.access_key) else None

    server.refuse = refuse
    server.before_read = lambda number: ended.add(server.asked[-1].access_key) if number == 8 else None
    assert_equal(headrace.load_state_dict(URI, settings=many_reads), TENSORS)
    assert len({asked.access_key for asked in server.reads}) == 2


def test_a_token_that_is_good_no_more_ends_the_load(
    server: ScriptedS3, service: CredentialServer, many_reads: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in service.web_identity().items():
        monkeypatch.setenv(name, value)

    def rot(number: int) -> None:
        if number == 6:
            service.rotate()
            service.token_file.write_text("token of another time")

    server.before_read = rot
    with pytest.raises(AccessDenied) as caught:
        headrace.load_state_dict(URI, settings=many_reads)
    assert "AssumeRoleWithWebIdentity" in str(caught.value)
    assert "token of another time" not in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "verify_tls", "loads"),
    [("SSL_CERT_FILE", True, True), ("AWS_CA_BUNDLE", True, True), (None, False, True), (None, True, False)],
)
def test_a_private_authority_is_trusted_by_the_service_that_gives_keys_as_well(
    server: ScriptedS3,
    many_reads: Settings,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    variable: str | None,
    verify_tls: bool,
    loads: bool,
) -> None:
    """One certificate bundle for every connection, the SDK's to its token endpoint included; and checking is off for all or for none."""
    make_certificates(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "server.pem", tmp_path / "server.key")
    if variable is not None:
        monkeypatch.setenv(variable, str(tmp_path / "ca.pem"))
    settings = replace(many_reads, verify_tls=verify_tls)
    with CredentialServer(tmp_path / "token", tls=context) as service:
        for name, value in service.web_identity().items():
            monkeypatch.setenv(name, value)
        server.refuse = lambda asked: None if service.is_good(asked.access_key) else (400, "ExpiredToken")
        with warnings.catch_warnings():
            if not verify_tls:  # urllib3's, which says what was asked for.
                warnings.filterwarnings("ignore", message="Unverified HTTPS request")
            if loads:
                assert_equal(headrace.load_state_dict(URI, settings=settings), TENSORS)
            else:
                with pytest.raises(StoreUnavailable, match="certificate"):
                    headrace.load_state_dict(URI, settings=settings)
                assert service.asked == []


def test_a_load_with_keys_of_its_own_asks_no_service(
    server: ScriptedS3, many_reads: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine that is none of Amazon's, a question to the metadata service takes seconds to fail."""
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
    monkeypatch.setenv("AWS_METADATA_SERVICE_NUM_ATTEMPTS", "1")
    with SilentService() as metadata:
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", metadata.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "STATIC")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        assert_equal(headrace.load_state_dict(URI, settings=many_reads), TENSORS)
        assert metadata.asked == []
        assert {asked.access_key for asked in server.asked} == {"STATIC"}

        # Nor when the store refuses them: there are no others to be had.
        server.refuse = lambda asked: (403, "InvalidAccessKeyId")
        with pytest.raises(AccessDenied):
            headrace.load_state_dict(URI, settings=many_reads)
        assert metadata.asked == []

        # The test's own check: without keys, the service is asked.
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        with pytest.raises(AccessDenied):
            headrace.load_state_dict(URI, settings=many_reads)
        assert metadata.asked != []


def test_an_anonymous_load_asks_no_service_and_signs_nothing(
    server: ScriptedS3, many_reads: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "dummy")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "dummy")
    with SilentService() as metadata:
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", metadata.url)
        settings = Settings.from_environment(
            {"RUNAI_STREAMER_S3_UNSIGNED": "1"}, cache_dir=many_reads.cache_dir, progress=False
        )
        assert_equal(headrace.load_state_dict(URI, settings=settings), TENSORS)
        assert metadata.asked == []
        assert not any("authorization" in asked.headers for asked in server.asked)
