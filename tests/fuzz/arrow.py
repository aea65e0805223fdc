"""Shards: mapped, fetched as a whole, and read by ranges, which must all give the same documents or an error."""

import io
import struct
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from fmsdata.core.blocks import Block
from fmsdata.core.tokens import Tokens
from fmsdata.errors import DataError
from fmsdata.formats import open_shard, read_layout
from fmsdata.formats.arrow.shard import ArrowShard
from fmsdata.formats.base import Layout, Reading
from tests.fuzz.mutations import Rng, damage_bytes, edge, put_number, signed

NAME = "part-0.arrow"
MOST = 5000  # documents to read of a shard that says that it has more
U16, I32, I64 = pa.uint16(), pa.int32(), pa.int64()
Documents = list[list[int]]


class Sample(NamedTuple):
    """A valid file, and where its parts are."""

    data: bytes
    documents: Documents
    listed: bool
    stream: bool
    compressed: bool
    messages: list[list[int]]  # of each record batch its offset and the sizes of metadata and body
    tables: list[tuple[int, int]]  # of list offsets: the place and the number of entries
    wide: bool  # whether list offsets have 64 bits


def write(batches: Sequence[Any], stream: bool, compression: str | None) -> bytes:
    sink = io.BytesIO()
    writer: Any = pa.ipc.new_stream if stream else pa.ipc.new_file
    options: Any = pa.ipc.IpcWriteOptions
    with writer(sink, batches[0].schema, options=options(compression=compression)) as file:
        for batch in batches:
            file.write_batch(batch)
    return sink.getvalue()


def in_batches(rows: Sequence[Any], kind: Any, size: int, extra: bool) -> list[Any]:
    made = []
    for first in range(0, len(rows), size):
        part = rows[first : first + size]
        columns: dict[str, Any] = {"tokens": pa.array(part, kind)}
        if extra:
            text = pa.array(["x" * (i % 9) for i in range(len(part))], pa.string())
            columns = {"text": text, "number": pa.array(range(len(part)), pa.int16()), **columns, "behind": text}
        made.append(pa.record_batch(columns))
    return made


def samples() -> list[Sample]:
    """Valid files of every kind, small."""
    rng = np.random.default_rng(0)
    made = []
    rows: list[Any] = [rng.integers(10, 250, n).tolist() for n in rng.integers(0, 12, 24)]
    holes: list[Any] = [None if i % 5 == 3 else row for i, row in enumerate(rows)]
    fixed = [[i, i + 1, i + 2] for i in range(24)]
    many = [[i % 200, 7] for i in range(900)]
    for stream in (False, True):
        for compression in (None, "lz4", "zstd"):
            for some, kind, size, extra in (
                (rows, pa.list_(U16), 7, False),
                (rows, pa.large_list(I32), 24, True),
                (rows, pa.large_list(U16), 5, False),
                (holes, pa.list_(I64), 7, True),
                (fixed, pa.list_(I32, 3), 9, False),
                (many, pa.list_(U16), 1, False),
            ):
                if len(some) == len(many) and compression:
                    continue
                data = write(in_batches(some, kind, size, extra), stream, compression)
                made.append(sample(data, [row or [] for row in some], True, stream, compression is not None))
            for some in (rows, many):
                batches = [pa.record_batch({"tokens": pa.array(row, U16)}) for row in some]
                made.append(sample(write(batches, stream, compression), some, False, stream, compression is not None))
    return made


