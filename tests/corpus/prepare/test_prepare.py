"""Prepared corpora: the same bytes on any number of processes, nothing lost, and every option as promised."""

import csv
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fmsdata
from fmsdata.corpus.convert import convert_corpus
from fmsdata.corpus.counts import read_counts
from fmsdata.corpus.index import index_corpus
from fmsdata.corpus.prepare import removal
from fmsdata.corpus.scan import scan_file
from fmsdata.errors import ConfigError, DataError
from fmsdata.prepare import prepare_corpus, write_shard
from fmsdata.storage.local import file_entry
from fmsdata.storage.location import Location
from tests.corpus.prepare.texts import SMALL, expected, read_corpus, read_shard, tree, write_file, write_texts


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[str]]]:
    root = tmp_path_factory.mktemp("texts")
    return root, write_texts(root)


def prepare(source: Path, output: Path, **options: Any) -> Any:
    return prepare_corpus(source, output, "bytes", **{**SMALL, "processes": 1, **options})


@pytest.mark.parametrize("shuffle", [True, False])
def test_any_number_of_processes_writes_the_same_bytes(
    texts: tuple[Path, dict[str, list[str]]], tmp_path: Path, shuffle: bool
) -> None:
    options: dict[str, Any] = {"shuffle": shuffle, "validation": 0.2, "deduplicate": True}
    outputs = []
    for processes in (1, 2, 3) if shuffle else (1, 2):
        prepare(texts[0], tmp_path / str(processes), processes=processes, **options)
        outputs.append(tree(tmp_path / str(processes)))
    assert len(outputs[0]) > 10
    assert all(output == outputs[0] for output in outputs)


@pytest.mark.parametrize("shuffle", [True, False])
def test_all_documents_of_every_format_are_there_exactly_once(
    texts: tuple[Path, dict[str, list[str]]], tmp_path: Path, shuffle: bool
) -> None:
    root, files = texts
    done = prepare(root, tmp_path, shuffle=shuffle)
    for source in ("web", "wikí"):
        found = read_corpus(tmp_path, source)
        found.pop(b"", None)
        assert found == expected(files, source)
    assert done.tokens == sum(len(text.encode()) for each in files.values() for text in each)
    assert done.empty == sum(not text for each in files.values() for text in each)


def test_documents_are_shuffled_within_and_across_files(
    texts: tuple[Path, dict[str, list[str]]], tmp_path: Path
) -> None:
    root, files = texts
    prepare(root, tmp_path / "a", shard_tokens=6_000)
    prepare(root, tmp_path / "b", shard_tokens=6_000, seed=1)
    first = read_shard(tmp_path / "a" / "web" / "part-00000.arrow")
    holders = [{name for name, each in files.items() if text.decode() in each} for text in first]
    assert len({name for held in holders for name in held if name.startswith("web")}) >= 6
    in_file = [text.encode() for text in files["web/part 0.jsonl"] if text]
    order = [text for text in first if text in in_file]
    assert order != [text for text in in_file if text in order]
    assert first != read_shard(tmp_path / "b" / "web" / "part-00000.arrow")


