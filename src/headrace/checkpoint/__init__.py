"""What the files of a checkpoint claim to hold: headers, index, snapshot, side files. Moves no weight bytes."""

from headrace.checkpoint.checkpoint import Checkpoint
from headrace.checkpoint.dtypes import DTYPES, StoredDtype
from headrace.checkpoint.entry import Entry
from headrace.checkpoint.header import ParsedHeader, parse_header
from headrace.checkpoint.headers import Fetch
from headrace.checkpoint.opening import open_checkpoint
from headrace.checkpoint.sidefiles import SideFiles
from headrace.checkpoint.snapshot import Snapshot

__all__ = [
    "DTYPES",
    "Checkpoint",
    "Entry",
    "Fetch",
    "ParsedHeader",
    "SideFiles",
    "Snapshot",
    "StoredDtype",
    "open_checkpoint",
    "parse_header",
]
