"""Tokens for Azure storage: asked for once for all threads, and again well before they expire. Knows no particular credential."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from azure.core.credentials import AccessToken
from azure.core.exceptions import AzureError

from headrace.errors import MissingDependency

SCOPE = "https://storage.azure.com/.default"
"""What a token is for: Azure storage, in every cloud (Microsoft, "Authorize access to blobs using Microsoft Entra ID")."""

_AHEAD_S = 300.0  # Long enough for a slow chain, and for a request that is signed now and retried for a while.
_PAUSE_S = 1.0  # All readers want a new token at the same moment; one failure answers them all.
_MARGIN_S = 10.0  # A token that is this close to its end is not sent any more.


class TokenSource:
    """The tokens of one credential. It is a credential itself, for the SDK, so that listing and ranged reads share them. Thread safe."""

    def __init__(
        self, credential: Any, *, tenant_id: str | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        """Ask for nothing yet. ``credential`` has ``get_token`` as azure-identity's have; ``clock`` gives seconds since 1970."""
        self._credential = credential
        self._tenant_id = tenant_id
        self._clock = clock
        self._lock = threading.Lock()
        self._token: AccessToken | None = None
        self._renew_at = 0.0
        self._failure: Exception | None = None
        self._failed_at = float("-inf")

    @property
    def tenant_id(self) -> str | None:
        """The tenant that the store asked for; None where it takes the credential's own."""
        return self._tenant_id

    @property
    def last_token(self) -> str | None:
        """The token that was given last; None before the first."""
        return None if self._token is None else self._token.token

    @property
    def expires_s(self) -> float | None:
        """When the token that was given last ends, in seconds since 1970; None before the first."""
        return None if self._token is None else float(self._token.expires_on)

    def token(self) -> str:
        """Return a token that is good for now. Raises what the credential raises."""
        return self._current().token

    def get_token(self, *scopes: str, claims: str | None = None, tenant_id: str | None = None, **_: Any) -> AccessToken:
        """Return a token, as the SDK asks for it: with a tenant or claims when the store has refused the last one, so that this is a new one."""
        if tenant_id is None and claims is None:
            return self._current()
        with self._lock:
            self._tenant_id = tenant_id or self._tenant_id
            more = {} if claims is None else {"claims": claims}
            return self._ask(scopes, **more)

    def close(self) -> None:
        """Close the credential's own connections."""
        if hasattr(self._credential, "close"):
            self._credential.close()

    def _current(self) -> AccessToken:
        seen, now = self._token, self._clock()
        if seen is not None and now < self._renew_at:
            return seen
        if seen is not None and now < seen.expires_on - _MARGIN_S:
            return self._renew_early(seen)
        with self._lock:
            if self._token is not None and self._token is not seen:  # Another thread was here first.
                return self._token
            if self._failure is not None and abs(self._clock() - self._failed_at) < _PAUSE_S:
                raise self._failure
            return self._ask((SCOPE,))

    def _renew_early(self, seen: AccessToken) -> AccessToken:
        """Return a new token, or the one that still holds for a while where another thread asks already or the credential fails."""
        if not self._lock.acquire(blocking=False):
            return seen
        try:
            return self._ask((SCOPE,))
        except (AzureError, OSError, ValueError):
            self._renew_at = self._clock() + _PAUSE_S
            return seen
        finally:
            self._lock.release()

    def _ask(self, scopes: tuple[str, ...], **options: str) -> AccessToken:
        if self._tenant_id is not None:
            options["tenant_id"] = self._tenant_id
        try:
            token, renew_at = self._fetch(scopes, options)
        except (AzureError, OSError, ValueError) as error:
            self._failure, self._failed_at = error, self._clock()
            raise
        now = self._clock()
        ahead_s = min(_AHEAD_S, max(0.0, (token.expires_on - now) / 2))
        self._token, self._renew_at, self._failure = token, renew_at or token.expires_on - ahead_s, None
        return token

    def _fetch(self, scopes: tuple[str, ...], options: dict[str, str]) -> tuple[AccessToken, float | None]:
        """Return a token, and when the credential wants it to be renewed, where it says so."""
        if not hasattr(self._credential, "get_token_info"):
            return self._credential.get_token(*scopes, **options), None
        found = self._credential.get_token_info(*scopes, options=options)
        return AccessToken(found.token, found.expires_on), found.refresh_on


def make_default_credential(**transport: Any) -> Any:
    """Return azure-identity's default chain: variables, workload and managed identity, az login and others. Raises `MissingDependency`."""
    try:
        from azure.identity import DefaultAzureCredential
    except ImportError as error:
        raise MissingDependency(
            "There is neither key nor SAS for Azure storage, and azure-identity, which gives tokens, cannot be imported.",
            f"{error}.",
            'Install it with: pip install "headrace[azure]".',
        ) from error
    return DefaultAzureCredential(**transport)
