"""The manifest: what is planned from it is what is planned from a listing, without one, and changes are noticed."""

import json
import logging
import os
import pickle
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import fmsdata
from fmsdata.corpus.counts import open_source, read_counts
from fmsdata.corpus.index import index_corpus
from fmsdata.corpus.manifest import FILE, Corpus, Manifest, Shards, write_manifest
from fmsdata.corpus.verify import verify_corpus
from fmsdata.errors import CountsError, DataError, StorageError
from fmsdata.planning.counts import Counts
from fmsdata.storage import location
from fmsdata.storage.location import Location
from tests.helpers import CONFIG, documents, maker, open_file, write_source
from tests.servers.fault_proxy import FaultProxy
from tests.servers.object_store import ObjectStore

EMPTY = Corpus(url=None, column=None, folders={}, counts={}, others=[])


def write(folder: Path, seed: int, **options: object) -> Path:
    return write_source(folder, documents(np.random.default_rng(seed), 24, shortest=1), **options)  # type: ignore[arg-type]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A corpus with nested folders, and names that sort around the slash."""
    for seed, name in enumerate(("web", "web/deep/er", "web-x", "wiki", "wiki.old")):
        write(tmp_path / "corpus" / name, seed)
    return tmp_path / "corpus"


def as_tuple(counts: Counts) -> tuple[list[str], list[int], list[int], str]:
    return list(counts.shards), counts.documents.tolist(), counts.tokens.tolist(), counts.digest


