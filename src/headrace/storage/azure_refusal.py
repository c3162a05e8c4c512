"""What Azure's refusals mean. Codes: Azure Storage REST API, "Common REST API error codes" and "Blob service error codes".

One code stands for many reasons: ``AuthenticationFailed`` is a wrong key as well as a SAS that has run out. The words beside it tell them apart.
"""

from __future__ import annotations

import re

from headrace.errors import AccessDenied, ObjectNotFound, StorageError, StoreUnavailable
from headrace.storage.refusal import CHANGED, Complaint, Dialect, Rule, read_complaint
from headrace.storage.store import Refusal

_SIGN_IN = "Check the identity that signs in (az account show; AZURE_CLIENT_ID, AZURE_TENANT_ID and the like)"

_ABSENT = Rule(
    ObjectNotFound,
    "Check account, container and folder; upper and lower case differ.",
    "does not exist",
    is_absence=True,
)
_NO_CONTAINER = Rule(
    ObjectNotFound,
    "Check the names of container and account.",
    "is in a container that does not exist",
)
_DENIED = Rule(
    AccessDenied,
    "Check what the credentials allow: reading and listing blobs is needed.",
    why="The credentials do not allow it.",
)
_BARE_DENIED = Rule(
    AccessDenied,
    _DENIED.mend,
    why="The store gave no reason; expired credentials and missing rights look like this.",
    refresh=True,
)
_NO_RIGHT = Rule(
    AccessDenied,
    "Give the identity the role Storage Blob Data Reader on account or container (Owner and Contributor do not read blobs); a SAS needs sp=rl.",
    why="The credentials do not allow reading or listing blobs.",
)
_NOT_REACHABLE = Rule(
    AccessDenied,
    "Allow this network in the account's firewall or use its private endpoint; a SAS may be bound to addresses (sip) or services (ss=b, srt=sco).",
    why="The account does not take this request from here, or the SAS is for something else.",
)
_NARROW_SAS = Rule(
    AccessDenied,
    "Make a SAS for the blob service (ss=b), for service, container and object (srt=sco), for this network (sip) and protocol (spr).",
    why="The SAS is for another service, resource, network or protocol.",
)
_WRONG_SIGNATURE = Rule(
    AccessDenied,
    "Check that the key or SAS is whole, of this account and, if a SAS, not expired; a key that was rotated (az storage account keys renew) ends its SAS too.",
    why="The signature does not match the account's key.",
    refresh=True,
)
_OLD_SAS = Rule(
    AccessDenied,
    "Make a new SAS that is valid now (az storage container generate-sas) and set it; check this machine's clock.",
    why="The SAS has expired, or is not valid yet.",
    retry=True,
    refresh=True,
)
_OLD_TOKEN = Rule(
    AccessDenied,
    f"{_SIGN_IN} and this machine's clock; az login gets a new token.",
    why="The token has expired, or is not for this account.",
    retry=True,
    refresh=True,
)
_SKEWED = Rule(
    AccessDenied,
    "Set this machine's clock; the store allows fifteen minutes of difference.",
    why="This machine's clock differs too much from the store's.",
)
_NO_KEYS = Rule(
    AccessDenied,
    "Unset AZURE_STORAGE_KEY, AZURE_STORAGE_SAS_TOKEN and AZURE_STORAGE_CONNECTION_STRING and sign in (az login, a managed identity).",
    why="The account does not allow access by key, or by a SAS made of one.",
)
_NOT_PUBLIC = Rule(
    AccessDenied,
    "Use credentials, or make the container public.",
    why="Anonymous requests are not allowed.",
)
_DISABLED = Rule(
    AccessDenied, "Enable the account in the portal, or pay its bill.", why="The storage account is disabled."
)
_BUSY = Rule(
    StoreUnavailable,
    "Try again later; fewer connections (HEADRACE_CONNECTIONS) ask for less.",
    why="The store is overloaded or broken.",
    retry=True,
)
_BARE_BUSY = Rule(
    StoreUnavailable,
    "Try again later; check that the endpoint is that of an Azure storage account.",
    why="The store is overloaded or broken, and gave no reason.",
    retry=True,
)
_ARCHIVED = Rule(
    StoreUnavailable,
    "Rehydrate it (az storage blob set-tier --tier Hot), and wait until that is done.",
    why="The blob is in the archive tier.",
)
_REFUSED = Rule(
    StorageError,
    "Check that the endpoint is that of an Azure storage account, and the uri.",
    why="The store does not say why.",
)

