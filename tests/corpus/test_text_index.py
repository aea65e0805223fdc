"""The index of text: made once, kept beside the corpus or in a cache folder, checked whenever it is used."""

import gzip
import json
import logging
import multiprocessing
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import fmsdata
from fmsdata import testing
from fmsdata.core.iterator import Exhausted
from fmsdata.core.lane import Lane
from fmsdata.corpus import text_copy, text_counts
from fmsdata.corpus.index import index_corpus
from fmsdata.corpus.text_index import FILE, TextIndex, read_table, write_table
from fmsdata.corpus.tokenizer import open_tokenizer
from fmsdata.errors import ConfigError, CountsError, DataError
from fmsdata.formats import line_index
from fmsdata.formats.compression import Frames
from fmsdata.prefetch.open_files import OpenFiles
from fmsdata.prepare import write_shard
from fmsdata.storage.settings import CacheSettings, Storage
from tests.fuzz.mutations import damage_bytes
from tests.helpers import maker
from tests.text_files import SUFFIXES, encode, expected, write, write_source

LANES = 4


def some_texts(count: int = 90, seed: int = 1) -> list[str | None]:
    rng = np.random.default_rng(seed)
    texts: list[str | None] = ["é" * int(n) + f" {i}" for i, n in enumerate(rng.integers(0, 60, count))]
    texts[3], texts[10] = None, ""
    return texts


def read_all(reader: fmsdata.ShardReader) -> Counter[bytes]:
    """The documents of an epoch, from all lanes."""
    reader = reader.with_max_epochs(1)
    found: Counter[bytes] = Counter()
    for index in range(LANES):
        for item in items(reader, index):
            found[bytes(item.tokens.astype(np.uint8))] += 1
    return found


def items(reader: fmsdata.ShardReader, lane: int) -> Any:
    iterator = reader.open(Lane(index=lane, count=LANES, seed=3))
    while True:
        try:
            chunk = iterator.read()
        except Exhausted:
            return
        yield from chunk


def counted(texts: list[str | None]) -> Counter[bytes]:
    return Counter(text for text in expected(texts) if text)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "fmsdata" / "fmsdata-text"


