"""Reading shards: every layout gives the stored tokens, without copies; a damaged file gives an error, nothing else."""

import io
import subprocess
import sys
from collections.abc import Iterable, Sequence
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fmsdata
from fmsdata.corpus.shard_writer import Layout, write_shard
from fmsdata.errors import DataError
from fmsdata.formats.arrow.shard import ArrowShard
from fmsdata.storage.mapped import MappedFile
from fmsdata.testing import stored_documents
from tests.helpers import documents, open_file, write_source

Documents = list[list[int]]
INTEGERS: list[Any] = [np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)]
LAYOUTS: list[tuple[Layout, bool]] = [("list", False), ("list", True), ("batch", False), ("batch", True)]
COMPRESSIONS = [None, "lz4", "zstd"]


def some_documents(count: int = 30, longest: int = 20, seed: int = 0) -> Documents:
    return [document.tolist() for document in documents(np.random.default_rng(seed), count, longest)]


def ipc(batches: Sequence[Any], *, stream: bool = False, compression: str | None = None, schema: Any = None) -> bytes:
    """Record batches as the bytes of an Arrow file or stream."""
    sink = io.BytesIO()
    writer: Any = pa.ipc.new_stream if stream else pa.ipc.new_file
    options: Any = pa.ipc.IpcWriteOptions
    schema = batches[0].schema if schema is None else schema
    with writer(sink, schema, options=options(compression=compression)) as file:
        for batch in batches:
            file.write_batch(batch)
    return sink.getvalue()


def list_batches(some: Documents, kind: Any, rows: int = 7, name: str = "tokens") -> list[Any]:
    starts = range(0, len(some), rows)
    return [pa.record_batch([pa.array(some[start : start + rows], kind)], names=[name]) for start in starts]


def token_batches(some: Documents, kind: Any, name: str = "tokens") -> list[Any]:
    return [pa.record_batch([pa.array(document, kind)], names=[name]) for document in some]


def plain_shard(some: Documents, layout: Layout, stream: bool, compression: str | None = None) -> bytes:
    batches = list_batches(some, pa.list_(pa.uint16())) if layout == "list" else token_batches(some, pa.uint16())
    return ipc(batches, stream=stream, compression=compression)


def opened(data: bytes, column: str | None = None) -> ArrowShard:
    return ArrowShard(pa.py_buffer(data), "part-0.arrow", column)


def read(shard: ArrowShard, first: int = 0, stop: int | None = None) -> Documents:
    """A run of documents; each must be there in its full length."""
    stop = shard.documents if stop is None else stop
    if first == stop:
        return []
    located = shard.locate(np.array([first]), np.array([stop])) if shard.plain else None
    block = shard.read(first, stop)
    assert len(block.array) == len(block.start) == len(block.length) == stop - first
    if located is not None:
        starts, lengths, (row,) = located
        rows = slice(row, row + stop - first)
        assert [starts[rows].tolist(), lengths[rows].tolist()] == [block.start.tolist(), block.length.tolist()]
    found = []
    for array, start, length in zip(block.array.tolist(), block.start.tolist(), block.length.tolist(), strict=True):
        assert 0 <= start <= start + length <= len(block.arrays[array])
        found.append(block.arrays[array][start : start + length].tolist())
    return found


def epoch_of(reader: fmsdata.ShardReader) -> dict[int, tuple[int, list[int]]]:
    """The first epoch of a source with one shard: by document, where its tokens start, and the tokens."""
    items = takewhile(lambda item: item.epochs == [0], reader)
    return {item.document: (item.spans[0].start, item.tokens.tolist()) for item in items}


