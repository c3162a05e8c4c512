"""What every store has: a root, and at most one object that was named. Knows nothing of how objects are reached."""

from __future__ import annotations

from headrace.storage.uri import Uri


class RootedStore:
    """A store below ``uri``. Subclasses say what ``endpoint`` is and do the rest of `headrace.storage.store.ObjectStore`."""

    def __init__(self, uri: Uri, selected_key: str | None) -> None:
        self._uri = uri
        self._selected_key = selected_key

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self._uri)!r}, endpoint={self.endpoint!r})"

    @property
    def uri(self) -> Uri:
        """The root of this store."""
        return self._uri

    @property
    def selected_key(self) -> str | None:
        """The single object that the user's uri named, relative to the root; None where it named a folder."""
        return self._selected_key

    @property
    def endpoint(self) -> str:
        """Where requests go, for messages. Never holds a secret."""
        raise NotImplementedError

    def uri_of(self, key: str) -> str:
        """Return the full uri of one object, for messages."""
        return str(self._uri.child(key))
