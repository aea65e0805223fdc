"""Counts: every spelling of a CSV row finds its shard; what disagrees is an error that names the file and the fix."""

import os
from pathlib import Path

import numpy as np
import pytest

import fmsdata
from fmsdata.core.lane import Lane
from fmsdata.corpus.counts import read_counts
from fmsdata.corpus.index import write_index
from fmsdata.corpus.manifest import FILE
from fmsdata.corpus.shard_writer import Layout, write_shard
from fmsdata.errors import CountsError, DataError
from fmsdata.planning.counts import Counts
from tests.helpers import documents, write_source

HEADER = "dataset/filename,documents,tokens"
DOCUMENTS = [[1, 2, 3], [4], [], [5, 6]]
TRUTH = (4, 6)


def write_csv(path: Path, *rows: str, header: str = HEADER) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


def write_shards(root: Path, *names: str, layout: Layout = "list") -> Path:
    for name in names:
        write_shard(root / name, DOCUMENTS, layout=layout)
    return root


def counted(folder: Path) -> dict[str, tuple[int, int]]:
    counts = read_counts(folder)
    return {
        shard: (documents, tokens)
        for shard, documents, tokens in zip(
            counts.shards, counts.documents.tolist(), counts.tokens.tolist(), strict=True
        )
    }


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """One source, `web`, of two shards."""
    return write_shards(tmp_path, "web/a.arrow", "web/b.arrow")


@pytest.mark.parametrize("prefix", ["/web/", "web/", "some/prefix/web/", "/some/prefix/web/", "./web/"])
def test_every_spelling_of_a_row_finds_its_shard(root: Path, prefix: str) -> None:
    write_csv(root / "meta/counts.csv", f"{prefix}a.arrow,7,70", f"{prefix}b.arrow,8,80")
    assert counted(root / "web") == {"a.arrow": (7, 70), "b.arrow": (8, 80)}


@pytest.mark.parametrize("prefix", ["/lang=en/dataset=x/", "lang=en/dataset=x/", "corpus/v1/lang=en/dataset=x/"])
@pytest.mark.parametrize("meta", ["meta", "lang=en/meta", "lang=en/dataset=x/meta"])
def test_nested_sources_find_their_counts_beside_them_or_above(tmp_path: Path, prefix: str, meta: str) -> None:
    write_shards(tmp_path, "lang=en/dataset=x/a.arrow", "lang=en/dataset=x/deep/er/b.arrow")
    write_csv(tmp_path / meta / "x_counts_1.csv", f"{prefix}a.arrow,7,70", f"{prefix}deep/er/b.arrow,8,80")
    assert counted(tmp_path / "lang=en/dataset=x") == {"a.arrow": (7, 70), "deep/er/b.arrow": (8, 80)}


def test_rows_may_start_at_the_folder_that_holds_meta(tmp_path: Path) -> None:
    write_shards(tmp_path, "lang=en/dataset=x/a.arrow")
    write_csv(tmp_path / "lang=en/meta/counts.csv", "dataset=x/a.arrow,7,70")
    assert counted(tmp_path / "lang=en/dataset=x") == {"a.arrow": (7, 70)}


def test_shards_of_the_same_name_in_different_sources_are_told_apart(tmp_path: Path) -> None:
    names = ["lang=en/dataset=x/a.arrow", "lang=de/dataset=x/a.arrow", "dataset=x/a.arrow"]
    write_shards(tmp_path, *names)
    write_csv(tmp_path / "meta/counts.csv", *(f"{name},{i},{10 * i}" for i, name in enumerate(names, 1)))
    assert [counted((tmp_path / name).parent)["a.arrow"] for name in names] == [(1, 10), (2, 20), (3, 30)]


def test_shards_of_the_same_name_in_one_source_are_told_apart(tmp_path: Path) -> None:
    write_shards(tmp_path, "web/x/a.arrow", "web/y/a.arrow", "web/a.arrow")
    write_csv(tmp_path / "meta/counts.csv", "web/x/a.arrow,1,10", "web/y/a.arrow,2,20", "web/a.arrow,3,30")
    assert counted(tmp_path / "web") == {"a.arrow": (3, 30), "x/a.arrow": (1, 10), "y/a.arrow": (2, 20)}


def test_several_csvs_are_read_together(root: Path) -> None:
    write_csv(root / "meta/counts_web.csv", "web/a.arrow,7,70")
    write_csv(root / "meta/more-counts-2.csv", "/web/b.arrow,8,80")
    write_csv(root / "meta/notes.csv", "this is no row", header="nor is this a header")
    assert counted(root / "web") == {"a.arrow": (7, 70), "b.arrow": (8, 80)}


