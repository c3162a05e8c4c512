"""`headrace doctor` as a person runs it, against real servers: what is right and what is wrong, and never a secret."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save

from headrace.cli.doctor import DoctorOptions, doctor
from headrace.doctor import Examination, Finding, Plan, State, World
from headrace.settings import Settings
from tests.support.checkpoints import make_tensors

WEIGHTS = save(make_tensors(3))


def run(*arguments: str, **environment: str | None) -> subprocess.CompletedProcess[str]:
    """Run a command with the environment of the tests and ``environment``, of which None takes a variable away."""
    merged = {**os.environ, **environment}
    return subprocess.run(
        [sys.executable, "-m", "headrace", *arguments],
        env={name: value for name, value in merged.items() if value is not None},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def failures(findings: dict[str, dict[str, Any]]) -> list[str]:
    return [step for step, finding in findings.items() if finding["state"] == "failed"]


@pytest.fixture
def model(bucket: str, s3_client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The uri of a model in the bucket; the cache is the test's own."""
    s3_client.put_object(Bucket=bucket, Key="llama-3/model.safetensors", Body=WEIGHTS)
    s3_client.put_object(Bucket=bucket, Key="llama-3/config.json", Body=b"{}")
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path / "cache"))
    return f"s3://{bucket}/llama-3"


Diagnose = Callable[..., tuple[dict[str, Any], dict[str, dict[str, Any]]]]


