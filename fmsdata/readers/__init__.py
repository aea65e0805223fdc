"""One module a file format. Each opens a shard and gives runs of its documents as spans of mapped memory."""

from pathlib import Path

from fmsdata.readers.arrow import ArrowShard
from fmsdata.readers.base import Block, StoredTokens, Tokens
from fmsdata.readers.ranges import Layout, Reading, read_layout
from fmsdata.storage import Mapped, map_file

SUFFIXES = (".arrow",)

__all__ = [
    "SUFFIXES",
    "ArrowShard",
    "Block",
    "Layout",
    "Reading",
    "StoredTokens",
    "Tokens",
    "open_shard",
    "read_layout",
]


def open_shard(path: Path, column: str | None = None, mapped: Mapped | None = None) -> ArrowShard:
    """Open one shard. Its documents are read later, a run at a time.

    >>> open_shard(Path("corpus/web/part-0.arrow")).documents   # doctest: +SKIP
    812
    """
    return ArrowShard(map_file(path) if mapped is None else mapped.get(path), str(path), column)