def test_the_nearest_counts_that_speak_of_the_source_are_taken(tmp_path: Path) -> None:
    write_shards(tmp_path, "lang=en/web/a.arrow")
    write_csv(tmp_path / "meta/counts.csv", "lang=en/web/a.arrow,9,90")
    write_csv(tmp_path / "lang=en/web/meta/counts.csv", "other/b.arrow,1,10")
    assert counted(tmp_path / "lang=en/web") == {"a.arrow": (9, 90)}
    write_csv(tmp_path / "lang=en/meta/counts.csv", "lang=en/web/a.arrow,7,70")
    assert counted(tmp_path / "lang=en/web") == {"a.arrow": (7, 70)}


@pytest.mark.parametrize("layout", ["list", "batch"])
def test_without_counts_the_files_are_counted(tmp_path: Path, layout: Layout) -> None:
    write_shards(tmp_path, "web/a.arrow", "web/deep/b.arrow", layout=layout)
    assert counted(tmp_path / "web") == {"a.arrow": TRUTH, "deep/b.arrow": TRUTH}


def test_shards_that_no_row_speaks_of_are_counted(root: Path) -> None:
    write_csv(root / "meta/counts.csv", "web/a.arrow,7,70")
    assert counted(root / "web") == {"a.arrow": (7, 70), "b.arrow": TRUTH}


def test_rows_of_other_sources_are_no_concern(root: Path) -> None:
    write_csv(root / "meta/counts.csv", "web/a.arrow,7,70", "wiki/gone.arrow,1,10", "web2/gone.arrow,1,10")
    assert counted(root / "web") == {"a.arrow": (7, 70), "b.arrow": TRUTH}


@pytest.mark.parametrize("name", ["metadata", "my-meta", "meta", "meta.v2", "counts"])
def test_a_folder_with_meta_in_its_name_can_be_a_source(tmp_path: Path, name: str) -> None:
    write_shards(tmp_path, f"{name}/a.arrow", f"{name}/b.arrow")
    write_csv(tmp_path / "meta/counts.csv", f"{name}/a.arrow,7,70")
    assert counted(tmp_path / name) == {"a.arrow": (7, 70), "b.arrow": TRUTH}


