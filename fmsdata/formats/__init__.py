"""Formats: bytes become blocks of documents. One folder or file for each format, without I/O.

`FORMATS` lists them by the ending of a file's name. A new format implements `Shard` and `Layout` of
`formats/base.py` and adds one entry.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import pyarrow as pa

from fmsdata.formats.arrow.layout import read_arrow_layout, refuse_remote_stream
from fmsdata.formats.arrow.shard import ArrowShard
from fmsdata.formats.base import Layout, Reading, Shard, ShardBytes


def _accept(name: str, data: pa.Buffer) -> None:
    """Every file of the format can be read from remote storage."""


class Format(NamedTuple):
    """How the files of a format are read."""

    open: Callable[[pa.Buffer | ShardBytes, str, str | None], Shard]
    read_layout: Callable[[str, int, str | None, Sequence[int], bool], Reading[Layout]]
    check_remote: Callable[[str, pa.Buffer], None] = _accept  # raises for what `read_layout` refuses


FORMATS: Mapping[str, Format] = {".arrow": Format(ArrowShard, read_arrow_layout, refuse_remote_stream)}
SUFFIXES = tuple(FORMATS)


def _format_of(name: str) -> Format:
    return next((found for suffix, found in FORMATS.items() if name.endswith(suffix)), FORMATS[".arrow"])


def open_shard(data: pa.Buffer | ShardBytes, name: str, column: str | None = None, *, remote: bool = False) -> Shard:
    """Open a shard whose bytes are in memory or mapped. Documents are read later, in blocks.

    `remote` refuses what `read_layout` refuses, so that it does not depend on the size of a source
    whether it can be read.

    >>> open_shard(MappedFile(path), "part-0.arrow").documents   # doctest: +SKIP
    812
    """
    chosen = _format_of(name)
    if remote and isinstance(data, pa.Buffer):
        chosen.check_remote(name, data)
    return chosen.open(data, name, column)


def read_layout(
    name: str, size: int, column: str | None = None, bounds: Sequence[int] = (), *, dense: bool = False
) -> Reading[Layout]:
    """The layout of a remote shard of `size` bytes: its number of documents, and where they are.

    Blocks can then be read between any two of the `bounds`, which are document numbers. (The first
    and the last document are always among them.) A layout keeps some numbers for each bound, not
    for each document. With `dense`, most blocks will be read, so the layout also keeps the offsets
    of documents around a block.

    >>> reading = read_layout("part-0.arrow", 1_000_000, bounds=[0, 500, 812])
    >>> next(reading)
    [Range(start=983616, stop=1000000)]
    """
    return _format_of(name).read_layout(name, size, column, bounds, dense)
