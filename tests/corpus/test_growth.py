"""`fmsdata index --append`: new shards get the next generation, and nothing else may have changed."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fmsdata.corpus import index as indexing
from fmsdata.corpus.counts import read_counts
from fmsdata.corpus.counts_csv import read_rows
from fmsdata.corpus.index import index_corpus
from fmsdata.corpus.manifest import FILE, GROWN, SCHEMA, Corpus, Growth, Manifest, Shards, write_manifest
from fmsdata.corpus.manifest_writing import keep_manifest, manifest_of
from fmsdata.corpus.shard_writer import write_shard
from fmsdata.corpus.verify import verify_corpus
from fmsdata.errors import CountsError, DataError
from fmsdata.storage.clients.base import Entry
from fmsdata.storage.location import Location
from tests.helpers import documents, write_source
from tests.servers.object_store import ObjectStore

ROOT = Path(__file__).parents[2]


def add(path: Path, seed: int = 5, count: int = 12) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_shard(path, documents(np.random.default_rng(seed), count, shortest=1))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for seed, name in enumerate(("web", "wiki")):
        write_source(tmp_path / "corpus" / name, documents(np.random.default_rng(seed), 24, shortest=1), shards=2)
    return tmp_path / "corpus"


def generations(root: Path) -> tuple[dict[str, int], int]:
    """The generation of each shard, and the last one that running states may take up."""
    manifest = manifest_of(Location(root))
    assert manifest is not None
    rows = manifest.rows("")
    assert rows is not None
    found = [0] * len(rows) if rows.generations is None else rows.generations.tolist()
    return dict(zip(rows.names, found, strict=True)), manifest.appended


OLD = {"web/part-0.arrow": 0, "web/part-1.arrow": 0, "wiki/part-0.arrow": 0, "wiki/part-1.arrow": 0}


def test_each_append_is_a_generation_and_shards_stay_sorted_by_name(root: Path) -> None:
    index_corpus(root)
    add(root / "web/a.arrow")
    add(root / "books/part-0.arrow")
    done = index_corpus(root, append=True)
    assert (done.added, done.rows, done.notes) == (2, 6, [])
    assert generations(root) == ({"books/part-0.arrow": 1, "web/a.arrow": 1, **OLD}, 1)
    add(root / "web/part-00.arrow")
    assert index_corpus(root, append=True).added == 1
    assert generations(root) == ({"books/part-0.arrow": 1, "web/a.arrow": 1, "web/part-00.arrow": 2, **OLD}, 2)
    assert list(generations(root)[0]) == sorted(generations(root)[0])
    assert not verify_corpus(str(root)).problems
    counts = read_counts(root / "web")
    assert [counts.until(generation).number for generation in range(3)] == [2, 3, 4]
    assert len(read_rows([Location(root / "meta/counts.csv")])) == 7  # what other programs read has all of them


def test_an_index_without_append_keeps_the_history_and_asks_for_consent(root: Path) -> None:
    index_corpus(root)
    add(root / "web/a.arrow")
    notes = index_corpus(root).notes
    assert "warning: 1 shard new, such as web/a.arrow: a run that has begun does not resume" in notes[0]
    assert generations(root) == ({"web/a.arrow": 1, **OLD}, 0)
    assert index_corpus(root).notes == []
    add(root / "web/b.arrow")
    index_corpus(root, append=True)
    assert generations(root) == ({"web/a.arrow": 1, "web/b.arrow": 2, **OLD}, 2)
    before = (root / "meta" / FILE).read_bytes()
    assert index_corpus(root).manifest is None
    assert (root / "meta" / FILE).read_bytes() == before
    add(root / "web/c.arrow")
    index_corpus(root)
    assert generations(root)[1] == 2


def test_without_anything_new_nothing_is_written(root: Path) -> None:
    index_corpus(root)
    before = {path: path.stat().st_mtime_ns for path in (root / "meta").iterdir()}
    done = index_corpus(root, append=True)
    assert (done.added, done.written, done.manifest) == (0, False, None)
    (note,) = done.notes
    assert note.startswith("no new shards: nothing was appended. If a run does not resume because")
    assert "move the new shards away, run `fmsdata index`, move them back, and run `fmsdata index --append`" in note
    assert {path: path.stat().st_mtime_ns for path in (root / "meta").iterdir()} == before


@pytest.mark.parametrize("what", ["gone", "renamed", "other documents", "other size"])
def test_shards_that_are_not_as_they_were_are_named_and_nothing_is_written(root: Path, what: str) -> None:
    index_corpus(root)
    add(root / "web/a.arrow")
    before = {path: path.read_bytes() for path in (root / "meta").iterdir()}
    changed = root / "web/part-1.arrow"
    expected = {
        "gone": "web/part-1.arrow is gone",
        "renamed": "web/part-1.arrow is gone",
        "other documents": "web/part-1.arrow had 12 documents and .* and has 5 documents and .* now",
        "other size": "web/part-1.arrow had .* bytes, and has .* now",
    }[what]
    if what == "gone":
        changed.unlink()
    elif what == "renamed":
        changed.rename(root / "web/part-7.arrow")
    elif what == "other documents":
        add(changed, count=5)
    else:
        shard = documents(np.random.default_rng(0), 24, shortest=1)[1::2]
        write_shard(changed, shard, dtype=np.int32)
    if what in ("gone", "renamed"):
        (root / "meta/counts.csv").unlink()  # it says so too
        del before[root / "meta/counts.csv"]
    with pytest.raises(CountsError, match=f"must stay as they are: {expected}; nothing was written"):
        index_corpus(root, append=True)
    assert {path: path.read_bytes() for path in (root / "meta").iterdir()} == before
    done = index_corpus(root)
    assert "a run that has read this source does not resume with that" in "".join(done.notes)
    now, appended = generations(root)
    assert appended == 0
    assert now == {name: int(name not in OLD or name == "web/part-1.arrow") for name in now}  # changed ones are new


def test_shards_that_were_copied_again_as_they_are_may_be_appended_to(root: Path) -> None:
    index_corpus(root)
    for path in root.rglob("*.arrow"):
        os.utime(path, ns=(1, 1))
    add(root / "web/a.arrow")
    index_corpus(root, append=True)
    assert generations(root) == ({"web/a.arrow": 1, **OLD}, 1)


def test_before_the_first_index_there_is_nothing_to_append_to(root: Path) -> None:
    with pytest.raises(DataError, match="nothing to append to: there is no manifest and no counts"):
        index_corpus(root, append=True)
    assert not (root / "meta").exists() or not any((root / "meta").iterdir())


def test_counts_without_a_manifest_say_which_shards_are_old(root: Path) -> None:
    index_corpus(root)
    (root / "meta" / FILE).unlink()
    add(root / "web/a.arrow")
    assert index_corpus(root, append=True).added == 1
    assert generations(root) == ({"web/a.arrow": 1, **OLD}, 1)


def test_a_shard_after_the_last_append_was_removed_needs_consent_too(root: Path) -> None:
    index_corpus(root)
    for name in ("a", "b"):
        add(root / f"web/{name}.arrow")
        index_corpus(root, append=True)
    (root / "web/b.arrow").unlink()
    index_corpus(root)
    assert generations(root) == ({"web/a.arrow": 1, **OLD}, 1)
    add(root / "web/c.arrow", seed=6)
    assert "run `fmsdata index --append`" in index_corpus(root).notes[-1]
    assert generations(root) == ({"web/a.arrow": 1, "web/c.arrow": 2, **OLD}, 1)


def test_text_is_not_appended_to(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    index_corpus(tmp_path)
    with pytest.raises(DataError, match="no Arrow shards: a run can't take up text files"):
        index_corpus(tmp_path, append=True)


def test_a_damaged_manifest_is_not_appended_to(root: Path) -> None:
    index_corpus(root)
    (root / "meta" / FILE).write_bytes(b"damaged")
    add(root / "web/a.arrow")
    with pytest.raises(CountsError, match=r"not a readable manifest.*restore it, or run .* without the history"):
        index_corpus(root, append=True)
    (note,) = index_corpus(root).notes
    assert "the history of the corpus is lost: all shards count as old now" in note
    assert "move the new shards away" in note
    assert generations(root) == ({"web/a.arrow": 0, **OLD}, 0)


@pytest.mark.parametrize("only_counts", [False, True])
def test_an_append_that_is_killed_leaves_the_old_shards_in_a_manifest(
    root: Path, monkeypatch: pytest.MonkeyPatch, only_counts: bool
) -> None:
    """Counts are written before the manifest: between the two, the append is to be repeated."""
    index_corpus(root)
    before = (root / "meta" / FILE).read_bytes()
    if only_counts:
        (root / "meta" / FILE).unlink()
    add(root / "web/a.arrow")

    class Killed(BaseException):
        pass

    def kill(root: Location, entries: Sequence[Entry], *rest: Any) -> Location | None:
        if len(entries) > len(OLD):
            raise Killed
        return keep_manifest(root, entries, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(indexing, "keep_manifest", kill)
        with pytest.raises(Killed):
            index_corpus(root, append=True)
    assert generations(root) == (OLD, 0)
    assert only_counts or (root / "meta" / FILE).read_bytes() == before
    assert read_counts(root / "web").generations is None  # it is older than the counts
    assert len(read_counts(root / "web").shards) == 3
    index_corpus(root, append=True)
    assert generations(root) == ({"web/a.arrow": 1, **OLD}, 1)


def test_an_append_that_is_killed_before_it_writes_counts_hides_no_shard(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index_corpus(root)
    (root / "meta" / FILE).unlink()
    add(root / "web/a.arrow")

    def kill(*args: Any) -> None:
        keep_manifest(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(indexing, "keep_manifest", kill)
        with pytest.raises(KeyboardInterrupt):
            index_corpus(root, append=True)
    assert generations(root) == (OLD, 0)
    assert len(read_rows([Location(root / "meta/counts.csv")])) == 4
    assert len(read_counts(root / "web").shards) == 3
    index_corpus(root, append=True)
    assert generations(root) == ({"web/a.arrow": 1, **OLD}, 1)


def test_a_copy_of_a_corpus_that_has_grown_keeps_its_generations(root: Path, tmp_path: Path) -> None:
    index_corpus(root)
    add(root / "web/a.arrow")
    index_corpus(root, append=True)
    shutil.copytree(root, tmp_path / "copy")
    counts = read_counts(tmp_path / "copy/web")
    assert counts.generations is not None
    assert (counts.generations.tolist(), counts.appended) == ([1, 0, 0], 1)
    assert counts.digest == read_counts(root / "web").digest
    index_corpus(tmp_path / "copy")
    assert generations(tmp_path / "copy") == generations(root)


@pytest.mark.parametrize("where", ["disk", "object store"])
def test_a_folder_of_an_indexed_corpus_is_appended_to_as_part_of_it(
    root: Path, object_store: ObjectStore, where: str
) -> None:
    """Runs whose path is the corpus plan from its manifest. On an object store, they would never see the new shard."""
    corpus = Location(root)
    if where == "object store":
        url = f"{object_store.bucket()}/corpus"
        object_store.upload(root, url)
        corpus = Location(url, object_store.options)
    index_corpus(corpus)
    assert index_corpus(corpus / "web").notes == []
    for file in (corpus / "web/meta").level().files:
        (corpus / "web/meta" / file.name).remove()
    (corpus / "web/a.arrow").write_bytes((root / "wiki/part-0.arrow").read_bytes())
    with pytest.raises(DataError, match=r"nothing was written\. Run") as refused:
        index_corpus(corpus / "web", append=True)
    assert f"this folder is part of the corpus at {corpus}" in str(refused.value)
    assert f"Run `fmsdata index {corpus} --append`" in str(refused.value)
    assert not (corpus / "web/meta").level().files
    index_corpus(corpus, append=True)
    assert index_corpus(corpus / "web").notes == []  # with an index of its own from here on, for readers of it alone
    (corpus / "web/b.arrow").write_bytes((root / "wiki/part-1.arrow").read_bytes())
    (warning,) = index_corpus(corpus / "web", append=True).notes
    assert f"run `fmsdata index {corpus} --append` too" in warning
    assert index_corpus(corpus, append=True).notes == []
    (corpus / "web/c.arrow").write_bytes((root / "wiki/part-1.arrow").read_bytes())
    (nearer,) = [note for note in index_corpus(corpus, append=True).notes if "is nearer" in note]
    assert f"run `fmsdata index {corpus / 'web'} --append` too" in nearer


def test_a_manifest_without_growth_has_no_generations() -> None:
    corpus = Corpus(url=None, column=None, folders={}, counts={}, others=[])
    shards = Shards(["a.arrow", "b.arrow"], [1, 2], [None, None], [3, 4], [5, 6])
    plain = Manifest.of_bytes(write_manifest(shards, corpus))
    assert plain.batch.schema.remove_metadata().equals(SCHEMA)
    assert plain.generations is None
    grown = Manifest.of_bytes(write_manifest(shards, corpus, Growth([0, 3], 2)))
    assert grown.batch.schema.remove_metadata().equals(GROWN)
    assert grown.generations is not None
    assert (grown.generations.tolist(), grown.appended) == ([0, 3], 2)
    with pytest.raises(CountsError, match="a number is negative"):
        Manifest.of_bytes(write_manifest(shards, corpus, Growth([0, -3], 2)))


def test_the_command_says_what_it_did(root: Path) -> None:
    def run(*args: str) -> str:
        command = [sys.executable, "-c", "from fmsdata.cli.app import main; main()", "index", str(root), *args]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    run()
    add(root / "web/a.arrow")
    assert "appended 1 shard, for runs to read from the next epoch of the source on" in run("--append")
    assert "no new shards: nothing was appended" in run("--append")
    add(root / "web/b.arrow")
    add(root / "web/c.arrow")
    report = json.loads(run("--append", "--json"))
    assert (report["new_shards"], report["shards"]) == (2, 7)