def test_a_source_may_be_named_relative_to_where_the_process_stands(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_csv(root / "meta/counts.csv", "web/a.arrow,7,70")
    monkeypatch.chdir(root / "web")
    assert counted(Path(".")) == counted(root / "web") == {"a.arrow": (7, 70), "b.arrow": TRUTH}


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_line_ends_spaces_blank_lines_and_further_columns_do_not_matter(root: Path, end: str) -> None:
    lines = [" dataset/filename , tokens,documents,size", "", " web/a.arrow , 70, 7 ,1", "", "web/b.arrow,80,8,1"]
    (root / "meta").mkdir()
    (root / "meta/counts.csv").write_bytes(end.join(lines).encode())
    assert counted(root / "web") == {"a.arrow": (7, 70), "b.arrow": (8, 80)}


def test_the_same_row_twice_is_no_disagreement(root: Path) -> None:
    write_csv(root / "meta/counts.csv", "web/a.arrow,7,70", "/web/a.arrow,7,70", "p/web/a.arrow,7,70")
    write_csv(root / "meta/counts2.csv", "web/a.arrow,7,70")
    assert counted(root / "web")["a.arrow"] == (7, 70)


@pytest.mark.parametrize(
    "rows",
    [
        ("web/a.arrow,7,70", "web/a.arrow,7,71"),
        ("web/a.arrow,7,70", "/web/a.arrow,8,70"),
        ("p/web/a.arrow,7,70", "q/web/a.arrow,7,71"),
    ],
)
def test_rows_that_disagree_are_an_error(root: Path, rows: tuple[str, str]) -> None:
    write_csv(root / "meta/counts.csv", *rows)
    with pytest.raises(CountsError, match=r"counts\.csv.*web/a\.arrow"):
        read_counts(root / "web")


def test_csvs_that_disagree_are_an_error(root: Path) -> None:
    write_csv(root / "meta/counts.csv", "web/a.arrow,7,70")
    write_csv(root / "meta/old_counts.csv", "web/a.arrow,6,60")
    with pytest.raises(CountsError, match=r"old_counts\.csv:2.*web/a\.arrow.*fmsdata index"):
        read_counts(root / "web")


@pytest.mark.parametrize(
    "header", ["", "dataset/filename", "dataset/filename,documents", "web/a.arrow,7,70", "documents,tokens,x", "a;b;c"]
)
def test_a_header_of_another_kind_is_an_error(root: Path, header: str) -> None:
    write_csv(root / "meta/counts.csv", "web/a.arrow,7,70", header=header)
    with pytest.raises(CountsError, match=r"counts\.csv.*header.*dataset/filename,documents,tokens"):
        read_counts(root / "web")


@pytest.mark.parametrize(
    "row", ["web/a.arrow", "web/a.arrow,7", "web/a.arrow,x,70", "web/a.arrow,7.5,70", "web/a.arrow,,"]
)
def test_a_row_that_is_not_numbers_is_an_error_that_names_the_line(root: Path, row: str) -> None:
    write_csv(root / "meta/counts.csv", "web/b.arrow,8,80", row)
    with pytest.raises(CountsError, match=r"counts\.csv:3.*web/a\.arrow"):
        read_counts(root / "web")


def test_a_row_for_a_missing_file_is_an_error(root: Path) -> None:
    write_csv(root / "meta/counts.csv", "web/a.arrow,7,70", "web/gone.arrow,8,80")
    with pytest.raises(CountsError, match=r"web/gone\.arrow.*no such file.*fmsdata index"):
        read_counts(root / "web")


def test_a_row_for_a_missing_file_behind_a_prefix_is_an_error(root: Path) -> None:
    write_csv(root / "meta/counts.csv", "some/prefix/web/a.arrow,7,70", "some/prefix/web/deep/gone.arrow,8,80")
    with pytest.raises(CountsError, match=r"web/deep/gone\.arrow.*no such file.*fmsdata index"):
        read_counts(root / "web")


@pytest.mark.parametrize("layout", ["list", "batch"])
@pytest.mark.parametrize("said", [TRUTH[0] - 1, TRUTH[0] + 1, 1000])
def test_counts_of_documents_that_disagree_with_the_file_are_an_error(
    tmp_path: Path, layout: Layout, said: int
) -> None:
    write_shards(tmp_path, "web/deep/a.arrow", layout=layout)
    write_csv(tmp_path / "meta/counts.csv", f"web/deep/a.arrow,{said},{TRUTH[1]}")
    reader = fmsdata.ShardReader(tmp_path / "web")
    with pytest.raises(CountsError) as caught:
        next(iter(reader))
    for part in ("'web'", "deep/a.arrow", f"{said} documents", f"holds {TRUTH[0]}", "`fmsdata index`"):
        assert part in str(caught.value)


@pytest.mark.parametrize("said", [0, TRUTH[1] - 1, TRUTH[1] + 1])
def test_counts_of_tokens_that_disagree_with_the_file_are_an_error(tmp_path: Path, said: int) -> None:
    write_shards(tmp_path, "web/a.arrow", layout="list")
    write_csv(tmp_path / "meta/counts.csv", f"web/a.arrow,{TRUTH[0]},{said}")
    reader = fmsdata.ShardReader(tmp_path / "web", name="other name")
    with pytest.raises(CountsError) as caught:
        next(iter(reader))
    for part in ("'other name'", "a.arrow", f"{said} tokens", f"holds {TRUTH[1]}", "`fmsdata index`"):
        assert part in str(caught.value)


def test_counts_that_are_right_are_read_in_peace(root: Path) -> None:
    write_csv(root / "meta/counts.csv", *(f"web/{name}.arrow,{TRUTH[0]},{TRUTH[1]}" for name in "ab"))
    chunk = fmsdata.ShardReader(root / "web").open(Lane()).read()
    assert len(chunk) > 0


def test_a_shard_that_counts_call_empty_is_looked_at(root: Path) -> None:
    write_csv(root / "meta/counts.csv", f"web/a.arrow,{TRUTH[0]},{TRUTH[1]}", "web/b.arrow,0,0")
    with pytest.raises(CountsError, match=r"0 documents in b.arrow but the file holds 4; run `fmsdata index`"):
        fmsdata.ShardReader(root / "web")


def test_index_writes_what_is_read_back(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    write_source(tmp_path / "web", documents(rng, 30))
    write_source(tmp_path / "lang=en/dataset=x", documents(rng, 20), layout="batch")
    before = [counted(tmp_path / name) for name in ("web", "lang=en/dataset=x")]
    target = write_index(tmp_path).local
    assert target == tmp_path / "meta/counts.csv"
    lines = target.read_text().splitlines()
    assert lines[0] == HEADER
    assert len(lines) == 1 + 6
    assert "/web/part-0.arrow,{},{}".format(*before[0]["part-0.arrow"]) in lines
    assert [counted(tmp_path / name) for name in ("web", "lang=en/dataset=x")] == before
    assert sorted(os.listdir(tmp_path / "meta")) == ["counts.csv", FILE]


def test_index_replaces_counts_and_keeps_the_old_ones(root: Path) -> None:
    old = write_csv(root / "meta/my_counts.csv", "web/a.arrow,7,70").read_text()
    other = write_csv(root / "meta/web_counts_2.csv", "web/a.arrow,8,80", "web/gone.arrow,1,1").read_text()
    write_index(root, replace=True)
    assert counted(root / "web") == {"a.arrow": TRUTH, "b.arrow": TRUTH}
    assert {file.name for file in (root / "meta").iterdir()} == {"counts.csv", FILE, "replaced"}
    kept = {file.read_text() for file in (root / "meta/replaced").iterdir()}
    assert kept == {old, other}


def test_index_does_not_believe_the_counts_that_are_there(root: Path) -> None:
    write_csv(root / "meta/counts.csv", "no row", header="no header")
    write_index(root, replace=True)
    assert counted(root / "web") == {"a.arrow": TRUTH, "b.arrow": TRUTH}


def test_index_leaves_the_counts_alone_if_a_shard_is_torn(root: Path) -> None:
    write_csv(root / "meta/counts.csv", "web/a.arrow,7,70")
    (root / "web/b.arrow").write_bytes((root / "web/b.arrow").read_bytes()[:-20])
    with pytest.raises(DataError, match=r"b\.arrow"):
        write_index(root)
    assert (root / "meta/counts.csv").read_text() == f"{HEADER}\nweb/a.arrow,7,70\n"


def test_a_missing_folder_a_file_and_an_empty_folder_are_errors(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    for name, why in (("gone", "no such folder"), ("file", "not a folder"), ("empty", "no shards")):
        with pytest.raises(DataError, match=f"{name}.*{why}"):
            read_counts(tmp_path / name)
        with pytest.raises(DataError, match=name):
            write_index(tmp_path / name)


def test_hidden_and_unfinished_files_are_no_shards(root: Path) -> None:
    write_shards(root, "web/.hidden.arrow", "web/.copy/c.arrow")
    (root / "web/.d.arrow.unfinished").touch()
    (root / "web/e.arrow.tmp").touch()
    assert list(counted(root / "web")) == ["a.arrow", "b.arrow"]


def test_the_order_in_which_files_are_written_or_listed_does_not_matter(tmp_path: Path) -> None:
    names = [f"web/{folder}{i}.arrow" for folder in ("", "x/", "x-y/") for i in range(5)]
    shuffled = np.random.default_rng(0).permutation(names).tolist()
    write_shards(tmp_path / "one", *names)
    write_shards(tmp_path / "two", *shuffled)
    write_csv(tmp_path / "one/meta/counts.csv", *(f"{name},{len(name)},70" for name in names))
    write_csv(tmp_path / "two/meta/counts.csv", *(f"/{name},{len(name)},70" for name in shuffled))
    one, two = (read_counts(tmp_path / name / "web") for name in ("one", "two"))
    assert list(one.shards) == sorted(one.shards)
    assert one.shards == two.shards
    assert one.documents.tolist() == two.documents.tolist()
    assert one.digest == two.digest


def test_digest_changes_with_any_change() -> None:
    def digest(shards: tuple[str, ...], documents: list[int], tokens: list[int]) -> str:
        return Counts(shards, np.array(documents), np.array(tokens)).digest

    digests = [
        digest(("a", "b"), [1, 2], [10, 20]),
        digest(("a", "c"), [1, 2], [10, 20]),
        digest(("a", "b"), [1, 3], [10, 20]),
        digest(("a", "b"), [1, 2], [10, 21]),
        digest(("a", "b"), [2, 1], [10, 20]),
        digest(("a", "b"), [1, 2], [20, 10]),
        digest(("b", "a"), [1, 2], [10, 20]),
        digest(("a",), [1], [10]),
        digest(("a", "b", "c"), [1, 2, 0], [10, 20, 0]),
        digest(("a", "b"), [10, 20], [1, 2]),
    ]
    assert len(set(digests)) == len(digests)
    assert digests[0] == digest(("a", "b"), [1, 2], [10, 20])


def test_mean_length_is_tokens_per_document_and_never_below_one() -> None:
    assert Counts(("a", "b"), np.array([1, 3]), np.array([10, 10])).mean_length == 5
    assert Counts(("a",), np.array([3]), np.array([0])).mean_length == 1
    assert Counts(("a",), np.array([0]), np.array([0])).mean_length == 1
