"""Reading shards as ranges: the same documents as from a mapped file, for about as many bytes as they have."""

import gc
import io
import struct
import tracemalloc
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fmsdata.core.blocks import Block
from fmsdata.core.keys import offsets
from fmsdata.core.ranges import Range
from fmsdata.core.tokens import Tokens
from fmsdata.corpus.shard_writer import Layout as Written
from fmsdata.errors import DataError
from fmsdata.formats import open_shard, read_layout
from fmsdata.formats.base import Layout, Reading, read_from
from fmsdata.formats.fetched import PartlyKnown
from tests.formats.test_arrow import (
    COMPRESSIONS,
    INTEGERS,
    Documents,
    ipc,
    list_batches,
    opened,
    plain_shard,
    read,
    some_documents,
    token_batches,
)
from tests.formats.test_damage import by_pyarrow
from tests.helpers import documents

Result = TypeVar("Result")
NAME = "part-0.arrow"
LAYOUTS: list[Written] = ["list", "batch"]


class Asked:
    """Answers readings from the bytes of a file, and keeps account of what they ask for."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.steps: list[list[Range]] = []

    @property
    def ranges(self) -> list[Range]:
        return [one for step in self.steps for one in step]

    @property
    def bytes(self) -> int:
        return sum(stop - start for start, stop in self.ranges)

    def read(self, reading: Reading[Result]) -> Result:
        try:
            ranges = next(reading)
            while True:
                assert ranges
                assert all(0 <= start < stop <= len(self.data) for start, stop in ranges)
                assert all(type(place) is int for one in ranges for place in one)
                assert sum(stop - start for start, stop in ranges) <= 2 * len(self.data)
                self.steps.append(ranges)
                whole: bytes | memoryview = self.data if len(self.steps) % 2 else memoryview(self.data)
                ranges = reading.send([whole[start:stop] for start, stop in ranges])
        except StopIteration as done:
            result: Result = done.value
            return result


def layout_of(data: bytes, bounds: Sequence[int] = (), column: str | None = None, *, keeps_end: bool = False) -> Layout:
    dense = len(data) // 8 % 2 == 1  # must not make a difference
    layout = Asked(data).read(read_layout(NAME, len(data), column, bounds, dense=dense))
    if isinstance(layout, PartlyKnown) and not keeps_end:
        layout.forget()  # a small file would be nothing else
    return layout


def documents_of(block: Block[Tokens], data: bytes) -> Documents:
    """The documents of a block, each in its full length, whose pieces must be where they say they are."""
    for tokens, offset in zip(block.arrays, block.offsets, strict=True):
        if offset is not None:
            there = np.frombuffer(data[offset : offset + tokens.nbytes], tokens.dtype)
            assert len(there) == len(tokens)
            assert (there == tokens).all()
    found = []
    for array, start, length in zip(block.array.tolist(), block.start.tolist(), block.length.tolist(), strict=True):
        tokens = block.arrays[array]
        assert 0 <= start <= start + length <= len(tokens)
        found.append(tokens[start : start + length].tolist())
    return found


def read_ranges(data: bytes, bounds: Sequence[int] = (), column: str | None = None) -> Documents:
    """All documents, block by block. That the tokens can be counted is a part of it."""
    layout = layout_of(data, bounds, column, keeps_end=len(data) // 16 % 2 == 1)
    found: Documents = []
    for first, stop in pairwise(sorted({0, *bounds, layout.documents})):
        if stop <= layout.documents:
            found += documents_of(Asked(data).read(layout.block(first, stop)), data)
    assert len(found) == layout.documents
    assert Asked(data).read(layout.tokens()) >= 0
    return found


def outcome(data: bytes, bounds: Sequence[int] | None = None, column: str | None = None) -> Documents | str:
    """What comes of reading a file, as ranges if there are bounds, else as it is mapped."""
    try:
        return read(opened(data, column)) if bounds is None else read_ranges(data, bounds, column)
    except DataError as error:
        return str(error)


def in_batches(rows: Sequence[Any], sizes: Sequence[int], kind: Any, others: bool = False) -> list[Any]:
    """Record batches of these numbers of rows, one after the other, with other columns around the tokens on request."""
    ends = [*offsets(np.array(sizes, np.int64)).tolist()]
    made = []
    for first, stop in pairwise(ends):
        columns: dict[str, Any] = {"tokens": pa.array(rows[first:stop], kind)}
        if others:
            text = pa.array(["x" * (i % 50) for i in range(stop - first)], pa.string())
            columns = {"text": text, "number": pa.array(range(stop - first), pa.int16()), **columns, "behind": text}
        made.append(pa.record_batch(columns))
    return made


@st.composite
def files(draw: st.DrawFn) -> tuple[bytes, int, list[int]]:
    """A file of any kind, how many documents it has, and bounds."""
    dtype = draw(st.sampled_from(INTEGERS))
    values = pa.from_numpy_dtype(dtype)
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    count = draw(st.integers(0, 60))
    longest = draw(st.sampled_from([0, 3, 40, 3000]))
    limits = np.iinfo(dtype)
    layout = draw(st.sampled_from(["batch", "list", "large_list", "fixed"]))
    fixed = draw(st.sampled_from([0, 1, 5]))
    lengths = [fixed] * count if layout == "fixed" else rng.integers(0, longest + 1, count).tolist()
    some: list[Any] = [rng.integers(limits.min, limits.max, n, dtype, endpoint=True).tolist() for n in lengths]
    if layout in ("list", "large_list") and draw(st.booleans()):
        some = [None if rng.random() < 0.1 else one for one in some]
    others = draw(st.booleans())
    if layout == "batch":
        batches = [batch for one in some for batch in in_batches(one, [len(one)], values, others)]
    else:
        kinds = {"list": pa.list_(values), "large_list": pa.large_list(values), "fixed": pa.list_(values, fixed)}
        most = draw(st.sampled_from([1, 4, 60]))
        sizes: list[int] = []
        while sum(sizes) < count:
            sizes.append(min(int(rng.integers(0, most + 1)), count - sum(sizes)))
        batches = in_batches(some, [*sizes, 0], kinds[layout], others)
    schema = batches[0].schema if batches else pa.schema({"tokens": values})
    bounds = sorted({0, count, *draw(st.lists(st.integers(0, count), max_size=12))})
    return ipc(batches, schema=schema, compression=draw(st.sampled_from(COMPRESSIONS))), count, bounds


@settings(max_examples=80, deadline=None)
@given(files())
def test_any_block_of_any_file_is_what_the_mapped_file_gives(file: tuple[bytes, int, list[int]]) -> None:
    data, count, bounds = file
    shard, layout = opened(data), layout_of(data, bounds)
    assert layout.documents == shard.documents == count
    assert layout.known_tokens == shard.known_tokens
    assert Asked(data).read(layout.tokens()) == shard.tokens()
    for first in bounds:
        for stop in bounds:
            if first < stop:
                block = Asked(data).read(layout.block(first, stop))
                assert documents_of(block, data) == read(shard, first, stop)
                assert {tokens.dtype for tokens in block.arrays} == {shard.whole.dtype}


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bytes_that_lie_in_the_file_are_not_copied(layout: Written, compression: str | None) -> None:
    data = plain_shard(some_documents(), layout, False, compression)
    whole = np.frombuffer(data, np.uint8)
    block = read_from(data, layout_of(data, [0, 11, 23, 30]).block(11, 23))
    for tokens, offset in zip(block.arrays, block.offsets, strict=True):
        assert np.shares_memory(tokens, whole) == (compression is None)
        assert (offset is None) == (compression is not None)


@pytest.mark.parametrize(
    "column",
    [
        pa.array([1, None], pa.int32()),
        pa.array([[1], [2, None]], pa.list_(pa.int32())),
        pa.array([[1, 2], [None, 3]], pa.list_(pa.int32(), 2)),
        pa.array([1.5]),
        pa.array([[[1]]]),
        pa.array(["x"]),
    ],
    ids=lambda column: str(column.type),
)
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_what_cannot_be_tokens_is_the_same_error(column: Any, compression: str | None) -> None:
    data = ipc([pa.record_batch({"tokens": column})], compression=compression)
    for name in (None, "tokens", "other"):
        expected = outcome(data, None, name)
        assert isinstance(expected, str)
        assert outcome(data, (), name) == expected


def test_nulls_among_the_tokens_are_an_error_when_they_are_counted() -> None:
    data = ipc([pa.record_batch({"tokens": pa.array([1, None], pa.int32())})])
    with pytest.raises(DataError, match=r"part-0\.arrow: the token column holds nulls"):
        Asked(data).read(layout_of(data).tokens())


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_remote_stream_is_an_error_that_says_how_to_rewrite_it(layout: Written, compression: str | None) -> None:
    data = plain_shard(some_documents(2000), layout, True, compression)
    problem = r"^part-0\.arrow: this is an Arrow stream.* can only be read from a local disk"
    way_out = r"rewrite it in the Arrow file format \(with `fmsdata\.prepare\.write_shard`.*new_file.*copy the corpus"
    for length in (8, 100, len(data) - 1, len(data)):  # also if it is cut short
        asked = Asked(data[:length])
        with pytest.raises(DataError, match=f"{problem}.*{way_out}"):
            asked.read(read_layout(NAME, length))
        assert len(asked.ranges) <= 2
        assert asked.bytes < 20_000
    for length in range(8):
        assert outcome(data[:length], ()) == outcome(data[:length])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_remote_stream_is_the_same_error_if_it_was_fetched_whole(layout: Written) -> None:
    data = plain_shard(some_documents(), layout, True)
    assert open_shard(pa.py_buffer(data), NAME).documents == 30
    with pytest.raises(DataError) as by_ranges:
        Asked(data).read(read_layout(NAME, len(data)))
    with pytest.raises(DataError) as whole:
        open_shard(pa.py_buffer(data), NAME, remote=True)
    assert str(whole.value) == str(by_ranges.value)
    file = plain_shard(some_documents(), layout, False)
    assert open_shard(pa.py_buffer(file), NAME, remote=True).documents == 30


@pytest.mark.parametrize("compression", [None, "lz4"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_file_cut_short_anywhere_is_the_same_error(layout: Written, compression: str | None) -> None:
    data = plain_shard(some_documents(12), layout, False, compression)
    for length in range(len(data)):
        expected = outcome(data[:length])
        found = outcome(data[:length], [0, 7, 12])
        assert isinstance(found, str)
        assert found == expected, length


def damages(data: bytes, count: int, seed: int = 3) -> list[bytes]:
    """The file with a few bytes flipped, in each of them one or two, more of them where the metadata is."""
    rng = np.random.default_rng(seed)
    made = []
    for i in range(count):
        damaged = bytearray(data)
        for _ in range(1 + i % 2):
            damaged[rng.integers(len(data))] ^= int(rng.choice([1, 2, 128, 255, int(rng.integers(1, 256))]))
        made.append(bytes(damaged))
    return made


@pytest.mark.parametrize("compression", [None, "lz4"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_flipped_bytes_give_what_a_careful_reader_gives_or_an_error(layout: Written, compression: str | None) -> None:
    some = some_documents(16, 12)
    data = plain_shard(some, layout, False, compression)
    errors = 0
    for damaged in damages(data, 500):
        found = outcome(damaged, [0, 5, 9, 16])
        if isinstance(found, str):
            assert found.startswith(NAME)
            errors += 1
        elif found != some:
            assert found in (
                outcome(damaged),
                by_pyarrow(damaged, layout, False),
            )
    assert errors > 100


def test_random_bytes_are_an_error() -> None:
    rng = np.random.default_rng(0)
    for start in (b"", b"ARROW1\0\0", b"\xff\xff\xff\xff", b"\xff\xff\xff\xff\x10\0\0\0"):
        for size in [*range(64), *rng.integers(64, 4096, 50).tolist()]:
            for end in (b"", b"ARROW1", (size // 2).to_bytes(4, "little") + b"ARROW1"):
                with pytest.raises(DataError, match=r"part-0\.arrow"):
                    layout_of(start + rng.bytes(size) + end)


def listed(data: bytes) -> tuple[int, int]:
    """Where a file's footer lists its record batches, and how many."""
    count = len(opened(data)._messages)
    first = struct.pack("<qi", *opened(data)._messages[0, :2].tolist())
    return data.rindex(first), count


