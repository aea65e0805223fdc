"""Arrow IPC shards, file or stream format, mapped and never copied.

There are two layouts: a primitive integer column, where each record batch is a document; and a list
column, where each row is a document. In both, a few array operations per block locate documents
from the metadata and the list offsets. The whole file is seen as one array of tokens, and a
document is a part of it. Only record batches that are compressed or have nulls are decoded by
pyarrow.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fmsdata.core.blocks import Block, numbers
from fmsdata.core.keys import Ints, offsets
from fmsdata.core.tokens import Tokens
from fmsdata.formats.arrow.column import TokenColumn
from fmsdata.formats.arrow.framing import NOT_WHOLE
from fmsdata.formats.arrow.metadata import Metadata, Shape
from fmsdata.formats.arrow.opening import read_framing
from fmsdata.formats.base import Blocks, Decoded, InMemory, Keep, ShardBytes, keep_nothing
from fmsdata.formats.damage import Guarded, Truncated

Lengths: TypeAlias = npt.NDArray[np.signedinteger[Any]]

KEPT_BYTES = 1 << 18  # of list offsets, for each shard
ROW_BYTES = 12  # of a table of all documents, for each of them


class Batches:
    """Record batches in memory, and their documents.

    `messages` are their places in the data. `base` is the data's first byte in the file.
    """

    text = False

    def __init__(
        self, column: TokenColumn, metadata: Metadata, data: ShardBytes, messages: Ints, base: int = 0
    ) -> None:
        self._column = column
        self._metadata = metadata
        self._data = data
        self._messages = messages
        self._base = base
        self.keep: Keep = keep_nothing
        self._kept: dict[int, Ints] = {}  # list offsets, by the place of their table
        self._room = KEPT_BYTES
        self.table: tuple[Ints, Lengths] | None = None  # of all documents: start, length
        self._located = 0  # documents that were located without it
        self.whole = data.tokens(column.dtype)
        self._first_row: Sequence[int] = range(len(messages) + 1)
        self.known_tokens: int | None = None if len(messages) else 0
        self._batch_tokens: Ints | None = None  # of each record batch, if that is known
        self._shape = Shape(0, 0, compressed=False)
        self._plain: list[bool] = []
        if not len(messages):
            return
        with Guarded(column.name):
            heads, here = self._heads(messages[:1])
            self._shape = metadata.shape(heads, here, base + int(messages[0, 0] - here[0, 0]))
            column.require(self._shape)
            if not column.listed:
                return
            nodes, buffers = self._read_metadata(slice(None))
            self._first_row = column.first_rows(column.rows_of(nodes)).tolist()
            plain = column.are_plain(nodes, self._shape)
            tokens = column.row_tokens(nodes, buffers, plain)
        if not nodes[:, column.node, 1].any():  # a null row may hide values
            self.known_tokens, self._batch_tokens = int(tokens.sum()), tokens
        self._plain = plain.tolist()
        self._buffers = buffers.tolist()

    @property
    def documents(self) -> int:
        return self._first_row[-1]

    @property
    def plain(self) -> bool:
        """Whether the tokens are stored as they are, so that reading decodes nothing."""
        return not self._shape.compressed and (not self._column.listed or all(self._plain))

    @property
    def blocks(self) -> Blocks | None:
        """Its record batches. Where each is a document, all metadata is read for that."""
        if self._batch_tokens is not None:
            return np.diff(self._first_row), self._batch_tokens
        if self._column.listed or not self.documents:
            return None
        with Guarded(self._column.name):
            located = self._locate(np.arange(self.documents))
        return None if located is None else (np.ones(self.documents, np.int64), located[1])

    def read(self, first: int, stop: int) -> Block[Any]:
        """The documents `first` to `stop - 1`, of which there must be at least one."""
        with Guarded(self._column.name):
            located = self._locate(np.arange(first, stop))
        if located is not None:
            return Block([self.whole], np.zeros(stop - first, np.int64), *located)
        if not self._column.listed:
            return self._decoded(first, stop, first, stop)
        return self._decoded(bisect_right(self._first_row, first) - 1, bisect_left(self._first_row, stop), first, stop)

    def locate(self, first: Ints, stop: Ints) -> tuple[Ints, Lengths, Ints] | None:
        """Where documents start in `whole`, and their lengths; and of each block from `first` to `stop` its first row.

        None if one of them has to be decoded. Of a small file a table of all documents is made once: at once if that
        costs no more, else when as many documents were located as there are.
        """
        with Guarded(self._column.name):
            worth_it = self._column.listed or self._located >= self.documents
            if self.table is None and worth_it and self.plain and self.documents * ROW_BYTES <= KEPT_BYTES:
                self._make_table()
            if self.table is not None:
                return *self.table, first
            blocks, which = np.unique(np.stack([first, stop], axis=1), axis=0, return_inverse=True)
            sizes = blocks[:, 1] - blocks[:, 0]
            located = self._locate(numbers(blocks[:, 0], sizes))
            self._located += int(sizes.sum())
            if located is None:
                return None
            start, length = map(np.ascontiguousarray, located)
            return start, length, offsets(sizes).take(which)

    def _make_table(self) -> None:
        located = self._locate(np.arange(self.documents))
        if located is not None:
            start, length = located
            self.table = start, length.astype(np.int32 if length.max() < 1 << 31 else np.int64)

    def _locate(self, documents: Ints) -> tuple[Ints, Ints] | None:
        """Where these documents start in `whole`, and their lengths. Their numbers must rise.

        None if one of them has to be decoded.
        """
        if self._column.listed:
            first, last = (bisect_right(self._first_row, documents[at]) - 1 for at in (0, -1))
            return self._locate_lists(documents) if all(self._plain[first : last + 1]) else None
        nodes, buffers = self._read_metadata(documents)
        plain = self._column.are_plain(nodes, self._shape).all()
        return self._column.documents(nodes, buffers) if plain else None

    def _locate_lists(self, documents: Ints) -> tuple[Ints, Ints]:
        """The same for documents that are rows of lists, which are stored as they are."""
        begin = bisect_right(self._first_row, documents[0]) - 1
        end = bisect_right(self._first_row, documents[-1])
        cuts = np.searchsorted(documents, self._first_row[begin : end + 1]).tolist()
        parts = [
            self._locate_rows(batch, documents[low:high])
            for batch, (low, high) in enumerate(pairwise(cuts), begin)
            if low < high
        ]
        start, length = zip(*parts, strict=True)
        return np.concatenate(start), np.concatenate(length)

    def _locate_rows(self, batch: int, documents: Ints) -> tuple[Ints, Ints]:
        """The same for documents of a record batch of lists."""
        column, low, high = self._column, self._first_row[batch], self._first_row[batch + 1]
        rows = documents - low
        if column.fixed_size is not None:
            start = rows * column.fixed_size
            return column.between(start, start + column.fixed_size, *self._buffers[batch][column.values])
        table, size = self._buffers[batch][column.table]
        column.require_table(table, size, high - low)
        kept = self._kept_offsets(table, high - low)
        if kept is None:
            start, stop = self._collect_offsets(table, rows)
        else:
            start, stop = kept.take(rows).astype(np.int64), kept.take(rows + 1).astype(np.int64)
        return column.between(start, stop, *self._buffers[batch][column.values])

    def _collect_offsets(self, table: int, rows: Ints) -> tuple[Ints, Ints]:
        """The list offsets of rows in a table that is too large to be kept."""
        width = self._column.ends.itemsize
        runs = np.flatnonzero(np.append(True, rows[1:] != rows[:-1] + 1))  # of neighbours
        counts = np.diff(runs, append=len(rows))
        ranges = np.stack([table + rows[runs] * width, (counts + 1) * width], axis=1)
        data, places = self._data.collect(ranges)
        ends = np.frombuffer(data, self._column.ends, len(data) // width)
        index = np.arange(len(rows)) + np.repeat(places // width - runs, counts)
        return ends.take(index).astype(np.int64), ends.take(index + 1).astype(np.int64)

    def _read_metadata(self, which: slice | Ints) -> tuple[Ints, Ints]:
        messages = self._messages[which]
        heads, here = self._heads(messages)
        moved = messages[:, :1] - here[:, :1]
        try:
            nodes, buffers = self._metadata.read(heads, here, self._shape, self._base + int(moved[0, 0]))
        except Truncated:
            if len(messages) == 1 or not moved.any():
                raise
            for batch in np.arange(len(self._messages))[which].tolist():  # the error names the byte in the file
                self._read_metadata(slice(batch, batch + 1))
            raise
        buffers[:, :, 0] += moved
        return nodes, buffers

    def _heads(self, messages: Ints) -> tuple[memoryview, Ints]:
        """The metadata of record batches, and the places of the messages if it were the file."""
        here = messages.copy()
        heads, here[:, 0] = self._data.collect(messages[:, :2])
        return heads, here

    def _kept_offsets(self, table: int, rows: int) -> Ints | None:
        """All list offsets of a record batch; None if there are too many to keep them.

        They are read once: blocks are often smaller than a copy costs.
        """
        kept, size = self._kept.get(table), (rows + 1) * self._column.ends.itemsize
        if kept is None and size <= self._room:
            self._room -= size
            self._kept[table] = kept = np.frombuffer(self._data.read(table, table + size), self._column.ends)
        return kept

    def _decoded(self, begin: int, end: int, first: int, stop: int) -> Block[Any]:
        """Documents of record batches that pyarrow has to decode: a copy, which does not keep the others in memory."""
        parts: list[Tokens] = []
        lengths: list[Ints] = []
        for batch in range(begin, end):
            row, behind = (min(max(place - self._first_row[batch], 0), self._rows(batch)) for place in (first, stop))
            if row < behind:
                decode = partial(self._decode, batch)
                tokens, ends, _ = self.keep(batch, decode) if self._column.listed else decode()
                parts.append(tokens[ends[row] : ends[behind]])
                lengths.append(np.diff(ends[row : behind + 1]))
        length = np.concatenate(lengths)
        copied = parts[0].copy() if len(parts) == 1 else np.concatenate(parts)
        return Block([copied], np.zeros(len(length), np.int64), offsets(length)[:-1], length)

    def _rows(self, batch: int) -> int:
        return self._first_row[batch + 1] - self._first_row[batch]

    def _decode(self, batch: int) -> Decoded:
        offset, metadata, body = self._messages[batch].tolist()
        message = pa.py_buffer(self._data.read(offset, offset + metadata + body))
        with Guarded(self._column.name):
            decoded = pa.ipc.read_record_batch(pa.ipc.read_message(message), self._column.schema)
            column: Any = decoded.column(self._column.index)  # its kind of array depends on the shard's type
            column.validate(full=True)
            if len(column) != (self._rows(batch) if self._column.listed else decoded.num_rows):
                raise Truncated("a record batch has another number of rows than its metadata says")
            length = np.array([len(column)], np.int64)
            if self._column.listed:
                plain = column.fill_null([]) if column.null_count and self._column.fixed_size is None else column
                length = plain.value_lengths().fill_null(0).to_numpy().astype(np.int64)
                column = plain.flatten()
        if column.null_count:
            raise self._column.null_tokens()
        tokens: Tokens = column.to_numpy(zero_copy_only=True)
        return Decoded(tokens, offsets(length), tokens.nbytes + 8 * len(length) + message.size)


class ArrowShard(Batches):
    """One Arrow file and its documents.

    >>> shard = ArrowShard(buffer, "part-0.arrow")    # doctest: +SKIP
    >>> shard.read(0, 100).length.sum()               # doctest: +SKIP
    48211
    """

    def __init__(self, data: pa.Buffer | ShardBytes, name: str, column: str | None = None) -> None:
        self.name = name
        data = InMemory(data) if isinstance(data, pa.Buffer) else data
        with Guarded(name, NOT_WHOLE):
            schema, messages = read_framing(data)
        super().__init__(TokenColumn(schema, column, name), Metadata(), data, messages)

    def tokens(self) -> int:
        """The number of tokens in the shard."""
        return int(self.read(0, self.documents).length.sum()) if self.known_tokens is None else self.known_tokens
