"""The column of an Arrow shard that holds the tokens, and its buffers in a record batch."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fmsdata.core.keys import Ints, offsets
from fmsdata.errors import DataError
from fmsdata.formats.arrow.framing import ALIGNMENT
from fmsdata.formats.arrow.metadata import Shape
from fmsdata.formats.damage import Guarded, Truncated

EMPTY_ROWS = 1 << 20  # rows of a record batch of lists without tokens, which take no bytes


class TokenColumn:
    """The column with this name, by default `tokens`, else the only one that can hold tokens.

    >>> schema = pa.schema({"text": pa.string(), "ids": pa.list_(pa.uint16())})
    >>> TokenColumn(schema, None, "part-0.arrow").index
    1
    """

    def __init__(self, schema: pa.Schema, column: str | None, name: str) -> None:
        self.schema = schema
        self.name = name  # of the file, for errors
        with Guarded(name):
            schema.names  # noqa: B018  (raises if they are not text)
        self.index = _token_column(schema, column, name)
        self.type = schema.field(self.index).type
        self.listed = not pa.types.is_integer(self.type)
        self.dtype: np.dtype[Any] = np.dtype(str(self.type.value_type if self.listed else self.type))
        self.fixed_size: int | None = self.type.list_size if pa.types.is_fixed_size_list(self.type) else None
        self.ends = np.dtype(np.int64 if pa.types.is_large_list(self.type) else np.int32)  # the type of list offsets
        before = [schema.field(i).type for i in range(self.index)]
        self.node = sum(map(_nodes, before))  # the column's first field node in a record batch
        counts = [_buffers(kind) for kind in before]
        first = sum(filter(None, counts))
        self._located = None not in counts  # whether it is known which buffers are the column's
        self.table = first + 1  # the buffer with the list offsets
        self.values = first + (1 if not self.listed else 3 if self.fixed_size is None else 2)

    def require(self, shape: Shape) -> None:
        """Raise if a record batch of this shape can't have the column."""
        if shape.nodes <= self.node + self.listed or (self._located and shape.buffers <= self.values):
            raise Truncated("record batches have fewer columns than the schema")

    def are_plain(self, nodes: Ints, shape: Shape) -> npt.NDArray[np.bool_]:
        """Which record batches hold their tokens as they are: not compressed, and without nulls."""
        nulls = nodes[:, self.node : self.node + 1 + self.listed, 1].sum(axis=1)
        plain: npt.NDArray[np.bool_] = (nulls == 0) & (self._located and not shape.compressed)
        return plain

    def rows_of(self, nodes: Ints) -> Ints:
        """The number of rows of each record batch, which all of its columns must have."""
        rows = nodes[:, self.node, 0]
        if self.node and (rows != nodes[:, 0, 0]).any():  # the first column's were compared with the record batch
            raise Truncated("a column is shorter than its record batch")
        return rows

    def first_rows(self, rows: Ints) -> Ints:
        """The number of each record batch's first row, and at the end the number of rows."""
        if rows.sum(dtype=np.float64) >= 1 << 62:
            raise Truncated("record batches say that they have more rows than there can be")
        return offsets(rows)

    def row_tokens(self, nodes: Ints, buffers: Ints, plain: npt.NDArray[np.bool_]) -> Ints:
        """The tokens in each record batch of lists, including those that null rows hide."""
        rows, tokens = self.rows_of(nodes), nodes[:, self.node + 1, 0]
        if tokens.sum(dtype=np.float64) >= 1 << 62:
            raise Truncated("record batches say that they have more tokens than there can be")
        if plain.any():
            stored = buffers[:, self.values, 1] // self.dtype.itemsize
            if self.fixed_size is None:
                most = np.maximum(buffers[:, self.table, 1] // self.ends.itemsize, 1) - 1  # none need no list offsets
            else:
                most = stored // self.fixed_size if self.fixed_size else np.full(len(rows), EMPTY_ROWS)
            if ((tokens > stored) | (rows > most))[plain].any():
                raise _short_batch()
        return tokens

    def documents(self, nodes: Ints, buffers: Ints) -> tuple[Ints, Ints]:
        """The starts, in tokens, and the lengths of record batches that are one document each."""
        place, size = buffers[:, self.values].T
        length = self.rows_of(nodes)
        if (length > size // self.dtype.itemsize).any() or (place % ALIGNMENT).any():
            raise _short_batch()
        return place // self.dtype.itemsize, length

    def require_table(self, place: int, size: int, rows: int) -> None:
        """Raise if a buffer can't hold the list offsets of this many rows."""
        if size < (rows + 1) * self.ends.itemsize or place % ALIGNMENT:
            raise Truncated("list offsets are missing")

    def rows(self, ends: Ints, place: int, size: int) -> tuple[Ints, Ints]:
        """The same as `documents`, for rows with these list offsets into a buffer of values."""
        width = self.dtype.itemsize
        # Compared, not subtracted: a difference of two numbers of a file may wrap around.
        falling = np.count_nonzero(ends[1:] < ends[:-1])
        if falling or ends.item(0) < 0 or ends.item(-1) > size // width or place % ALIGNMENT:
            raise Truncated("list offsets point outside the values")
        return ends[:-1] + place // width, ends[1:] - ends[:-1]

    def between(self, start: Ints, stop: Ints, place: int, size: int) -> tuple[Ints, Ints]:
        """The same for rows that are not neighbours, from the list offsets before and behind each."""
        width = self.dtype.itemsize
        if np.count_nonzero(stop < start) or start.min() < 0 or stop.max() > size // width or place % ALIGNMENT:
            raise Truncated("list offsets point outside the values")
        return start + place // width, stop - start

    def null_tokens(self) -> DataError:
        return DataError(f"{self.name}: the token column holds nulls; every token must be a number")


def _short_batch() -> Truncated:
    return Truncated("a record batch is shorter than it says")


def _token_column(schema: pa.Schema, column: str | None, name: str) -> int:
    if column is None:
        candidates = [field.name for field in schema if _holds_tokens(field.type)]
        column = "tokens" if "tokens" in schema.names or len(candidates) != 1 else candidates[0]
    columns = ", ".join(f"{field.name}: {field.type}" for field in schema)
    if schema.names.count(column) != 1:
        raise DataError(f"{name}: no column {column!r}; the file has ({columns}), name one with `column`")
    index = schema.get_field_index(column)
    if not _holds_tokens(schema.field(index).type):
        raise DataError(
            f"{name}: column {column!r} is {schema.field(index).type}, but tokens are integers or lists of integers; "
            f"the file has ({columns})"
        )
    return index


def _holds_tokens(kind: pa.DataType) -> bool:
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        kind = kind.value_type
    return bool(pa.types.is_integer(kind))


def _nodes(kind: pa.DataType) -> int:
    """The number of field nodes that a column of this type has in a record batch's metadata."""
    kind = getattr(kind, "storage_type", kind)  # of an extension type
    return 1 + sum(_nodes(kind.field(i).type) for i in range(kind.num_fields))


def _buffers(kind: pa.DataType) -> int | None:
    """The number of buffers that a column of this type has, or None for nested types."""
    kind = getattr(kind, "storage_type", kind)
    if pa.types.is_primitive(kind) or pa.types.is_dictionary(kind):
        return 2
    texts = (pa.types.is_string, pa.types.is_binary, pa.types.is_large_string, pa.types.is_large_binary)
    return 3 if any(test(kind) for test in texts) else None