NUMBERS = [-1, -(1 << 63), (1 << 63) - 1, 1 << 62, 1 << 40, 1 << 31, 1 << 20, 7, 0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_number_in_a_footer_leads_outside_the_file(layout: Written) -> None:
    some = some_documents(20)
    data = plain_shard(some, layout, False)
    place, count = listed(data)
    for entry in range(count):
        for at, form in ((0, "<q"), (8, "<i"), (16, "<q")):
            for number in NUMBERS:
                damaged = bytearray(data)
                size = struct.calcsize(form)
                struct.pack_into(form, damaged, place + 24 * entry + at, number if size == 8 else number % (1 << 31))
                found = outcome(bytes(damaged), [0, 4, 20])
                assert found == some or isinstance(found, str)
    for number in [*NUMBERS, len(data), len(data) - 10, len(data) // 2]:
        damaged = bytearray(data)
        struct.pack_into("<i", damaged, len(data) - 10, (number + (1 << 31)) % (1 << 32) - (1 << 31))
        assert isinstance(outcome(bytes(damaged), ()), str)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_number_of_a_record_batch_leads_outside_the_file(layout: Written) -> None:
    """Each word of the metadata and of the list offsets in turn. Undetectable damage is read as if mapped."""
    some = some_documents(12)
    data = plain_shard(some, layout, False)
    offset, metadata, body = opened(data)._messages[1].tolist()
    for place in range(offset, offset + metadata + min(body, 32), 8):
        for number in [*NUMBERS, -metadata, len(data)]:
            damaged = bytearray(data)
            struct.pack_into("<q", damaged, place, number)
            found = outcome(bytes(damaged), [0, 4, 12])
            expected = outcome(bytes(damaged))
            assert isinstance(found, str) or found in (some, expected)


def test_a_footer_that_lists_one_record_batch_many_times_does_not_ask_for_many_files() -> None:
    some = [[7] * 5000, *some_documents(40)]
    for layout in ("list", "batch"):
        data = bytearray(plain_shard(some, layout, False))
        place, count = listed(bytes(data))
        data[place : place + 24 * count] = data[place : place + 24] * count
        found = outcome(bytes(data), ())
        assert isinstance(found, str) or found == outcome(bytes(data))


def test_a_size_that_no_metadata_has_is_an_error_before_it_is_asked_for() -> None:
    data = bytearray(token_file([1 << 20] * 8, pa.list_(I32), rows=1))
    place, count = listed(bytes(data))
    struct.pack_into("<i", data, place + 24 * (count // 2) + 8, 9 << 20)
    asked = Asked(bytes(data))
    with pytest.raises(DataError, match=r"part-0\.arrow.*no record batch at byte"):
        asked.read(read_layout(NAME, len(data)))
    assert asked.bytes < 70_000
    struct.pack_into("<i", data, len(data) - 10, 25 << 20)
    asked = Asked(bytes(data))
    with pytest.raises(DataError, match=r"part-0\.arrow.*footer"):
        asked.read(read_layout(NAME, len(data)))
    assert asked.bytes < 70_000


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_record_batch_of_no_bytes_is_an_error(layout: Written) -> None:
    data = bytearray(plain_shard(some_documents(20), layout, False))
    place, _ = listed(bytes(data))
    struct.pack_into("<iiq", data, place + 24 + 8, 0, 0, 0)
    for bounds in (None, (), range(21)):
        assert "no record batch at byte" in outcome(bytes(data), bounds)


def test_damaged_list_offsets_of_no_rows_do_not_matter() -> None:
    rows: list[Any] = [None, [1, 2], [3]]
    data = bytearray(ipc(in_batches(rows, [2, 0, 1], pa.list_(U16))))
    offset, metadata, body = opened(bytes(data))._messages[1].tolist()
    assert data[offset + metadata : offset + metadata + body] == bytes(8)
    struct.pack_into("<i", data, offset + metadata, 1 << 30)
    assert outcome(bytes(data)) == outcome(bytes(data), ()) == [[], [1, 2], [3]]


def test_record_batches_in_another_order_than_the_footer_lists_them_are_read() -> None:
    some = some_documents(40)
    for layout in ("list", "batch"):
        data = bytearray(plain_shard(some, layout, False))
        place, count = listed(bytes(data))
        entries = np.frombuffer(data, "V24", count, place).copy()
        data[place : place + 24 * count] = np.random.default_rng(0).permutation(entries).tobytes()
        expected = read(opened(bytes(data)))
        assert expected != some
        assert sorted(expected) == sorted(some)
        assert read_ranges(bytes(data), [0, 11, 12, 40]) == expected


def test_gaps_between_record_batches_and_a_footer_in_another_order_do_not_matter_where_the_footer_is_long() -> None:
    rng = np.random.default_rng(0)
    data = bytearray(token_file(rng.integers(0, 300, 3000).tolist(), U16, rows=None))
    place, count = listed(bytes(data))
    entries = np.frombuffer(data, "V24", count, place).copy()
    swapped = [*range(1500), *reversed(range(1500, 3000))]
    for order in (swapped, [0, *range(2999)], [i - i % 7 % 2 for i in range(3000)]):
        data[place : place + 24 * count] = entries[order].tobytes()
        assert read_ranges(bytes(data), [0, 700, 1400, 1600, 3000]) == read(opened(bytes(data)))


def test_dictionaries_between_record_batches_do_not_matter() -> None:
    """In the file format they come first; in a stream they may come again, and so they do here."""
    for stream in (False, True):
        for kind in (pa.list_(pa.int32()), pa.int32()):
            some: Documents = [[1, 2], [3], [4, 5, 6], [], [7], [8, 9]]
            sink = io.BytesIO()
            batches = []
            for i, one in enumerate(some):
                rows: list[Any] = [one, []] if kind != pa.int32() else one
                words = pa.DictionaryArray.from_arrays(
                    pa.array([0] * len(rows), pa.int8()), pa.array(["abc"[: 1 + i * stream]])
                )
                batches.append(pa.record_batch({"language": words, "tokens": pa.array(rows, kind)}))
            writer: Any = pa.ipc.new_stream if stream else pa.ipc.new_file
            with writer(sink, batches[0].schema) as file:
                for batch in batches:
                    file.write_batch(batch)
            data = sink.getvalue()
            expected = read(opened(data, "tokens"))
            assert [one for one in expected if one] == [one for one in some if one]
            for bounds in ([0, 1, 3, len(expected)], [0, len(expected)], list(range(len(expected) + 1))):
                assert stream or read_ranges(data, bounds, "tokens") == expected


def test_counts_that_are_wrong_do_not_matter_to_the_layout() -> None:
    for layout in LAYOUTS:
        data = plain_shard(some_documents(30), layout, False)
        assert layout_of(data, [0, 20, 40, 60]).documents == 30
        assert layout_of(data, [0, 5, 10]).documents == 30


def token_file(lengths: Sequence[int], kind: Any, *, rows: int | None, text: int = 0, compression: Any = None) -> bytes:
    """A large file: a batch per document, or `rows` of them in each; beside each document a text of this length."""
    values = kind if rows is None else kind.value_type
    total = int(np.sum(lengths))
    tokens = pa.array(np.arange(total).astype(str(values)))
    ends = offsets(np.array(lengths, np.int64))
    batches = []
    for first in range(0, len(lengths), rows or 1):
        some = ends[first : first + (rows or 1) + 1]
        column: Any = tokens.slice(int(some[0]), int(some[-1] - some[0]))
        if rows is not None:
            fixed = pa.types.is_fixed_size_list(kind)
            form = np.int64 if pa.types.is_large_list(kind) else np.int32
            table = pa.array((some - some[0]).astype(form))
            made: Any = pa.LargeListArray if form is np.int64 else pa.ListArray
            column = (
                pa.FixedSizeListArray.from_arrays(column, kind.list_size) if fixed else made.from_arrays(table, column)
            )
        columns = {"tokens": column}
        if text:
            columns = {"text": pa.array(["x" * text] * len(column)), **columns}
        batches.append(pa.record_batch(columns))
    return ipc(batches, compression=compression)


def lengths_of(mean: int, tokens: int, seed: int = 0) -> list[int]:
    """Lengths of documents: most are short, a few very long."""
    drawn = np.random.default_rng(seed).lognormal(0, 1.2, tokens // mean)
    return np.maximum(1, drawn * mean / drawn.mean()).astype(int).tolist()  # type: ignore[no-any-return]


def uneven_file(sizes: Sequence[int]) -> bytes:
    """Documents of 100 tokens, in record batches of these numbers of rows."""
    rows = [np.full(100, i % 60_000, np.uint16) for i in range(sum(sizes))]
    return ipc(in_batches(rows, sizes, pa.list_(U16)))


U16, I32 = pa.uint16(), pa.int32()
SHAPES: dict[str, Callable[[], bytes]] = {
    "documents of 100": lambda: token_file(lengths_of(100, 1 << 19), U16, rows=None),
    "documents of 5000": lambda: token_file(lengths_of(5000, 1 << 22), I32, rows=None),
    "lists of 100": lambda: token_file(lengths_of(100, 1 << 21), pa.list_(U16), rows=1024),
    "lists of 700": lambda: token_file(lengths_of(700, 1 << 22), pa.list_(U16), rows=1024),
    "lists of 700 in one batch": lambda: token_file(lengths_of(700, 1 << 21), pa.list_(U16), rows=1 << 20),
    "lists of 10000": lambda: token_file(lengths_of(10_000, 1 << 22), pa.large_list(I32), rows=100),
    "small batches": lambda: token_file(lengths_of(100, 1 << 19), pa.list_(U16), rows=5),
    "batches of a twentieth": lambda: token_file(lengths_of(500, 1 << 22), pa.list_(U16), rows=20),
    "small batches and a large one": lambda: uneven_file([2] * 2000 + [1 << 12] + [2] * 48),
    "lists of fixed size": lambda: token_file([512] * 4096, pa.list_(U16, 512), rows=1000),
}


def cut(lengths: int, blocks: int) -> list[int]:
    return [i * lengths // blocks for i in range(blocks + 1)]


@pytest.mark.parametrize("shape", SHAPES)
def test_an_epoch_asks_for_hardly_more_bytes_than_the_file_has(shape: str) -> None:
    data = SHAPES[shape]()
    documents = opened(data).documents
    for blocks in (13, 8):
        bounds = cut(documents, blocks)
        layout = layout_of(data, bounds)
        asked = Asked(data)
        for first, stop in pairwise(bounds):
            before = len(asked.steps)
            found = asked.read(layout.block(first, stop))
            assert len(asked.steps) - before <= 2
            assert sum(len(step) for step in asked.steps[before:]) <= 6
            expected = opened(data).read(first, stop)
            assert found.length.tolist() == expected.length.tolist()
        assert asked.bytes <= 1.05 * len(data)


@pytest.mark.parametrize(("rows", "blocks"), [(1024, 9), (40, 3)])
def test_other_columns_are_not_fetched(rows: int, blocks: int) -> None:
    data = token_file(lengths_of(300, 1 << 21), pa.list_(U16), rows=rows, text=3000)
    bounds = cut(opened(data).documents, blocks)
    layout, asked = layout_of(data, bounds), Asked(data)
    found: list[int] = []
    for first, stop in pairwise(bounds):
        found += asked.read(layout.block(first, stop)).length.tolist()
    assert found == lengths_of(300, 1 << 21)
    assert asked.bytes < 1.05 * (2 * sum(found) + 4 * len(found)) < len(data) / 4


def test_record_batches_so_small_that_requests_cost_more_are_fetched_with_other_columns() -> None:
    data = token_file(lengths_of(100, 1 << 19), pa.list_(U16), rows=2, text=500)
    bounds = cut(opened(data).documents, 9)
    layout, asked = layout_of(data, bounds), Asked(data)
    for first, stop in pairwise(bounds):
        asked.read(layout.block(first, stop))
    assert len(asked.ranges) == 9
    assert asked.bytes <= 1.05 * len(data)


def test_compressed_batches_and_those_with_nulls_are_fetched_whole_and_once_per_block() -> None:
    rows: list[Any] = [None if i % 10 == 3 else [i] * 100 for i in range(1000)]
    nulls = ipc(in_batches(rows, [100] * 10, pa.list_(U16)))
    packed = token_file([100] * 1000, pa.list_(U16), rows=100, compression="zstd")
    for data in (nulls, packed):
        bounds = [0, 100, 150, 300, 1000]
        layout = layout_of(data, bounds)
        sizes = opened(data)._messages[:, 1:].sum(axis=1)
        for (first, stop), touched in zip(pairwise(bounds), ([0], [1], [1, 2], list(range(3, 10))), strict=True):
            asked = Asked(data)
            block = asked.read(layout.block(first, stop))
            assert documents_of(block, data) == read(opened(data), first, stop)
            assert set(block.offsets) == {None}
            assert asked.bytes == sizes[touched].sum()
            assert len(asked.ranges) == 1


@pytest.mark.parametrize("dense", [True, False])
def test_no_byte_of_a_file_of_documents_is_requested_twice(dense: bool) -> None:
    some = documents(np.random.default_rng(0), 3000, 500)
    data = ipc(token_batches([document.tolist() for document in some], pa.uint16()))
    bounds = [*range(0, 3000, 170), 3000]
    asked, found = Asked(data), []
    layout = asked.read(read_layout(NAME, len(data), None, bounds, dense=dense))
    for first, stop in pairwise(bounds):
        found += documents_of(asked.read(layout.block(first, stop)), data)
    assert found == [document.tolist() for document in some]
    ranges = sorted(asked.ranges)
    assert not [(before, after) for before, after in pairwise(ranges) if after.start < before.stop]


@pytest.mark.parametrize("rows", [100, 400])
@pytest.mark.parametrize("kind", [pa.list_(pa.uint16()), pa.list_(pa.int32()), pa.large_list(pa.uint16())])
def test_no_byte_of_a_file_of_lists_is_requested_twice(rows: int, kind: Any) -> None:
    some = documents(np.random.default_rng(rows), 2000, 500)
    sizes = [rows] * (len(some) // rows)
    data = ipc(in_batches(some, [*sizes, len(some) - sum(sizes)] if len(some) % rows else sizes, kind))
    bounds = [*range(0, 2000, 90), 2000] if rows > 90 else [*range(0, 2000, 14 * rows), 2000]
    asked, found = Asked(data), []
    layout = asked.read(read_layout(NAME, len(data), None, bounds, dense=True))
    for first, stop in pairwise(bounds):
        found += documents_of(asked.read(layout.block(first, stop)), data)
    assert found == [document.tolist() for document in some]
    ranges = sorted(asked.ranges)
    assert not [(before, after) for before, after in pairwise(ranges) if after.start < before.stop]


def test_the_layout_of_a_file_takes_one_request_and_two_more_for_a_long_footer() -> None:
    for count, requests in ((600, 1), (5000, 3)):  # of a long footer, only the part that says where its parts are
        data = token_file([20] * count, U16, rows=None)
        asked = Asked(data)
        assert asked.read(read_layout(NAME, len(data), None, [0, 10, count])).documents == count
        assert len(asked.ranges) == requests
        assert asked.bytes <= 1 << 15
    one = Asked(token_file(lengths_of(700, 1 << 22), pa.list_(U16), rows=1024))
    one.read(read_layout(NAME, len(one.data)))
    assert len(one.steps) == 2  # the footer, and the metadata of all record batches at once
    assert one.bytes < 70_000


def test_the_metadata_of_small_record_batches_is_asked_for_together() -> None:
    data = token_file([20] * 30_000, pa.list_(U16), rows=1)
    asked = Asked(data)
    asked.read(read_layout(NAME, len(data), None, [0, 30_000]))
    assert len(asked.ranges) < 10
    assert asked.bytes < 1.2 * len(data)


def test_tokens_are_counted_in_ranges_of_at_most_8_mb() -> None:
    null: Any = [None, *([i] * 200_000 for i in range(60))]
    files = [
        (token_file(lengths_of(400, 1 << 23), U16, rows=None), sum(lengths_of(400, 1 << 23))),
        (token_file([1 << 20] * 16, I32, rows=None), 1 << 24),
        (ipc(in_batches(null, [30, 31], pa.list_(U16))), 60 * 200_000),
    ]
    for data, tokens in files:
        layout, asked = layout_of(data), Asked(data)
        assert asked.read(layout.tokens()) == tokens
        assert all(stop - start <= 8 << 20 for start, stop in asked.ranges)
        assert asked.bytes <= 1.05 * len(data)


def kept(data: bytes, bounds: Sequence[int]) -> tuple[Layout, int]:
    """A layout, and the memory that it takes, as Python and Arrow count it."""
    layout_of(data, bounds)  # whatever is made once
    gc.collect()
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    layout = layout_of(data, bounds)
    gc.collect()
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return layout, size + pa.total_allocated_bytes() - before


@pytest.mark.parametrize("rows", [None, 2])
def test_a_layout_takes_memory_for_the_bounds_and_not_for_the_documents(rows: int | None) -> None:
    data = token_file([10] * 20_000, U16 if rows is None else pa.list_(U16), rows=rows)
    few, some = kept(data, cut(20_000, 10)), kept(data, cut(20_000, 200))
    assert few[1] < 32_000
    assert some[1] < few[1] + 200 * 100
    assert few[0].nbytes < 10_000
    assert 0 <= some[0].nbytes - few[0].nbytes < 200 * 100


def test_blocks_do_not_make_a_layout_grow() -> None:
    data = token_file(lengths_of(30, 1 << 19), U16, rows=None)
    bounds = cut(opened(data).documents, 40)
    layout = layout_of(data, bounds)
    read_from(data, layout.block(bounds[0], bounds[1]))
    gc.collect()
    tracemalloc.start()
    for first, stop in pairwise(bounds):
        Asked(bytes(data)).read(layout.block(first, stop))
    gc.collect()
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size < 20_000


@pytest.mark.parametrize("layout", LAYOUTS)
def test_readings_of_one_layout_may_take_turns(layout: Written) -> None:
    some = some_documents(60)
    data = plain_shard(some, layout, False)
    bounds = cut(60, 6)
    shared = layout_of(data, bounds)
    readings = [shared.block(first, stop) for first, stop in pairwise(bounds)]
    asked = [next(reading) for reading in readings]
    found: dict[int, Documents] = {}
    while len(found) < len(readings):
        for i, reading in enumerate(readings):
            if i in found:
                continue
            try:
                asked[i] = reading.send([data[start:stop] for start, stop in asked[i]])
            except StopIteration as done:
                found[i] = documents_of(done.value, data)
    assert [one for i in range(len(found)) for one in found[i]] == some


def test_a_block_between_other_documents_than_the_bounds_is_refused() -> None:
    layout = layout_of(ipc(token_batches(some_documents(30), U16)), [0, 10, 30])
    for first, stop in ((0, 11), (9, 30), (0, 31)):
        with pytest.raises(ValueError, match="bounds"):
            next(layout.block(first, stop))


def test_a_large_schema_is_read() -> None:
    some = some_documents(9)
    batches = [batch.replace_schema_metadata({"notes": "x" * 200_000}) for batch in list_batches(some, pa.list_(U16))]
    assert read_ranges(ipc(batches), [0, 4, 9]) == some
