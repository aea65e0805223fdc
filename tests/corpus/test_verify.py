"""Verify finds what is wrong, says where, and reads on."""

import gzip
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from fmsdata.corpus.index import write_index
from fmsdata.corpus.shard_writer import write_shard
from fmsdata.corpus.verify import LISTED, verify_corpus
from fmsdata.errors import DataError
from tests.helpers import write_corpus


def problems(path: Path, **options: object) -> list[tuple[str, int | None, str]]:
    found = verify_corpus(path, **options)  # type: ignore[arg-type]
    return [(problem.shard, problem.document, problem.problem) for problem in found.problems]


def test_a_corpus_that_is_right_has_no_problems(corpus: Path) -> None:
    write_index(corpus)
    report = verify_corpus(corpus, vocabulary=250, duplicates=True)
    assert report.problems == []
    assert report.notes == []
    assert [(source.name, source.shards, source.documents) for source in report.sources] == [
        ("web", 3, 60),
        ("wiki", 2, 23),
    ]
    assert report.duplicates == 0


def test_tokens_outside_the_vocabulary_are_named(tmp_path: Path) -> None:
    write_shard(tmp_path / "web" / "a.arrow", [[1, 2], [9, 3, 11], [4], [10]], dtype=np.int16)
    write_shard(tmp_path / "web" / "b.arrow", [[1], [3, -1]], dtype=np.int16)
    assert problems(tmp_path, vocabulary=10) == [
        ("web/a.arrow", 1, "token 11 is outside the vocabulary of 10"),
        ("web/a.arrow", 3, "token 10 is outside the vocabulary of 10"),
        ("web/b.arrow", 1, "token -1 is negative"),
    ]
    assert problems(tmp_path) == [("web/b.arrow", 1, "token -1 is negative")]
    write_shard(tmp_path / "wiki" / "c.arrow", [[50]] * (LISTED + 5))
    found = problems(tmp_path / "wiki", vocabulary=10)
    assert len(found) == LISTED + 1
    assert found[-1] == ("c.arrow", None, "5 more problems of this kind")


