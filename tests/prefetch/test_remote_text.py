"""Text in object storage: the laws over every format, the same stream as from local files, few bytes."""

from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import fmsdata
from fmsdata import testing
from fmsdata.config.build import build_data, make_loader
from fmsdata.config.read import read_config
from fmsdata.core.lane import Lane
from fmsdata.corpus import text_copy, text_counts
from fmsdata.corpus.index import index_corpus
from fmsdata.corpus.tokenizer import open_tokenizer
from fmsdata.errors import DataError, StorageError
from fmsdata.storage.location import Location
from fmsdata.testing import MakeLoader
from tests.servers.fault_proxy import FaultProxy
from tests.servers.object_store import ObjectStore
from tests.text_files import SUFFIXES, encode, write, write_source

SOURCES = {suffix.replace(".", "_"): suffix for suffix in SUFFIXES}


class Corpus(NamedTuple):
    local: Path
    url: str

    def make(self, options: dict[str, Any] | None, **more: Any) -> MakeLoader:
        """Loaders from the store, with its options, or from the disk."""
        dotted = {name.replace("__", "."): value for name, value in more.items()}
        config = read_config(
            {
                "seed": 5,
                "path": str(self.local) if options is None else self.url,
                "storage_options": options or {},
                "sources": {name: {"weight": 1 + i % 3} for i, name in enumerate(SOURCES)},
                "documents": {"eos": 0, "tokenizer": "bytes"},
                "pack": {"seq_len": 48},
                "shuffle": {"window": 8},
                "lanes": 6,
                "loader": {"batch_size": 2, "prefetch": 1, "outputs": ["provenance", "epochs"]},
            },
            dotted,
        )
        data = build_data(config)
        return lambda rank, world_size: make_loader(config, data, rank=rank, world_size=world_size)


def some_texts(seed: int, count: int = 40) -> list[str | None]:
    rng = np.random.default_rng(seed)
    return [None if i % 17 == 4 else "é" * int(n) + f"{i}" for i, n in enumerate(rng.integers(0, 40, count))]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory, object_store: ObjectStore) -> Corpus:
    """A source of each format."""
    root = tmp_path_factory.mktemp("text") / "corpus"
    for i, (name, suffix) in enumerate(SOURCES.items()):
        write_source(root / name, some_texts(i), suffix, shards=2, frame=400)
    url = object_store.bucket("texts") + "/corpus"
    object_store.upload(root, url)
    return Corpus(root, url)


@pytest.mark.parametrize("workers", [0, 1])
def test_the_stream_is_the_one_of_local_files_at_any_world_size(
    corpus: Corpus, object_store: ObjectStore, workers: int
) -> None:
    local = corpus.make(None)
    remote = corpus.make(object_store.options, loader__num_workers=workers)
    testing.check_same_stream(local, world_sizes=[3] if workers else [2, 6], samples=120, variants=[remote])


def test_every_document_comes_exactly_once_over_stops_and_rescales(corpus: Corpus, object_store: ObjectStore) -> None:
    stored = testing.stored_documents(
        {name: f"{corpus.url}/{name}" for name in SOURCES}, storage_options=object_store.options
    )
    assert len(stored) > 250
    testing.check_exactly_once(
        corpus.make(object_store.options), stored=stored, world_sizes=[1, 4, 6], steps=25, most_samples=20_000
    )


def test_restoring_after_any_step_continues_the_same(corpus: Corpus, object_store: ObjectStore) -> None:
    testing.check_restore_anywhere(corpus.make(object_store.options), steps=3)


def test_the_mix_holds_from_the_first_batch_on(corpus: Corpus, object_store: ObjectStore) -> None:
    weights = {name: float(1 + i % 3) for i, name in enumerate(SOURCES)}
    testing.check_mix_holds(corpus.make(object_store.options), weights=weights, samples=200, within=2500)