def forbid_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, no file of lines may be indexed."""

    def fail(*_: object) -> None:
        raise AssertionError("a file was indexed")

    monkeypatch.setattr(text_counts, "index_lines", fail)


# Kept in the cache folder.


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_format_is_read_and_indexed_once(
    tmp_path: Path, cache: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = some_texts()
    web = write_source(tmp_path / "web", texts, suffix, frame=300)
    first = fmsdata.ShardReader(web)
    assert first.holds_text()
    assert first.size().documents == 90
    assert read_all(first) == counted(texts)
    forbid_passes(monkeypatch)
    again = fmsdata.ShardReader(web)
    assert again.describe() == first.describe()
    assert read_all(again) == counted(texts)
    if suffix != "parquet":
        assert stat.S_IMODE(cache.stat().st_mode) == 0o700
        write(web / f"part-1.{suffix}", ["another"])
        with pytest.raises(AssertionError, match="indexed"):
            fmsdata.ShardReader(web)


def test_a_damaged_index_in_the_cache_is_made_again(tmp_path: Path, cache: Path) -> None:
    texts = some_texts()
    web = write_source(tmp_path / "web", texts, "jsonl")
    fmsdata.ShardReader(web)
    for file in cache.glob("*.index"):
        file.write_bytes(file.read_bytes()[:-9])
    assert read_all(fmsdata.ShardReader(web)) == counted(texts)


def test_without_a_writable_cache_folder_text_is_still_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    texts = some_texts()
    web = write_source(tmp_path / "web", texts, "txt.gz")
    with caplog.at_level(logging.WARNING, "fmsdata"):
        assert read_all(fmsdata.ShardReader(web)) == counted(texts)
    assert "its index can't be kept" in caplog.text
    monkeypatch.setattr(text_copy, "MOST_LINES", 100)
    with pytest.raises(ConfigError, match=r"storage\.cache"):
        fmsdata.ShardReader(web)


def test_the_cache_of_storage_settings_is_used(tmp_path: Path, cache: Path) -> None:
    web = write_source(tmp_path / "web", some_texts(), "txt")
    storage = Storage(cache=CacheSettings(path=str(tmp_path / "own"), limit=1 << 30))
    fmsdata.ShardReader(web, storage=storage)
    assert len(list((tmp_path / "own").rglob("*.index"))) == 3
    assert not cache.exists()


def _open(web: Path, barrier: Any, results: Any) -> None:
    barrier.wait()
    results.put(fmsdata.ShardReader(web).counts.digest)


def test_processes_that_start_together_index_once_and_agree(tmp_path: Path, cache: Path) -> None:
    web = write_source(tmp_path / "web", some_texts(600), "jsonl.gz", shards=6)
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    started = [context.Process(target=_open, args=(web, barrier, results)) for _ in range(2)]
    for process in started:
        process.start()
    digests = {results.get(timeout=100) for _ in started}
    for process in started:
        process.join()
    assert digests == {fmsdata.ShardReader(web).counts.digest}
    assert len(list(cache.glob("*.index"))) == 6
    assert not list(cache.glob("*.unfinished"))


# Kept beside the corpus.


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    root = tmp_path / "corpus"
    write_source(root / "web", some_texts(60), "jsonl.zst", frame=300)
    write_source(root / "deep/wiki", some_texts(31), "parquet", shards=2)
    write_source(root / "code", some_texts(40), "txt", shards=1)
    return root


def test_an_index_beside_the_corpus_is_used_wherever_the_corpus_is(
    corpus: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = {name: fmsdata.ShardReader(corpus / name).describe() for name in ("web", "deep/wiki", "code")}
    done = index_corpus(corpus)
    assert done.text is not None
    assert done.file.name == FILE
    assert (done.written, done.documents, len(done.text.entries)) == (True, 131, 6)
    assert not index_corpus(corpus).written
    moved = Path(shutil.copytree(corpus, tmp_path / "moved", copy_function=shutil.copyfile))  # with new times
    shutil.rmtree(cache)
    forbid_passes(monkeypatch)
    for name, described in without.items():
        reader = fmsdata.ShardReader(moved / name)
        assert reader.describe() == described
        assert reader.counts.csv_root == str(moved)
        assert read_all(reader).total() > 20
    assert not cache.exists()


def test_only_changed_files_are_read_again(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index_corpus(corpus)
    write(corpus / "web/part-1.jsonl.zst", ["new", "ones"])
    write(corpus / "web/part-7.jsonl.zst", ["new"])
    os.remove(corpus / "code/part-0.txt")
    read: list[str] = []
    index_lines = line_index.index_lines

    def note(name: str, size: int) -> Any:
        read.append(Path(name).name)
        return index_lines(name, size)

    monkeypatch.setattr(text_counts, "index_lines", note)
    done = index_corpus(corpus)
    assert sorted(read) == ["part-1.jsonl.zst", "part-7.jsonl.zst"]
    assert done.text is not None
    assert "code/part-0.txt" not in done.text.entries
    assert done.documents == 31 + 40 + 3


def test_a_stale_index_beside_the_corpus_is_an_error(corpus: Path) -> None:
    index_corpus(corpus)
    write(corpus / "web/part-1.jsonl.zst", ["another"])
    with pytest.raises(
        CountsError, match=r"lists web/part-1\.jsonl\.zst with .* bytes, but the file has .*fmsdata index"
    ):
        fmsdata.ShardReader(corpus / "web")
    fmsdata.ShardReader(corpus / "deep/wiki")


def test_files_that_the_index_lacks_are_read_with_a_note(corpus: Path) -> None:
    index_corpus(corpus)
    write(corpus / "web/part-9.jsonl.zst", ["new"])
    reader = fmsdata.ShardReader(corpus / "web")
    assert reader.size().documents == 61
    (note,) = reader.counts.notes
    assert "lacks 1 of the 4 shards, such as part-9.jsonl.zst" in note


def test_a_damaged_index_is_an_error_and_never_other_documents(corpus: Path) -> None:
    """Also if what is damaged still looks like an index."""
    index_corpus(corpus)
    place = corpus / "meta" / FILE
    data, web = place.read_bytes(), counted(some_texts(60))
    rng = np.random.default_rng(5)
    refused = 0
    for _ in range(120):
        place.write_bytes(damage_bytes(rng, data))
        try:
            assert read_all(fmsdata.ShardReader(corpus / "web")) == web
        except DataError:
            refused += 1
    assert refused > 40
    entries = dict(read_table(data, "index").entries)
    for column in range(4):  # numbers that a table may hold, but not this one
        for number in (-1, 0, 5, 1 << 20, 1 << 62, (1 << 63) - 1):
            lines = entries["web/part-0.jsonl.zst"].lines
            assert lines is not None
            points = lines.points.copy()
            points[1, column] = number
            changed = {
                **entries,
                "web/part-0.jsonl.zst": entries["web/part-0.jsonl.zst"]._replace(lines=type(lines)(points)),
            }
            place.write_bytes(write_table(TextIndex(changed)))
            if not np.array_equal(points, lines.points):
                with pytest.raises(DataError):
                    read_all(fmsdata.ShardReader(corpus / "web"))


def test_indexing_a_folder_that_cannot_be_written_is_an_error(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (corpus / "meta").write_text("a file")
    with pytest.raises(DataError, match=r"can't be written"):
        index_corpus(corpus)


def test_text_and_tokens_of_one_corpus_are_indexed_each_in_its_way(corpus: Path) -> None:
    write_shard(corpus / "tokens/part-0.arrow", [[1, 2, 3], [4]])
    (corpus / "tokens/README.txt").write_text("a note\n")
    (corpus / "lists").mkdir()
    pq.write_table(pa.table({"tokens": [[1, 2], [3]]}), corpus / "lists/a.parquet")
    done = index_corpus(corpus)
    assert done.text is not None
    assert (done.rows, done.documents, done.tokens, len(done.text.entries)) == (2, 4, 7, 6)
    assert any("README.txt" in note for note in done.notes)
    assert fmsdata.ShardReader(corpus / "lists").size() == (2, 3)
    assert not fmsdata.ShardReader(corpus / "lists").holds_text()
    assert fmsdata.ShardReader(corpus / "tokens").size() == (2, 4)


# Tokens.


def test_tokens_are_counted_with_a_tokenizer_and_make_natural_weights(corpus: Path) -> None:
    sources: Any = {"web": {}, "code": {}}
    options = {"documents__tokenizer": "bytes", "sources": sources}
    with pytest.raises(ConfigError, match="fmsdata index CORPUS --tokenizer"):
        maker(corpus, **options)
    maker(corpus, documents__tokenizer="bytes", sources={"web": {"weight": 1}, "code": {"weight": 2}})
    index_corpus(corpus)
    with pytest.raises(ConfigError, match="fmsdata index CORPUS --tokenizer"):
        maker(corpus, **options)
    done = index_corpus(corpus, tokenizer=open_tokenizer("bytes"))
    assert done.text is not None
    tokens = {
        name: sum(map(len, expected(some_texts(n)))) for name, n in (("web", 60), ("deep/wiki", 31), ("code", 40))
    }
    assert done.text.tokens == sum(tokens.values())
    weights = maker(corpus, **options)(0, 1).state_dict()["pipeline"]
    shares = json.loads(weights)["lines"]["children"]["below"]["children"]["below"]["children"]["below"]["weights"]
    assert shares["web"] / shares["code"] == pytest.approx(tokens["web"] / tokens["code"])
    kept = index_corpus(corpus, tokenizer=open_tokenizer("bytes"))
    assert "6 text files were tokenized before with the same tokenizer" in kept.notes
    assert not kept.written
    assert not index_corpus(corpus).written  # what was counted is kept


def test_counts_of_another_tokenizer_are_not_used(corpus: Path) -> None:
    class Words:
        fingerprint = "words"

        def encode_batch(self, texts: Any) -> list[list[int]]:
            return [[1] * len(text.split()) for text in texts]

    index_corpus(corpus, tokenizer=open_tokenizer(Words()))
    reader = fmsdata.ShardReader(corpus / "web")
    assert reader.counts.text_tokens == sum(len((text or "").split()) for text in some_texts(60))
    assert fmsdata.Tokenize(reader, Words()).is_counted
    assert not fmsdata.Tokenize(reader, "bytes").is_counted
    done = index_corpus(corpus, tokenizer=open_tokenizer("bytes"))
    assert "tokenized before" not in " ".join(done.notes)
    assert fmsdata.Tokenize(fmsdata.ShardReader(corpus / "web"), "bytes").is_counted


def test_a_killed_index_leaves_no_wrong_index_and_continues(tmp_path: Path, cache: Path) -> None:
    corpus = tmp_path / "corpus"
    for i in range(40):
        write(corpus / f"web/part-{i:02}.jsonl", some_texts(50, seed=i))
    code = f"""