def test_damage_does_not_hide_what_comes_after_it(corpus: Path) -> None:
    write_index(corpus)
    data = (corpus / "web" / "part-0.arrow").read_bytes()
    (corpus / "web" / "part-0.arrow").write_bytes(data[: len(data) // 2])
    write_shard(corpus / "wiki" / "part-1.arrow", [[1, 2]], dtype=np.int32)
    (damaged, documents, tokens) = problems(corpus)
    assert damaged[0] == "web/part-0.arrow"
    assert "not a whole Arrow IPC file" in damaged[2]
    assert documents[0] == tokens[0] == "wiki/part-1.arrow"
    assert "counts say 11 documents, but the file holds 1" in documents[2]
    assert "tokens, but the file holds 2" in tokens[2]


def test_rows_of_files_that_are_gone_are_a_problem(corpus: Path) -> None:
    write_index(corpus)
    (corpus / "web" / "part-1.arrow").unlink()
    (found,) = problems(corpus)
    assert "web/part-1.arrow" in found[2]
    assert "no such file" in found[2]


def test_bad_lines_and_cut_frames_of_text_are_named(tmp_path: Path) -> None:
    folder = tmp_path
    for name in "abcde":
        (folder / name).mkdir()
    (folder / "a" / "a.jsonl").write_bytes(b'{"text": "one"}\n{"text": 1}\nnonsense\n{"text": "four"}')
    (folder / "b" / "b.txt").write_bytes(b"fine\n\xff\xfe\n")
    (folder / "c" / "c.txt.gz").write_bytes(gzip.compress(b"one\ntwo\n" * 1000)[:-6])
    (folder / "d" / "d.zst").write_bytes(zstandard.compress(b"one\ntwo\n" * 1000)[:-6])
    (folder / "e" / "e.txt").write_bytes(b"fine")
    found = problems(tmp_path)
    assert [(shard, document) for shard, document, _ in found] == [
        ("a/a.jsonl", 1),
        ("a/a.jsonl", 2),
        ("b/b.txt", 1),
        ("c/c.txt.gz", None),
        ("d/d.zst", None),
    ]
    reasons = " ".join(reason for *_, reason in found)
    for words in ("not a string", "not JSON", "not UTF-8", "gzip member", "zstd frame"):
        assert words in reasons


def test_text_and_tokens_in_one_source_are_a_problem(tmp_path: Path) -> None:
    (tmp_path / "web").mkdir()
    pq.write_table(pa.table({"tokens": [[1, 2], [3]]}), tmp_path / "web" / "a.parquet")
    pq.write_table(pa.table({"text": ["one", "two"]}), tmp_path / "web" / "b.parquet")
    (tmp_path / "web" / "c.txt").write_text("one\n")
    assert problems(tmp_path) == [
        ("web/b.parquet", None, "holds text, but shards before it in source 'web' hold tokens"),
        ("web/c.txt", None, "is not parquet, like the shards before it in source 'web'"),
        ("web/c.txt", None, "holds text, but shards before it in source 'web' hold tokens"),
    ]
    write_shard(tmp_path / "web" / "d.arrow", [[1]])
    report = verify_corpus(tmp_path)
    assert report.problems == []
    assert "3 files are not read, such as web/a.parquet" in report.notes[0]


def test_duplicates_are_found_across_shards_types_and_layouts(tmp_path: Path) -> None:
    write_shard(tmp_path / "web" / "a.arrow", [[1, 2], [3], [], [1, 2]], dtype=np.uint16)
    write_shard(tmp_path / "wiki" / "b.arrow", [[7], [3], []], dtype=np.uint32, layout="batch")
    report = verify_corpus(tmp_path, duplicates=True)
    assert report.duplicates == 2
    assert [str(problem) for problem in report.problems] == [
        "web/a.arrow, document 3: is a duplicate of web/a.arrow, document 0",
        "wiki/b.arrow, document 1: is a duplicate of web/a.arrow, document 1",
    ]


def test_many_duplicates_are_counted_as_a_multiset(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    some = [rng.integers(0, 3, rng.integers(0, 4)).tolist() for _ in range(300)]
    write_shard(tmp_path / "web" / "a.arrow", some, dtype=np.uint16)
    counts = Counter(tuple(document) for document in some if document)
    assert verify_corpus(tmp_path, duplicates=True).duplicates == counts.total() - len(counts)


def test_copies_leftovers_and_missing_counts_are_notes(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    (tmp_path / "web" / "cache-0123456789abcdef.arrow").write_bytes(b"")
    (tmp_path / "web" / "part-0 copy.arrow").write_bytes((tmp_path / "web" / "part-0.arrow").read_bytes())
    report = verify_corpus(tmp_path)
    assert report.problems == []
    notes = " ".join(report.notes)
    for words in ("another program left there", "look like copies", "there are no counts"):
        assert words in notes


def test_an_unfinished_corpus_is_a_problem(corpus: Path) -> None:
    (corpus / ".fmsdata-prepare").mkdir()
    (found,) = problems(corpus)
    assert "did not finish" in found[2]


def test_a_folder_without_shards_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no shards"):
        verify_corpus(tmp_path)


def test_a_file_that_is_not_there_does_not_hide_wrong_counts_of_others(corpus: Path) -> None:
    counts = Path(str(write_index(corpus)))
    wiki, web = sorted((corpus / "wiki").glob("*.arrow")), sorted((corpus / "web").glob("*.arrow"))
    rows = counts.read_text().splitlines()
    at = next(i for i, row in enumerate(rows) if f"web/{web[0].name}" in row)
    rows[at] = ",".join([*rows[at].split(",")[:2], "5"])
    counts.write_text("\n".join(rows) + "\n")
    wiki[0].unlink()
    report = verify_corpus(corpus)
    found = [(problem.shard, problem.problem) for problem in report.problems]
    assert any(f"{wiki[0].name}, but there is no such file" in problem for _, problem in found)
    assert any(shard == f"web/{web[0].name}" and "counts say 5 tokens" in problem for shard, problem in found)
    assert not any("there are no counts" in note for note in report.notes)


def test_an_index_of_text_that_is_older_than_its_files_is_a_problem(tmp_path: Path) -> None:
    path = tmp_path / "web" / "a.jsonl"
    path.parent.mkdir()
    path.write_text('{"text": "one"}\n{"text": "two"}\n')
    write_index(tmp_path)
    assert verify_corpus(tmp_path).notes == []
    assert problems(tmp_path) == []
    with path.open("a") as file:
        file.write('{"text": "three"}\n')
    assert [(shard, problem[:27]) for shard, _, problem in problems(tmp_path)] == [
        ("web/a.jsonl", "the index of text lists 32 "),
        ("web/a.jsonl", "counts say 2 documents, but"),
    ]
