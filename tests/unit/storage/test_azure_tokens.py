from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from azure.core.credentials import AccessToken, AccessTokenInfo
from azure.core.exceptions import ClientAuthenticationError

from headrace.storage.azure_tokens import SCOPE, TokenSource

from .azure_stub import FakeCredential


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def made(*names: str, lives_s: float = 3600) -> tuple[TokenSource, FakeCredential, Clock]:
    clock = Clock()
    credential = FakeCredential(*names, lives_s=lives_s, clock=clock)
    return TokenSource(credential, clock=clock), credential, clock


def test_a_token_is_asked_for_once_and_again_well_before_its_end() -> None:
    source, credential, clock = made("A", "B")
    assert source.last_token is None
    assert (source.token(), source.token()) == ("A", "A")
    assert [asked["scopes"] for asked in credential.asked] == [(SCOPE,)]
    clock.now += 3600 - 301
    assert source.token() == "A"
    clock.now += 2
    assert (source.token(), source.token(), source.last_token) == ("B", "B", "B")
    assert len(credential.asked) == 2


def test_a_token_that_lives_shortly_is_not_asked_for_each_time() -> None:
    source, credential, clock = made("A", "B", lives_s=60)
    assert (source.token(), source.token()) == ("A", "A")
    clock.now += 31
    assert source.token() == "B"
    assert len(credential.asked) == 2


def test_the_credential_may_say_when_to_renew() -> None:
    class Managed:
        num_asked = 0

        def get_token_info(self, *scopes: str, options: Any = None) -> AccessTokenInfo:
            self.num_asked += 1
            return AccessTokenInfo(f"T{self.num_asked}", int(clock.now + 86_400), refresh_on=int(clock.now + 43_200))

    clock, credential = Clock(), Managed()
    source = TokenSource(credential, clock=clock)
    assert source.token() == "T1"
    clock.now += 43_201
    assert source.token() == "T2"


def test_a_failure_to_renew_is_borne_while_the_old_token_holds() -> None:
    source, credential, clock = made("A", "B")
    source.token()
    credential.fails = True
    clock.now += 3600 - 200
    assert (source.token(), source.token()) == ("A", "A")
    assert len(credential.asked) == 2  # Once, and then not again at once.
    clock.now += 195  # Five seconds before the end it is not sent any more.
    with pytest.raises(ClientAuthenticationError):
        source.token()
    credential.fails = False
    clock.now += 2
    assert source.token() == "B"


def test_a_failure_answers_all_who_ask_at_that_moment() -> None:
    source, credential, clock = made("A")
    credential.fails = True
    for _ in range(3):
        with pytest.raises(ClientAuthenticationError):
            source.token()
    assert len(credential.asked) == 1
    clock.now += 1.5
    credential.fails = False
    assert source.token() == "A"


def test_threads_ask_once() -> None:
    entered, leave = threading.Event(), threading.Event()

    class Slow:
        num_asked = 0

        def get_token(self, *scopes: str, **_: Any) -> AccessToken:
            self.num_asked += 1
            entered.set()
            assert leave.wait(10)
            return AccessToken("A", int(clock.now + 3600))

    clock, credential = Clock(), Slow()
    source = TokenSource(credential, clock=clock)
    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(source.token) for _ in range(4)]
        assert entered.wait(10)
        leave.set()
        assert [item.result(10) for item in asking] == ["A"] * 4
    assert credential.num_asked == 1


def test_nobody_waits_for_a_renewal_while_the_old_token_holds() -> None:
    source, credential, clock = made("A", "B")
    source.token()
    clock.now += 3600 - 200
    source._lock.acquire()  # Another thread asks.
    try:
        assert source.token() == "A"
    finally:
        source._lock.release()
    assert len(credential.asked) == 1
    assert source.token() == "B"


def test_what_the_store_challenges_is_not_answered_from_memory() -> None:
    """The SDK names a tenant when the store has refused a token; ranged reads then use that tenant, too."""
    source, credential, _ = made("A", "B", "C")
    assert source.get_token(SCOPE).token == "A"
    assert source.get_token(SCOPE, tenant_id="home").token == "B"
    assert credential.asked[-1] == {"scopes": (SCOPE,), "tenant_id": "home"}
    assert source.token() == "B"
    assert source.tenant_id == "home"
    assert source.get_token(SCOPE, claims="more").token == "C"
    assert credential.asked[-1] == {"scopes": (SCOPE,), "claims": "more", "tenant_id": "home"}


def test_closing_closes_the_credential() -> None:
    source, credential, _ = made("A")
    source.close()
    assert credential.is_closed
    TokenSource(object()).close()