@pytest.fixture
def diagnose(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Diagnose:
    """Run the command in this process, and return its report as JSON with the findings by step; no secret is in what was printed."""

    def run_command(
        uri: str, *, measures: bool = False, **environment: str | None
    ) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.delenv(name, raising=False) if value is None else patch.setenv(name, value)
            options = DoctorOptions(uri=uri, read_settings=Settings.from_environment, measures=measures, json=True)
            code = doctor(options, dict(os.environ))
            secret = os.environ.get("AWS_SECRET_ACCESS_KEY", "").strip()
        printed = capsys.readouterr()
        assert printed.err == ""
        assert not secret or secret not in printed.out
        report = json.loads(printed.out)
        assert code == (1 if report["state"] == "failed" else 0)
        return report, {finding["step"]: finding for finding in report["findings"]}

    return run_command


def test_everything_is_right(model: str, s3_environment: dict[str, str], tmp_path: Path, diagnose: Diagnose) -> None:
    report, findings = diagnose(model, measures=True)
    assert (report["uri"], report["state"], failures(findings)) == (model, "ok", [])
    assert (
        findings["settings"]["details"]["endpoint"] == f"{s3_environment['AWS_ENDPOINT_URL_S3']} (AWS_ENDPOINT_URL_S3)"
    )
    assert findings["settings"]["details"]["region"] == "us-east-1 (AWS_DEFAULT_REGION)"
    assert findings["network"]["details"]["route"] == "this machine"
    assert findings["tls"]["state"] == "skipped"
    assert findings["clock"]["what"] == "The clocks agree."
    assert "the variables AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in findings["credentials"]["what"]
    assert findings["list"]["what"].startswith("1 file, ")
    assert findings["range read"]["details"]["answer"] == "206 Partial Content"
    assert "is refused (412)" in findings["conditional read"]["what"]
    assert findings["cache"]["details"]["folder"] == f"{tmp_path / 'cache'} (HEADRACE_CACHE_DIR)"


def test_plain_output_is_lines_without_colours(model: str, s3_environment: dict[str, str]) -> None:
    done = run("doctor", model, "--no-throughput")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    lines = done.stdout.splitlines()
    assert lines[0].split()[:2] == ["ok", "name"]
    assert lines[-1] == "A load should work: nothing is wrong."
    assert "skipped  throughput        Not measured, as --no-throughput says." in lines
    assert s3_environment["AWS_SECRET_ACCESS_KEY"] not in done.stdout


def test_a_wrong_bucket(model: str, diagnose: Diagnose) -> None:
    _, findings = diagnose("s3://no-such-bucket-of-ours/llama-3")
    assert failures(findings) == ["list"]
    assert "is in a bucket that does not exist" in findings["list"]["what"]
    assert findings["range read"]["what"] == "Not tried, because list failed."


def test_a_wrong_folder(model: str, diagnose: Diagnose) -> None:
    wrong = model.removesuffix("llama-3") + "llama3"
    report, findings = diagnose(wrong)
    assert failures(findings) == ["list"]
    assert f"Did you mean {model}?" in report["summary"]
    done = run("inspect", wrong)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"  doctor  list: There is {model}. Did you mean that?" in done.stderr


def test_a_wrong_secret_key(model: str, s3_environment: dict[str, str], diagnose: Diagnose) -> None:
    wrong = "not-the-secret-key-of-anybody"
    _, findings = diagnose(model, AWS_SECRET_ACCESS_KEY=wrong)
    assert failures(findings) == ["list"]
    assert "SignatureDoesNotMatch" in findings["list"]["what"]
    assert "Check the secret key" in findings["list"]["mend"]
    shown = f"the access key …{s3_environment['AWS_ACCESS_KEY_ID'][-4:]} from the variables"
    assert findings["list"]["details"]["shown"].startswith(shown)


def test_a_wrong_access_key(model: str, diagnose: Diagnose) -> None:
    _, findings = diagnose(model, AWS_ACCESS_KEY_ID="AKIANOBODYHASTHISKEY")
    assert failures(findings) == ["list"]
    assert "InvalidAccessKeyId" in findings["list"]["what"]


def test_a_secret_key_with_a_line_end(model: str, s3_environment: dict[str, str], diagnose: Diagnose) -> None:
    secret = s3_environment["AWS_SECRET_ACCESS_KEY"]
    _, findings = diagnose(model, AWS_SECRET_ACCESS_KEY=f"{secret}\n")
    assert failures(findings) == ["credentials"]
    assert findings["credentials"]["what"].startswith("AWS_SECRET_ACCESS_KEY begins or ends with a blank")
    assert findings["list"]["what"] == "Not tried, because credentials failed."


def test_no_credentials(model: str, diagnose: Diagnose) -> None:
    _, findings = diagnose(
        model, AWS_ACCESS_KEY_ID=None, AWS_SECRET_ACCESS_KEY=None, KUBERNETES_SERVICE_HOST="10.0.0.1"
    )
    assert failures(findings) == ["credentials"]
    assert "found no credentials" in findings["credentials"]["why"]
    looked = findings["credentials"]["details"]["looked for"]
    assert "AWS_ACCESS_KEY_ID is not set." in looked
    assert any("AWS_WEB_IDENTITY_TOKEN_FILE is not set" in line for line in looked)


def test_anonymous_requests_where_they_are_refused(model: str, diagnose: Diagnose) -> None:
    _, findings = diagnose(model, HEADRACE_S3_ANONYMOUS="1")
    assert failures(findings) == ["list"]
    assert findings["credentials"]["what"] == "None are sent: anonymous access is asked for (HEADRACE_S3_ANONYMOUS)."


def test_a_port_at_which_nothing_listens(model: str, diagnose: Diagnose) -> None:
    _, findings = diagnose(model, AWS_ENDPOINT_URL_S3="http://127.0.0.1:9")
    assert failures(findings) == ["network"]
    assert "no program listens on port 9" in findings["network"]["why"]


def test_tls_at_a_port_that_does_not_speak_it(model: str, s3_environment: dict[str, str], diagnose: Diagnose) -> None:
    endpoint = s3_environment["AWS_ENDPOINT_URL_S3"].replace("http:", "https:")
    _, findings = diagnose(model, AWS_ENDPOINT_URL_S3=endpoint)
    assert failures(findings) == ["tls"]
    assert "does not speak TLS" in findings["tls"]["why"]


def test_a_cache_that_cannot_be_written(model: str, tmp_path: Path, diagnose: Diagnose) -> None:
    (tmp_path / "file").write_text("")
    report, findings = diagnose(model, HEADRACE_CACHE_DIR=str(tmp_path / "file" / "cache"))
    assert (report["state"], findings["cache"]["state"]) == ("warning", "warning")
    assert "cannot be written" in findings["cache"]["what"]
    assert "HEADRACE_CACHE_DIR" in findings["cache"]["mend"]


def test_settings_that_cannot_be_read(model: str, diagnose: Diagnose) -> None:
    _, findings = diagnose(model, HEADRACE_CONNECTIONS="many")
    assert failures(findings) == ["settings"]
    assert "HEADRACE_CONNECTIONS is 'many'." in findings["settings"]["what"]


@pytest.mark.parametrize("command", ["load", "inspect"])
def test_a_failed_load_ends_with_the_doctors_finding(command: str, model: str) -> None:
    done = run(command, model, AWS_ENDPOINT_URL_S3="http://models.invalid:9000")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("StoreUnavailable: ")
    first, second = done.stderr.splitlines()[-2:]
    assert first.startswith("  doctor  network: models.invalid ")
    assert second.strip() == f"Run headrace doctor {model} for all checks."


def test_refused_credentials_end_with_which_ones_they_were(model: str, s3_environment: dict[str, str]) -> None:
    wrong = "not-the-secret-key-of-anybody"
    done = run("inspect", model, AWS_SECRET_ACCESS_KEY=wrong)
    shown = f"The access key …{s3_environment['AWS_ACCESS_KEY_ID'][-4:]} comes from the variables"
    assert f"  doctor  credentials: {shown}" in done.stderr
    assert wrong not in done.stderr


def test_a_server_that_cannot_load_ends_with_the_doctors_finding(model: str) -> None:
    done = run("serve", model, "--port", "0", AWS_ENDPOINT_URL_S3="http://127.0.0.1:9")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-2:]
    assert last[0].startswith("Doctor: network: Nothing can be reached at 127.0.0.1 on port 9.")
    assert last[1] == f"Run headrace doctor {model} for all checks."


