"""What a web server's refusal means: a dialect of `headrace.storage.refusal` for plain HTTP. Meanings: RFC 9110, section 15.5 and 15.6."""

from __future__ import annotations

from headrace.errors import AccessDenied, ObjectNotFound, StorageError, StoreUnavailable
from headrace.storage.refusal import CHANGED, Dialect, Rule

_ABSENT = Rule(
    ObjectNotFound,
    "Check the address; upper and lower case differ.",
    "does not exist",
    is_absence=True,
)
_UNAUTHORIZED = Rule(
    AccessDenied,
    "Set HEADRACE_HTTP_TOKEN to the token that the server takes (Authorization: Bearer).",
    why="The server wants credentials, or other ones.",
)
_DENIED = Rule(
    AccessDenied,
    "Check that the address is right and public; a signed address may have ended, and a token goes into HEADRACE_HTTP_TOKEN.",
    why="The server does not say why; a signed address that has ended and a missing right look like this.",
)
_PROXY = Rule(
    StoreUnavailable,
    "Put user and password of the proxy into HTTPS_PROXY, or the server into NO_PROXY.",
    why="A proxy wants credentials.",
)
_BUSY = Rule(
    StoreUnavailable,
    "Try again later; fewer connections (HEADRACE_CONNECTIONS) ask for less.",
    why="The server is overloaded or broken.",
    retry=True,
)
_REFUSED = Rule(
    StorageError, "Check the address, and that a web server with files is there.", why="The server does not say why."
)

HTTP = Dialect(
    # Web servers have no codes; an object store behind a signed address has, and its status says as much.
    by_code={"SlowDown": _BUSY, "NoSuchKey": _ABSENT},
    by_status={
        401: _UNAUTHORIZED,
        403: _DENIED,
        404: _ABSENT,
        407: _PROXY,
        410: _ABSENT,
        412: CHANGED,
        **dict.fromkeys((408, 409, 425, 429), _BUSY),
    },
    denied=_DENIED,
    bare_bad=_REFUSED,
    busy=_BUSY,
    bare_busy=_BUSY,
    refused=_REFUSED,
)
"""Web servers, and object stores behind signed addresses."""
