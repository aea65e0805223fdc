"""The index of text files: how many documents each holds, and where a file can be entered.

It is one Arrow table with a row for each file. `fmsdata index` writes it to `meta/` beside the corpus;
without it, the index of each file is made once, and kept in the user's cache folder. Whatever is
read from it is checked: a damaged index is an error.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from fmsdata.core.keys import Ints, offsets
from fmsdata.errors import CountsError
from fmsdata.formats.damage import DAMAGE, Truncated
from fmsdata.formats.line_index import LineIndex

FILE = "fmsdata-text-index.ipc"  # in `meta`; it does not end in .arrow, so that nobody takes it for a shard
VERSION = b"1"
POINT = 4  # numbers of a point
COLUMNS: dict[str, Any] = {
    "name": pa.string(),
    "size": pa.int64(),
    "version": pa.string(),
    "column": pa.string(),
    "documents": pa.int64(),
    "bytes": pa.int64(),
    "largest": pa.int64(),
    "points": pa.list_(pa.int64()),
    "tokens": pa.int64(),
}
SCHEMA = pa.schema(COLUMNS)


class TextEntry(NamedTuple):
    """What is known of a text file."""

    size: int  # bytes of the stored file
    version: str | None
    column: str | None  # of a Parquet file
    documents: int
    nbytes: int  # of text: of lines, the bytes of the decompressed file; of Parquet, an estimate
    largest: int  # the most bytes that are decoded to read one document
    lines: LineIndex | None  # if its documents are lines
    tokens: int | None = None  # that a tokenizer makes of it


class TextIndex(NamedTuple):
    """The entries of files by name; and if tokens were counted, by which tokenizer, and of which field."""

    entries: Mapping[str, TextEntry]
    tokenizer: str | None = None  # its identity
    field: str = ""


def write_table(index: TextIndex) -> bytes:
    """The index as bytes of a file."""
    rows = sorted(index.entries.items())
    columns: dict[str, list[Any]] = {name: [] for name in SCHEMA.names}
    for name, entry in rows:
        points: Any = [] if entry.lines is None else entry.lines.points.ravel()
        values = (name, entry.size, entry.version, entry.column, entry.documents, entry.nbytes, entry.largest)
        for column, value in zip(SCHEMA.names, (*values, points, entry.tokens), strict=True):
            columns[column].append(value)
    metadata = {b"fmsdata": VERSION}
    if index.tokenizer is not None:
        metadata |= {b"tokenizer": index.tokenizer.encode(), b"field": index.field.encode()}
    schema = SCHEMA.with_metadata(metadata)
    arrays = [pa.array(columns[field.name], field.type) for field in SCHEMA]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(pa.table(arrays, schema=schema))
    return sink.getvalue().to_pybytes()


def read_table(data: bytes, name: str) -> TextIndex:
    """The index in the bytes of a file; `name` is for errors."""
    try:
        return _read_table(data)
    except DAMAGE as error:
        raise CountsError(f"{name}: not a readable index of text files ({error}); run `fmsdata index` again") from None


def _read_table(data: bytes) -> TextIndex:
    table = pa.ipc.open_file(pa.py_buffer(data)).read_all()
    metadata = table.schema.metadata or {}
    if metadata.get(b"fmsdata") != VERSION or not table.schema.remove_metadata().equals(SCHEMA):
        raise Truncated("it has other columns, or is of another version of fmsdata")
    table.validate(full=True)
    table = table.combine_chunks()
    columns: dict[str, list[Any]] = {name: table.column(name).to_pylist() for name in SCHEMA.names if name != "points"}
    points, ends = _points(table.column("points"))
    entries: dict[str, TextEntry] = {}
    for row, name in enumerate(columns["name"]):
        size, documents, nbytes, largest = (columns[key][row] for key in ("size", "documents", "bytes", "largest"))
        tokens = columns["tokens"][row]
        numbers = (size, documents, nbytes, largest, 0 if tokens is None else tokens)
        if name in entries or not isinstance(name, str) or not all(_is_count(number) for number in numbers):
            raise Truncated(f"its row of {name!r} is not valid")
        own = points[ends[row] : ends[row + 1]]
        lines = None
        if len(own):
            if len(own) % POINT:
                raise Truncated(f"the points of {name} are not complete")
            lines = LineIndex(own.reshape(-1, POINT).copy())
            lines.require(size)
            if (lines.documents, lines.nbytes, lines.largest) != (documents, nbytes, largest):
                raise Truncated(f"the points of {name} disagree with its counts")
        column, version = columns["column"][row], columns["version"][row]
        entries[name] = TextEntry(size, version, column, documents, nbytes, largest, lines, tokens)
    tokenizer = metadata.get(b"tokenizer")
    return TextIndex(entries, None if tokenizer is None else tokenizer.decode(), metadata.get(b"field", b"").decode())


def _points(column: Any) -> tuple[Ints, Ints]:
    """The numbers of all rows, and where rows end."""
    chunks = column.chunks
    lengths = [chunk.value_lengths().fill_null(0).to_numpy() for chunk in chunks]
    values = [chunk.flatten() for chunk in chunks]
    if any(each.null_count for each in values):
        raise Truncated("it has points without a number")
    numbers = [each.to_numpy(zero_copy_only=True) for each in values]
    empty = np.empty(0, np.int64)
    return np.concatenate([empty, *numbers]), offsets(np.concatenate([empty, *lengths]).astype(np.int64))


def _is_count(number: object) -> bool:
    return isinstance(number, int) and 0 <= number < 1 << 62


def line_entry(size: int, version: str | None, lines: LineIndex) -> TextEntry:
    """The entry of a file of lines."""
    return TextEntry(size, version, None, lines.documents, lines.nbytes, lines.largest, lines)


def summed(entries: Iterable[TextEntry]) -> int | None:
    """The tokens of all entries, if all were counted."""
    counted = [entry.tokens for entry in entries]
    return None if any(tokens is None for tokens in counted) else sum(filter(None, counted))