import time
from fmsdata.corpus import token_lengths
from fmsdata.corpus.index import index_corpus
from fmsdata.corpus.tokenizer import open_tokenizer
count = token_lengths._count
token_lengths._count = lambda *given: (time.sleep(0.05), count(*given))[1]
index_corpus({str(corpus)!r}, tokenizer=open_tokenizer("bytes"))
"""
    process = subprocess.Popen([sys.executable, "-c", code])
    kept = corpus / "meta/fmsdata-tokens/web"
    while len(list(kept.glob("*.ipc")) if kept.exists() else []) < 3:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (corpus / "meta" / FILE).exists()
    done = index_corpus(corpus, tokenizer=open_tokenizer("bytes"))
    assert "tokenized before" in " ".join(done.notes)
    assert done.text is not None
    assert done.text.tokens == sum(len(text) for i in range(40) for text in expected(some_texts(50, seed=i)))


# Files that can't be entered in the middle.


@pytest.mark.parametrize("suffix", ["jsonl.gz", "txt.zst", "parquet"])
def test_a_file_that_is_one_frame_is_copied_once_and_read_from_the_copy(
    tmp_path: Path, cache: Path, suffix: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(text_copy, "MOST_LINES", 5500)
    monkeypatch.setattr(text_copy, "MOST_ROWS", 2000)
    monkeypatch.setattr(text_copy, "GROUP", 500)
    texts = some_texts(300)
    web = write_source(tmp_path / "web", texts, suffix, rows=10_000)
    small = write_source(tmp_path / "small", texts, suffix, rows=10, frame=300)
    with caplog.at_level(logging.WARNING, "fmsdata"):
        reader = fmsdata.ShardReader(web)
    assert "copying 3 files" in caplog.text
    assert "which take" in caplog.text
    copies = sorted(cache.glob("*.parquet"))
    assert len(copies) == 3
    assert all(pq.ParquetFile(copy).num_row_groups > 5 for copy in copies)
    assert read_all(reader) == counted(texts)
    before = [copy.stat().st_mtime_ns for copy in copies]
    again = fmsdata.ShardReader(web)
    assert [copy.stat().st_mtime_ns for copy in sorted(cache.glob("*.parquet"))] == before
    assert again.describe() == reader.describe()
    fmsdata.ShardReader(small)
    assert len(list(cache.glob("*.parquet"))) == 3  # small frames need no copy


def test_a_block_decompresses_no_more_than_its_frames_or_its_part_of_the_copy(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resume in the middle of a file reads only what its blocks are in, counted in decompressed bytes."""
    monkeypatch.setattr(text_copy, "MOST_LINES", 1 << 14)
    monkeypatch.setattr(text_copy, "GROUP", 1 << 12)
    texts: list[str | None] = [f"{i} " + "x" * 200 for i in range(3000)]
    whole = sum(map(len, expected(texts)))
    for kind, frame in (("one", 1 << 30), ("many", 1 << 13)):
        folder = tmp_path / kind
        write(folder / "part-0.txt.gz", texts, frame=frame)
        reader = fmsdata.ShardReader(folder, block_tokens=1 << 10)  # 4 KiB of text
        decompressed = 0
        feed = Frames.feed

        def count(self: Frames, data: Any, feed: Any = feed) -> Any:
            nonlocal decompressed
            for piece in feed(self, data):
                decompressed += len(piece.data)
                yield piece

        monkeypatch.setattr(Frames, "feed", count)
        lane = Lane(index=0, count=1, seed=1)
        iterator = reader.open(lane, {"block": 40, "document": 3})
        chunk = iterator.read()
        assert len(chunk) > 0
        assert decompressed <= (0 if kind == "one" else 3 << 13)
        assert decompressed < whole / 10
        monkeypatch.setattr(Frames, "feed", feed)


