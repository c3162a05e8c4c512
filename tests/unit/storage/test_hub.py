"""The store for the hub, against a small server that speaks its API: listing, pinning, links, tokens, errors, and the cache of this machine."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.support.fake_hub import FakeHub, fake_hub, fill_cache

pytest.importorskip("huggingface_hub")

from huggingface_hub import constants

from headrace.errors import (
    AccessDenied,
    InvalidUri,
    MissingDependency,
    ObjectChanged,
    ObjectNotFound,
    StorageError,
    StoreUnavailable,
)
from headrace.settings import Settings, TransportSettings
from headrace.storage import HttpRange, ObjectStore, Refusal, StoredObject, open_store
from headrace.storage.hub import HubStore
from headrace.storage.local import LocalStore

QUICK = TransportSettings(max_attempts=3, backoff_first_s=0.001, connect_timeout_s=5, idle_timeout_s=5)
WEIGHTS = bytes(range(256)) * 40
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": WEIGHTS,
    "tokenizer.json": b'{"version": 1}',
    "README.md": b"",
    "sub/model.safetensors": b"12345",
    "sub/deep/notes.txt": b"1",
    "a b+%20\xc3\xbc.txt".encode().decode("latin-1"): b"odd",
}
NAME = "org/name"

Open = Callable[..., ObjectStore]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    with fake_hub(monkeypatch, tmp_path, tokens=("good",)) as one:
        yield one


@pytest.fixture
def open_hub(hub: FakeHub) -> Iterator[Open]:
    """Open a uri; all stores are closed in the end."""
    opened: list[ObjectStore] = []

    def open_one(uri: str = f"hf://{NAME}", **settings: Any) -> ObjectStore:
        opened.append(open_store(uri, settings=Settings(transport=QUICK, **settings)))
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def headers_of(asked: Any) -> dict[str, str]:
    assert isinstance(asked, HttpRange)
    return dict(asked.headers)


def learn_link(store: ObjectStore, stored: StoredObject, hub: FakeHub, location: str, **linked: str) -> None:
    """Tell the store of a redirect, as a transport does that meets one."""
    verdict = store.judge(stored, Refusal(302, "Found", {"location": location, **linked}))
    assert not verdict.retry


def test_one_level_of_the_commit_is_listed(hub: FakeHub, open_hub: Open) -> None:
    commit = hub.publish(NAME, FILES)
    store = open_hub()
    assert isinstance(store, HubStore)
    top = store.list_level()
    assert [item.key for item in top.objects] == sorted(key for key in FILES if "/" not in key)
    assert top.folders == ("sub",)
    assert store.stat("model.safetensors") == StoredObject("model.safetensors", len(WEIGHTS), digest(WEIGHTS))
    assert store.stat("config.json").version == hashlib.sha1(b"blob 23\0" + FILES["config.json"]).hexdigest()
    inner = store.list_level("sub")
    assert [item.key for item in inner.objects] == ["sub/model.safetensors"]
    assert inner.folders == ("sub/deep",)
    assert store.list_level("absent").objects == ()
    with pytest.raises(ObjectNotFound, match="hf://org/name/absent does not exist"):
        store.stat("absent")
    assert len(hub.hub.log) == 1, "one request lists it all"
    hub.publish(NAME, {"config.json": b"{}"})
    assert store.read_object(store.stat("config.json")) == FILES["config.json"]
    assert commit in hub.hub.log[1].path, "what came later does not count"


def test_a_folder_or_a_file_of_a_repository_can_be_opened(hub: FakeHub, open_hub: Open) -> None:
    hub.publish(NAME, FILES)
    store = open_hub(f"hf://{NAME}@main/sub/")
    assert [item.key for item in store.list_level().objects] == ["model.safetensors"]
    assert store.read_object(store.stat("model.safetensors")) == b"12345"
    assert store.uri_of("model.safetensors") == f"hf://{NAME}@main/sub/model.safetensors"
    one = open_hub(f"hf://{NAME}/sub/model.safetensors")
    assert (one.selected_key, str(one.uri)) == ("model.safetensors", f"hf://{NAME}/sub")
    with pytest.raises(ObjectNotFound, match="is a file, not a folder"):
        open_hub(f"hf://{NAME}/config.json").list_level()
    with pytest.raises(ObjectNotFound, match="no such folder"):
        open_hub(f"hf://{NAME}/elsewhere").list_level()


def test_a_revision_is_a_branch_a_tag_a_pull_request_or_a_commit(hub: FakeHub, open_hub: Open) -> None:
    first = hub.publish(NAME, {"config.json": b"1"}, branch="v1")
    hub.publish(NAME, {"config.json": b"2"}, branch="refs/pr/4")
    hub.publish(NAME, {"config.json": b"3"})
    contents = []
    for revision in ("@v1", "@refs%2Fpr%2F4", f"@{first}", "@main", ""):
        store = open_hub(f"hf://{NAME}{revision}")
        contents.append(store.read_object(store.stat("config.json")))
    assert contents == [b"1", b"2", b"1", b"3", b"3"]
    with pytest.raises(ObjectNotFound, match="has no such revision") as caught:
        open_hub(f"hf://{NAME}@v9")
    assert f"hf://{NAME}@v9" in caught.value.what


@pytest.mark.parametrize("key", sorted(FILES))
def test_small_reads_are_checked_against_the_listing(hub: FakeHub, open_hub: Open, key: str) -> None:
    hub.publish(NAME, FILES)
    store = open_hub()
    stored = store.stat(key)
    assert store.read_object(stored) == FILES[key]
    if len(FILES[key]) > 3:
        assert store.read_object(stored, start=1, stop=3) == FILES[key][1:3]


def test_a_content_that_is_not_the_listed_one_is_refused(hub: FakeHub, open_hub: Open) -> None:
    hub.publish(NAME, FILES)
    store = open_hub()
    hub.spoiled["config.json"] = FILES["config.json"].replace(b"llama", b"other")
    with pytest.raises(ObjectChanged, match="another content than the one that it lists"):
        store.read_object(store.stat("config.json"))
    hub.spoiled["config.json"] = FILES["config.json"] + b" "
    with pytest.raises(StorageError, match="24 bytes where 23"):
        store.read_object(store.stat("config.json"))


def test_a_listing_without_sizes_is_completed_from_the_tree(hub: FakeHub, open_hub: Open) -> None:
    hub.publish(NAME, FILES)
    hub.lists_sizes = False
    store = open_hub()
    assert store.stat("model.safetensors") == StoredObject("model.safetensors", len(WEIGHTS), digest(WEIGHTS))
    assert [sent.path.partition("?")[0].split("/")[5] for sent in hub.hub.log] == ["revision", "tree"]


@pytest.mark.parametrize("key", ["../secret", "a/../../secret", "/etc/passwd", "a//b", "", "a\0b", "."])
def test_keys_that_lead_elsewhere_are_refused(hub: FakeHub, open_hub: Open, key: str) -> None:
    hub.publish(NAME, FILES)
    store, stored = open_hub(), StoredObject(key, 6, "x")
    for ask in (lambda: store.stat(key), lambda: store.read_object(stored), lambda: store.describe_range(stored, 0, 1)):
        with pytest.raises(InvalidUri):
            ask()


def test_a_range_is_asked_of_the_hub_until_it_has_given_a_link(hub: FakeHub, open_hub: Open) -> None:
    Path(constants.HF_TOKEN_PATH).write_text("good")
    commit = hub.publish(NAME, FILES)
    store = open_hub()
    stored = store.stat("model.safetensors")
    asked = store.describe_range(stored, 5, 9)
    assert isinstance(asked, HttpRange)
    assert (f"http://{asked.host}:{asked.port}", asked.target) == (
        hub.url,
        f"/{NAME}/resolve/{commit}/model.safetensors",
    )
    sent = headers_of(asked)
    assert (sent["Range"], sent["Accept-Encoding"]) == ("bytes=5-8", "identity")
    assert sent["Authorization"] == "Bearer good"
    linked = {"x-linked-etag": f'"{stored.version}"', "x-linked-size": str(stored.size_bytes)}
    learn_link(store, stored, hub, f"{hub.cdn.url}/x?X-Amz-Signature=secret", **linked)
    link = store.describe_range(stored, 9, 12)
    assert isinstance(link, HttpRange)
    assert (f"http://{link.host}:{link.port}", link.target) == (hub.cdn.url, "/x?X-Amz-Signature=secret")
    assert "Authorization" not in headers_of(link)
    assert link.etag is None
    assert not [text for text in (repr(link), repr(store), repr(asked)) if "secret" in text or "good" in text]
    assert store.describe_range(store.stat("sub/model.safetensors"), 0, 1) != link


@pytest.mark.parametrize("linked", [{"x-linked-etag": '"other"'}, {"x-linked-size": "7"}])
def test_a_link_to_another_content_is_refused(hub: FakeHub, open_hub: Open, linked: dict[str, str]) -> None:
    hub.publish(NAME, FILES)
    store = open_hub()
    stored = store.stat("model.safetensors")
    with pytest.raises(ObjectChanged, match="HF_ENDPOINT"):
        store.judge(stored, Refusal(302, "Found", {"location": f"{hub.cdn.url}/x", **linked}))
    asked = store.describe_range(stored, 0, 1)
    assert isinstance(asked, HttpRange)
    assert f"http://{asked.host}:{asked.port}" == hub.url


def test_a_link_that_is_refused_is_forgotten(hub: FakeHub, open_hub: Open) -> None:
    hub.publish(NAME, FILES)
    store = open_hub()
    stored = store.stat("model.safetensors")
    body = b"<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>"
    expired = Refusal(403, "Forbidden", {}, body)
    assert not store.judge(stored, expired).retry, "there was no link that could have ended"
    learn_link(store, stored, hub, f"{hub.cdn.url}/x")
    assert [store.judge(stored, expired).retry for _ in range(2)] == [True, True]
    asked = store.describe_range(stored, 0, 1)
    assert isinstance(asked, HttpRange)
    assert f"http://{asked.host}:{asked.port}" == hub.url
    gated = Refusal(403, "Forbidden", {"x-error-code": "GatedRepo", "x-error-message": "restricted"})
    assert not store.judge(stored, gated).retry, "the hub itself refuses"


def test_a_new_login_is_taken_where_the_old_one_has_ended(
    hub: FakeHub, open_hub: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.publish(NAME, FILES)
    monkeypatch.setenv("HF_TOKEN", "good")
    store = open_hub()
    stored = store.stat("model.safetensors")
    hub.known_tokens.clear()
    refused = Refusal(401, "Unauthorized", {"x-error-message": "Invalid credentials in Authorization header"})
    assert not store.judge(stored, refused).retry, "it is still the same one"
    monkeypatch.setenv("HF_TOKEN", "newer")
    hub.known_tokens.add("newer")
    store = open_hub()
    monkeypatch.setenv("HF_TOKEN", "newest")
    hub.known_tokens = {"newest"}
    assert store.read_object(store.stat("config.json")) == FILES["config.json"]
    verdict = store.judge(stored, refused)
    assert (verdict.retry, verdict.refresh_credentials) == (True, True)
    assert headers_of(store.describe_range(stored, 0, 1))["Authorization"] == "Bearer newest"


def test_a_private_repository_wants_a_token(hub: FakeHub, open_hub: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.publish(NAME, FILES, is_private=True)
    with pytest.raises(ObjectNotFound, match="hf auth login"):
        open_hub()
    monkeypatch.setenv("HF_TOKEN", "good")
    assert open_hub().read_object(open_hub().stat("config.json")) == FILES["config.json"]
    monkeypatch.setenv("HF_TOKEN", "wr0ng")
    with pytest.raises(AccessDenied) as caught:
        open_hub()
    assert "wr0ng" not in str(caught.value)


@pytest.mark.parametrize("token", [None, "other"])
def test_a_gated_repository_says_where_access_is_given(
    hub: FakeHub, open_hub: Open, monkeypatch: pytest.MonkeyPatch, token: str | None
) -> None:
    hub.publish(NAME, FILES, is_gated=True)
    hub.known_tokens.add("other")
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    store = open_hub()  # Its listing is public.
    with pytest.raises(AccessDenied) as caught:
        store.read_object(store.stat("config.json"))
    assert f"Ask for access at {hub.url}/{NAME}" in caught.value.mend
    assert "hf auth login" in caught.value.mend
    monkeypatch.setenv("HF_TOKEN", "good")
    store = open_hub()
    assert store.read_object(store.stat("config.json")) == FILES["config.json"]


def test_a_bare_name_falls_back_to_the_hub(
    hub: FakeHub, open_hub: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """origin A8: what is neither local nor in object storage is looked for on the hub."""
    hub.publish(NAME, FILES)
    monkeypatch.chdir(tmp_path)
    store = open_hub(NAME)
    assert isinstance(store, HubStore)
    assert str(store.uri) == f"hf://{NAME}"
    with pytest.raises(ObjectNotFound) as caught:
        open_hub("org/absent")
    assert caught.value.what == "org/absent is neither a local path nor a repository of the hub that this user can see."
    (tmp_path / NAME).mkdir(parents=True)
    num_asked = len(hub.hub.log)
    assert isinstance(open_hub(NAME), LocalStore)
    assert len(hub.hub.log) == num_asked


def test_trouble_is_waited_for_and_named_in_the_end(hub: FakeHub, open_hub: Open) -> None:
    hub.publish(NAME, FILES)
    hub.troubles.extend([(503, {}), (429, {"retry-after": "0"})])
    assert open_hub().stat("config.json").size_bytes == 23
    hub.troubles.extend([(503, {})] * 3)
    with pytest.raises(StoreUnavailable, match="503"):
        open_hub()
    assert not hub.troubles


def test_a_hub_that_is_not_there_or_is_none_is_named(
    hub: FakeHub, open_hub: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", hub.cdn.url.replace(hub.cdn.url.rpartition(":")[2], "9"))
    with pytest.raises(StoreUnavailable, match=r"http://127\.0\.0\.1:9 cannot be reached"):
        open_hub()
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    hub.troubles.append((200, {}))
    with pytest.raises(StorageError, match="does not answer as the hub does"):
        open_hub()


def test_a_whole_snapshot_in_the_local_cache_is_used(hub: FakeHub, open_hub: Open, tmp_path: Path) -> None:
    commit = hub.publish(NAME, FILES)
    files = {key: FILES[key] for key in ("config.json", "model.safetensors", "tokenizer.json")}
    snapshot = fill_cache(tmp_path, NAME, commit, files)
    store = open_hub()
    assert isinstance(store, LocalStore)
    assert str(store.uri) == str(snapshot)
    hub.publish(NAME, FILES | {"config.json": b"{}"})
    assert isinstance(open_hub(), HubStore), "the snapshot is of an older commit"
    assert isinstance(open_hub(f"hf://{NAME}@{commit}"), LocalStore)
    (snapshot / "tokenizer.json").unlink()
    assert isinstance(open_hub(f"hf://{NAME}@{commit}"), HubStore), "not all of it is there"
    assert isinstance(open_hub(f"hf://{NAME}@{commit}/sub"), HubStore)


def test_offline_only_the_local_cache_is_used(
    hub: FakeHub, open_hub: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = hub.publish(NAME, FILES)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ObjectNotFound, match="HF_HUB_OFFLINE is set") as caught:
        open_hub()
    assert f"hf download {NAME}" in caught.value.mend
    index = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}).encode()
    snapshot = fill_cache(tmp_path, NAME, commit, {"model.safetensors.index.json": index, "model-1.safetensors": b"1"})
    with pytest.raises(ObjectNotFound, match=r"only in part on this machine, without model-2\.safetensors\."):
        open_hub()
    (snapshot / "model-2.safetensors").write_bytes(b"2")
    store = open_hub()
    assert isinstance(store, LocalStore)
    assert store.list_level().objects[0].key == "model-1.safetensors"
    assert open_hub(f"hf://{NAME}/model-1.safetensors").selected_key == "model-1.safetensors"
    fill_cache(tmp_path, "org/tokenizer", "ab" * 20, {"tokenizer.json": b"{}"})
    assert open_hub("hf://org/tokenizer").list_level().objects[0].key == "tokenizer.json", "there may be no weights"
    assert hub.hub.log == []


def test_where_the_hub_does_not_answer_the_local_cache_is_used_with_a_warning(
    hub: FakeHub, open_hub: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    commit = hub.publish(NAME, FILES)
    snapshot = fill_cache(tmp_path, NAME, commit, {"model.safetensors": WEIGHTS, "config.json": b"{}"})
    hub.troubles.extend([(503, {})] * 3)
    store = open_hub()
    assert isinstance(store, LocalStore)
    assert [record.levelname for record in caplog.records if str(snapshot) in record.message] == ["WARNING"]
    (snapshot / "model.safetensors").unlink()
    hub.troubles.extend([(503, {})] * 3)
    with pytest.raises(StoreUnavailable):
        open_hub()


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("hub", "hub_access", "hub_cache", "hub_opening"):
        monkeypatch.delitem(sys.modules, f"headrace.storage.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for uri, what in (("hf://org/name", "hf://org/name"), ("org/name", "There is no local path org/name.")):
        with pytest.raises(MissingDependency) as caught:
            open_store(uri, settings=Settings())
        assert what in caught.value.what
        assert "huggingface_hub" in caught.value.why
        assert "headrace[hub]" in caught.value.mend
        assert isinstance(caught.value.__cause__, ImportError)


def test_threads_share_a_store(hub: FakeHub, open_hub: Open) -> None:
    hub.publish(NAME, {f"{number}.txt": b"%d" % number for number in range(16)})
    store = open_hub()
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda number: store.read_object(store.stat(f"{number}.txt")), range(16)))
    assert answers == [b"%d" % number for number in range(16)]


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_can_use_it(hub: FakeHub, open_hub: Open) -> None:
    hub.publish(NAME, FILES)
    store = open_hub()
    stored = store.stat("config.json")
    child = os.fork()
    if child == 0:
        good = store.read_object(stored) == FILES["config.json"]
        store.close()
        os._exit(0 if good else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert store.read_object(stored) == FILES["config.json"]