@pytest.fixture
def no_listing(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it to make every listing of shards an error."""

    def refuse(*_: object) -> None:
        raise AssertionError("a folder is listed")

    def start() -> None:
        monkeypatch.setattr("fmsdata.corpus.listing.list_files", refuse)
        monkeypatch.setattr("fmsdata.corpus.listing.list_ids", lambda *_: [])
        monkeypatch.setattr(location, "list_files", refuse)

    return start


@pytest.mark.parametrize("objects", [0, 1000])
def test_counts_and_digests_are_those_of_a_listing(
    root: Path, no_listing: Callable[[], None], monkeypatch: pytest.MonkeyPatch, objects: int
) -> None:
    names = ["web", "web/deep", "web-x", "wiki", "wiki.old", ""]
    listed = [as_tuple(read_counts(root / name)) for name in names]
    index_corpus(root)
    no_listing()
    monkeypatch.setattr("fmsdata.corpus.counts.MOST_COMPARED", objects)
    assert isinstance(read_counts(root).shards, tuple) == bool(objects)
    assert [as_tuple(read_counts(root / name)) for name in names] == listed


def test_a_run_is_the_same_and_resumes_from_a_state_saved_without_a_manifest(root: Path) -> None:
    sources = {"web": {"weight": 7}, "wiki": {"weight": 3}}
    loader = maker(root, sources=sources)(0, 1)
    batches = [next(loader)["input_ids"].tolist() for _ in range(9)]
    state = maker(root, sources=sources)(0, 1)
    for _ in range(4):
        next(state)
    saved = state.state_dict()
    index_corpus(root)
    planned = maker(root, sources=sources)(0, 1)
    planned.load_state_dict(json.loads(json.dumps(saved)))
    assert [next(planned)["input_ids"].tolist() for _ in range(5)] == batches[4:]
    assert planned.state_dict()["pipeline"] == loader.state_dict()["pipeline"]


def test_the_sources_of_a_corpus_are_found_in_it(root: Path, no_listing: Callable[[], None]) -> None:
    write(root / "validation", 9)
    (root / "texts").mkdir()
    (root / "texts/a.jsonl").write_text('{"text": "a"}\n')
    expected = fmsdata.build_loader({**CONFIG, "path": str(root), "sources": None})
    index_corpus(root)
    no_listing()
    found = fmsdata.build_loader({**CONFIG, "path": str(root), "sources": None})
    assert found.state_dict()["pipeline"] == expected.state_dict()["pipeline"]


def test_folders_without_arrow_shards_are_warned_about(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    (root / "texts").mkdir()
    (root / "texts/a.jsonl").write_text('{"text": "a"}\n')
    index_corpus(root)
    fmsdata.build_loader({**CONFIG, "path": str(root), "sources": None})
    assert "not read, as they hold no Arrow shards: texts" in caplog.text


@pytest.mark.parametrize("folder", ["web", "web/deep/er", "web/new/folder"])
def test_an_added_shard_is_read_and_warned_about(root: Path, folder: str, caplog: pytest.LogCaptureFixture) -> None:
    (root / "web/new").mkdir()
    index_corpus(root)
    (root / folder).mkdir(exist_ok=True)
    shutil.copyfile(root / "wiki/part-0.arrow", root / folder / "added.arrow")
    with caplog.at_level(logging.WARNING, "fmsdata"):
        found = read_counts(root / "web")
    assert len(found.shards) == 7
    assert f"run `fmsdata index {root}`" in caplog.text
    assert f"run `fmsdata index {root}` once" in found.notes[0]
    caplog.clear()
    read_counts(root / "wiki")
    assert not caplog.text  # nothing was added to this one
    index_corpus(root)
    assert as_tuple(read_counts(root / "web")) == as_tuple(found)
    assert not caplog.text


def test_a_removed_and_a_renamed_shard_are_errors(root: Path) -> None:
    index_corpus(root)
    (root / "web/part-0.arrow").rename(root / "web/part-8.arrow")
    (root / "wiki/part-0.arrow").unlink()
    for name in ("web", "wiki"):
        with pytest.raises(CountsError, match=r"part-0.arrow, but there is no such file.*`fmsdata index`"):
            read_counts(root / name)
    shutil.rmtree(root / "wiki")
    with pytest.raises(DataError, match="no such folder"):
        read_counts(root / "wiki")


def test_a_shard_of_another_size_is_an_error_when_it_is_opened(root: Path) -> None:
    index_corpus(root)
    with open(root / "wiki/part-1.arrow", "ab") as file:
        file.write(b"12345678")
    loader = maker(root)(0, 1)
    with pytest.raises(CountsError, match=r"'wiki'.*part-1.arrow with .* bytes, but the file has .*`fmsdata index`"):
        for _ in range(40):
            next(loader)


def test_a_shard_that_was_empty_is_looked_at(root: Path) -> None:
    fmsdata.write_shard(root / "web/empty.arrow", [])
    index_corpus(root)
    assert 0 in read_counts(root / "web").documents
    shutil.copyfile(root / "wiki/part-0.arrow", root / "web/empty.arrow")
    with pytest.raises(CountsError, match=r"0 documents in empty.arrow but the file holds 8"):
        read_counts(root / "web")


def test_a_copy_of_the_corpus_is_used_after_a_listing(root: Path, tmp_path: Path) -> None:
    index_corpus(root)
    expected = as_tuple(read_counts(root / "web"))
    copy = Path(shutil.copytree(root, tmp_path / "copy", copy_function=shutil.copyfile))
    found = open_source(Location(copy / "web"))
    assert (as_tuple(found.counts), found.counts.csv_root) == (expected, str(copy))
    assert found.sizes is not None


def test_counts_written_later_are_believed(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    index_corpus(root)
    csv = root / "meta/counts.csv"
    csv.write_text(csv.read_text().replace("/web/part-0.arrow,", "/web/part-0.arrow,1"))
    assert read_counts(root / "web").documents[3] == 18  # of 8: it is found when the shard is opened
    assert f"older than the counts beside it, so it is not used; run `fmsdata index {root}`" in caplog.text
    index_corpus(root)
    assert read_counts(root / "web").documents[3] == 8


def test_where_it_cannot_be_written_counts_that_are_right_still_do(root: Path) -> None:
    index_corpus(root)
    (root / "meta" / FILE).unlink()
    (root / "meta" / FILE).mkdir()
    done = index_corpus(root)
    assert (done.written, done.manifest) == (False, None)
    assert any(f"{FILE}: the manifest can't be written" in note for note in done.notes)
    assert read_counts(root / "web").csv_root == str(root)
    write(root / "web", 5, shards=4)
    with pytest.raises(DataError, match="the manifest can't be written"):
        index_corpus(root)


@pytest.mark.parametrize("tokens", [1, 40, 10**9])
@pytest.mark.parametrize("remote", [False, True])
def test_a_manifest_has_the_documents_and_tokens_of_the_blocks_of_each_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remote: bool, tokens: int
) -> None:
    """As far as the metadata says that: a compressed list that may be null does not."""
    monkeypatch.setattr("fmsdata.corpus.counts.BLOCK_TOKENS", tokens)
    root, some = tmp_path / "corpus", documents(np.random.default_rng(3), 60, shortest=0)
    write_source(root / "lists", some, shards=2, rows=4)
    write_source(root / "one", some, shards=2, rows=1000)
    write_source(root / "single", some, shards=2, layout="batch")
    with pa.ipc.new_file(str(root / "lists" / "part-9.arrow"), pa.schema({"tokens": pa.list_(pa.uint16())})) as writer:
        writer.write_batch(pa.record_batch([pa.array([[1, 2], None, [3]], pa.list_(pa.uint16()))], ["tokens"]))
    with ObjectStore(tmp_path / "store") if remote else nullcontext() as store:
        place: Location | Path = root
        if store is not None:
            url = f"{store.bucket()}/corpus"
            store.upload(root, url)
            place = Location(url, store.options)
        index_corpus(place)
        manifest = Manifest.of_bytes((Location(place) / "meta" / FILE).read_bytes())
    rows = manifest.rows("")
    assert rows is not None
    for row, name in enumerate(rows.names):
        blocks = rows.blocks(row)
        if name == "lists/part-9.arrow":
            assert blocks is None
            continue
        assert blocks is not None
        shard = open_file(root / name)
        lengths = shard.read(0, shard.documents).length
        expected = [int(part.sum()) for part in np.split(lengths, np.cumsum(blocks[0])[:-1])]
        assert (int(blocks[0].sum()), blocks[1].tolist()) == (shard.documents, expected)
        if tokens == 1 and not name.startswith("one"):
            assert len(blocks[0]) > 5
        if tokens == 10**9 or name.startswith("one"):
            assert len(blocks[0]) == 1


def test_only_new_and_changed_shards_are_counted_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[str] = []
    count = index_corpus.__globals__["measure_shards"]

    def watch(folder: Location, shards: list[str], column: str | None) -> object:
        counted.extend(shards)
        return count(folder, shards, column)

    monkeypatch.setitem(index_corpus.__globals__, "measure_shards", watch)
    index_corpus(root)
    assert len(counted) == 15
    counted.clear()
    write(root / "web", 77, shards=4)
    index_corpus(root)
    assert counted == [f"web/part-{number}.arrow" for number in range(4)]
    rows = Manifest.of_file(root / "meta" / FILE).rows("web")
    assert rows is not None
    assert rows.documents.tolist() == read_counts(root / "web").documents.tolist() == [8, 8, 8, 6, 6, 6, 6]


def test_a_nearer_meta_folder_decides(root: Path) -> None:
    index_corpus(root)
    index_corpus(root / "web")
    assert read_counts(root / "web").csv_root == str(root / "web")
    assert read_counts(root / "wiki").csv_root == str(root)


def test_other_processes_map_the_same_file_also_after_it_was_written_again(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fmsdata.corpus.counts.MOST_COMPARED", 0)
    index_corpus(root)
    first = open_source(Location(root / "web"))
    sent = pickle.dumps(first)
    assert len(sent) < 3000
    assert as_tuple(pickle.loads(sent).counts) == as_tuple(first.counts)
    write(root / "web", 3, shards=5)
    index_corpus(root)
    later = pickle.dumps(first)
    assert as_tuple(pickle.loads(later).counts) == as_tuple(first.counts)
    assert as_tuple(read_counts(root / "web")) != as_tuple(first.counts)
    with pytest.raises(DataError, match="was written again while the processes of a run were started"):
        pickle.loads(sent)


def test_names_are_a_sequence() -> None:
    names = sorted(f"{folder}/{number}.arrow" for folder in ("a", "a-b", "a.b", "ä", "b/c") for number in range(9))
    shards = Shards(names, [1] * 45, [None] * 45, [2] * 45, [3] * 45)
    manifest = Manifest.of_bytes(write_manifest(shards, EMPTY))
    for folder in ("", "a", "a-b", "a.b", "ä", "b", "b/c"):
        expected = [
            name[len(folder) + bool(folder) :] for name in names if name.startswith(f"{folder}/" if folder else "")
        ]
        rows = manifest.rows(folder)
        assert rows is not None
        found = rows.names
        assert list(found) == found[:] == [found[i] for i in range(len(found))] == expected
        assert (found[-1], found[1:5:2]) == (expected[-1], expected[1:5:2])
        assert [found.index(name) for name in expected] == list(range(len(expected)))
        assert all(name in found for name in expected)
        assert "nothing" not in found
        with pytest.raises(ValueError, match="nothing"):
            found.index("nothing")
        with pytest.raises(IndexError):
            found[len(expected)]
    assert manifest.rows("c") is manifest.rows("a/") is None
    everything = manifest.rows("")
    assert everything is not None
    assert everything.examples == ["a-b/0.arrow", "a.b/0.arrow", "a/0.arrow", "b/c/0.arrow", "ä/0.arrow"]


@pytest.mark.parametrize(
    ("names", "size", "problem"),
    [
        (["b", "a"], 1, "not in order"),
        (["a", "a"], 1, "not in order"),
        (["a", None], 1, "not in order"),
        (["a", "b"], -1, "negative"),
    ],
)
def test_a_manifest_that_is_wrong_is_an_error(names: list[str], size: int, problem: str) -> None:
    data = write_manifest(Shards(names, [size] * 2, [None] * 2, [1] * 2, [1] * 2), EMPTY)
    with pytest.raises(CountsError, match=f"place: not a readable manifest.*{problem}.*`fmsdata index`"):
        Manifest.of_bytes(data, "place")


def test_a_damaged_manifest_is_an_error_and_made_again(root: Path) -> None:
    index_corpus(root)
    file = root / "meta" / FILE
    whole = file.read_bytes()
    expected = as_tuple(read_counts(root / "web"))
    for damaged in (b"", whole[:-9], whole[:400], b"x" * 999, whole.replace(b'"url"', b'"ulr"')):
        file.write_bytes(damaged)
        with pytest.raises(CountsError, match=f"{FILE}.*`fmsdata index`"):
            read_counts(root / "web")
        assert index_corpus(root).manifest is not None
        assert as_tuple(read_counts(root / "web")) == expected


def test_verify_compares_in_full(root: Path) -> None:
    index_corpus(root)
    assert not verify_corpus(root).problems
    assert not any("manifest" in note for note in verify_corpus(root).notes)
    (root / "meta/counts.csv").unlink()
    write(root / "web", 5, shards=4)
    (root / "wiki/part-0.arrow").unlink()
    report = verify_corpus(root)
    problems = {problem.shard: problem.problem for problem in report.problems if "manifest" in problem.problem}
    assert "there is no such file" in problems["wiki/part-0.arrow"]
    assert "the manifest lists" in problems["web/part-0.arrow"]
    assert any("the manifest lacks 1 shard, such as web/part-3.arrow" in note for note in report.notes)


def test_a_corpus_without_arrow_shards_has_none(tmp_path: Path) -> None:
    write(tmp_path / "web", 1)
    index_corpus(tmp_path)
    shutil.rmtree(tmp_path / "web")
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    index_corpus(tmp_path)
    assert FILE not in os.listdir(tmp_path / "meta")


# On an object store


@pytest.fixture
def remote(root: Path, object_store: ObjectStore, proxy: FaultProxy) -> Location:
    """The same corpus, indexed where it is."""
    url = f"{object_store.bucket()}/corpus"
    object_store.upload(root, url)
    place = Location(url, proxy.options)
    index_corpus(place)
    proxy.clear()
    return place


def plan(place: Location, **sources: object) -> fmsdata.StatefulDataLoader:
    config = {**CONFIG, "path": place.url, "storage_options": place.options, "sources": sources or None}
    return fmsdata.build_loader(config)


def test_a_remote_corpus_is_planned_with_two_requests_and_no_listing_of_shards(
    remote: Location, root: Path, proxy: FaultProxy
) -> None:
    sources = {name: {"weight": 1} for name in ("web", "web-x", "wiki", "wiki.old")}
    there = plan(remote, **sources)
    assert [record.request.method for record in proxy.records] == ["GET", "GET"]
    assert not [record for record in proxy.records if "web" in record.request.query]
    proxy.clear()
    again = plan(remote, **sources)
    assert len(proxy.records) == 1  # the manifest is kept on the disk
    here = fmsdata.build_loader({**CONFIG, "path": str(root), "sources": sources})
    assert again.state_dict()["pipeline"] == there.state_dict()["pipeline"] == here.state_dict()["pipeline"]
    expected = [next(here)["input_ids"].tolist() for _ in range(9)]
    assert [next(there)["input_ids"].tolist() for _ in range(9)] == expected


def test_a_remote_shard_that_was_replaced_is_an_error_when_it_is_read(
    remote: Location, root: Path, object_store: ObjectStore
) -> None:
    object_store.put(f"{remote.url}/wiki/part-1.arrow", (root / "web/part-1.arrow").read_bytes())
    loader = plan(remote, wiki={"weight": 1})
    with pytest.raises(StorageError, match=r"wiki/part-1.arrow.*`fmsdata index`"):
        for _ in range(40):
            next(loader)


def test_counts_written_later_beside_a_remote_manifest_are_believed(remote: Location, root: Path) -> None:
    tokens = read_counts(root / "wiki").tokens[0]
    (remote / "web/part-9.arrow").write_bytes((root / "wiki/part-0.arrow").read_bytes())
    assert len(read_counts(remote / "web").shards) == 6  # nobody said so
    csv = remote / "meta/counts.csv"
    csv.write_bytes(csv.read_bytes() + f"/web/part-9.arrow,8,{tokens}\n".encode())
    assert len(read_counts(remote / "web").shards) == 7
    index_corpus(remote)
    assert len(read_counts(remote / "web").shards) == 7


def test_a_corpus_that_was_copied_to_another_bucket_is_listed(
    remote: Location, root: Path, object_store: ObjectStore, proxy: FaultProxy
) -> None:
    url = f"{object_store.bucket()}/elsewhere"
    object_store.upload(root, url)
    there = Location(url, proxy.options)
    for name in (FILE, "counts.csv"):
        (there / "meta" / name).write_bytes((remote / "meta" / name).read_bytes())
    found, expected = (open_source(place / "web") for place in (there, remote))
    assert as_tuple(found.counts) == as_tuple(expected.counts)
    assert isinstance(found.entries, tuple)
    assert found.stored == expected.stored


def test_the_manifest_of_a_remote_corpus_that_was_downloaded_is_checked_by_a_listing(
    remote: Location, root: Path
) -> None:
    (root / "meta").mkdir()
    for name in (FILE, "counts.csv"):
        (root / "meta" / name).write_bytes((remote / "meta" / name).read_bytes())
    assert as_tuple(read_counts(root / "web")) == as_tuple(read_counts(remote / "web"))
    assert open_source(Location(root / "web")).sizes is not None
    shutil.copyfile(root / "wiki/part-0.arrow", root / "web/added.arrow")
    assert "added.arrow" in read_counts(root / "web").shards


def test_the_newest_manifest_of_a_corpus_is_kept_on_the_disk(remote: Location, own_cache: Path) -> None:
    def kept() -> set[str]:
        return {file.name for file in own_cache.rglob("*.manifest")}

    before = kept()
    read_counts(remote / "web")
    (first,) = kept() - before
    (remote / "wiki/part-1.arrow").remove()
    index_corpus(remote)
    read_counts(remote / "web")
    assert len(kept() - before) == 1
    assert first not in kept()
