"""Parquet files: a text column, or a list column of tokens.

The footer says where the column is in each row group. A block fetches and decodes the row groups
that its rows are in, with pyarrow. Mapped and remote files are read in the same way: pyarrow gets a
file of which only those ranges are there. Decoded row groups are kept for the blocks around.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from fmsdata.core.blocks import Block
from fmsdata.core.keys import Ints, offsets
from fmsdata.core.ranges import Range
from fmsdata.core.tokens import Tokens
from fmsdata.errors import DataError
from fmsdata.formats.base import (
    Blocks,
    Data,
    Decoded,
    Documents,
    InMemory,
    Keep,
    Layout,
    Reading,
    ShardBytes,
    find_kept,
    keep_nothing,
    read_ranges,
)
from fmsdata.formats.damage import DAMAGE, Guarded, Truncated
from fmsdata.formats.fetched import Fetched, in_parts
from fmsdata.formats.lines import NOT_UTF8
from fmsdata.formats.lists import flatten_lists, holds_lists
from fmsdata.formats.text import is_utf8
from fmsdata.storage.seekable import SeekableFile

MAGIC = b"PAR1"
TAIL = 1 << 16  # bytes at the end of a file that are read first
NAMES = ("text", "tokens")  # of the column, if the user names none
NOT_WHOLE = "not a complete Parquet file"
OWN, PER_GROUP = 4096, 512  # bytes of a layout
WINDOW = 1 << 23  # bytes of a range when a whole file is read
STREAMED, ROWS = 1 << 20, 256  # bytes and rows that are read at once, from the first row to the last


class NoColumn(DataError):
    """A file without the column that was requested, or without one of the usual names."""

    def __init__(self, message: str, columns: list[str]) -> None:
        super().__init__(message)
        self.columns = columns  # that could be read


class ParquetRows:
    """What both ways to read a file share: its footer, and how a row group becomes documents."""

    def __init__(self, name: str, size: int, footer: bytes, column: str | None, keep: Keep = keep_nothing) -> None:
        import pyarrow.parquet as pq  # takes a while

        self.name, self.keep, self._size = name, keep, size
        with Guarded(name, NOT_WHOLE):
            # Places in the file are not looked at: the footer is enough.
            self.metadata: Any = pq.read_metadata(pa.BufferReader(MAGIC + footer))
            schema: pa.Schema = self.metadata.schema.to_arrow_schema()
            self.column, self.text = choose_column(schema, column, name)
            self.groups: int = self.metadata.num_row_groups
            rows = np.array([self.metadata.row_group(i).num_rows for i in range(self.groups)], np.int64)
            if (rows < 0).any() or rows.sum(dtype=np.float64) >= 1 << 62:
                raise Truncated("its row groups have no valid number of rows")
            self._places = self._locate()
            self.group_bytes = self._sizes()  # of each row group, when it is decoded; roughly
        self.first_row = offsets(rows)
        self.documents = int(self.first_row[-1])
        self.known_tokens: int | None = None  # the footer does not say
        self.blocks: Blocks | None = None

    def estimate(self) -> int:
        """About how many bytes of text, from the footer alone: always the same number for the same file."""
        return sum(self.group_bytes)

    def groups_of(self, first: int, stop: int) -> range:
        """The row groups that hold the rows `first` to `stop - 1`."""
        rows = self.first_row
        return range(int(rows.searchsorted(first, "right")) - 1, int(rows.searchsorted(stop, "left")))

    def _locate(self) -> list[Range]:
        """Where the column is in each row group: what pyarrow asks for, from a file without any bytes."""
        file = _Part(memoryview(b""), 0, self._size)
        opened = self._open(file)
        places = []
        for group in range(self.groups):
            file.missing = None
            try:
                opened.read_row_group(group, columns=[self.column], use_threads=False)
            except (Truncated, *DAMAGE):
                if file.missing is None:
                    raise
            places.append(Range(0, 0) if file.missing is None else file.missing)
        return places

    def _sizes(self) -> list[int]:
        """The bytes of the column in each row group. (pyarrow has located them: it ends the process otherwise.)"""
        paths = [self.metadata.schema.column(leaf).path for leaf in range(self.metadata.num_columns)]
        leaf = next((i for i, path in enumerate(paths) if f"{path}.".startswith(f"{self.column}.")), None)
        if leaf is None:
            raise Truncated(f"its footer lacks the column {self.column!r}")
        columns = (self.metadata.row_group(group).column(leaf) for group in range(self.groups))
        return [max(0, column.total_uncompressed_size) for column in columns]

    def _open(self, file: "_Part") -> Any:
        import pyarrow.parquet as pq

        return pq.ParquetFile(pa.PythonFile(file, "r"), metadata=self.metadata, pre_buffer=False)

    def _decode(self, group: int, data: memoryview) -> Decoded:
        with Guarded(self.name):
            file = _Part(data, self._places[group].start, self._size)
            column = self._open(file).read_row_group(group, columns=[self.column], use_threads=False).column(0)
            rows = int(self.first_row[group + 1] - self.first_row[group])
            if len(column) != rows:
                raise Truncated(f"row group {group} has {len(column)} rows, not {rows}")
            column.validate(full=not self.text)
            tokens, ends = _texts(column) if self.text else flatten_lists(column, self.name)
        if self.text:
            require_utf8(self.name, tokens, ends, int(self.first_row[group]))
        return Decoded(tokens, ends, tokens.nbytes + ends.nbytes)

    def _block(self, first: int, stop: int, decoded: Sequence[Decoded]) -> Block[Any]:
        parts: list[Tokens] = []
        lengths = []
        for group, (tokens, ends, _) in zip(self.groups_of(first, stop), decoded, strict=True):
            low, high = self.first_row[group : group + 2].tolist()
            ends = ends[max(first, low) - low : min(stop, high) - low + 1]
            parts.append(tokens[ends[0] : ends[-1]])
            lengths.append(np.diff(ends))
        length = np.concatenate(lengths)
        # A copy: a view would keep the whole row group in memory.
        copied = parts[0].copy() if len(parts) == 1 else np.concatenate(parts)
        return Block([copied], np.zeros(len(length), np.int64), offsets(length)[:-1], length, [None])


class ParquetShard(ParquetRows):
    """A file whose bytes are in memory or mapped.

    >>> shard = ParquetShard(buffer, "part-0.parquet")      # doctest: +SKIP
    >>> shard.text, shard.documents                         # doctest: +SKIP
    (True, 812)
    """

    plain = False

    def __init__(self, data: pa.Buffer | ShardBytes, name: str, column: str | None = None) -> None:
        self._data = InMemory(data) if isinstance(data, pa.Buffer) else data
        size = self._data.size
        super().__init__(name, size, read_ranges(read_parquet_footer(name, size), self._data.read), column)

    def read(self, first: int, stop: int) -> Block[Any]:
        """The documents `first` to `stop - 1`, of which there must be at least one."""
        return self._block(first, stop, [self.keep(g, lambda g=g: self._read(g)) for g in self.groups_of(first, stop)])  # type: ignore[misc]

    def tokens(self) -> int:
        """The number of tokens; of text, the estimated number of bytes."""
        return self.estimate() if self.text else sum(len(self._read(group).tokens) for group in range(self.groups))

    def _read(self, group: int) -> Decoded:
        return self._decode(group, self._data.read(*self._places[group]))


class ParquetLayout(ParquetRows):
    """A remote file."""

    def __init__(self, name: str, size: int, footer: bytes, column: str | None, keep: Keep) -> None:
        super().__init__(name, size, footer, column, keep)
        self.nbytes = OWN + PER_GROUP * self.groups * int(self.metadata.num_columns)

    def block(self, first: int, stop: int) -> Reading[Block[Tokens]]:
        """The documents `first` to `stop - 1`, of which there must be at least one."""
        found = {group: find_kept(self.keep, group) for group in self.groups_of(first, stop)}
        missing = [group for group, decoded in found.items() if decoded is None]
        fetched = [group for group in missing if self._places[group] != (0, 0)]
        data: dict[int, Data] = {}
        if fetched:
            data = dict(zip(fetched, (yield [self._places[group] for group in fetched]), strict=True))
        for group in missing:
            decoded = self._decode(group, memoryview(data.get(group, b"")))
            found[group] = self.keep(group, lambda decoded=decoded: decoded)  # type: ignore[misc]
        return self._block(first, stop, [decoded for decoded in found.values() if decoded is not None])

    def tokens(self) -> Reading[int]:
        """The number of tokens; of text, the estimated number of bytes."""
        if self.text:
            return self.estimate()
        total: int = 0
        for group in range(self.groups):
            low, high = self.first_row[group : group + 2].tolist()
            if low < high:
                block = yield from in_parts(self.block(low, high), WINDOW)
                total += int(block.length.sum())
        return total


def stream_parquet(file: Any, name: str, column: str) -> Iterator[Documents]:
    """The text of a file, from its first row to its last, in little memory also if row groups are large."""
    import pyarrow.parquet as pq

    first = 0
    with Guarded(name):
        opened: Any = pq.ParquetFile(pa.PythonFile(file, "r"), buffer_size=STREAMED, pre_buffer=False)
        for batch in opened.iter_batches(batch_size=ROWS, columns=[column], use_threads=False):
            tokens, ends = _texts(pa.chunked_array([batch.column(0)]))
            require_utf8(name, tokens, ends, first)
            yield Documents(tokens, ends, first, [])
            first += len(ends) - 1
        if first != opened.metadata.num_rows:
            raise Truncated(f"it has {first} rows, and its footer says {opened.metadata.num_rows}")


def require_utf8(name: str, tokens: Tokens, ends: Ints, first: int) -> None:
    """Raise for a row that is no text. `first` is the number of the first row."""
    if is_utf8(tokens, ends):
        return
    for row in range(len(ends) - 1):
        if not is_utf8(tokens[ends[row] : ends[row + 1]], np.array([0, ends[row + 1] - ends[row]])):
            raise DataError(f"{name}: row {first + row + 1}: {NOT_UTF8}; correct the row, or remove it")


def read_parquet_layout(name: str, size: int, column: str | None, keep: Keep) -> Reading[Layout]:
    """The layout of a Parquet file of `size` bytes, see `fmsdata.formats.read_layout`."""
    footer = yield from read_parquet_footer(name, size)
    return ParquetLayout(name, size, footer, column, keep)


def choose_column(schema: pa.Schema, column: str | None, name: str) -> tuple[str, bool]:
    """The column to read, by default `text` or `tokens`, and whether it holds text."""
    columns = ", ".join(f"{field.name}: {field.type}" for field in schema)
    if column is None:
        column = next((name for name in NAMES if name in schema.names), None)
    if column is None or schema.names.count(column) != 1:
        missing = " or ".join(map(repr, NAMES)) if column is None else repr(column)
        raise NoColumn(
            f"{name}: no column {missing}; the file has ({columns}); set documents.column to the one with "
            "text or lists of tokens",
            [field.name for field in schema if _holds_text(field.type) or holds_lists(field.type)],
        )
    kind = schema.field(column).type
    text = _holds_text(kind)
    if not text and not holds_lists(kind):
        raise DataError(
            f"{name}: column {column!r} is {kind}, but documents are text or lists of integers; the file has "
            f"({columns}); set documents.column"
        )
    return column, text


def _holds_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    views = (pa.types.is_string_view, pa.types.is_binary_view)
    return any(test(kind) for test in (*tests, *views))


def _texts(column: Any) -> tuple[Tokens, Ints]:
    """The bytes of all rows, and where they end. Null rows are empty."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    array: Any = pa.concat_arrays([pa.array([], pa.large_binary()), *column.cast(pa.large_binary()).chunks])
    array.validate(full=True)
    array = array.fill_null(b"")
    _, ends, data = array.buffers()
    if not len(array):
        return np.empty(0, np.uint8), np.zeros(1, np.int64)
    places = np.frombuffer(ends, np.int64)[array.offset : array.offset + len(array) + 1]
    return np.frombuffer(data or b"", np.uint8)[places[0] : places[-1]], places - places[0]


