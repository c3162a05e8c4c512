"""The folder of a web server that a URL names, and the addresses of the files in it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from urllib.parse import unquote, urlsplit

from headrace.storage.address import Address, encode_key, encode_path, encode_query, parse_address
from headrace.storage.uri import Uri


@dataclass(frozen=True, slots=True)
class HttpRoot:
    """``base`` is the folder's address without a slash at its end; ``query`` goes with every request, and may be a signature.

    ``selected`` is the key of the single file that the URL named, and its name as the user had encoded it.
    """

    base: Address
    query: str = field(repr=False)
    selected: tuple[str, str] | None = field(repr=False)

    @classmethod
    def of(cls, uri: Uri, selected_key: str | None) -> HttpRoot:
        """Take the URL that the user wrote apart as it was written: a signature may be one over its very letters."""
        server = parse_address(f"{uri.scheme}://{uri.bucket}")
        written = urlsplit(uri.text.partition("#")[0])
        path = encode_path(written.path).rstrip("/")
        full_key = "/".join(part for part in (uri.key, selected_key) if part)
        if unquote(path).strip("/") != full_key:  # The uri is not what was written, but something below or above it.
            path = f"/{encode_key(full_key)}".rstrip("/")
        selected = None
        if selected_key is not None:
            path, _, name = path.rpartition("/")
            selected = (selected_key, name)
        return cls(replace(server, target=path), encode_query(written.query), selected)

    @property
    def endpoint(self) -> str:
        """The server, for messages: ``https://host``."""
        return f"{self.base.scheme}://{self.base.authority}"

    def address_of(self, key: str) -> Address:
        """Return the address of ``key``, which is relative to the root."""
        is_selected = self.selected is not None and key == self.selected[0]
        name = self.selected[1] if self.selected is not None and is_selected else encode_key(key)
        target = f"{self.base.target}/{name}"
        return replace(self.base, target=f"{target}?{self.query}" if self.query else target)