def test_a_copy_is_refused_if_the_original_changes(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_copy, "MOST_LINES", 2000)
    web = write_source(tmp_path / "web", some_texts(300), "jsonl.gz", shards=1)
    reader = fmsdata.ShardReader(web)
    items_read = iter(reader)
    next(items_read)
    (web / "part-0.jsonl.gz").write_bytes(encode(["other"], "jsonl.gz"))
    with pytest.raises(DataError, match=r"part-0\.jsonl\.gz: the file .* during the run"):
        list(islice(items_read, 2000))


@pytest.mark.parametrize("suffix", ["txt", "jsonl.zst", "parquet"])
def test_a_text_file_that_changes_during_a_run_is_an_error(tmp_path: Path, suffix: str) -> None:
    web = write_source(tmp_path / "web", some_texts(300), suffix, shards=1, frame=400)
    items_read = iter(fmsdata.ShardReader(web, block_tokens=64))
    next(items_read)
    (web / f"part-0.{suffix}").write_bytes(encode(some_texts(299), suffix, frame=400))
    with pytest.raises(DataError, match=f"part-0.{suffix}: the file .* during the run"):
        list(islice(items_read, 2000))


def test_a_copy_that_was_killed_leaves_nothing_behind(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_copy, "MOST_LINES", 2000)
    web = write_source(tmp_path / "web", some_texts(300), "jsonl.gz", shards=1)
    fmsdata.ShardReader(web)
    (copy,) = cache.glob("*.parquet")
    left = cache / f".{copy.name}.0123abcd.unfinished"
    copy.rename(left)  # as if the process had ended before the end
    assert read_all(fmsdata.ShardReader(web)) == counted(some_texts(300))
    assert not left.exists()
    assert copy.exists()