def read_parquet_footer(name: str, size: int) -> Reading[bytes]:
    """The footer with what follows it, up to the end of the file."""
    with Guarded(name, NOT_WHOLE):
        if size < 12:
            raise Truncated(f"it has {size} bytes")
    fetched = Fetched()
    tail = Range(max(0, size - TAIL), size)
    fetched.add([tail], (yield [tail]))
    data = fetched.get(tail)
    with Guarded(name, NOT_WHOLE):
        if bytes(data[-4:]) == b"PARE":
            raise Truncated("it is encrypted")
        if bytes(data[-4:]) != MAGIC:
            raise Truncated("it does not end with PAR1")
        length = int.from_bytes(data[-8:-4], "little") + 8
        if length > size - 4:
            raise Truncated("its footer is larger than the file")
    if length > len(data):
        (data,) = yield from fetched.read([Range(size - length, size)])
    return bytes(data[len(data) - length :])


class _Part(SeekableFile):
    """A file of which only some bytes are there. `missing` is what was read elsewhere."""

    def __init__(self, data: memoryview, start: int, size: int) -> None:
        super().__init__(size)
        self._data, self._start = data, start
        self.missing: Range | None = None

    def read(self, count: int | None = -1) -> Any:
        place, stop = self.place, self.size if count is None or count < 0 else self.place + count
        if not 0 <= place < stop <= self.size:
            raise Truncated(f"a row group points to bytes {place} to {stop}, outside the file")
        begin = place - self._start
        if begin < 0 or stop - self._start > len(self._data):
            self.missing = Range(place, stop)
            raise Truncated(f"bytes {place} to {stop} are not in its column")
        self.place = stop
        return self._data[begin : stop - self._start]
