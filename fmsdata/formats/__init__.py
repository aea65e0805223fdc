"""Formats: bytes become blocks of documents. One folder or file for each format, without I/O.

`FORMATS` lists them by the ending of a file's name. A new format implements `Shard` and `Layout` of
`formats/base.py` and adds one entry.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import pyarrow as pa

from fmsdata.errors import ConfigError
from fmsdata.formats.arrow.layout import read_arrow_layout, refuse_remote_stream
from fmsdata.formats.arrow.shard import ArrowShard
from fmsdata.formats.base import (
    DocumentStream,
    InMemory,
    Keep,
    Layout,
    Reading,
    Shard,
    ShardBytes,
    keep_nothing,
    read_ranges,
)
from fmsdata.formats.compression import decompressor
from fmsdata.formats.jsonl import FIELD, parse_jsonl
from fmsdata.formats.line_file import LineLayout, LineShard
from fmsdata.formats.line_index import LineIndex, index_lines
from fmsdata.formats.lines import LineStream, Parse
from fmsdata.formats.parquet import ParquetShard, read_parquet_layout
from fmsdata.formats.text import parse_text


class Request(NamedTuple):
    """What the layout of a remote shard is read for, see `read_layout`."""

    name: str
    size: int
    column: str | None
    bounds: Sequence[int]
    dense: bool
    lines: LineIndex | None
    keep: Keep


class Format(NamedTuple):
    """How the files of a format are read."""

    kind: str  # files of one kind can be together in a source
    open: Callable[[pa.Buffer | ShardBytes, str, str | None, LineIndex | None], Shard]
    read_layout: Callable[[Request], Reading[Layout]]
    check_remote: Callable[[str, pa.Buffer], None] | None = None  # raises for what `read_layout` refuses
    parse: Callable[[str | None], Parse] | None = None  # of formats whose documents are lines; takes the column


def _lines(kind: str, parse: Callable[[str | None], Parse]) -> Format:
    def open_lines(data: pa.Buffer | ShardBytes, name: str, column: str | None, index: LineIndex | None) -> Shard:
        data = InMemory(data) if isinstance(data, pa.Buffer) else data
        index = read_ranges(index_lines(name, data.size), data.read) if index is None else index
        return LineShard(data, name, parse(column), index)

    def read_lines_layout(asked: Request) -> Reading[Layout]:
        index = (yield from index_lines(asked.name, asked.size)) if asked.lines is None else asked.lines
        return LineLayout(asked.name, asked.size, parse(asked.column), index, asked.keep)

    return Format(kind, open_lines, read_lines_layout, parse=parse)


ARROW = Format(
    "arrow",
    lambda data, name, column, _: ArrowShard(data, name, column),
    lambda asked: read_arrow_layout(asked.name, asked.size, asked.column, asked.bounds, asked.dense),
    refuse_remote_stream,
)
PARQUET = Format(
    "parquet",
    lambda data, name, column, _: ParquetShard(data, name, column),
    lambda asked: read_parquet_layout(asked.name, asked.size, asked.column, asked.keep),
)
JSONL = _lines("jsonl", lambda column: partial(parse_jsonl, field=FIELD if column is None else column))
TEXT = _lines("text", lambda _: parse_text)
FORMATS: Mapping[str, Format] = {
    ".arrow": ARROW,
    ".parquet": PARQUET,
    ".jsonl": JSONL,
    ".jsonl.gz": JSONL,
    ".jsonl.zst": JSONL,
    ".txt": TEXT,
    ".txt.gz": TEXT,
    ".txt.zst": TEXT,
    ".zst": TEXT,
}
SUFFIXES = tuple(FORMATS)


def format_of(name: str) -> Format:
    """The format of a file, by the longest ending that fits; Arrow if none does.

    >>> format_of("part-0.jsonl.zst").kind, format_of("part-0.zst").kind
    ('jsonl', 'text')
    """
    return FORMATS.get(max((suffix for suffix in FORMATS if name.endswith(suffix)), key=len, default=".arrow"), ARROW)


def open_shard(
    data: pa.Buffer | ShardBytes,
    name: str,
    column: str | None = None,
    *,
    remote: bool = False,
    index: LineIndex | None = None,
) -> Shard:
    """Open a shard whose bytes are in memory or mapped. Documents are read later, in blocks.

    `remote` refuses what `read_layout` refuses, so that it does not depend on the size of a source
    whether it can be read. Files of lines have an `index`; without it, the whole file is read.

    >>> open_shard(MappedFile(path), "part-0.arrow").documents   # doctest: +SKIP
    812
    """
    chosen = format_of(name)
    if remote and chosen.check_remote is not None and isinstance(data, pa.Buffer):
        chosen.check_remote(name, data)
    return chosen.open(data, name, column, index)


def read_layout(
    name: str,
    size: int,
    column: str | None = None,
    bounds: Sequence[int] = (),
    *,
    dense: bool = False,
    index: LineIndex | None = None,
    keep: Keep = keep_nothing,
) -> Reading[Layout]:
    """The layout of a remote shard of `size` bytes: its number of documents, and where they are.

    Blocks can then be read between any two of the `bounds`, which are document numbers. (The first
    and the last document are always among them.) A layout keeps some numbers for each bound, not
    for each document. With `dense`, most blocks will be read, so the layout also keeps the offsets
    of documents around a block. Files of lines have an `index`; without it, the whole file is read.
    `keep` is called for each part that must be decoded.

    >>> reading = read_layout("part-0.arrow", 1_000_000, bounds=[0, 500, 812])
    >>> next(reading)
    [Range(start=983616, stop=1000000)]
    """
    return format_of(name).read_layout(Request(name, size, column, bounds, dense, index, keep))


def open_stream(name: str, column: str | None = None, *, skip_bad: bool = False) -> DocumentStream:
    """Read a text file of lines from its beginning to its end, without an index and in little memory.

    With `skip_bad`, a bad line becomes an empty document and is listed; else it is an error. (Parquet
    files are read by row groups instead.)

    >>> stream = open_stream("part-0.txt")
    >>> stream.feed(b"one\\ntwo").tokens.tobytes(), stream.finish().tokens.tobytes()
    (b'one', b'two')
    """
    parse = format_of(name).parse
    if parse is None:
        raise ConfigError(f"{name} is not a text file of lines; only those are read as streams")
    return LineStream(name, decompressor(name), parse(column), skip_bad=skip_bad)
