"""Where the login for the Hugging Face hub comes from, for people. Order of the sources: huggingface_hub (2.4), ``get_token``. Shows no token."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from huggingface_hub import constants

from headrace.settings import TransportSettings
from headrace.storage.credentials import CredentialSource
from headrace.storage.hub_access import HubAccess, HubRepository, find_endpoint
from headrace.storage.uri import Uri

_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


def describe_hub_login(authorization: str | None, environment: Mapping[str, str]) -> CredentialSource:
    """Return where ``authorization``, the header that the hub is shown, comes from; None means anonymous requests."""
    if authorization is None:
        if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN:
            return CredentialSource(kind="", source="HF_HUB_DISABLE_IMPLICIT_TOKEN is set, so the login is not used")
        return CredentialSource(
            kind="", source="there is neither HF_TOKEN nor a login, so private and gated models are refused"
        )
    if environment.get("HF_OIDC_RESOURCE"):
        return CredentialSource(kind="token", source="an exchange of tokens (HF_OIDC_RESOURCE)", renews_itself=True)
    named = next((name for name in _VARIABLES if environment.get(name)), "")
    if named:
        return CredentialSource(kind="token", source=f"the variable {named}")
    return CredentialSource(kind="token", source=f"the login in {Path(constants.HF_TOKEN_PATH)} (hf auth login)")


def find_hub_login(uri: Uri, transport: TransportSettings, environment: Mapping[str, str]) -> CredentialSource:
    """Return where the login for ``uri`` comes from; the hub is not asked. Raises `AccessDenied` for a login that cannot be used."""
    access = HubAccess(uri=uri, repository=HubRepository.of(uri), endpoint=find_endpoint(), transport=transport)
    return describe_hub_login(access.authorization(), environment)