def stripped(document: list[int], strip: Iterable[int]) -> tuple[int, list[int]]:
    """What stripping means, one token at a time."""
    unwanted, start, stop = set(strip), 0, len(document)
    while start < stop and document[start] in unwanted:
        start += 1
    while start < stop and document[stop - 1] in unwanted:
        stop -= 1
    return start, document[start:stop]


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize(("layout", "stream"), LAYOUTS)
def test_what_is_written_is_read(tmp_path: Path, layout: Layout, stream: bool, dtype: Any) -> None:
    limits = [int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)]
    some = [limits, [], [1], *([i, 2, i] for i in range(40)), [], limits * 50]
    write_shard(tmp_path / "a.arrow", some, dtype=dtype, layout=layout, stream=stream, rows=9)
    shard = open_file(tmp_path / "a.arrow")
    assert shard.documents == len(some)
    assert shard.tokens() == sum(map(len, some))
    assert read(shard) == some
    assert all(array.dtype == dtype for array in shard.read(0, 1).arrays)


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("make", [pa.list_, pa.large_list], ids=["list", "large_list"])
def test_lists_of_either_size_are_read(make: Any, stream: bool, compression: str | None) -> None:
    some = some_documents()
    for values in (pa.uint8(), pa.int64()):
        shard = opened(ipc(list_batches(some, make(values)), stream=stream, compression=compression))
        assert read(shard) == some
        assert shard.tokens() == sum(map(len, some))


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("stream", [False, True])
def test_lists_of_fixed_size_are_read(stream: bool, compression: str | None) -> None:
    some = [[i, i + 1, i + 2] for i in range(20)]
    shard = opened(ipc(list_batches(some, pa.list_(pa.int32(), 3)), stream=stream, compression=compression))
    assert read(shard) == some
    assert read(shard, 5, 16) == some[5:16]
    assert shard.tokens() == 60


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize(("layout", "stream"), LAYOUTS)
def test_any_run_of_documents_is_read(layout: Layout, stream: bool, compression: str | None) -> None:
    some = some_documents()
    shard = opened(plain_shard(some, layout, stream, compression))
    for first in range(0, 30, 3):
        for stop in range(first + 1, 31, 2):
            assert read(shard, first, stop) == some[first:stop]


