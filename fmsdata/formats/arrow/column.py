"""The column of an Arrow shard that holds the tokens: which it is, and where a record batch keeps it."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fmsdata.core.keys import Ints, offsets
from fmsdata.errors import DataError
from fmsdata.formats.arrow.framing import Guarded, Shape, Truncated


class TokenColumn:
    """The column asked for, else `tokens`, else the only one that can hold tokens.

    >>> TokenColumn(pa.schema({"text": pa.string(), "ids": pa.list_(pa.uint16())}), None, "part-0.arrow").index
    1
    """

    def __init__(self, schema: pa.Schema, column: str | None, name: str) -> None:
        self.schema = schema
        self.name = name  # the file's, for errors
        with Guarded(name):
            schema.names  # noqa: B018  (raises if they are no text)
        self.index = _token_column(schema, column, name)
        self.type = schema.field(self.index).type
        self.listed = not pa.types.is_integer(self.type)
        self.dtype: np.dtype[Any] = np.dtype((self.type.value_type if self.listed else self.type).to_pandas_dtype())
        self.fixed_size: int | None = self.type.list_size if pa.types.is_fixed_size_list(self.type) else None
        self.ends = np.dtype(np.int64 if pa.types.is_large_list(self.type) else np.int32)  # the type of list offsets
        before = [schema.field(i).type for i in range(self.index)]
        self.node = sum(map(_nodes, before))  # the field node of a record batch that is this column's first
        vectors = [_vectors(one) for one in before]
        vector = sum(filter(None, vectors))
        self._told = None not in vectors  # which buffers are this column's
        self.table = vector + 1  # the buffer with the list offsets
        self.values = vector + (1 if not self.listed else 3 if self.fixed_size is None else 2)

    def require(self, shape: Shape) -> None:
        """Raise if a record batch of this shape has no room for the column."""
        if shape.nodes <= self.node + self.listed or (self._told and shape.buffers <= self.values):
            raise Truncated("record batches have fewer columns than the schema")

    def are_plain(self, nodes: Ints, shape: Shape) -> npt.NDArray[np.bool_]:
        """Of which record batches the tokens lie in the file as they are."""
        nulls = nodes[:, self.node : self.node + 1 + self.listed, 1].sum(axis=1)
        plain: npt.NDArray[np.bool_] = (nulls == 0) & (self._told and not shape.compressed)
        return plain

    def first_rows(self, rows: Ints) -> Ints:
        """The number of each record batch's first row, and of the one behind the last."""
        if rows.sum(dtype=np.float64) >= 1 << 62:
            raise Truncated("record batches say that they have more rows than there can be")
        return offsets(rows)

    def row_tokens(self, nodes: Ints, buffers: Ints, plain: npt.NDArray[np.bool_]) -> Ints:
        """How many tokens record batches of lists have. (Null rows may hide some of them.)"""
        tokens = nodes[:, self.node + 1, 0]
        if plain.any() and (tokens > buffers[:, self.values, 1] // self.dtype.itemsize)[plain].any():
            raise Truncated("a record batch is shorter than it says")
        return tokens

    def documents(self, nodes: Ints, buffers: Ints) -> tuple[Ints, Ints]:
        """Where record batches that are one document each start, in tokens, and how long they are."""
        place, size = buffers[:, self.values].T
        length = nodes[:, self.node, 0]
        if (length > size // self.dtype.itemsize).any() or (place % self.dtype.itemsize).any():
            raise Truncated("a record batch is shorter than it says")
        return place // self.dtype.itemsize, length

    def require_table(self, place: int, size: int, rows: int) -> None:
        """Raise if a buffer can't hold the list offsets of this many rows."""
        if size < (rows + 1) * self.ends.itemsize or place % self.ends.itemsize:
            raise Truncated("list offsets are missing")

    def rows(self, ends: Ints, place: int, size: int) -> tuple[Ints, Ints]:
        """The same as `documents` for rows with these list offsets into a buffer of values."""
        length = ends[1:] - ends[:-1]
        if ends.item(0) < 0 or length.min() < 0 or ends.item(-1) * self.dtype.itemsize > size:
            raise Truncated("list offsets point outside the values")
        return ends[:-1] + place // self.dtype.itemsize, length

    def null_tokens(self) -> DataError:
        return DataError(f"{self.name}: the token column holds nulls; every token must be a number")


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