def test_without_shuffling_each_file_becomes_one_shard_with_its_rows(
    texts: tuple[Path, dict[str, list[str]]], tmp_path: Path
) -> None:
    root, files = texts
    prepare(root, tmp_path, shuffle=False, shard_tokens=None)
    for name, each in files.items():
        assert read_shard(tmp_path / f"{name}.arrow") == [text.encode() for text in each]
    shards = [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*.arrow"))]
    assert len(shards) == len(files)


def test_without_shuffling_a_shard_size_cuts_files_in_order(
    texts: tuple[Path, dict[str, list[str]]], tmp_path: Path
) -> None:
    root, files = texts
    prepare(root, tmp_path, shuffle=False, shard_tokens=700)
    for name, each in files.items():
        shards = sorted((tmp_path / name).parent.glob(f"{Path(name).name}-*.arrow"))
        assert len(shards) > 1
        assert [text for shard in shards for text in read_shard(shard)] == [text.encode() for text in each]


def test_the_split_is_by_content_and_stable_when_files_are_added(
    texts: tuple[Path, dict[str, list[str]]], tmp_path: Path
) -> None:
    root, files = texts
    done = prepare(root, tmp_path / "all", validation=0.2)
    train, held = read_corpus(tmp_path / "all", "w*"), read_corpus(tmp_path / "all" / "validation")
    assert train + held == expected(files)
    assert not train.keys() & held.keys()  # copies of a document are on the same side
    assert 0.1 < held.total() / expected(files).total() < 0.3
    assert (done.documents, done.validation_documents) == (train.total(), held.total())
    few = {name: each for name, each in files.items() if name.startswith("wikí")}
    for name, each in few.items():
        write_file(tmp_path / "few" / name, each)
    prepare(tmp_path / "few", tmp_path / "some", validation=0.2)
    assert set(read_corpus(tmp_path / "some" / "validation")) == set(held) & set(expected(few))


def test_counts_are_those_that_index_would_write(texts: tuple[Path, dict[str, list[str]]], tmp_path: Path) -> None:
    prepare(texts[0], tmp_path, validation=0.2)
    for root in (tmp_path, tmp_path / "validation"):
        table = (root / "meta" / "counts.csv").read_text()
        with (root / "meta" / "counts.csv").open() as file:
            assert all(int(row["documents"]) for row in csv.DictReader(file))
        counts = read_counts(root / "web")
        assert counts.csv_root == str(root)
        if root != tmp_path:  # the index of the whole corpus also lists what was held out
            assert not index_corpus(root).written
            assert table == (root / "meta" / "counts.csv").read_text()


def test_held_out_documents_are_no_source_unless_they_are_named(
    texts: tuple[Path, dict[str, list[str]]], tmp_path: Path
) -> None:
    tmp_path = tmp_path / "prepared"
    prepare(texts[0], tmp_path, validation=0.2)
    assert _sources(path=str(tmp_path)) == {"web", "wikí"}
    assert _sources(path=str(tmp_path / "validation")) == {"web", "wikí"}
    assert _sources(path=str(tmp_path), sources={"validation": {"weight": 1}}) == {"validation"}
    convert_corpus(tmp_path, tmp_path.parent / "converted", layout="batch")
    assert _sources(path=str(tmp_path.parent / "converted")) == {"web", "wikí"}
    assert read_corpus(tmp_path.parent / "converted" / "validation") == read_corpus(tmp_path / "validation")
    with pytest.raises(DataError, match="is not a file of this version of `fmsdata prepare`"):
        prepare(texts[0], tmp_path.parent / "converted", validation=0.2)


def _sources(**config: Any) -> set[str]:
    """The sources that a run reads."""
    loader = {"batch_size": 4, "outputs": ["provenance"], "steps": 40}
    run = {"seed": 1, "documents": {"eos": 0}, "pack": {"seq_len": 64}, "lanes": 4, "loader": loader, **config}
    batches = fmsdata.build_loader(run, rank=0, world_size=1)
    return {span[0] for batch in batches for row in batch["provenance"] for span in row}


def test_of_equal_documents_the_first_stays(texts: tuple[Path, dict[str, list[str]]], tmp_path: Path) -> None:
    root, files = texts
    done = prepare(root, tmp_path / "plain", deduplicate=True)
    assert read_corpus(tmp_path / "plain") == Counter(dict.fromkeys(expected(files), 1))
    assert done.duplicates == expected(files).total() - len(expected(files))
    prepare(root, tmp_path / "ordered", shuffle=False, shard_tokens=None, deduplicate=True)
    seen: set[str] = set()
    for name, each in sorted(files.items()):
        kept = [text for i, text in enumerate(each) if not text or (text not in seen and text not in each[:i])]
        seen.update(each)
        assert read_shard(tmp_path / "ordered" / f"{name}.arrow") == [text.encode() for text in kept]


@pytest.mark.parametrize("bucket", [1, 7, 1000])
def test_duplicates_are_the_same_however_many_are_compared_at_once(
    texts: tuple[Path, dict[str, list[str]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bucket: int
) -> None:
    defaults = removal.find_dropped.__defaults__
    monkeypatch.setattr(removal.find_dropped, "__defaults__", (bucket,))
    assert defaults == (removal.BUCKET,)
    done = prepare(texts[0] / "wikí", tmp_path / "out", deduplicate=True)
    few = {name: each for name, each in texts[1].items() if name.startswith("wikí")}
    assert read_corpus(tmp_path / "out") == Counter(dict.fromkeys(expected(few), 1))
    assert done.duplicates == expected(few).total() - len(expected(few))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    files=st.lists(st.lists(st.text("ab\x85é", max_size=6), max_size=12), min_size=1, max_size=3),
    unit=st.integers(1, 40),
    piece=st.integers(1, 30),
    shard=st.integers(1, 40),
    shuffle=st.booleans(),
    seed=st.integers(0, 3),
)
def test_any_cut_into_units_pieces_and_shards_keeps_all_documents(
    tmp_path_factory: pytest.TempPathFactory,
    files: list[list[str]],
    unit: int,
    piece: int,
    shard: int,
    shuffle: bool,
    seed: int,
) -> None:
    root = tmp_path_factory.mktemp("any")
    for number, each in enumerate(files):
        write_file(root / "in" / f"{number}.txt", each)
    cut: dict[str, Any] = {"unit_bytes": unit, "piece_tokens": piece, "shard_tokens": shard}
    wanted = Counter(text.encode() for each in files for text in each)
    if not any(map(any, files)) and (shuffle or not wanted):
        with pytest.raises(DataError, match="empty or bad"):
            prepare(root / "in", root / "out", shuffle=shuffle, seed=seed, **cut)
        return
    prepare(root / "in", root / "out", shuffle=shuffle, seed=seed, **cut)
    found = read_corpus(root / "out")
    if shuffle:
        del wanted[b""]
    assert found == wanted
    if not shuffle:
        for number, each in enumerate(files):
            shards = sorted((root / "out" / "in").glob(f"{number}.txt-*.arrow"))
            assert [text for path in shards for text in read_shard(path)] == [text.encode() for text in each]


def test_the_type_of_tokens_follows_the_vocabulary(tmp_path: Path) -> None:
    write_file(tmp_path / "in" / "a.txt", ["one two", "three"])

    class Words:
        fingerprint = "words"

        def __init__(self, size: int) -> None:
            self._size = size

        def get_vocab(self) -> dict[str, int]:
            return {"a": self._size - 1}

        def encode(self, text: str) -> list[int]:
            return [self._size - 1 for _ in text.split()]

    for size, dtype in ((65_536, "uint16"), (65_537, "uint32")):
        done = prepare_corpus(tmp_path / "in", tmp_path / str(size), Words(size), processes=1)
        assert (done.dtype, done.tokens) == (dtype, 3)
        (shard,) = (tmp_path / str(size)).rglob("*.arrow")
        (some,) = scan_file(Location(shard), file_entry(shard.parent, shard.name))
        assert some.tokens.dtype == np.dtype(dtype)
        assert set(some.tokens.tolist()) == {size - 1}


def test_bad_lines_are_an_error_or_listed(tmp_path: Path) -> None:
    good = [json.dumps({"text": f"document {i}"}) for i in range(300)]
    lines = [*good[:200], "{nonsense", *good[200:250], json.dumps({"text": 7}), *good[250:]]
    (tmp_path / "in" / "web").mkdir(parents=True)
    (tmp_path / "in" / "web" / "a.jsonl").write_bytes("\n".join(lines).encode() + b'\n{"text": "\xff"}')
    with pytest.raises(DataError, match=r"a\.jsonl: line 201: it is not JSON .*--skip-bad"):
        prepare(tmp_path / "in", tmp_path / "out")
    finished = {path: path.stat().st_ino for path in (tmp_path / "out" / ".fmsdata-prepare" / "units").iterdir()}
    assert finished
    done = prepare(tmp_path / "in", tmp_path / "out", skip_bad=True)  # continues
    assert (done.bad, done.documents, done.continued) == (3, 300, True)
    assert [(file, line) for file, line, _ in done.bad_listed] == [("web/a.jsonl", line) for line in (201, 252, 303)]
    with (tmp_path / "out" / "meta" / "fmsdata-skipped.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["file"], int(row["line"])) for row in rows] == [("web/a.jsonl", line) for line in (201, 252, 303)]
    assert "not a string" in rows[1]["reason"]
    assert read_corpus(tmp_path / "out") == Counter(f"document {i}".encode() for i in range(300))


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.zst", "a.parquet"])
def test_a_cut_file_is_an_error_even_when_bad_lines_are_skipped(tmp_path: Path, name: str) -> None:
    write_file(tmp_path / "in" / "web" / name, ["one", "two"] * 200)
    data = (tmp_path / "in" / "web" / name).read_bytes()
    (tmp_path / "in" / "web" / name).write_bytes(data[: len(data) - 5])
    with pytest.raises(DataError, match=name):
        prepare(tmp_path / "in", tmp_path / "out", skip_bad=True)


def test_one_giant_document_and_empty_files_work(tmp_path: Path) -> None:
    write_file(tmp_path / "in" / "a.txt", ["x" * 3_000_000])
    write_file(tmp_path / "in" / "b.txt", [])
    (tmp_path / "in" / "c.jsonl").write_bytes(b"\n\n")
    done = prepare(tmp_path / "in", tmp_path / "out", unit_bytes=100_000, shard_tokens=1_000_000)
    assert (done.documents, done.tokens, done.empty) == (1, 3_000_000, 2)
    assert read_corpus(tmp_path / "out") == Counter([b"x" * 3_000_000])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda root: (root / "in", root / "in"), "is the source itself"),
        (lambda root: (root / "in", root / "in" / "out"), "is inside the source"),
        (lambda root: (root / "in", root), "is inside the output"),
        (lambda root: (root / "nowhere", root / "out"), "no such folder"),
        (lambda root: (root / "tokens", root / "out"), "is a shard of tokens"),
        (lambda root: (root / "lists", root / "out"), "holds tokens"),
        (lambda root: (root / "notes", root / "out"), r"2 others: 1 with no ending, 1 with \.md"),
        (lambda root: (root / "in", root / "full"), "is not empty"),
        (lambda root: (root / "in", root / "in" / "a.txt" / "out"), "can't be written|is inside the source"),
        (lambda root: (root / "in", root / "notes" / "README.md" / "out"), "Not a directory"),
        (lambda root: (root / "in", root / "notes" / "README.md"), "is a file"),
        (lambda root: (root / "in", Path("/proc/nowhere")), "can't be written to"),
    ],
)
def test_what_cannot_be_prepared_says_why(tmp_path: Path, make: Any, words: str) -> None:
    write_file(tmp_path / "in" / "a.txt", ["one"])
    write_shard(tmp_path / "tokens" / "a.arrow", [[1, 2]])
    (tmp_path / "lists").mkdir()
    pq.write_table(pa.table({"tokens": [[1, 2], [3]]}), tmp_path / "lists" / "a.parquet")
    for name in ("notes/README.md", "notes/LICENSE", "full/a.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    before = tree(tmp_path)
    with pytest.raises((ConfigError, DataError), match=words):
        prepare(*make(tmp_path))
    after = {name for name in tree(tmp_path) if not name.startswith("out/.fmsdata-prepare/")}
    assert after == before.keys()  # nothing is left where it does not belong


def test_a_source_named_validation_is_refused_only_with_a_split(tmp_path: Path) -> None:
    write_file(tmp_path / "in" / "validation" / "a.txt", ["one"])
    with pytest.raises(ConfigError, match="rename it"):
        prepare(tmp_path / "in", tmp_path / "out", validation=0.5)
    assert prepare(tmp_path / "in", tmp_path / "out").documents == 1


def test_a_single_file_is_a_source_with_its_name(tmp_path: Path) -> None:
    write_file(tmp_path / "books.jsonl.gz", ["one", "two"])
    write_file(tmp_path / "other.txt", ["three"])
    prepare(tmp_path / "books.jsonl.gz", tmp_path / "out")
    assert read_corpus(tmp_path / "out", "books") == Counter([b"one", b"two"])


def test_the_column_is_the_field_of_the_text(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text('{"body": "one", "text": "two"}\n')
    pq.write_table(pa.table({"body": ["three"], "text": ["four"]}), tmp_path / "in" / "b.parquet")
    prepare(tmp_path / "in", tmp_path / "out", column="body")
    assert read_corpus(tmp_path / "out") == Counter([b"one", b"three"])


@pytest.mark.parametrize("shuffle", [True, False])
def test_shards_smaller_than_a_document_have_one_each(tmp_path: Path, shuffle: bool) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("".join(f"document number {i}\n" for i in range(20)))
    prepare(tmp_path / "in", tmp_path / "out", shard_tokens=1, shuffle=shuffle)
    shards = list((tmp_path / "out").rglob("*.arrow"))
    assert 1 < len(shards) <= 20
    assert read_counts(shards[0].parent).documents.sum() == 20
