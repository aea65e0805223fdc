"""Formats: bytes become blocks of documents. One folder or file for each format, without I/O."""

from collections.abc import Sequence

import pyarrow as pa

from fmsdata.formats.arrow.framing import PREFIX
from fmsdata.formats.arrow.layout import read_arrow_layout, refuse_stream
from fmsdata.formats.arrow.shard import ArrowShard
from fmsdata.formats.base import Layout, Reading, Shard

SUFFIXES = (".arrow",)


def open_shard(data: pa.Buffer, name: str, column: str | None = None, *, remote: bool = False) -> Shard:
    """Open a shard whose bytes are in memory or mapped. Documents are read later, in blocks.

    `remote` refuses the formats that `read_layout` refuses, so that it does not depend on the size
    of a source whether it can be read.

    >>> open_shard(map_file(path), "part-0.arrow").documents   # doctest: +SKIP
    812
    """
    if remote:
        refuse_stream(name, memoryview(data)[:PREFIX])
    return ArrowShard(data, name, column)


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
    return read_arrow_layout(name, size, column, bounds, dense)
