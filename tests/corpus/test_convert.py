"""Converted corpora hold the same documents in the same order."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fmsdata.corpus.convert import convert_corpus
from fmsdata.corpus.index import index_corpus, write_index
from fmsdata.corpus.scan import scan_file
from fmsdata.corpus.shard_writer import BATCH_TOKENS, write_shard, writing_shard
from fmsdata.errors import ConfigError, CountsError, DataError
from fmsdata.storage.local import file_entry
from fmsdata.storage.location import Location
from tests.helpers import documents, write_source


def read(root: Path, source: str) -> list[list[int]]:
    """All documents of a source, in order."""
    found: list[list[int]] = []
    for path in sorted((root / source).rglob("*.arrow")):
        for some in scan_file(Location(path), file_entry(path.parent, path.name)):
            ends = some.ends.tolist()
            found += [some.tokens[ends[i] : ends[i + 1]].tolist() for i in range(len(ends) - 1)]
    return found


def plain(some: list[npt.NDArray[Any]], shards: int) -> list[list[int]]:
    return [document.tolist() for shard in range(shards) for document in some[shard::shards]]


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 100),
    count=st.integers(0, 40),
    first=st.sampled_from(["list", "batch"]),
    second=st.sampled_from(["list", "batch"]),
    dtype=st.sampled_from([None, "uint16", "int64"]),
    shard_tokens=st.sampled_from([None, 1, 50, 10_000]),
)
def test_documents_order_and_counts_stay(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    count: int,
    first: Any,
    second: Any,
    dtype: str | None,
    shard_tokens: int | None,
) -> None:
    root = tmp_path_factory.mktemp("convert")
    some = documents(np.random.default_rng(seed), count)
    write_source(root / "in" / "lang=en" / "web", some, layout=first, dtype=np.int32)
    done = convert_corpus(root / "in", root / "out", layout=second, dtype=dtype, shard_tokens=shard_tokens)
    assert read(root / "out", "lang=en/web") == plain(some, 3)
    assert (done.documents, done.tokens) == (count, sum(map(len, some)))
    if shard_tokens is None:
        names = [path.name for path in sorted((root / "out" / "lang=en" / "web").iterdir())]
        assert names == ["part-0.arrow", "part-1.arrow", "part-2.arrow"]
        assert not index_corpus(root / "out").written
    for path in (root / "out").rglob("*.arrow"):
        with pa.ipc.open_file(str(path)) as file:
            kind = file.schema.field(0).type
            assert pa.types.is_list(kind) == (second == "list")
            if count >= 3 and path.stat().st_size:
                assert str(kind.value_type if second == "list" else kind) in (dtype or "int32", "uint32")
    if shard_tokens is not None and count:
        with (root / "out" / "meta" / "counts.csv").open() as file_:
            rows = list(csv.DictReader(file_))
        assert all(int(row["tokens"]) <= shard_tokens or int(row["documents"]) == 1 for row in rows)


def test_list_columns_of_parquet_files_are_token_shards(tmp_path: Path) -> None:
    (tmp_path / "in" / "web").mkdir(parents=True)
    rows = [[1, 2, 3], [], [4], None, [70_000]]
    pq.write_table(
        pa.table({"id": [1] * 5, "input_ids": pa.array(rows)}), tmp_path / "in/web/a.parquet", row_group_size=2
    )
    convert_corpus(tmp_path / "in", tmp_path / "out", column="input_ids", dtype="uint32")
    assert read(tmp_path / "out", "web") == [[1, 2, 3], [], [4], [], [70_000]]
    assert (tmp_path / "out" / "web" / "a.parquet.arrow").exists()


def test_tokens_that_do_not_fit_and_other_mistakes_are_errors(tmp_path: Path) -> None:
    write_shard(tmp_path / "in" / "web" / "a.arrow", [[1, 2], [3], [5, 70_000]])
    source, output = tmp_path / "in", tmp_path / "out"
    with pytest.raises(DataError, match=r"a\.arrow, document 2: token 70000 does not fit uint16"):
        convert_corpus(source, output, dtype="uint16")
    assert not list(output.rglob("*.arrow"))
    assert not list(output.rglob(".*"))
    for options, words in (
        ({"dtype": "float32"}, "must be an integer type"),
        ({"dtype": "nonsense"}, "must be an integer type"),
        ({"layout": "rows"}, "must be one of list, batch"),
        ({"shard_tokens": 0}, "must be at least 1"),
    ):
        with pytest.raises(ConfigError, match=words):
            convert_corpus(source, tmp_path / "other", **options)
    with pytest.raises(ConfigError, match="is inside the source"):
        convert_corpus(source, source / "out")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("one\n")
    with pytest.raises(DataError, match="holds text; run `fmsdata prepare`"):
        convert_corpus(tmp_path / "texts", tmp_path / "third")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty"):
        convert_corpus(source, tmp_path / "full")


def test_counts_that_disagree_with_the_source_are_an_error(tmp_path: Path) -> None:
    write_shard(tmp_path / "in" / "web" / "a.arrow", [[1, 2], [3]])
    write_index(tmp_path / "in")
    write_shard(tmp_path / "in" / "web" / "a.arrow", [[1, 2]])
    with pytest.raises(CountsError, match="counts say 2 documents and 3 tokens but the file holds 1 and 2"):
        convert_corpus(tmp_path / "in", tmp_path / "out")


def test_a_record_batch_of_lists_stays_below_the_limit_of_its_offsets(tmp_path: Path) -> None:
    long = np.zeros(BATCH_TOKENS - 5, np.uint8)
    with writing_shard(Location(tmp_path / "a.arrow"), dtype=np.uint8) as writer:
        writer.write(long, np.array([0, len(long)]))
        writer.write(np.arange(7, dtype=np.uint8), np.array([0, 5, 7]))
    with pa.ipc.open_file(str(tmp_path / "a.arrow")) as file:
        assert [file.get_batch(i).num_rows for i in range(file.num_record_batches)] == [2, 1]
