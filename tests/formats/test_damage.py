"""Damaged, odd and hostile files: never a crash, never another document than the one that was written."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from fmsdata.corpus.counts import read_counts
from fmsdata.corpus.shard_writer import Layout, write_shard
from fmsdata.errors import ConfigError, CountsError, DataError
from fmsdata.formats import read_layout
from fmsdata.formats.base import read_from
from tests.corpus.test_counts import write_csv, write_shards
from tests.formats.test_arrow import (
    INTEGERS,
    LAYOUTS,
    Documents,
    ipc,
    list_batches,
    opened,
    plain_shard,
    read,
    some_documents,
)
from tests.helpers import open_file


@pytest.mark.parametrize("row", ["web/a.arrow,-1,70", "web/a.arrow,7,-1", "web/a.arrow,99999999999999999999,1"])
def test_a_number_that_cannot_be_a_count_is_an_error_that_names_the_line(tmp_path: Path, row: str) -> None:
    write_shards(tmp_path, "web/a.arrow", "web/b.arrow")
    write_csv(tmp_path / "meta/counts.csv", "web/b.arrow,8,80", row)
    with pytest.raises(CountsError, match=r"counts\.csv:3.*web/a\.arrow"):
        read_counts(tmp_path / "web")


def test_a_csv_that_is_no_text_is_an_error(tmp_path: Path) -> None:
    write_shards(tmp_path, "web/a.arrow")
    write_csv(tmp_path / "meta/counts.csv").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(CountsError, match=r"counts\.csv"):
        read_counts(tmp_path / "web")


def test_rows_for_missing_files_only_are_an_error(tmp_path: Path) -> None:
    write_shards(tmp_path, "web/a.arrow")
    write_csv(tmp_path / "meta/counts.csv", "web/gone.arrow,7,70")
    with pytest.raises(CountsError, match=r"web/gone\.arrow.*no such file.*fmsdata index"):
        read_counts(tmp_path / "web")


@pytest.mark.parametrize(("layout", "stream"), LAYOUTS)
def test_a_shard_without_documents_is_read(tmp_path: Path, layout: Layout, stream: bool) -> None:
    write_shard(tmp_path / "a.arrow", [], layout=layout, stream=stream)
    shard = open_file(tmp_path / "a.arrow")
    assert (shard.documents, shard.tokens()) == (0, 0)


def test_tokens_behind_null_rows_are_not_counted() -> None:
    values, ends = pa.array([1, 2, 3, 4, 5], pa.int32()), pa.array([0, 2, 4, 5], pa.int32())
    made: Any = pa.ListArray.from_arrays(ends, values, mask=pa.array([False, True, False]))
    shard = opened(ipc([pa.record_batch({"tokens": made})]))
    assert read(shard) == [[1, 2], [], [5]]
    assert shard.tokens() == 3


def test_a_dictionary_column_before_the_tokens_does_not_matter() -> None:
    column = pa.array(["a", "b", "a"]).dictionary_encode()
    batch = pa.record_batch({"language": column, "tokens": pa.array([[1], [2, 3], []], pa.list_(pa.int32()))})
    for stream in (False, True):
        assert read(opened(ipc([batch], stream=stream))) == [[1], [2, 3], []]


def test_lists_of_no_tokens_are_read() -> None:
    assert read(opened(ipc(list_batches([[], []], pa.list_(pa.int32(), 0))))) == [[], []]


@pytest.mark.parametrize("dtype", INTEGERS[:3] + INTEGERS[4:7], ids=str)
def test_a_token_that_does_not_fit_the_type_is_an_error(tmp_path: Path, dtype: Any) -> None:
    with pytest.raises(ConfigError, match="do not fit"):
        write_shard(tmp_path / "a.arrow", [np.array([1, int(np.iinfo(dtype).max) + 1])], dtype=dtype)


def by_pyarrow(data: bytes, layout: Layout, stream: bool) -> Documents | None:
    """What a careful reader gives, or nothing."""
    try:
        reader: Any = (pa.ipc.open_stream if stream else pa.ipc.open_file)(data)
        batches = list(reader) if stream else [reader.get_batch(i) for i in range(reader.num_record_batches)]
        for batch in batches:
            batch.validate(full=True)
        columns = [batch.column(0).to_pylist() for batch in batches]
    except (pa.ArrowException, OSError, UnicodeDecodeError, MemoryError):
        return None
    return columns if layout == "batch" else [row or [] for column in columns for row in column]


@pytest.mark.parametrize("compression", [None, "lz4"])
@pytest.mark.parametrize(("layout", "stream"), LAYOUTS)
def test_a_flipped_byte_anywhere_gives_what_pyarrow_reads_or_an_error(
    layout: Layout, stream: bool, compression: str | None
) -> None:
    """A flipped token cannot be detected, nor a batch that says it has fewer rows. All else can."""
    some = some_documents()
    data = plain_shard(some, layout, stream, compression)
    rng = np.random.default_rng(3)
    for _ in range(1500):
        damaged = bytearray(data)
        place, change = int(rng.integers(len(data))), int(rng.integers(1, 256))
        damaged[place] ^= change
        try:
            found = read(opened(bytes(damaged)))
        except DataError:
            continue
        assert found == some or found == by_pyarrow(bytes(damaged), layout, stream), (place, change)


def both_readers(data: bytes) -> list[Callable[[], object]]:
    """The same file, mapped and read by ranges."""
    ranges = read_layout("part-0.arrow", len(data))
    return [lambda: read(opened(data)), lambda: read_from(data, read_from(data, ranges).block(0, 3))]


@pytest.mark.parametrize(
    "ends",
    [
        [0, (1 << 63) - 1, -2, 3],  # every difference is positive, if it is computed with 64 bits
        [0, 1 << 62, -(1 << 63), 3],
        [-4, -2, 0, 3],
        [2, 1, 2, 3],
        [0, 1, 2, 1 << 40],
    ],
)
def test_list_offsets_that_point_outside_of_the_tokens_are_an_error(ends: list[int]) -> None:
    data = bytearray(ipc(list_batches([[1], [2], [3]], pa.large_list(pa.int32()))))
    place = bytes(data).index(struct.pack("<4q", 0, 1, 2, 3))
    struct.pack_into("<4q", data, place, *ends)
    for attempt in both_readers(bytes(data)):
        with pytest.raises(DataError, match=r"part-0\.arrow: the file is damaged \(list offsets point outside"):
            attempt()


def test_a_record_batch_that_became_a_dictionary_is_missed() -> None:
    """One bit of its kind, and a stream would silently have fewer documents."""
    data = plain_shard([[1], [2], [3]] * 8, "list", True)
    kinds = []
    for place in range(len(data)):
        damaged = bytearray(data)
        damaged[place] ^= 1
        try:
            kinds.append(len(read(opened(bytes(damaged)))))
        except DataError:
            continue
    assert set(kinds) == {24}


def test_a_column_that_is_shorter_than_the_others_is_an_error() -> None:
    columns = {
        "number": pa.array(range(7), pa.int8()),
        "tokens": pa.array([[i] for i in range(7)], pa.list_(pa.int8())),
    }
    data = bytearray(ipc([pa.record_batch(columns)]))
    nodes = bytes(data).index(struct.pack("<6q", 7, 0, 7, 0, 7, 0))
    struct.pack_into("<q", data, nodes + 16, 6)
    for attempt in both_readers(bytes(data)):
        with pytest.raises(DataError, match="a column is shorter than its record batch"):
            attempt()


@pytest.mark.parametrize("kind", [pa.list_(pa.int8(), 2), pa.list_(pa.int8(), 0), pa.list_(pa.int8())], ids=str)
def test_more_rows_than_the_file_has_room_for_are_an_error_at_once(kind: Any) -> None:
    rows: list[Any] = [[1, 2] if kind.num_fields and "[2]" in str(kind) else []] * 3
    data = bytearray(ipc([pa.record_batch({"tokens": pa.array(rows, kind)})]))
    size = len(data)
    for place in range(0, size - 8, 8):
        if struct.unpack_from("<q", data, place) == (3,):  # the rows of the record batch, and of the column
            struct.pack_into("<q", data, place, 1 << 40)
    for attempt in both_readers(bytes(data)):
        with pytest.raises(DataError, match=r"part-0\.arrow"):
            attempt()
