"""Every knob, validated, and the only module below the command line that reads the environment.

Values given in code win over ``HEADRACE_*`` variables, which win over the variables of other programs for the same thing (Run:ai Model Streamer's, Google's,
curl's), which win over the defaults. What each value came from is kept, for the report of a load.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from headrace.errors import InvalidSetting
from headrace.processors import usable_processors
from headrace.units import MIB, UNLIMITED, parse_bytes, parse_memory_limit, parse_rate

_LEAST_CONNECTIONS, _MOST_CONNECTIONS = 8, 64


def connections_for(processors: float) -> int:
    """Return how many connections a node has where nobody says: two for each processor, at least 8 and at most 64.

    Object stores give a connection about 100 MB/s, and machines with more processors have quicker networks: cloud machines have 0.8 to 3 Gbit/s for each.
    """
    return max(_LEAST_CONNECTIONS, min(2 * math.ceil(processors), _MOST_CONNECTIONS))


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportSettings:
    """How bytes are moved."""

    num_connections: int = field(default_factory=lambda: connections_for(usable_processors()))
    """Connections (or file readers) at once, on this node (`HEADRACE_CONNECTIONS`, `RUNAI_STREAMER_CONCURRENCY`). Local ranks divide them."""
    read_bytes: int = 16 * MIB
    """Largest single ranged read, in bytes; reads are cut at the file's multiples of it."""
    gap_bytes: int = 64 << 10
    """Unwanted bytes between two wanted ranges that are read and dropped rather than skipped by a new request."""
    connect_timeout_s: float = 10.0
    """Longest wait for a connection, TLS included, in seconds."""
    idle_timeout_s: float = 20.0
    """Longest wait for the next byte of an answer, in seconds."""
    total_timeout_s: float = 300.0
    """Longest time for one attempt at one read, in seconds."""
    least_rate_bytes_per_s: int = 64 << 10
    """A body that comes slower than this, over `least_rate_window_s`, is given up and continued on a new connection. 0: never."""
    least_rate_window_s: float = 15.0
    """Over how many seconds the least rate is measured."""
    max_attempts: int = 6
    """Attempts at one read without a single new byte in between, the first included."""
    backoff_first_s: float = 0.2
    """Longest wait before the second attempt; it doubles from there (full jitter)."""
    backoff_most_s: float = 10.0
    """Longest wait between two attempts."""
    readers: int | str = "auto"
    """Processes that read from remote stores, for each rank (`HEADRACE_READERS`): 0 leaves it to threads of this process, and so does ``auto``, until they are seen to fill
    processors of a machine that has more."""
    reader_places: str = ""
    """Where reader processes run and read, in turn, with commas between (`HEADRACE_READER_PLACES`): ``INTERFACE``, ``@NODE`` (NUMA) or ``INTERFACE@NODE``."""
    bandwidth_bytes_per_s: int = 0
    """Most bytes per second from remote stores, all connections together. 0: no limit."""
    http_proxy: str = field(default="", repr=False)
    """Proxy for ``http`` stores, ``http://[user:password@]host:port``. Empty: none."""
    https_proxy: str = field(default="", repr=False)
    """Proxy for ``https`` stores, tunnelled through."""
    no_proxy: str = ""
    """Hosts that are reached directly: names, suffixes, ``*``, with commas between."""
    hedge_after_s: float = 3.0
    """A last read that takes longer than this, and much longer than its peers, is asked for a second time. 0: never."""

    def __post_init__(self) -> None:
        least = {
            "num_connections": 1,
            "read_bytes": 4096,
            "gap_bytes": 0,
            "max_attempts": 1,
            "bandwidth_bytes_per_s": 0,
        }
        for name, smallest in least.items():
            _check_number(name, getattr(self, name), smallest, whole=True)
        if self.readers != "auto":
            _check_readers(self.readers)
        for item in fields(self):
            if item.name.endswith("_s") and item.name not in least:
                _check_number(item.name, getattr(self, item.name), 0.001 if item.name.endswith("_timeout_s") else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class AzureSettings:
    """Which Azure storage account is used, and with what. Nothing here is read by the Azure SDK itself; keys and tokens stay out of the repr."""

    account: str = ""
    """Name of the account (`AZURE_STORAGE_ACCOUNT`, `AZURE_STORAGE_ACCOUNT_NAME`)."""
    connection_string: str = field(default="", repr=False)
    """Account, endpoint and key or SAS in one, as the portal gives it (`AZURE_STORAGE_CONNECTION_STRING`); wins over all others."""
    sas_token: str = field(default="", repr=False)
    """Shared access signature, with or without its question mark (`AZURE_STORAGE_SAS_TOKEN`)."""
    account_key: str = field(default="", repr=False)
    """Key of the account, in base64 (`AZURE_STORAGE_KEY`, `AZURE_STORAGE_ACCOUNT_KEY`, `AZURE_STORAGE_ACCESS_KEY`)."""
    endpoint: str = field(default="", repr=False)
    """URL of the account's blob service, for an emulator or a domain of one's own (`AZURE_STORAGE_ENDPOINT`, `AZURE_STORAGE_SERVICE_ENDPOINT`)."""
    endpoint_suffix: str = "core.windows.net"
    """What follows ``account.blob.`` in the host name (`AZURE_STORAGE_ENDPOINT_SUFFIX`)."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> AzureSettings:
        """Return what ``environment`` (default: the process's) says. Of several variables for one thing, the first that is set counts."""
        source = os.environ if environment is None else environment
        found = {
            name: next((source[variable].strip() for variable in variables if source.get(variable)), "")
            for name, variables in _AZURE_VARIABLES.items()
        }
        return cls(**{name: value for name, value in found.items() if value})

    @staticmethod
    def sources(environment: Mapping[str, str]) -> dict[str, str]:
        """Return which variable each field is read from, as ``azure.account`` and its like; fields that none sets are left out."""
        found = {
            f"azure.{name}": next((variable for variable in variables if environment.get(variable)), "")
            for name, variables in _AZURE_VARIABLES.items()
        }
        return {name: variable for name, variable in found.items() if variable}


_AZURE_VARIABLES = {
    "account": ("AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_ACCOUNT_NAME"),
    "connection_string": ("AZURE_STORAGE_CONNECTION_STRING",),
    "sas_token": ("AZURE_STORAGE_SAS_TOKEN",),
    "account_key": ("AZURE_STORAGE_KEY", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY"),
    "endpoint": ("AZURE_STORAGE_ENDPOINT", "AZURE_STORAGE_SERVICE_ENDPOINT"),
    "endpoint_suffix": ("AZURE_STORAGE_ENDPOINT_SUFFIX",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that is not about one call."""

    cache_dir: Path = field(default_factory=lambda: Path.home() / ".cache" / "headrace")
    """Where side files are mirrored (`HEADRACE_CACHE_DIR`)."""
    memory_limit_bytes: int | None = None
    """Most memory for tensors on their way, in bytes, for the node (`HEADRACE_MEMORY_LIMIT`, `RUNAI_STREAMER_MEMORY_LIMIT`): -1 is unlimited, 0 the smallest that works; None chooses an
    eighth of what is available, at most 8 GiB. Local ranks divide it."""
    local_ranks: int = 1
    """Processes of this node that load at the same time (`LOCAL_WORLD_SIZE`, as torchrun sets it): memory and connections are divided by it."""
    debug_poison: bool = False
    """Fill memory that tensors gave back with 0xFF, to find a consumer that reads it after all (`HEADRACE_DEBUG_POISON`)."""
    huge_pages: bool = True
    """Make large pieces of memory of huge pages where the system has them at hand, by what the first cost (`HEADRACE_HUGE_PAGES`, 0 or 1)."""
    progress: bool = True
    """Show progress on standard error (`HEADRACE_PROGRESS`, 0 or 1)."""
    s3_anonymous: bool = False
    """Send no credentials to S3 and look for none, for public buckets (`HEADRACE_S3_ANONYMOUS`, `RUNAI_STREAMER_S3_UNSIGNED`)."""
    s3_addressing_style: str | None = None
    """path, virtual or auto (`HEADRACE_S3_ADDRESSING_STYLE`, `RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING`); None takes the AWS configuration's."""
    s3_endpoint: str | None = field(default=None, repr=False)
    """URL of another store than Amazon's (`HEADRACE_S3_ENDPOINT`, `RUNAI_STREAMER_S3_ENDPOINT`); None takes the AWS configuration's (`AWS_ENDPOINT_URL`)."""
    s3_request_payer: bool = False
    """Pay for requests to buckets whose readers do (`HEADRACE_S3_REQUEST_PAYER`, ``requester``)."""
    gcs_anonymous: bool = False
    """Send no token to Google Cloud Storage and look for no credentials, for public buckets (`HEADRACE_GCS_ANONYMOUS`)."""
    gcs_credentials_file: Path | None = None
    """Key file of a service account (`HEADRACE_GCS_CREDENTIALS_FILE`, `RUNAI_STREAMER_GCS_CREDENTIAL_FILE`); None asks for Google's application
    default credentials."""
    gcs_endpoint: str | None = None
    """Another endpoint than Google's (`HEADRACE_GCS_ENDPOINT`, `CLOUDSDK_API_ENDPOINT_OVERRIDES_STORAGE`); one over plain HTTP gets no token."""
    gcs_user_project: str | None = None
    """Project that pays, for buckets whose readers do (`HEADRACE_GCS_USER_PROJECT`)."""
    azure: AzureSettings | None = None
    """Account and credentials for Azure; None reads the `AZURE_STORAGE_*` variables whenever they are needed."""
    azure_anonymous: bool = False
    """Send no credentials to Azure and look for none, for public containers (`HEADRACE_AZURE_ANONYMOUS`)."""
    http_token: str | None = field(default=None, repr=False)
    """Token for `http` and `https` uris (`HEADRACE_HTTP_TOKEN`): sent as `Authorization: Bearer` to the server that the uri names, and to no other."""
    ca_file: str | None = None
    """Certificates to trust for `https`, `hf` and `az` uris, in PEM form (`SSL_CERT_FILE`, `REQUESTS_CA_BUNDLE`); None means the system's."""
    verify_tls: bool = True
    """Check servers' certificates (`HEADRACE_VERIFY_TLS`)."""
    transport: TransportSettings = field(default_factory=TransportSettings)
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Setting to the variable that its value was read from, or to another source than the code that made these settings. A default, or what code gave, is not in it."""

    def __post_init__(self) -> None:
        if self.memory_limit_bytes is not None:
            _check_number("memory_limit_bytes", self.memory_limit_bytes, UNLIMITED, whole=True)
        _check_number("local_ranks", self.local_ranks, 1, whole=True)

    @property
    def rank_transport(self) -> TransportSettings:
        """This rank's share of the node's connections, at least one."""
        return replace(self.transport, num_connections=max(1, self.transport.num_connections // self.local_ranks))

    def changed(self, source: str, **values: Any) -> Settings:
        """Return these settings with ``values``, fields of this class or of `TransportSettings`, and keep that they came from ``source``."""
        inner = {name: value for name, value in values.items() if name in _TRANSPORT_NAMES}
        own = {name: value for name, value in values.items() if name not in inner}
        sources = {**self.sources, **dict.fromkeys(values, source)}
        return replace(self, transport=replace(self.transport, **inner), sources=sources, **own)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None, **given: Any) -> Settings:
        """Return the settings that ``environment`` (default: the process's) and ``given`` ask for; ``None`` in ``given`` means not given.

        ``given`` may name fields of this class and of `TransportSettings`. Raises `InvalidSetting` that lists what is known.
        """
        source = os.environ if environment is None else environment
        own = {item.name for item in fields(cls)} - {"transport", "sources"}
        unknown = sorted(set(given) - own - _TRANSPORT_NAMES)
        if unknown:
            known = ", ".join(sorted(own | _TRANSPORT_NAMES))
            raise InvalidSetting(f"Unknown setting {', '.join(unknown)}.", f"Known are: {known}.")
        _warn_of_unknown(source)
        values: dict[str, Any] = {}
        sources: dict[str, str] = {}
        for variable, (name, convert) in _VARIABLES.items():
            if source.get(variable) and given.get(name) is None:
                values[name] = _converted(variable, source[variable], convert)
                sources[name] = variable
        if given.get("azure") is None:
            sources |= AzureSettings.sources(source)
        values.update({name: value for name, value in given.items() if value is not None})
        transport = {name: values.pop(name) for name in list(values) if name in _TRANSPORT_NAMES}
        return replace(cls(**values), transport=TransportSettings(**transport), sources=sources)


_TRANSPORT_NAMES = frozenset(item.name for item in fields(TransportSettings))


def says_yes(variable: str, text: str) -> bool:
    """Say whether the ``text`` of a ``variable`` asks for what it switches on. Raises `InvalidSetting` for what says neither yes nor no."""
    try:
        return bool(text.strip()) and _switch(text.strip())
    except KeyError as error:
        raise InvalidSetting(f"{variable} is {text!r}.", "It must be 0 or 1.") from error


def known_variables() -> dict[str, tuple[str, ...]]:
    """Return the environment variables of each setting that has any, those first that win over others; ``azure.account`` and its like are fields of `AzureSettings`."""
    found: dict[str, tuple[str, ...]] = {}
    for variable, (name, _) in _VARIABLES.items():
        found[name] = (variable, *found.get(name, ()))
    return {**found, **{f"azure.{name}": variables for name, variables in _AZURE_VARIABLES.items()}}


def _warn_of_unknown(environment: Mapping[str, str]) -> None:
    """Say once which ``HEADRACE_`` variables mean nothing: a slip in a name would otherwise be a setting that silently is not made."""
    for variable in sorted(environment):
        if variable.startswith("HEADRACE_") and variable not in _VARIABLES and variable not in _OTHERS_VARIABLES:
            near = get_close_matches(variable, (*_VARIABLES, *_OTHERS_VARIABLES), n=1)
            _say_once(variable, f" Did you mean {near[0]}?" if near else "")


@cache
def _say_once(variable: str, hint: str) -> None:
    logging.getLogger("headrace").warning("The variable %s is set and means nothing to Headrace.%s", variable, hint)


_OTHERS_VARIABLES = frozenset(
    {"HEADRACE_API_KEY", "HEADRACE_AS_RUNAI", "HEADRACE_ENV_ROOT", "HEADRACE_SGLANG", "HEADRACE_VLLM"}
)
"""Variables that the command line, the Makefile, the engines' plug-ins and the stand-in for Run:ai's package read."""


def _check_number(name: str, value: Any, least: float, *, whole: bool = False) -> None:
    good = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    most = _LONGEST_S if name.endswith("_s") and not whole else float("inf")
    if not good or not math.isfinite(value) or not least <= value <= most:
        kind = "a whole number" if whole else "a number"
        above = f" and at most {most:g}" if math.isfinite(most) else ""
        raise InvalidSetting(f"{name} is {value!r}.", f"It must be {kind}, at least {least:g}{above}.")


def _check_readers(value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MOST_READERS:
        raise InvalidSetting(f"readers is {value!r}.", f"It must be auto, or a whole number from 0 to {_MOST_READERS}.")


_MOST_READERS = 256

_LONGEST_S = 1e8
"""Three years: a longer time is a slip, and the system's calls refuse it in words that lead astray."""


def _converted(variable: str, text: str, convert: Any) -> Any:
    try:
        return convert(text)
    except InvalidSetting as error:
        raise InvalidSetting(f"{variable}: {error.what}", error.why, error.mend) from error
    except (ValueError, KeyError) as error:
        raise InvalidSetting(f"{variable} is {text!r}.", f"It must be {_kind_of(convert)}.") from error


def _kind_of(convert: Any) -> str:
    kinds = {
        int: "a whole number",
        float: "a number",
        _switch: "0 or 1",
        _style: "0 or 1",
        _payer: "requester, 0 or 1",
        parse_readers: "auto or a whole number",
    }
    return kinds.get(convert, "something else")


def parse_readers(text: str) -> int | str:
    """Return ``auto`` or the number that ``text`` is; what it may be is `TransportSettings`'s to check. Raises ValueError."""
    return "auto" if text.lower() == "auto" else int(text)


def _switch(text: str) -> bool:
    return {"0": False, "false": False, "no": False, "1": True, "true": True, "yes": True}[text.lower()]


def _payer(text: str) -> bool:
    """Read the word of the AWS SDKs, which is also the header's, as well as a switch."""
    return text.lower() == "requester" or _switch(text)


def _style(text: str) -> str:
    return "virtual" if _switch(text) else "path"


# Of several for one thing the later wins: ours over those of other programs. What Run:ai's mean: environment variables of run-ai/runai-model-streamer 0.17.
_VARIABLES: dict[str, tuple[str, Any]] = {
    "HEADRACE_CACHE_DIR": ("cache_dir", lambda text: Path(text).expanduser()),
    "RUNAI_STREAMER_MEMORY_LIMIT": ("memory_limit_bytes", parse_memory_limit),
    "HEADRACE_MEMORY_LIMIT": ("memory_limit_bytes", parse_memory_limit),
    "HEADRACE_PROGRESS": ("progress", _switch),
    "HEADRACE_DEBUG_POISON": ("debug_poison", _switch),
    "HEADRACE_HUGE_PAGES": ("huge_pages", _switch),
    "LOCAL_WORLD_SIZE": ("local_ranks", int),
    "RUNAI_STREAMER_S3_UNSIGNED": ("s3_anonymous", _switch),
    "HEADRACE_S3_ANONYMOUS": ("s3_anonymous", _switch),
    "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": ("s3_addressing_style", _style),
    "HEADRACE_S3_ADDRESSING_STYLE": ("s3_addressing_style", str),
    "RUNAI_STREAMER_S3_ENDPOINT": ("s3_endpoint", str),
    "HEADRACE_S3_ENDPOINT": ("s3_endpoint", str),
    "HEADRACE_S3_REQUEST_PAYER": ("s3_request_payer", _payer),
    "HEADRACE_GCS_ANONYMOUS": ("gcs_anonymous", _switch),
    "RUNAI_STREAMER_GCS_CREDENTIAL_FILE": ("gcs_credentials_file", lambda text: Path(text).expanduser()),
    "HEADRACE_GCS_CREDENTIALS_FILE": ("gcs_credentials_file", lambda text: Path(text).expanduser()),
    "CLOUDSDK_API_ENDPOINT_OVERRIDES_STORAGE": ("gcs_endpoint", str),
    "HEADRACE_GCS_ENDPOINT": ("gcs_endpoint", str),
    "HEADRACE_GCS_USER_PROJECT": ("gcs_user_project", str),
    "HEADRACE_AZURE_ANONYMOUS": ("azure_anonymous", _switch),
    "HEADRACE_HTTP_TOKEN": ("http_token", str),
    "REQUESTS_CA_BUNDLE": ("ca_file", str),
    "SSL_CERT_FILE": ("ca_file", str),
    "HEADRACE_VERIFY_TLS": ("verify_tls", _switch),
    "RUNAI_STREAMER_CONCURRENCY": ("num_connections", int),
    "HEADRACE_CONNECTIONS": ("num_connections", int),
    "RUNAI_STREAMER_CHUNK_BYTESIZE": ("read_bytes", parse_bytes),
    "HEADRACE_READ_BYTES": ("read_bytes", parse_bytes),
    "HEADRACE_READERS": ("readers", parse_readers),
    "HEADRACE_READER_PLACES": ("reader_places", str),
    "HEADRACE_BANDWIDTH_LIMIT": ("bandwidth_bytes_per_s", parse_rate),
    # The names that curl and the SDKs know, in both spellings; the lower one wins where they differ, as with curl.
    "HTTP_PROXY": ("http_proxy", str),
    "http_proxy": ("http_proxy", str),
    "HTTPS_PROXY": ("https_proxy", str),
    "https_proxy": ("https_proxy", str),
    "NO_PROXY": ("no_proxy", str),
    "no_proxy": ("no_proxy", str),
    "HEADRACE_CONNECT_TIMEOUT": ("connect_timeout_s", float),
    "HEADRACE_IDLE_TIMEOUT": ("idle_timeout_s", float),
    "HEADRACE_TOTAL_TIMEOUT": ("total_timeout_s", float),
    "HEADRACE_MAX_ATTEMPTS": ("max_attempts", int),
}
