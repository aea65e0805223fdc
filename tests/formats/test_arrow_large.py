"""Arrow files by ranges: the same documents as from the whole file, and little more than their bytes."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from fmsdata.core.blocks import Block
from fmsdata.core.ranges import Range
from fmsdata.core.tokens import Tokens
from fmsdata.errors import DataError
from fmsdata.formats import read_layout
from fmsdata.formats.arrow.shard import ArrowShard
from fmsdata.formats.base import Layout, Read, Reading, read_from

KINDS: dict[str, Any] = {
    "documents": lambda value: value,
    "list": pa.list_,
    "large_list": pa.large_list,
    "fixed": lambda value: pa.list_(value, 3),
}


def arrow_file(
    documents: Sequence[Sequence[int]],
    *,
    kind: str = "list",
    dtype: str = "uint16",
    rows: Sequence[int] = (7,),
    compression: Any = None,
    nulls: bool = False,
    extra: bool = False,
) -> bytes:
    """A file with these documents, in record batches of these numbers of rows, over and over."""
    value = pa.from_numpy_dtype(np.dtype(dtype))
    fields = [("tokens", KINDS[kind](value))]
    if extra:
        fields = [("id", pa.int64()), *fields, ("text", pa.string())]
    schema = pa.schema(fields)
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_file(sink, schema, options=options) as writer:
        begin, turn = 0, 0
        while begin < len(documents):
            count = 1 if kind == "documents" else rows[turn % len(rows)]
            some: list[Any] = [list(one) for one in documents[begin : begin + count]]
            begin, turn = begin + count, turn + 1
            if nulls and kind != "documents" and some:
                some[0] = None
            column = pa.array(some[0] if kind == "documents" else some, schema.field("tokens").type)
            length = len(column)
            columns: list[Any] = [column]
            if extra:
                columns = [pa.array(range(length), pa.int64()), column, pa.array(["some text"] * length)]
            writer.write_batch(pa.record_batch(columns, schema=schema))
    return bytes(sink.getvalue())


class Asked:
    """Answers readings, and remembers the ranges that they request."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.ranges: list[Range] = []
        self.steps = 0

    def __call__(self, reading: Reading[Read]) -> Read:
        try:
            requested = next(reading)
            while True:
                self.steps += 1
                for start, stop in requested:
                    assert 0 <= start <= stop <= len(self.data)
                self.ranges += requested
                requested = reading.send([self.data[start:stop] for start, stop in requested])
        except StopIteration as end:
            value: Read = end.value
            return value

    @property
    def bytes(self) -> int:
        return sum(one.stop - one.start for one in self.ranges)


def tokens_of(block: Block[Tokens]) -> list[list[int]]:
    arrays = block.arrays
    return [
        arrays[array][start : start + length].tolist()
        for array, start, length in zip(block.array, block.start, block.length, strict=True)
    ]


def check(data: bytes, bounds: Sequence[int], column: str | None = "tokens") -> Layout:
    """The documents between any two neighbouring bounds are those of the whole file."""
    check_layout(data, bounds, column, dense=True)
    return check_layout(data, bounds, column, dense=False)


def check_layout(data: bytes, bounds: Sequence[int], column: str | None, dense: bool) -> Layout:
    shard = ArrowShard(pa.py_buffer(data), "whole.arrow", column)
    layout = read_from(data, read_layout("part.arrow", len(data), column, bounds, dense=dense))
    assert layout.documents == shard.documents
    assert layout.known_tokens in (None, shard.tokens())
    assert read_from(data, layout.tokens()) == shard.tokens()
    for first, stop in pairwise(bounds):
        block = Asked(data)(layout.block(first, stop))
        arrays, array, start, length, _ = shard.read(first, stop)
        expected = [arrays[a][s : s + n].tolist() for a, s, n in zip(array, start, length, strict=True)]
        assert tokens_of(block) == expected
        for tokens, offset in zip(block.arrays, block.offsets, strict=True):
            if offset is not None:
                stored = np.frombuffer(data, tokens.dtype, len(tokens), offset)
                assert np.array_equal(stored, tokens)
    return layout


