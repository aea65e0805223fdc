"""Arrow IPC shards, file or stream format, mapped and never copied.

Two layouts: a primitive integer column, where each record batch is one document; and a list column, where
each row is one. In both, documents are located from the metadata and the list offsets, with a few array
operations per block, and their tokens are places in the file seen as one array. Only what is compressed or
has nulls goes through pyarrow's decoding.
"""

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fmsdata.errors import DataError
from fmsdata.keys import Ints, offsets
from fmsdata.readers.base import Block, Tokens
from fmsdata.readers.framing import Metadata, Truncated, read_framing

Read = TypeVar("Read")
DAMAGE = (struct.error, IndexError, ValueError, OverflowError, OSError, Truncated, pa.ArrowException)


class ArrowShard:
    """One Arrow file: how many documents it has, and any run of them.

    >>> shard = ArrowShard(buffer, "part-0.arrow")    # doctest: +SKIP
    >>> shard.read(0, 100).length.sum()               # doctest: +SKIP
    48211
    """

    def __init__(self, buffer: pa.Buffer, name: str, column: str | None = None) -> None:
        self.name = name
        self._buffer = buffer
        try:
            self._schema, self._messages = read_framing(buffer)
        except DAMAGE as error:
            raise DataError(
                f"{name}: not a whole Arrow IPC file, it is truncated or of another kind ({error}); "
                "write it again or remove it"
            ) from None
        self._guarded(lambda: self._schema.names)
        self._column = _token_column(self._schema, column, name)
        self._type = self._schema.field(self._column).type
        self._listed = not pa.types.is_integer(self._type)
        self._dtype: np.dtype[Any] = np.dtype((self._type.value_type if self._listed else self._type).to_pandas_dtype())
        self._whole: Tokens = self._as_array(self._dtype)
        self._fixed_size = self._type.list_size if pa.types.is_fixed_size_list(self._type) else None
        self._ends = self._as_array(
            np.int64 if pa.types.is_large_list(self._type) else np.int32
        )  # list offsets are among these
        before = [self._schema.field(i).type for i in range(self._column)]
        self._node = sum(map(_nodes, before))
        vectors = [_vectors(one) for one in before]
        self._vector = -1 if None in vectors else sum(filter(None, vectors))  # -1: not to be told
        self._metadata = self._guarded(lambda: Metadata(buffer, self._messages))
        self._first_row: Sequence[int] = range(len(self._messages) + 1)
        self.known_tokens: int | None = None if len(self._messages) else 0  # what the file need not be read for
        if self._listed and len(self._messages):
            nodes, buffers = self._guarded(lambda: self._metadata.read(0, len(self._messages)))
            self._first_row = offsets(nodes[:, self._node, 0]).tolist()
            if not nodes[:, self._node, 1].any():  # a null row may hide values
                self.known_tokens = int(nodes[:, self._node + 1, 0].sum())
            self._plain = self._are_plain(nodes).tolist()
            self._buffers = buffers.tolist()

    @property
    def documents(self) -> int:
        return self._first_row[-1]

    def tokens(self) -> int:
        """All tokens of the shard."""
        return int(self.read(0, self.documents).length.sum()) if self.known_tokens is None else self.known_tokens

    def read(self, first: int, stop: int) -> Block:
        """The documents `first` to `stop - 1`, of which there must be at least one."""
        if not self._listed:
            nodes, buffers = self._guarded(lambda: self._metadata.read(first, stop))
            return self._plain_batches(nodes, buffers) if self._are_plain(nodes).all() else self._decoded(first, stop)
        begin, end = bisect_right(self._first_row, first) - 1, bisect_left(self._first_row, stop)
        if all(self._plain[begin:end]):
            return self._plain_lists(begin, end, first, stop)
        block, rows = self._decoded(begin, end), slice(first - self._first_row[begin], stop - self._first_row[begin])
        return Block(block.arrays, block.array[rows], block.start[rows], block.length[rows])

    def _are_plain(self, nodes: Ints) -> npt.NDArray[np.bool_]:
        """Of which record batches the tokens lie in the file as they are."""
        nulls = nodes[:, self._node : self._node + 1 + self._listed, 1].sum(axis=1)
        plain: npt.NDArray[np.bool_] = (nulls == 0) & (self._vector >= 0 and not self._metadata.compressed)
        return plain

    def _plain_batches(self, nodes: Ints, buffers: Ints) -> Block:
        place, size = buffers[:, self._vector + 1].T
        length = nodes[:, self._node, 0]
        if (length > size // self._dtype.itemsize).any() or (place % self._dtype.itemsize).any():
            raise self._damaged("a record batch is shorter than it says")
        return Block([self._whole], np.zeros(len(length), np.int64), place // self._dtype.itemsize, length)

    def _plain_lists(self, begin: int, end: int, first: int, stop: int) -> Block:
        starts: list[Ints] = []
        lengths: list[Ints] = []
        for batch in range(begin, end):
            low, high = self._first_row[batch], self._first_row[batch + 1]
            row, count = max(first, low) - low, min(stop, high) - max(first, low)
            if not count:
                continue
            if self._fixed_size is not None:
                ends = np.arange(row, row + count + 1) * self._fixed_size
                place, size = self._buffers[batch][self._vector + 2]
            else:
                table, size = self._buffers[batch][self._vector + 1]
                if size < (high - low + 1) * self._ends.itemsize or table % self._ends.itemsize:
                    raise self._damaged("list offsets are missing")
                table = table // self._ends.itemsize + row
                ends = self._ends[table : table + count + 1].astype(np.int64)
                place, size = self._buffers[batch][self._vector + 3]
            length = ends[1:] - ends[:-1]
            if ends.item(0) < 0 or length.min() < 0 or ends.item(-1) * self._dtype.itemsize > size:
                raise self._damaged("list offsets point outside the values")
            starts.append(ends[:-1] + place // self._dtype.itemsize)
            lengths.append(length)
        start, length = (some[0] if len(some) == 1 else np.concatenate(some) for some in (starts, lengths))
        return Block([self._whole], np.zeros(len(start), np.int64), start, length)

    def _decoded(self, begin: int, end: int) -> Block:
        """The same by pyarrow, for record batches whose bytes are not plainly the tokens."""
        arrays: list[Tokens] = []
        starts: list[Ints] = []
        lengths: list[Ints] = []
        for batch in range(begin, end):
            column: Any = self._decode(batch)  # of whichever kind of array the shard's type has
            if self._listed:
                plain = (
                    column.fill_null([])
                    if column.null_count and not pa.types.is_fixed_size_list(self._type)
                    else column
                )
                lengths.append(plain.value_lengths().fill_null(0).to_numpy().astype(np.int64))
                column = plain.flatten()
            else:
                lengths.append(np.array([len(column)], np.int64))
            if column.null_count:
                raise DataError(f"{self.name}: the token column holds nulls; every token must be a number")
            starts.append(offsets(lengths[-1])[:-1])
            arrays.append(column.to_numpy(zero_copy_only=True))
        array = np.repeat(np.arange(len(arrays)), [len(start) for start in starts])
        return Block(arrays, array, np.concatenate(starts), np.concatenate(lengths))

    def _decode(self, batch: int) -> "pa.Array[Any]":
        offset, metadata, body = self._messages[batch].tolist()
        message = self._buffer.slice(offset, metadata + body)
        batches = self._guarded(lambda: pa.ipc.read_record_batch(pa.ipc.read_message(message), self._schema))
        column = batches.column(self._column)
        self._guarded(lambda: column.validate(full=True))
        return column

    def _guarded(self, read: Callable[[], Read]) -> Read:
        try:
            return read()
        except DAMAGE as error:
            raise self._damaged(str(error)) from None

    def _as_array(self, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """The file as one array; Arrow aligns all its buffers to 8 bytes."""
        return np.frombuffer(memoryview(self._buffer), dtype, self._buffer.size // np.dtype(dtype).itemsize)

    def _damaged(self, why: str) -> DataError:
        return DataError(f"{self.name}: the file is damaged ({why}); write it again or remove it")


def _token_column(schema: pa.Schema, column: str | None, name: str) -> int:
    """The column that holds the tokens: the one asked for, else `tokens`, else the only one that can."""
    if column is None:
        able = [field.name for field in schema if _holds_tokens(field.type)]
        column = "tokens" if "tokens" in schema.names or len(able) != 1 else able[0]
    have = ", ".join(f"{field.name}: {field.type}" for field in schema)
    if schema.names.count(column) != 1:
        raise DataError(f"{name}: no column {column!r}; the file has ({have}), name one with `column`")
    index = schema.get_field_index(column)
    if not _holds_tokens(schema.field(index).type):
        raise DataError(
            f"{name}: column {column!r} is {schema.field(index).type}, but tokens are integers or lists of integers; "
            f"the file has ({have})"
        )
    return index


def _holds_tokens(kind: pa.DataType) -> bool:
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        kind = kind.value_type
    return bool(pa.types.is_integer(kind))


def _nodes(kind: pa.DataType) -> int:
    """How many field nodes a column of this type has in a record batch's metadata."""
    kind = getattr(kind, "storage_type", kind)  # of an extension type
    return 1 + sum(_nodes(kind.field(i).type) for i in range(kind.num_fields))


def _vectors(kind: pa.DataType) -> int | None:
    """How many buffers a column of this type has, for the flat types."""
    kind = getattr(kind, "storage_type", kind)
    if pa.types.is_primitive(kind) or pa.types.is_dictionary(kind):
        return 2
    if any(
        test(kind)
        for test in (
            pa.types.is_string,
            pa.types.is_binary,
            pa.types.is_large_string,
            pa.types.is_large_binary,
        )
    ):
        return 3
    return None