def test_a_bad_line_stops_a_copy_with_its_place(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_copy, "MOST_LINES", 10)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n{"text": 5}\n'))
    with pytest.raises(DataError, match=r"a\.jsonl\.gz: line 2: the field 'text' is a number"):
        fmsdata.ShardReader(tmp_path)
    assert not list(cache.glob("*.parquet"))
    assert not list(cache.glob(".*"))


def test_decoded_text_stays_within_the_budget_on_many_lanes(tmp_path: Path) -> None:
    texts: list[str | None] = [f"{i} " + "x" * 400 for i in range(4000)]
    web = write_source(tmp_path / "web", texts, "jsonl.zst", frame=1 << 15)
    budget = 1 << 18
    reader = fmsdata.ShardReader(web, storage=Storage(prefetch_bytes=budget)).with_max_epochs(1)
    host = OpenFiles(1.0)
    lanes = [reader.open(Lane(index=i, count=32, seed=1, host=host)) for i in range(32)]
    held = [lane.read() for _ in range(4) for lane in lanes]  # all lanes hold chunks
    total = sum(len(item.tokens) for chunk in held for item in chunk)
    decoded = host.decoded(reader.path.storage)
    assert total > budget
    assert decoded._batch_bytes <= budget / 2 + (1 << 17)
    assert decoded._copies.bytes <= budget / 2 + max(int(chunk.lengths().sum()) for chunk in held)