def sample(data: bytes, documents: Documents, listed: bool, stream: bool, compressed: bool) -> Sample:
    shard = ArrowShard(pa.py_buffer(data), NAME)
    column, tables = shard._column, []
    if listed and not compressed and column.fixed_size is None:
        tables = [(place, size // column.ends.itemsize) for place, size in (b[column.table] for b in shard._buffers)]
    wide = column.ends.itemsize == 8
    return Sample(data, documents, listed, stream, compressed, shard._messages.tolist(), tables, wide)


def by_pyarrow(data: bytes, one: Sample) -> Documents | None:
    """What a careful reader of this column gives, or nothing."""
    open_reader: Any = pa.ipc.open_stream if one.stream else pa.ipc.open_file
    options: Any = pa.ipc.IpcReadOptions
    try:
        index = ArrowShard(pa.py_buffer(data), NAME)._column.index
        reader = open_reader(data, options=options(included_fields=[index]))
        batches = list(reader) if one.stream else [reader.get_batch(i) for i in range(reader.num_record_batches)]
        for batch in batches:
            batch.validate(full=True)
        columns = [batch.column(0).to_pylist() for batch in batches]
    except (pa.ArrowException, OSError, ValueError, MemoryError, OverflowError):
        return None
    return [row or [] for column in columns for row in column] if one.listed else columns


def documents_of(block: Block[Tokens], count: int) -> Documents:
    """The documents of a block, none of which may be outside of its array."""
    assert len(block.array) == len(block.start) == len(block.length) == count, "another number of documents"
    found = []
    for array, start, length in zip(block.array.tolist(), block.start.tolist(), block.length.tolist(), strict=True):
        assert 0 <= array < len(block.arrays), "no such array"
        assert 0 <= start <= start + length <= len(block.arrays[array]), "a document outside of its array"
        found.append(block.arrays[array][start : start + length].tolist())
    return found


def by_ranges(data: bytes, reading: Reading[Any]) -> Any:
    """Answers a reading, which may ask for what is in the file only, and not for much more than the file."""
    try:
        ranges = next(reading)
        while True:
            assert all(0 <= start < stop <= len(data) for start, stop in ranges), "a range outside of the file"
            assert sum(stop - start for start, stop in ranges) <= 2 * len(data) + (1 << 16), "more than the file"
            ranges = reading.send([data[start:stop] for start, stop in ranges])
    except StopIteration as done:
        return done.value


def pieces(rng: Rng, documents: int) -> list[int]:
    """Where blocks begin and end."""
    assert 0 <= documents < 1 << 62
    some = rng.integers(0, documents + 1, 3).tolist() if documents < MOST else [documents - 9, documents // 2]
    return sorted({0, min(documents, MOST), documents, *some})


class Shards:
    """Damaged shards, as bytes in memory."""

    def __init__(self, folder: Path) -> None:  # noqa: ARG002
        self._samples = samples()

    def attempt(self, rng: Rng) -> None:
        one = self._samples[rng.integers(len(self._samples))]
        data = one.data
        exchanged = rng.random() < 0.1 and not one.stream
        for _ in range(0 if exchanged else int(rng.choice([1, 1, 1, 2, 3]))):
            data = self._damaged(rng, one, data)
        if exchanged:  # alone: only if all else is right, it is known what it has to give
            data = self._exchange_entries(rng, one)
        found = [self._try(reader, rng, data) for reader in (mapped, whole, ranges)]
        expected = None
        for documents in found:
            if not isinstance(documents, DataError) and documents != one.documents:
                expected = by_pyarrow(data, one) if expected is None else expected
                # A token that was changed can't be detected. Everything else must be as a careful reader sees it.
                same = list(map(len, documents)) == list(map(len, one.documents))
                assert same or expected is not None, "documents of a file that pyarrow refuses"
                assert same or documents == expected, "other documents than pyarrow reads"
        refused = [error for error in found if isinstance(error, DataError)]
        if refused:
            raise refused[0]

    def _try(self, reader: Any, rng: Rng, data: bytes) -> Documents | DataError:
        try:
            documents: Documents = reader(rng, data)
            return documents
        except DataError as error:
            if not str(error).startswith(NAME):
                raise AssertionError("an error that does not name the file") from error
            return error

    def _damaged(self, rng: Rng, one: Sample, before: bytes) -> bytes:
        data = bytearray(before)
        kind = int(rng.integers(9))
        offset, metadata, body = one.messages[rng.integers(len(one.messages))]
        if kind <= 2:
            return damage_bytes(rng, before, self._samples[rng.integers(len(self._samples))].data)
        if kind <= 5:
            put_number(rng, data, offset + int(rng.integers(metadata)) // 4 * 4)
        elif kind == 6 and body:
            put_number(rng, data, offset + metadata + int(rng.integers(body)) // 4 * 4)
        elif kind == 7:
            end = one.messages[-1]
            put_number(rng, data, int(rng.integers(sum(end), max(sum(end) + 1, len(data)))) // 4 * 4)
        elif one.tables:
            self._damage_offsets(rng, one, data)
        return bytes(data)

    def _exchange_entries(self, rng: Rng, one: Sample) -> bytes:
        """Let the footer list a record batch at another's place, or twice."""
        data = bytearray(one.data)
        first = data.rfind(struct.pack("<qi", *one.messages[0][:2]))
        count = len(one.messages)
        a, b = (first + 24 * int(entry) for entry in rng.integers(count, size=2))
        entry = bytes(data[a : a + 24])
        if rng.random() < 0.5:
            data[a : a + 24] = data[b : b + 24]
        data[b : b + 24] = entry
        return bytes(data)

    def _damage_offsets(self, rng: Rng, one: Sample, data: bytearray) -> None:
        """List offsets: outside of the values, decreasing, or with differences that wrap around."""
        place, entries = one.tables[rng.integers(len(one.tables))]
        form, bits = ("<q", 64) if one.wide else ("<i", 32)
        size = bits // 8
        if entries < 2 or place + entries * size > len(data):
            return
        match int(rng.integers(4)):
            case 0:
                struct.pack_into(form, data, place + size * int(rng.integers(entries)), edge(rng, bits))
            case 1:  # up by almost half of all numbers, twice or four times, back to where it was
                at, steps = int(rng.integers(entries)), int(rng.choice([2, 4]))
                value, step = 0, (1 << bits) // steps
                for entry in range(at, min(at + steps, entries)):
                    value += step - int(rng.integers(2))
                    struct.pack_into(form, data, place + size * entry, signed(value, bits))
            case 2:
                shift = edge(rng, bits)
                for entry in range(entries):
                    (old,) = struct.unpack_from(form, data, place + size * entry)
                    struct.pack_into(form, data, place + size * entry, signed(old + shift, bits))
            case 3:
                a, b = (place + size * int(entry) for entry in rng.integers(entries, size=2))
                data[a : a + size], data[b : b + size] = data[b : b + size], data[a : a + size]


def mapped(rng: Rng, data: bytes) -> Documents:
    return _read_shard(rng, ArrowShard(pa.py_buffer(data), NAME))


def whole(rng: Rng, data: bytes) -> Documents:
    """As the bytes of a remote shard that was fetched at once."""
    return _read_shard(rng, open_shard(pa.py_buffer(data), NAME, remote=True))


def _read_shard(rng: Rng, shard: Any) -> Documents:
    found: Documents = []
    for first, stop in pairwise(pieces(rng, shard.documents)):
        if stop - first <= MOST:
            found += documents_of(shard.read(first, stop), stop - first)
    tokens = shard.tokens() if shard.documents <= MOST else 0
    assert 0 <= tokens < 1 << 62
    return found


def ranges(rng: Rng, data: bytes) -> Documents:
    """By ranges, as a shard on S3 is read."""
    dense = bool(rng.random() < 0.5)
    bounds = [0, 3, 7, 11, 24] if rng.random() < 0.7 else list(range(0, 901, 100))
    layout: Layout = by_ranges(data, read_layout(NAME, len(data), None, bounds, dense=dense))
    found: Documents = []
    assert 0 <= layout.documents < 1 << 62
    known = [bound for bound in bounds if bound <= layout.documents]
    for first, stop in pairwise(sorted({*known, layout.documents})):
        if stop - first <= MOST:
            found += documents_of(by_ranges(data, layout.block(first, stop)), stop - first)
    tokens = by_ranges(data, layout.tokens()) if layout.documents <= MOST else 0
    assert 0 <= tokens < 1 << 62
    return found