@pytest.mark.parametrize("kind", ["documents", "list"])
@pytest.mark.parametrize("length", [100, 400])
def test_little_more_is_read_than_the_blocks(kind: str, length: int) -> None:
    """Over an epoch within 5% of the file, beside layouts; and those are small, in bytes and in memory."""
    rng = np.random.default_rng(1)
    documents = [rng.integers(0, 9999, int(n)).tolist() for n in rng.integers(length // 2, 2 * length, 6000)]
    data = arrow_file(documents, kind=kind, rows=[256])
    bounds = [*range(0, 6000, 150), 6000]
    opening, blocks = Asked(data), Asked(data)
    layout = opening(read_layout("part.arrow", len(data), None, bounds))
    for first, stop in pairwise(bounds):
        before = blocks.steps
        blocks(layout.block(first, stop))
        assert blocks.steps - before <= 2
    footer = 24 * 6000 if kind == "documents" else 0
    assert blocks.bytes - footer <= 1.05 * len(data)
    assert layout.nbytes < 12_000
    assert opening.bytes < 25_000
    assert len(opening.ranges) == 3


def test_documents_are_found_whatever_a_footer_and_a_schema_look_like() -> None:
    rng = np.random.default_rng(3)
    documents = [rng.integers(0, 9999, 5).tolist() for _ in range(3000)]
    check(arrow_file(documents, kind="documents"), list(range(0, 3001, 100)))  # a footer larger than one read
    check(arrow_file(documents, rows=[1]), list(range(0, 3001, 100)))
    check(arrow_file(documents, rows=[3, 5]), list(range(0, 3001, 100)))  # not the same number of rows
    schema = pa.schema([("tokens", pa.list_(pa.uint16()))], metadata={"note": "x" * 10_000})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(pa.record_batch([pa.array(documents, schema.field(0).type)], schema=schema))
    check(bytes(sink.getvalue()), [0, 7, 3000])


@pytest.mark.parametrize("kind", ["list", "large_list"])
@pytest.mark.parametrize("extra", [False, True])
def test_record_batches_of_a_large_file_are_not_asked_before_they_are_read(kind: str, extra: bool) -> None:
    rng = np.random.default_rng(4)
    documents = [rng.integers(0, 9999, int(n)).tolist() for n in rng.integers(0, 260, 21_100)]
    data = arrow_file(documents, kind=kind, rows=[300], extra=extra)
    bounds = [0, 1, 299, 300, 301, 899, 1500, *range(2000, 21_100, 170), 21_100]
    asked = Asked(data)
    layout = asked(read_layout("part.arrow", len(data), "tokens", bounds))
    assert (len(asked.ranges), asked.steps) == (3, 2)
    asked = Asked(data)
    for first, stop in pairwise(bounds):
        assert tokens_of(asked(layout.block(first, stop))) == documents[first:stop]
    stored = sum(2 * len(one) + 8 for one in documents)
    assert asked.bytes < 1.05 * stored + len(bounds) * 1000
    assert read_from(data, layout.tokens()) == sum(map(len, documents))
    for compression in ("lz4", "zstd"):
        check(arrow_file(documents[:3000], kind=kind, rows=[40], extra=extra, compression=compression), [0, 7, 3000])


@pytest.mark.parametrize("kind", ["list", "large_list"])
@pytest.mark.parametrize("rows", [300, 4000])
def test_where_most_blocks_are_read_the_documents_of_a_record_batch_are_found_once(kind: str, rows: int) -> None:
    rng = np.random.default_rng(5)
    documents = [rng.integers(0, 9999, int(n)).tolist() for n in rng.integers(100, 400, 20_000)]
    data = arrow_file(documents, kind=kind, rows=[rows])
    bounds = [*range(0, 20_000, 37), 20_000]
    layout = read_from(data, read_layout("part.arrow", len(data), "tokens", bounds, dense=True))
    asked = Asked(data)
    for first, stop in pairwise(bounds):
        assert tokens_of(asked(layout.block(first, stop))) == documents[first:stop]
    batches = -(-20_000 // rows)
    assert asked.steps <= len(bounds) + batches
    assert len(asked.ranges) <= len(bounds) + 3 * batches  # some blocks are of two record batches
    assert asked.bytes < 1.02 * len(data)
    assert layout.nbytes < 20_000 * 8 + 300 * batches + 30_000


def test_rows_that_are_not_as_expected_are_an_error() -> None:
    """Their sum is, so nobody notices before such a record batch is read."""
    documents = [[1, 2, 3] * 4000] * 300
    data = arrow_file(documents, rows=[3, *[3] * 40, 4, 2, *[3] * 200])
    layout = read_from(data, read_layout("part.arrow", len(data), None, [*range(127), 300]))
    assert tokens_of(read_from(data, layout.block(0, 1))) == documents[:1]
    with pytest.raises(DataError, match=r"a record batch has 4 rows, but the first and the last .* imply 3"):
        read_from(data, layout.block(124, 125))
