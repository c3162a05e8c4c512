"""Which certificates to trust: one bundle for an SDK and for ranged reads, which would otherwise each have their own idea of it."""

from __future__ import annotations

import ssl
from pathlib import Path

from headrace.errors import InvalidSetting


def check_ca_file(path: str, named_by: str) -> str:
    """Return ``path``, which ``named_by`` names, if it is a file. Raises `InvalidSetting`."""
    if not Path(path).is_file():
        raise InvalidSetting(
            f"The certificate bundle {path} is not a file.",
            f"{named_by} names it.",
            "Name a file of certificates in PEM form.",
        )
    return path


def find_system_ca_file() -> str | None:
    """Return ``SSL_CERT_FILE`` or the system's bundle; None where the system has no single file of them."""
    paths = ssl.get_default_verify_paths()
    if paths.cafile:
        return paths.cafile
    # Debian's OpenSSL looks into a folder, which the SDKs cannot; the same certificates lie in one file beside.
    bundle = Path(paths.capath or "") / "ca-certificates.crt"
    return str(bundle) if bundle.is_file() else None