def test_a_signed_address_stays_a_secret(model: str, bucket: str, s3_client: Any) -> None:
    params = {"Bucket": bucket, "Key": "llama-3/model.safetensors"}
    url = s3_client.generate_presigned_url("get_object", Params=params, ExpiresIn=600)
    query = url.partition("?")[2]
    done = run("doctor", url, "--json")
    assert done.stderr == ""
    findings = {finding["step"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert (done.returncode, failures(findings)) == (0, [])
    assert findings["credentials"]["state"] == "warning", "it ends in ten minutes"
    assert "signed address" in findings["credentials"]["what"]
    assert query not in done.stdout
    assert "Signature=" not in done.stdout


# -- other stores


def examine(uri: str, settings: Settings) -> dict[str, Finding]:
    plan = Plan(uri=uri, read_settings=lambda: settings)
    with contextlib.closing(Examination(plan, World(environment=os.environ))) as examination:
        return {finding.step: finding for finding in examination.run()}


def test_google_cloud_storage(gcs_bucket: Any, s3_settings: Settings) -> None:
    gcs_bucket.blob("llama-3/model.safetensors").upload_from_string(WEIGHTS)
    findings = examine(f"gs://{gcs_bucket.name}/llama-3", s3_settings)
    assert [step for step, finding in findings.items() if finding.state is State.FAILED] == []
    assert "gets no token" in findings["credentials"].what
    assert findings["range read"].state is State.OK
    # A generation that is not there is absent; of a pinned object that is a change.
    assert findings["conditional read"].what == "A version that is not there is refused (404)."


def test_azure_blob_storage(azure_container: Any, s3_settings: Settings) -> None:
    azure_container.upload_blob("llama-3/model.safetensors", WEIGHTS)
    findings = examine(f"az://{azure_container.container_name}/llama-3", s3_settings)
    assert [step for step, finding in findings.items() if finding.state is State.FAILED] == []
    assert findings["credentials"].what.endswith("comes from AZURE_STORAGE_KEY.")
    assert os.environ["AZURE_STORAGE_KEY"] not in repr(findings)
    assert findings["range read"].state is State.OK
    assert findings["conditional read"].state is State.OK