# Folders that can't be read as they are.


def test_a_folder_says_what_it_found_and_what_helps(tmp_path: Path) -> None:
    folder = tmp_path / "web"
    folder.mkdir()
    for i in range(2):
        pq.write_table(pa.table({"id": [1], "input_ids": [[1, 2]]}), folder / f"{i}.parquet")
    with pytest.raises(DataError) as error:
        fmsdata.ShardReader(folder)
    assert str(error.value) == (
        f"{folder}: no .arrow shards, but 2 .parquet files with the column input_ids; set documents.column"
    )
    assert fmsdata.ShardReader(folder, column="input_ids").size() == (2, 4)
    write(folder / "a.jsonl", ["a"])
    with pytest.raises(DataError, match="1 jsonl and 2 parquet files; a source has files of one kind: select them"):
        fmsdata.ShardReader(folder)
    assert fmsdata.ShardReader(folder, files="*.jsonl").size().documents == 1
    other = tmp_path / "other"
    other.mkdir()
    (other / "a.json").write_text("{}")
    with pytest.raises(DataError, match=r"but this has 1 file \(1 \.json\), such as a\.json; rename \.json files"):
        fmsdata.ShardReader(other)


def test_arrow_shards_are_read_and_other_files_beside_them_are_not(tmp_path: Path) -> None:
    write_shard(tmp_path / "web/a.arrow", [[1, 2, 3]])
    write(tmp_path / "web/a.jsonl", ["one", "two"])
    write(tmp_path / "news/a.jsonl", ["one"])
    reader = fmsdata.ShardReader(tmp_path / "web")
    assert reader.size() == (1, 3)
    (note,) = reader.counts.notes
    assert "1 file of other formats beside the Arrow shards, such as a.jsonl" in note
    with pytest.raises(DataError, match="select one kind"):
        fmsdata.ShardReader(tmp_path / "web", files=["a.arrow", "a.jsonl"])
    text = fmsdata.ShardReader(tmp_path / "web", files="*.jsonl")
    assert text.holds_text()


def test_a_file_beside_its_compressed_copy_is_warned_about(tmp_path: Path) -> None:
    for suffix in ("jsonl", "jsonl.gz"):
        write(tmp_path / f"web/part-0.{suffix}", some_texts())
    (note,) = fmsdata.ShardReader(tmp_path / "web").counts.notes
    assert "1 of 2 files look like copies of others (part-0.jsonl.gz has the same counts as part-0.jsonl)" in note


def test_files_of_only_blank_lines_or_of_nothing_are_sources_without_documents(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"")
    with pytest.raises(DataError, match="without documents"):
        fmsdata.ShardReader(tmp_path)
    (tmp_path / "a.txt").write_bytes(b"\r\n\n\n" * 50)
    reader = fmsdata.ShardReader(tmp_path)
    assert reader.size().documents == 150
    with pytest.raises(DataError, match="none of its 150 documents"):
        next(iter(reader))
    (tmp_path / "b.txt").write_bytes(b"text")
    assert next(iter(fmsdata.ShardReader(tmp_path))).document == 0


def test_stored_documents_are_those_that_are_read(tmp_path: Path) -> None:
    texts = some_texts()
    for suffix in SUFFIXES:
        folder = write_source(tmp_path / suffix, texts, suffix, frame=200)
        stored = testing.stored_documents({"web": folder})
        assert Counter(bytes(tokens.astype(np.uint8)) for tokens in stored.values()) == counted(texts)
