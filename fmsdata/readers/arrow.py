"""Arrow IPC shards, file or stream format, mapped and never copied.

Two layouts: a primitive integer column, where each record batch is one document; and a list column, where each row is one. In the
first, a block of documents is located by comparing the metadata of its record batches (see `framing.locate`), which costs a few array
operations per block. pyarrow decodes whatever does not look alike, and the list layout, where a record batch holds many documents.
"""

import struct

import numpy as np
import pyarrow as pa

from fmsdata.errors import DataError
from fmsdata.keys import Ints
from fmsdata.readers.base import Block, Tokens
from fmsdata.readers.framing import RecordBatch, Truncated, locate, read_framing

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
        self._column = _token_column(self._schema, column, name)
        kind = self._schema.field(self._column).type
        self._listed = not pa.types.is_integer(kind)
        self._dtype = np.dtype((kind.value_type if self._listed else kind).to_pandas_dtype())
        before = [self._schema.field(i).type for i in range(self._column)]
        self._node = sum(map(_nodes, before))
        vectors = [_vectors(one) for one in before]
        self._vector = -1 if None in vectors else sum(filter(None, vectors)) + 1
        rows = np.ones(len(self._messages), np.int64)
        self.known_tokens: int | None = None  # what the metadata alone tells
        if self._listed:
            shapes = [self._shape(offset) for offset in self._messages[:, 0].tolist()]
            rows = np.array([row for row, _ in shapes], np.int64)
            self.known_tokens = sum(values for _, values in shapes)
        self._first_row = np.concatenate([[0], np.cumsum(rows)]).astype(np.int64)

    @property
    def documents(self) -> int:
        return int(self._first_row[-1])

    def tokens(self) -> int:
        """All tokens of the shard; reads only metadata, though in the one-batch-a-document layout that is all over the file."""
        if self.known_tokens is not None:
            return self.known_tokens
        return int(self.read(0, self.documents).length.sum())

    def read(self, first: int, stop: int) -> Block:
        """The documents `first` to `stop - 1`."""
        return self._read_rows(first, stop) if self._listed else self._read_batches(first, stop)

    def _read_rows(self, first: int, stop: int) -> Block:
        arrays: list[Tokens] = []
        starts: list[Ints] = []
        lengths: list[Ints] = []
        batch = int(np.searchsorted(self._first_row, first, side="right")) - 1
        while first < stop:
            begin, end = self._first_row[batch : batch + 2].tolist()
            values, start, length = self._rows(self._decode(batch))
            run = slice(first - begin, min(stop, end) - begin)
            arrays.append(values)
            starts.append(start[run])
            lengths.append(length[run])
            first, batch = max(first, end), batch + 1
        array = np.repeat(np.arange(len(arrays), dtype=np.int64), [len(start) for start in starts])
        return Block(arrays, array, np.concatenate(starts), np.concatenate(lengths))

    def _rows(self, column: pa.Array) -> tuple[Tokens, Ints, Ints]:
        values = self._plain(column.values)
        if pa.types.is_fixed_size_list(column.type):
            length = np.full(len(column), column.type.list_size, np.int64)
            start = np.arange(len(column), dtype=np.int64) * column.type.list_size
        else:
            offsets = column.offsets.to_numpy().astype(np.int64)
            start, length = offsets[:-1], np.diff(offsets)
            if length.min() < 0 or offsets[0] < 0 or offsets[-1] > len(values):
                raise self._damaged("list offsets point outside the values")
        if column.null_count:
            length = np.where(column.is_valid().to_numpy(zero_copy_only=False), length, 0)
        return values, start, length

    def _read_batches(self, first: int, stop: int) -> Block:
        size = self._dtype.itemsize
        whole: Tokens = np.frombuffer(self._buffer, self._dtype, self._buffer.size // size)
        messages = self._messages[first:stop]
        try:
            start, length = locate(self._buffer, messages, self._node, self._vector, size)
        except DAMAGE as error:
            raise self._damaged(str(error)) from None
        odd = np.flatnonzero(start < 0).tolist()
        start //= size
        arrays, array = [whole], np.zeros(stop - first, np.int64)
        for i in odd:
            tokens = self._plain(self._decode(first + i))
            array[i], start[i], length[i] = len(arrays), 0, len(tokens)
            arrays.append(tokens)
        return Block(arrays, array, start, length)

    def _decode(self, batch: int) -> pa.Array:
        offset, metadata, body = self._messages[batch].tolist()
        try:
            message = pa.ipc.read_message(self._buffer.slice(offset, metadata + body))
            return pa.ipc.read_record_batch(message, self._schema).column(self._column)
        except DAMAGE as error:
            raise self._damaged(f"record batch {batch}: {error}") from None

    def _shape(self, offset: int) -> tuple[int, int]:
        """Rows of a record batch, and values in the list column, from its metadata."""
        try:
            data = memoryview(self._buffer)
            batch = RecordBatch(data, offset)
            (values,) = struct.unpack_from("<q", data, batch.nodes + 16 * (self._node + 1))
        except DAMAGE as error:
            raise self._damaged(str(error)) from None
        return batch.rows, values

    def _plain(self, values: pa.Array) -> Tokens:
        if values.null_count:
            raise DataError(f"{self.name}: the token column holds nulls; every token must be a number")
        tokens: Tokens = values.to_numpy(zero_copy_only=True)
        return tokens

    def _damaged(self, why: str) -> DataError:
        return DataError(f"{self.name}: the file is damaged ({why}); write it again or remove it")


def _token_column(schema: pa.Schema, column: str | None, name: str) -> int:
    """The column that holds the tokens: the one asked for, else `tokens`, else the only one that can."""
    if column is None:
        able = [field.name for field in schema if _holds_tokens(field.type)]
        if "tokens" in schema.names or len(able) != 1:
            column = "tokens"
        else:
            column = able[0]
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
    return 1 + sum(_nodes(kind.field(i).type) for i in range(kind.num_fields))


def _vectors(kind: pa.DataType) -> int | None:
    """How many buffers a column of this type has, for the flat types."""
    if pa.types.is_primitive(kind):
        return 2
    if any(test(kind) for test in (pa.types.is_string, pa.types.is_binary, pa.types.is_large_string, pa.types.is_large_binary)):
        return 3
    return None