@pytest.mark.parametrize("kept", [0, 60, 1 << 18])
@pytest.mark.parametrize("make", [pa.list_, pa.large_list, None])
@settings(deadline=None, max_examples=30)
@given(
    cuts=st.sets(st.integers(0, 200), min_size=2),
    which=st.lists(st.integers(0, 1000), min_size=1),
    rows=st.integers(1, 250),
    times=st.integers(1, 4),
)
def test_any_blocks_are_located_together(
    make: Any, kept: int, cuts: set[int], which: list[int], rows: int, times: int
) -> None:
    """Whatever is kept of the list offsets, in record batches of any size, and with a document in each.

    In any order, also blocks that come twice, as at the end of an epoch; and when they were located before.
    """
    all_blocks = list(pairwise(sorted(cuts)))
    blocks = [all_blocks[i % len(all_blocks)] for i in which]
    some = some_documents(200)
    data = ipc(token_batches(some, pa.uint16()) if make is None else list_batches(some, make(pa.uint16()), rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fmsdata.formats.arrow.shard.KEPT_BYTES", kept)
        shard = opened(data)
        for _ in range(times):
            located = shard.locate(*np.array(blocks).T)
    assert located is not None
    starts, lengths, firsts = map(np.ndarray.tolist, located)
    for (first, stop), row in zip(blocks, firsts, strict=True):
        for number in range(first, stop):
            start, length = starts[row + number - first], lengths[row + number - first]
            assert shard.whole[start : start + length].tolist() == some[number]


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("listed", [False, True], ids=["batch", "list"])
def test_columns_before_and_behind_the_tokens_do_not_matter(
    listed: bool, stream: bool, compression: str | None
) -> None:
    some = some_documents(12)
    batches = []
    for start in range(0, 12, 4) if listed else range(12):
        rows: list[Any] = some[start : start + 4] if listed else some[start]
        others = {
            "text": pa.array(["x" * i for i in range(len(rows))], pa.string()),
            "number": pa.array(range(len(rows)), pa.int64()),
            "with nulls": pa.array([None] * len(rows), pa.int16()),
            "bytes": pa.array([b"abc"] * len(rows), pa.large_binary()),
            "flag": pa.array([True] * len(rows), pa.bool_()),
            "nested": pa.array(
                [{"a": [1.5], "b": "x"}] * len(rows), pa.struct([("a", pa.list_(pa.float32())), ("b", pa.string())])
            ),
        }
        tokens = pa.array(rows, pa.list_(pa.int32()) if listed else pa.int32())
        batches.append((others, tokens))
    for before in ([], ["text"], ["number"], ["text", "number", "with nulls", "bytes", "flag"], ["nested", "text"]):
        made = [
            pa.record_batch({**{name: others[name] for name in before}, "tokens": tokens, "behind": others["text"]})
            for others, tokens in batches
        ]
        assert read(opened(ipc(made, stream=stream, compression=compression), "tokens")) == some


@pytest.mark.parametrize(("layout", "stream"), LAYOUTS)
@pytest.mark.parametrize("column", ["tokens", "input_ids", "ü", ""])
def test_the_only_column_may_have_any_name(tmp_path: Path, layout: Layout, stream: bool, column: str) -> None:
    write_shard(tmp_path / "a.arrow", [[1, 2], [3]], layout=layout, stream=stream, column=column)
    assert read(open_file(tmp_path / "a.arrow")) == [[1, 2], [3]]
    assert read(open_file(tmp_path / "a.arrow", column)) == [[1, 2], [3]]


def test_the_column_is_the_one_named_else_tokens_else_the_only_one_that_can_be() -> None:
    one, two, text = pa.array([[1, 2]]), pa.array([[3]]), pa.array(["x"])
    assert read(opened(ipc([pa.record_batch({"ids": one, "tokens": two})]))) == [[3]]
    assert read(opened(ipc([pa.record_batch({"ids": one, "tokens": two})]), "ids")) == [[1, 2]]
    assert read(opened(ipc([pa.record_batch({"text": text, "ids": one})]))) == [[1, 2]]
    with pytest.raises(DataError, match=r"part-0\.arrow.*'tokens'.*ids.*more"):
        opened(ipc([pa.record_batch({"ids": one, "more": two})]))


def test_a_missing_column_is_an_error_that_names_those_there_are() -> None:
    data = ipc([pa.record_batch({"a": pa.array([1]), "b": pa.array(["x"])})])
    with pytest.raises(DataError, match=r"part-0\.arrow: no column 'c'.*a: int64.*b: string"):
        opened(data, "c")


@pytest.mark.parametrize(
    "column",
    [pa.array([1.5]), pa.array(["x"]), pa.array([[1.5]]), pa.array([[[1]]]), pa.array([True]), pa.nulls(1)],
    ids=lambda column: str(column.type),
)
def test_a_column_of_another_type_is_an_error(column: Any) -> None:
    with pytest.raises(DataError, match=r"part-0\.arrow.*'tokens' is .*integers"):
        opened(ipc([pa.record_batch({"tokens": column})]))


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("make", [pa.list_, pa.large_list], ids=["list", "large_list"])
def test_null_rows_are_empty_documents(make: Any, stream: bool, compression: str | None) -> None:
    rows: list[Any] = [None, [1, 2], None, [], [3], None]
    batches = [pa.record_batch({"tokens": pa.array(some, make(pa.uint16()))}) for some in (rows, [[7]], [None])]
    shard = opened(ipc(batches, stream=stream, compression=compression))
    assert read(shard) == [[], [1, 2], [], [], [3], [], [7], []]
    assert read(shard, 2, 7) == [[], [], [3], [], [7]]
    assert shard.tokens() == 4


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize(
    "column",
    [
        pa.array([1, None], pa.int32()),
        pa.array([[1], [2, None]], pa.list_(pa.int32())),
        pa.array([[1, 2], [None, 3]], pa.list_(pa.int32(), 2)),
    ],
    ids=lambda column: str(column.type),
)
def test_nulls_among_the_tokens_are_an_error(column: Any, compression: str | None) -> None:
    shard = opened(ipc([pa.record_batch({"tokens": column})], compression=compression))
    with pytest.raises(DataError, match=r"part-0\.arrow.*null"):
        shard.read(0, shard.documents)


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("stream", [False, True])
def test_slices_and_batches_without_rows_are_read(stream: bool, compression: str | None) -> None:
    some = some_documents()
    whole = pa.record_batch({"tokens": pa.array(some, pa.list_(pa.uint16()))})
    parts = [whole.slice(5, 7), whole.slice(3, 0), whole.slice(29), whole.slice(0, 1), whole.slice(9, 0)]
    expected = [*some[5:12], some[29], some[0]]
    shard = opened(ipc(parts, stream=stream, compression=compression))
    assert read(shard) == expected
    assert [read(shard, i, i + 1)[0] for i in range(len(expected))] == expected
    assert shard.tokens() == sum(map(len, expected))


@pytest.mark.parametrize("stream", [False, True])
def test_slices_of_token_columns_are_read(stream: bool) -> None:
    whole = pa.record_batch({"tokens": pa.array(range(100), pa.uint16())})
    parts = [whole.slice(i, i % 5) for i in range(50)]
    assert read(opened(ipc(parts, stream=stream))) == [list(range(i, i + i % 5)) for i in range(50)]


@pytest.mark.parametrize("stream", [False, True])
def test_a_token_shard_without_batches_has_no_documents(stream: bool) -> None:
    shard = opened(ipc([], stream=stream, schema=pa.schema({"tokens": pa.int32()})))
    assert (shard.documents, shard.tokens()) == (0, 0)


def test_many_batches_of_different_sizes_are_read(tmp_path: Path) -> None:
    """Metadata of record batches is compared with that of earlier ones; sizes of 0 and of more bytes look different."""
    rng = np.random.default_rng(0)
    sizes = rng.choice([0, 0, 1, 3, 200, 70_000], 400, p=[0.2, 0.2, 0.2, 0.2, 0.19, 0.01]).tolist()
    some = [rng.integers(0, 60_000, size).tolist() for size in sizes]
    for stream in (False, True):
        write_shard(tmp_path / "a.arrow", some, dtype=np.uint16, layout="batch", stream=stream)
        shard = open_file(tmp_path / "a.arrow")
        assert shard.documents == 400
        assert shard.tokens() == sum(sizes)
        assert read(shard) == some


@pytest.mark.parametrize(("layout", "stream"), LAYOUTS)
def test_tokens_are_views_of_the_mapped_file(tmp_path: Path, layout: Layout, stream: bool) -> None:
    write_shard(tmp_path / "a.arrow", some_documents(), dtype=np.uint16, layout=layout, stream=stream, rows=7)
    buffer = MappedFile(tmp_path / "a.arrow").buffer
    shard = ArrowShard(buffer, "a.arrow")
    mapped = np.frombuffer(memoryview(buffer), np.uint8)
    before = pa.total_allocated_bytes()
    for array in shard.read(0, shard.documents).arrays:
        assert np.shares_memory(array, mapped)
        assert not array.flags.writeable
    assert pa.total_allocated_bytes() == before


def test_documents_of_a_reader_are_read_only(tmp_path: Path) -> None:
    write_source(tmp_path / "web", [[11, 12, 13, 14]] * 5, shards=1)
    item = next(iter(fmsdata.ShardReader(tmp_path / "web", strip=[11])))
    assert item.tokens.tolist() == [12, 13, 14]
    assert not item.tokens.flags.writeable


def test_an_empty_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.arrow").touch()
    with pytest.raises(DataError, match=r"a\.arrow.*empty"):
        open_file(tmp_path / "a.arrow")


def test_a_folder_or_nothing_in_place_of_a_shard_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.arrow").mkdir()
    for name in ("a.arrow", "gone.arrow"):
        with pytest.raises(DataError, match=name):
            open_file(tmp_path / name)


@pytest.mark.parametrize("compression", [None, "lz4"])
@pytest.mark.parametrize(("layout", "stream"), LAYOUTS)
def test_a_file_cut_short_anywhere_is_an_error(layout: Layout, stream: bool, compression: str | None) -> None:
    data = plain_shard(some_documents(), layout, stream, compression)
    for length in range(len(data)):
        with pytest.raises(DataError, match=r"part-0\.arrow.*write it again or remove it"):
            opened(data[:length])


@pytest.mark.parametrize(("layout", "stream"), LAYOUTS)
def test_a_torn_shard_of_a_source_is_an_error_that_names_it(tmp_path: Path, layout: Layout, stream: bool) -> None:
    write_source(tmp_path / "web", some_documents(), layout=layout, stream=stream)
    path = tmp_path / "web/part-1.arrow"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"part-1\.arrow"):
        fmsdata.ShardReader(tmp_path / "web")


@pytest.mark.parametrize("start", [b"", b"ARROW1\0\0", b"\xff\xff\xff\xff", b"\xff\xff\xff\xff\x10\0\0\0"], ids=repr)
def test_random_bytes_are_an_error(start: bytes) -> None:
    rng = np.random.default_rng(0)
    for size in [*range(64), *rng.integers(64, 4096, 200).tolist()]:
        for end in (b"", b"ARROW1", (size // 2).to_bytes(4, "little") + b"ARROW1"):
            with pytest.raises(DataError, match=r"part-0\.arrow"):
                opened(start + rng.bytes(size) + end)


@pytest.mark.parametrize(("layout", "stream"), LAYOUTS)
def test_a_flipped_byte_behind_the_schema_raises_nothing_but_data_errors(layout: Layout, stream: bool) -> None:
    data = plain_shard(some_documents(), layout, stream)
    schema_end = len(ipc([], stream=True, schema=opened(data)._column.schema))
    end = len(data) if stream else data.rindex(b"\xff\xff\xff\xff\0\0\0\0")
    rng = np.random.default_rng(3)
    errors = 0
    for _ in range(600):
        damaged = bytearray(data)
        damaged[rng.integers(schema_end, end)] ^= int(rng.integers(1, 256))
        try:
            shard = opened(bytes(damaged))
            shard.read(0, shard.documents)
        except DataError:
            errors += 1
    assert errors > 50


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_a_flipped_byte_in_compressed_tokens_gives_documents_or_an_error(compression: str) -> None:
    data = plain_shard([[7] * 500] * 4, "batch", False, compression)
    first, size, body = opened(data)._messages[0].tolist()
    rng = np.random.default_rng(3)
    errors = 0
    for _ in range(300):
        damaged = bytearray(data)
        damaged[rng.integers(first + size, first + size + body)] ^= int(rng.integers(1, 256))
        try:
            assert [len(document) for document in read(opened(bytes(damaged)))] == [500] * 4
        except DataError:
            errors += 1
    assert errors > 20


FEW_FILES = """
import os, resource, sys
from itertools import islice
import fmsdata
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
reader = fmsdata.ShardReader(sys.argv[1])
documents = iter(reader)
seen = {next(documents).shard}
before = len(os.listdir("/proc/self/fd"))
seen |= {item.shard for item in islice(documents, 2000)}
print(len(seen), len(os.listdir("/proc/self/fd")) - before)
"""


def test_open_files_do_not_grow_with_the_shards(tmp_path: Path) -> None:
    write_source(tmp_path / "web", [[i] for i in range(10, 910)], shards=450)
    command = [sys.executable, "-c", FEW_FILES, str(tmp_path / "web")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["450", "0"], done.stderr


@pytest.mark.parametrize("strip", [(), (0,), (0, 1), (1, 2), (0, 1, 2, 3)])
@pytest.mark.parametrize("min_length", [0, 1, 3])
@pytest.mark.parametrize("layout", ["list", "batch"])
def test_stripping_takes_as_many_tokens_as_stand_at_either_end(
    tmp_path: Path, layout: Layout, strip: tuple[int, ...], min_length: int
) -> None:
    rng = np.random.default_rng(0)
    some: Documents = [rng.integers(0, 4, rng.integers(0, 9)).tolist() for _ in range(250)]
    for run in (7, 8, 9, 100):
        middle = [5, 0, 0, 5]
        some += [[0] * run, [0] * run + middle, middle + [0] * run, [0] * run + middle + [0] * run, [0] * run + [5]]
    write_source(tmp_path / "web", some, shards=1, layout=layout)
    found = epoch_of(fmsdata.ShardReader(tmp_path / "web", strip=strip, min_length=min_length))
    expected = {i: stripped(document, strip) for i, document in enumerate(some)}
    assert found == {i: one for i, one in expected.items() if len(one[1]) >= max(1, min_length)}


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_stripping_works_where_tokens_are_decoded(tmp_path: Path, compression: str | None) -> None:
    some = [[0] * (i % 11) + [5, 0, 6] + [0] * (i % 7) for i in range(60)]
    (tmp_path / "web").mkdir()
    (tmp_path / "web/a.arrow").write_bytes(plain_shard(some, "batch", False, compression))
    found = epoch_of(fmsdata.ShardReader(tmp_path / "web", strip=[0]))
    assert found == {i: (i % 11, [5, 0, 6]) for i in range(60)}


def test_stripping_stops_at_the_ends_of_the_document(tmp_path: Path) -> None:
    """Its neighbours in memory consist of the same tokens."""
    some = [[0] * 20, [0, 0, 9], [0] * 20, [9, 0], [0] * 3, [9], [0] * 20]
    write_source(tmp_path / "web", some, shards=1)
    assert epoch_of(fmsdata.ShardReader(tmp_path / "web", strip=[0])) == {1: (2, [9]), 3: (0, [9]), 5: (0, [9])}


def test_an_epoch_holds_every_document_that_is_left_after_stripping(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    write_source(tmp_path / "web", [rng.integers(0, 3, rng.integers(0, 30)) for _ in range(300)], shards=4)
    stored = stored_documents({"web": tmp_path / "web"}, strip=[0], min_length=4)
    reader = fmsdata.ShardReader(tmp_path / "web", strip=[0], min_length=4)
    items = list(takewhile(lambda item: item.epochs == [0], reader))
    assert len(items) == len(stored)
    for item in items:
        (span,) = item.spans
        assert stored["web", span.shard, span.document][span.start : span.stop].tolist() == item.tokens.tolist()


@pytest.mark.parametrize("layout", ["list", "batch"])
@pytest.mark.parametrize(
    ("some", "options"),
    [
        ([[]] * 40, {}),
        ([[1, 2, 3]] * 40, {"min_length": 4}),
        ([[0] * 30, [0]] * 20, {"strip": [0]}),
        ([[0, 1, 2, 0]] * 40, {"strip": [0], "min_length": 3}),
    ],
    ids=["empty", "short", "stripped", "both"],
)
def test_a_source_of_which_nothing_is_left_is_an_error(
    tmp_path: Path, layout: Layout, some: Documents, options: dict[str, Any]
) -> None:
    write_source(tmp_path / "web", some, layout=layout)
    reader = fmsdata.ShardReader(tmp_path / "web", **options)
    with pytest.raises(DataError, match=r"'web'.*none of its 40 documents.*min_length"):
        next(iter(reader))


def test_one_document_that_passes_among_many_that_do_not_is_found(tmp_path: Path) -> None:
    write_source(tmp_path / "web", [[1]] * 700 + [[1, 2, 3]] + [[1]] * 700)
    items = fmsdata.ShardReader(tmp_path / "web", min_length=2)
    assert [item.tokens.tolist() for _, item in zip(range(3), items, strict=False)] == [[1, 2, 3]] * 3