def test_an_index_in_the_store_is_used_and_files_are_selected(
    tmp_path: Path, object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "corpus"
    write_source(root / "web", some_texts(1, 90), "jsonl.gz", frame=500)
    write_source(root / "wiki", some_texts(2, 30), "parquet")
    url = object_store.bucket("indexed") + "/corpus"
    object_store.upload(root, url)
    there = Location(url, object_store.options)
    done = index_corpus(there, tokenizer=open_tokenizer("bytes"))
    assert done.text is not None
    assert done.text.tokens == sum(len((text or "").encode()) for text in some_texts(1, 90) + some_texts(2, 30))
    assert not index_corpus(there).written
    local = fmsdata.ShardReader(root / "web", files="part-[12]*").counts.digest
    monkeypatch.setattr(text_counts, "index_lines", None)
    options = {"storage_options": object_store.options}
    reader = fmsdata.ShardReader(f"{url}/web", **options)  # type: ignore[arg-type]
    assert reader.size().documents == 90
    assert fmsdata.Tokenize(reader, "bytes").is_counted
    some = fmsdata.ShardReader(f"{url}/web/part-[12].*", **options)  # type: ignore[arg-type]
    named = fmsdata.ShardReader([f"{url}/web/part-2.jsonl.gz", f"{url}/web/part-1.jsonl.gz"], **options)  # type: ignore[arg-type]
    assert some.counts.digest == named.counts.digest == local
    assert len(list(islice(named, 100))) == 100


def read_blocks(reader: fmsdata.ShardReader, count: int) -> int:
    """Read so many documents of one lane, and return how many came."""
    iterator = reader.open(Lane(index=0, count=1, seed=1), {"block": 20, "document": 0})
    found = 0
    while found < count:
        found += len(iterator.read())
    return found


def test_a_block_fetches_only_what_it_needs_of_a_file(
    tmp_path: Path, proxy: FaultProxy, object_store: ObjectStore
) -> None:
    rng = np.random.default_rng(1)
    texts: list[str | None] = [rng.bytes(150).hex() for _ in range(6000)]
    url = object_store.bucket("large") + "/corpus"
    kinds: list[tuple[str, Any]] = [("txt", {}), ("txt.zst", {"frame": 1 << 14}), ("parquet", {"rows": 50})]
    for suffix, options in kinds:
        path = write(tmp_path / f"{suffix}/part-0.{suffix}", texts, **options)
        object_store.upload(path.parent, f"{url}/{suffix}")
        index_corpus(Location(f"{url}/{suffix}", object_store.options))
        reader = fmsdata.ShardReader(f"{url}/{suffix}", storage_options=proxy.options, block_tokens=1 << 10)
        proxy.clear()
        assert read_blocks(reader, 1) >= 1
        sent = sum(one.sent for one in proxy.asked(ending=suffix))
        assert 0 < sent < path.stat().st_size / 4, suffix


def test_small_blocks_do_not_fetch_and_decode_the_same_bytes_again(
    tmp_path: Path, proxy: FaultProxy, object_store: ObjectStore
) -> None:
    """A small compressed source on many lanes: its frames are fetched about once, not once for each block."""
    texts: list[str | None] = [f"{i} " + "".join(map(str, range(i, i + 30))) for i in range(600)]
    path = write(tmp_path / "web/part-0.txt.gz", texts)
    url = object_store.bucket("small") + "/corpus"
    object_store.upload(path.parent, url)
    reader = fmsdata.ShardReader(url, storage_options=proxy.options)
    data = fmsdata.Rescalable(fmsdata.Pack(fmsdata.Tokenize(reader, "bytes"), seq_len=65), lanes=8, seed=1)
    loader = fmsdata.StatefulDataLoader(data, batch_size=4, rank=0, world_size=1)
    proxy.clear()
    list(islice(loader, 300))
    loader.close()
    assert 0 < sum(one.sent for one in proxy.asked(ending=".gz")) < 20 * path.stat().st_size


def test_a_remote_file_of_one_frame_is_copied_once(
    tmp_path: Path, object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(text_copy, "MOST_LINES", 1000)
    monkeypatch.setattr(text_copy, "MOST_ROWS", 1000)
    url = object_store.bucket("single") + "/corpus"
    for suffix in ("jsonl.gz", "parquet"):
        texts = some_texts(3, 200)
        root = write_source(tmp_path / suffix, texts, suffix, shards=2, rows=1000)
        object_store.upload(root, f"{url}/{suffix}")
        remote = fmsdata.ShardReader(f"{url}/{suffix}", name="web", storage_options=object_store.options)
        local = fmsdata.ShardReader(root, name="web")
        far, near = ([bytes(each.tokens.tolist()) for each in islice(reader, 300)] for reader in (remote, local))
        assert far == near
    assert len(list((tmp_path / "cache").rglob("*.parquet"))) == 8


def test_a_remote_text_file_that_is_replaced_is_noticed(
    tmp_path: Path, object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def check(suffix: str, url: str) -> None:
        object_store.put(f"{url}/part-0.{suffix}", encode(some_texts(1, 400), suffix, frame=300))
        reader = fmsdata.ShardReader(url, storage_options=object_store.options, block_tokens=16)
        object_store.put(f"{url}/part-0.{suffix}", encode(some_texts(2, 400), suffix, frame=300))
        with pytest.raises(StorageError, match="replaced"):
            list(islice(reader, 300))

    for i, suffix in enumerate(("txt", "parquet", "jsonl.zst")):
        check(suffix, object_store.bucket(f"replaced-{i}") + "/web")
    monkeypatch.setattr(text_copy, "MOST_LINES", 1)
    check("txt.gz", object_store.bucket("replaced-copy") + "/web")


def test_a_damaged_remote_file_is_an_error_that_names_it(object_store: ObjectStore) -> None:
    url = object_store.bucket("damaged") + "/web"
    whole = encode(some_texts(1), "jsonl.zst")
    object_store.put(f"{url}/part-0.jsonl.zst", whole[:-5])
    with pytest.raises(DataError, match=r"part-0\.jsonl\.zst: the file is damaged \(it ends inside a zstd frame\)"):
        fmsdata.ShardReader(url, storage_options=object_store.options)
    object_store.put(f"{url}/part-0.jsonl.zst", encode(["a"], "txt.zst"))
    reader = fmsdata.ShardReader(url, storage_options=object_store.options)
    with pytest.raises(DataError, match=r"part-0\.jsonl\.zst: line 1: it is not JSON"):
        next(iter(reader))


def test_a_pass_over_remote_text_is_planned_without_reading_text(
    tmp_path: Path, proxy: FaultProxy, object_store: ObjectStore
) -> None:
    root = tmp_path / "corpus"
    write_source(root / "web", some_texts(1, 90), "jsonl.gz", frame=500)
    write_source(root / "wiki", some_texts(2, 30), "parquet")
    url = object_store.bucket("planned") + "/corpus"
    object_store.upload(root, url)
    for place in (Location(root), Location(url, object_store.options)):
        index_corpus(place, tokenizer=open_tokenizer("bytes"))
    lines = {}
    for path, options in ((str(root), {}), (url, proxy.options)):
        readers = {name: fmsdata.ShardReader(f"{path}/{name}", storage_options=options) for name in ("web", "wiki")}
        mixed = fmsdata.Mixture(
            {name: fmsdata.Tokenize(readers[name], "bytes") for name in readers}, dict.fromkeys(readers, 1)
        )
        data = fmsdata.Rescalable(fmsdata.Pack(mixed, seq_len=33), lanes=4, epochs=1)
        proxy.clear()
        lines[path] = data.plan().result().lines.tolist()
        assert not proxy.asked(ending=".gz")
        assert not proxy.asked(ending=".parquet")
        batches = list(fmsdata.StatefulDataLoader(data, batch_size=3, rank=0, world_size=1))
        assert sum(int((~batch["is_padding"]).sum()) for batch in batches) == sum(lines[path])
    assert lines[url] == lines[str(root)]
    assert proxy.asked(ending=".gz"), "the pass itself reads text"