_BY_CODE = {
    **dict.fromkeys(("BlobNotFound", "ResourceNotFound", "PathNotFound"), _ABSENT),
    **dict.fromkeys(("ContainerNotFound", "ContainerBeingDeleted", "FilesystemNotFound"), _NO_CONTAINER),
    "ConditionNotMet": CHANGED,
    "AuthorizationFailure": _NOT_REACHABLE,
    **dict.fromkeys(
        (
            "AuthorizationServiceMismatch",
            "AuthorizationResourceTypeMismatch",
            "AuthorizationSourceIPMismatch",
            "AuthorizationProtocolMismatch",
        ),
        _NARROW_SAS,
    ),
    **dict.fromkeys(("AuthorizationPermissionMismatch", "InsufficientAccountPermissions"), _NO_RIGHT),
    "KeyBasedAuthenticationNotPermitted": _NO_KEYS,
    **dict.fromkeys(("PublicAccessNotPermitted", "NoAuthenticationInformation"), _NOT_PUBLIC),
    "AuthenticationFailed": _WRONG_SIGNATURE,
    "InvalidAuthenticationInfo": _OLD_TOKEN,
    "AccountIsDisabled": _DISABLED,
    **dict.fromkeys(("BlobArchived", "BlobBeingRehydrated", "BlobNotReadable"), _ARCHIVED),
    **dict.fromkeys(("ServerBusy", "InternalError", "OperationTimedOut", "AccountBeingCreated"), _BUSY),
}
_BY_STATUS = {
    401: _BARE_DENIED,
    403: _BARE_DENIED,
    404: _ABSENT,
    412: CHANGED,
    **dict.fromkeys((408, 429), _BUSY),
}
_BY_WORDS = (
    (r"not valid in the specified time frame|signed expiry time", _OLD_SAS),
    (r"date header .*too old|too far in the (past|future)", _SKEWED),
    (r"lifetime validation failed|token is expired|issuer validation failed", _OLD_TOKEN),
)
_AUTHENTICATION = ("AuthenticationFailed", "InvalidAuthenticationInfo")
_CODE_HEADER = "x-ms-error-code"
_DETAIL = "AuthenticationErrorDetail"


def read_azure_complaint(refusal: Refusal) -> Complaint:
    """Return what the refused answer says; its error code is in a header, also where there is no body."""
    return read_complaint(refusal, code_header=_CODE_HEADER, detail=_DETAIL)


def is_expired(complaint: Complaint) -> bool:
    """Say whether the store refused the credentials only because they are too old."""
    return _find_special(complaint) in (_OLD_SAS, _OLD_TOKEN) or complaint.code == "InvalidAuthenticationInfo"


def is_without_container(complaint: Complaint) -> bool:
    """Say whether the store has no such container."""
    return _BY_CODE.get(complaint.code) is _NO_CONTAINER


def _find_special(complaint: Complaint) -> Rule | None:
    if complaint.code == "AuthorizationFailure" and "failed to authenticate" in complaint.message:
        return _WRONG_SIGNATURE  # So Azurite calls all that is wrong with a signature; in Azure this code is about networks.
    if complaint.code not in _AUTHENTICATION:
        return None
    return next((rule for words, rule in _BY_WORDS if re.search(words, complaint.message, re.IGNORECASE)), None)


AZURE = Dialect(
    by_code=_BY_CODE,
    by_status=_BY_STATUS,
    denied=_DENIED,
    bare_bad=_REFUSED,
    busy=_BUSY,
    bare_busy=_BARE_BUSY,
    refused=_REFUSED,
    find_special=_find_special,
)
"""Azure Blob Storage and its emulator."""
