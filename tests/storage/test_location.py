"""Planning is the same wherever a corpus is: on a disk, in memory, or on an object store, which is asked little."""

import json
import os
import pickle
import re
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qsl, unquote

import fsspec
import numpy as np
import pytest
import yaml

import fmsdata
from fmsdata import testing
from fmsdata.cli.common import parse_storage_options
from fmsdata.cli.run import mixture_of
from fmsdata.compat import fms_fsdp
from fmsdata.config.build import build_data, make_loader
from fmsdata.config.read import read_config
from fmsdata.corpus.counts import read_counts
from fmsdata.corpus.index import write_index
from fmsdata.corpus.listing import list_shards
from fmsdata.errors import (
    CheckpointError,
    ConfigError,
    CountsError,
    DataError,
    DeniedError,
    MissingError,
    StorageError,
)
from fmsdata.run.rescalable import Rescalable
from fmsdata.storage.location import Location
from fmsdata.storage.settings import CacheSettings, Storage
from tests.helpers import CONFIG, documents, write_source
from tests.servers.fault_proxy import Action, FaultProxy, Request, always, answer, faulty, never
from tests.servers.object_store import KEY, SECRET, ObjectStore, storage_options

FMSDATA = Path(sys.executable).parent / "fmsdata"
HEADER = "dataset/filename,documents,tokens\n"
PATIENT = Storage(retries=20, deadline=30)
numbers = count()


class Elsewhere:
    """Corpora that were copied from a local disk to another filesystem."""

    def __init__(self, kind: str, store: ObjectStore, proxy: FaultProxy) -> None:
        self.kind, self._store, self._proxy = kind, store, proxy
        self.options = proxy.options if kind == "s3" else {}

    def copy(self, folder: Path, below: str = "corpus") -> Location:
        """Where the folder is now."""
        if self.kind == "file":
            return Location(f"file://{folder}")
        if self.kind == "memory":
            url = f"memory://place-{next(numbers)}/{below}"
            fill_memory(url, folder)
            return Location(url)
        url = f"{self._store.bucket()}/{below}"
        self._store.upload(folder, url)
        self._proxy.clear()
        return Location(url, self.options)


def fill_memory(url: str, folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            fsspec.filesystem("memory").pipe(f"{url}/{path.relative_to(folder)}", path.read_bytes())


@pytest.fixture(params=["file", "memory", "s3"])
def elsewhere(request: pytest.FixtureRequest, object_store: ObjectStore, proxy: FaultProxy) -> Elsewhere:
    return Elsewhere(request.param, object_store, proxy)


@pytest.fixture
def on_s3(object_store: ObjectStore, proxy: FaultProxy) -> Elsewhere:
    return Elsewhere("s3", object_store, proxy)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A corpus of two sources, and what is no part of it."""
    rng = np.random.default_rng(1)
    home = tmp_path / "home"
    write_source(home / "web", documents(rng, 60), layout="list")
    write_source(home / "lang=de/wiki", documents(rng, 23), layout="batch", dtype=np.int32, shards=2)
    write_source(home / "web/.copy", documents(rng, 5), shards=1)
    (home / "web/.part-9.arrow").write_bytes(b"half")
    (home / "web/part-0.arrow.tmp").write_bytes(b"half")
    return home


SOURCES = {"web": {"weight": 7}, "wiki": {"weight": 3, "path": "lang=de/wiki"}}


def plan(root: str | Path | Location, options: dict[str, Any] | None = None, **overrides: Any) -> Rescalable:
    if isinstance(root, Location):
        options, root = root.options, root.url if root.local is None else f"file://{root.local}"
    dotted = {name.replace("__", "."): value for name, value in overrides.items()}
    return build_data(_config(root, options, dotted))


def _config(root: str | Path, options: dict[str, Any] | None, overrides: dict[str, Any]) -> Any:
    told = {**CONFIG, "path": str(root), "storage_options": options or {}, "sources": SOURCES}
    return read_config(told, overrides)


def listed(proxy: FaultProxy) -> list[str]:
    """What was asked for: listings by their prefix, files by their path."""
    asked = [(one.request, dict(parse_qsl(one.request.query))) for one in proxy.records]
    return [query.get("prefix", f"{request.method} {unquote(request.path)}") for request, query in asked]


# A location by itself


def test_locations_are_joined_and_left_as_paths_are() -> None:
    root = Location("s3://bucket/corpus/", {"anon": True})
    web = root / "lang=en/web/"
    assert (web.url, web.name, web.local, web.options) == (
        "s3://bucket/corpus/lang=en/web",
        "web",
        None,
        {"anon": True},
    )
    assert [one.url for one in web.parents] == ["s3://bucket/corpus/lang=en", "s3://bucket/corpus", "s3://bucket"]
    assert Location("s3://bucket").parent.url == "s3://bucket"
    assert [one.url for one in Location("hf://datasets/me/x/web").parents] == ["hf://datasets/me/x", "hf://datasets/me"]
    assert (root / "../other/./x").url == "s3://bucket/other/x"
    assert (root / "../../../x").url == "s3://bucket/x"
    assert (root / "s3://other/x").url == "s3://other/x"
    assert (root / "s3://other/x").options == root.options
    assert (root / "gs://other/x").options == {}
    assert web.inside(root) == "lang=en/web"
    assert (root / "..").inside(root) == ".."
    assert (root / ".").inside(root) == "."
    assert Location("s3://bucket/corpus-2").inside(root) == "../corpus-2"
    assert (root / "../corpus-2").url == "s3://bucket/corpus-2"
    assert Location("s3://other/corpus").inside(root) == "s3://other/corpus"


def test_local_locations_are_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for written in (tmp_path, str(tmp_path), f"file://{tmp_path}", f"local://{tmp_path}"):
        assert Location(written).local == tmp_path
        assert str(Location(written)) == str(tmp_path)
    assert str(Location("corpus") / "web") == "corpus/web"
    assert Location(".").name == tmp_path.name
    assert (Location("corpus") / "/else/web").local == Path("/else/web")
    assert (Location("corpus") / "s3://bucket/web").url == "s3://bucket/web"
    assert Location("corpus/../web").inside(Location("corpus")) == "../web"


def test_no_secret_is_shown() -> None:
    options = {"key": "hunter2", "client_kwargs": {"x": "hunter2"}}
    one = Location("https://me:hunter2@host:80/corpus", options) / "web"
    assert str(one) == "https://me:***@host:80/corpus/web"
    assert "hunter2" not in f"{one!r} {one.inside(Location('s3://x'))}"
    assert "hunter2" in one.url
    assert pickle.loads(pickle.dumps(one)).options == options
    for wrong in ("zip::https://me:hunter2@host/corpus", "https://host/corpus?sig=hunter2"):
        with pytest.raises(ConfigError) as caught:
            Location(wrong)
        assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "options", "words"),
    [
        ("", None, "path is ''"),
        (7, None, "path is 7"),
        ("s3://", None, "names no folder"),
        ("simplecache::s3://bucket/x", None, "storage.cache"),
        ("s3://bucket/x", ["hunter2"], r"storage_options must be a dict"),
        ("s3://bucket/x", {3: "hunter2"}, r"storage_options must be a dict"),
        ("nosuch://bucket/x", None, "nosuch"),
        ("s3://bucket/x", {"nosuch": 1}, "nosuch"),
    ],
)
def test_a_location_that_can_not_be_is_named(url: Any, options: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        fmsdata.ShardReader(url, storage_options=options)
    assert "hunter2" not in str(caught.value)


def test_small_files_are_written_read_and_removed(elsewhere: Elsewhere, home: Path) -> None:
    file = elsewhere.copy(home) / "meta/deep/notes.txt"
    assert not file.exists()
    file.write_bytes(b"one")
    file.write_bytes(b"two")
    assert file.read_bytes() == b"two"
    assert file.exists()
    assert file.is_file()
    assert not file.is_dir()
    assert file.parent.is_dir()
    assert file.parent.parent.folders() == ["deep"]
    assert [(one.name, one.size) for one in file.parent.files((".txt",))] == [("notes.txt", 3)]
    file.remove()
    assert not file.exists()


def test_a_folder_of_small_files_is_listed_and_removed(
    elsewhere: Elsewhere, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = elsewhere.copy(home) / "run"
    assert (folder.folders(), folder.sizes()) == ([], {})
    for name in ("step-1/b", "step-1/a", "step-1/.hidden", "step-1/deep/c", "step-2/b", "top"):
        (folder / name).write_bytes(name.encode())
    assert (folder.folders(), folder.sizes()) == (["step-1", "step-2"], {"top": 3})
    assert ((folder / "step-1").folders(), (folder / "step-1").sizes()) == (["deep"], {"a": 8, "b": 8})
    for _ in range(2):
        (folder / "step-1").remove_folder(first="b")
        (folder / "top").remove()
    assert (folder.folders(), folder.sizes()) == (["step-2"], {})


def test_a_file_that_disappears_during_a_listing_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abc":
        (tmp_path / name).write_bytes(b"x")
    scan = os.scandir

    def slow(folder: Path) -> list[os.DirEntry[str]]:
        found = list(scan(folder))
        (tmp_path / "b").unlink()
        return found

    monkeypatch.setattr(os, "scandir", slow)
    assert Location(tmp_path).sizes() == {"a": 1, "c": 1}


def test_failures_are_raised_as_the_error_that_was_chosen(elsewhere: Elsewhere, home: Path) -> None:
    there = Location(elsewhere.copy(home), error=CheckpointError)
    for file in (there / "none", there / "lang=de" / "none", there.parent / there.name / "none"):
        with pytest.raises(
            CheckpointError, match=rf"/{file.parent.name}/none can't be read: (it does not exist|No such file)"
        ):
            file.read_bytes()
    with pytest.raises((MissingError, FileNotFoundError)):
        (elsewhere.copy(home) / "none").read_bytes()


def test_the_home_folder_may_be_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Location("~/run").local == tmp_path / "run"
    assert (Location(".") / "~").local == Path("~")


# Planning


def test_a_plan_is_the_same_wherever_the_corpus_is(elsewhere: Elsewhere, home: Path) -> None:
    there = elsewhere.copy(home)
    moved, here = plan(there), plan(home)
    assert moved.fingerprint == here.fingerprint
    web: Any = mixture_of(moved).sources["web"]
    assert web.counts.shards == tuple(f"part-{i}.arrow" for i in range(3))
    if there.local is None:
        assert [entry.name for entry in web._files.entries] == list(web.counts.shards)
        assert [entry.size for entry in web._files.entries] == [
            (home / "web" / name).stat().st_size for name in web.counts.shards
        ]
        assert None not in [entry.version for entry in web._files.entries]
        assert web.path.options == there.options


def test_sources_are_found_by_listing(elsewhere: Elsewhere, home: Path) -> None:
    write_source(home / "code", [[1, 2, 3]], shards=1)
    (home / "notes").mkdir()
    (home / "notes/readme.txt").write_text("no shards")
    there = elsewhere.copy(home)
    assert sorted(mixture_of(plan(there, sources=None)).sources) == ["code", "lang=de", "web"]
    assert plan(there, sources=None).fingerprint == plan(home, sources=None).fingerprint
    (there / "loose.arrow").write_bytes((home / "code/part-0.arrow").read_bytes())
    with pytest.raises(DataError, match=r"corpus: loose.arrow is in no source|home: loose.arrow is in no source"):
        plan(there, sources=None)


def test_one_source_is_planned_by_itself(elsewhere: Elsewhere, home: Path) -> None:
    there = elsewhere.copy(home) / "web"
    reader = fmsdata.ShardReader(there.url, storage_options=there.options, storage=PATIENT)
    assert (reader.name, reader.path.url, reader.path.storage) == ("web", there.url, PATIENT)
    assert reader.describe() == fmsdata.ShardReader(home / "web").describe()
    again = pickle.loads(pickle.dumps(reader))
    assert (again.describe(), again.path.options) == (reader.describe(), reader.path.options)
    assert str(there.options.get("secret", "geheim")) not in f"{reader.path!r} {reader.describe()}"


def test_index_writes_the_counts_where_the_corpus_is(elsewhere: Elsewhere, home: Path) -> None:
    there = elsewhere.copy(home)
    before = read_counts(there / "web")
    assert before.csv_root is None
    (there / "meta/counts.csv").write_bytes(b"what was there before")
    (there / "meta/web_counts_2.csv").write_bytes(b"and this")
    assert write_index(there, replace=True).url == (there / "meta/counts.csv").url
    after = read_counts(there / "web")
    assert (after.digest, after.csv_root) == (before.digest, str(there))
    kept = {entry.name: (there / "meta" / entry.name).read_bytes() for entry in (there / "meta").files((".csv",))}
    assert kept.pop("counts.csv").decode().startswith(f"{HEADER}/lang=de/wiki/part-0.arrow,")
    assert kept == {"replaced/counts.csv": b"what was there before", "replaced/web_counts_2.csv": b"and this"}


@pytest.mark.parametrize("meta", ["", "..", "../..", "web"])
def test_counts_are_found_beside_and_above_a_source(elsewhere: Elsewhere, home: Path, meta: str) -> None:
    there = elsewhere.copy(home, "data/corpus")
    rows = "".join(f"data/corpus/web/part-{i}.arrow,{i + 1},{10 * i}\n" for i in range(3))
    if elsewhere.kind == "file":
        rows = rows.replace("data/corpus", f"{home.parent.name}/home")
    (there / meta / "meta/my_counts.csv").write_bytes((HEADER + rows).encode())
    counts = read_counts(there / "web")
    assert counts.documents.tolist() == [1, 2, 3]
    assert counts.csv_root == str((there / meta).absolute())


def test_counts_by_ranges_are_those_of_the_files(elsewhere: Elsewhere, tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    write_source(tmp_path / "a", documents(rng, 200), shards=40)
    write_source(tmp_path / "b", documents(rng, 50), layout="batch", stream=True)
    write_source(tmp_path / "c", documents(rng, 50), stream=True)
    write_source(tmp_path / "d", documents(rng, 50), layout="batch")
    there = elsewhere.copy(tmp_path)
    for name in "abcd":
        if name in "bc" and there.local is None:
            with pytest.raises(
                DataError, match=rf"/{name}/part-\d\.arrow: this is an Arrow stream.*local disk; rewrite"
            ):
                read_counts(there / name)
        else:
            assert read_counts(there / name).digest == read_counts(tmp_path / name).digest


def test_a_run_goes_on_where_the_corpus_was_moved(elsewhere: Elsewhere, home: Path) -> None:
    config = _config(home, None, {})
    loader = make_loader(config, build_data(config), rank=0, world_size=1)
    for _ in islice(loader, 9):
        pass
    state = loader.state_dict()
    loader.close()
    there = elsewhere.copy(home)
    moved = make_loader(config, plan(there), rank=0, world_size=1)
    moved.load_state_dict(state)
    assert moved.state_dict() == state


def test_a_source_that_was_removed_is_found_again(elsewhere: Elsewhere, home: Path) -> None:
    there = elsewhere.copy(home)
    sources: Any = mixture_of(plan(there)).sources
    without = mixture_of(plan(there, sources={"web": {"weight": 1}}))
    assert without.find is not None
    found: Any = without.find("wiki", sources["wiki"].describe())
    assert (found.describe(), found.path.url) == (sources["wiki"].describe(), sources["wiki"].path.url)


def test_a_source_may_be_on_another_filesystem(on_s3: Elsewhere, home: Path) -> None:
    there = on_s3.copy(home)
    mixed = {"web": {"weight": 1}, "wiki": {"weight": 1, "path": f"{there.url}/lang=de/wiki"}}
    fill_memory("memory://somewhere/web", home / "web")
    for root, options in ((f"{there.url}/other/..", there.options), (f"{there.parent.url}/x/../corpus", there.options)):
        assert mixture_of(plan(root, options, sources=mixed)).sources["wiki"].size().documents == 23
    mixed["web"] = {"weight": 1, "path": "memory://somewhere/web"}
    sources: Any = mixture_of(plan(there, sources=mixed)).sources
    assert [sources[name].folder for name in ("web", "wiki")] == ["memory://somewhere/web", "lang=de/wiki"]


def test_stored_documents_are_read_from_anywhere(elsewhere: Elsewhere, home: Path, tmp_path: Path) -> None:
    write_source(home / "stream", documents(np.random.default_rng(5), 30), stream=True)
    there = elsewhere.copy(home)
    names = {"web": "web", "wiki": "lang=de/wiki", "stream": "stream"}
    far = testing.stored_documents({name: there / path for name, path in names.items()}, strip=[11], min_length=4)
    near = testing.stored_documents({name: home / path for name, path in names.items()}, strip=[11], min_length=4)
    assert list(far) == list(near)
    assert all(np.array_equal(far[one], near[one]) for one in near)
    by_url = testing.StoredDocuments({"web": (there / "web").url}, storage_options=there.options)
    assert len(by_url) == len(testing.StoredDocuments({"web": home / "web"}))


# What an object store is asked


def test_planning_asks_little_however_many_shards_there_are(
    object_store: ObjectStore, proxy: FaultProxy, tmp_path: Path
) -> None:
    """13 sources: each is listed once, the counts are read once, and no shard is looked at."""
    sizes = {f"lang=l{i % 4}/dataset=d{i}": 25 for i in range(12)} | {"large": 200}
    url = f"{object_store.bucket()}/corpus"
    names = [f"{source}/part-{i:05d}.arrow" for source, size in sizes.items() for i in range(size)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: object_store.put(f"{url}/{name}", b"not looked at"), names))
    object_store.put(f"{url}/meta/counts.csv", (HEADER + "".join(f"{name},10,500\n" for name in names)).encode())
    sources = {name.replace("/", "."): {"path": name, "weight": 1} for name in sizes}
    data = plan(url, proxy.options, sources=sources)
    read = mixture_of(data).sources
    assert sum(source.size().documents for source in read.values()) == 10 * len(names)
    asked = sorted(listed(proxy))
    folders = [f"corpus/{source}/" for source in sizes]
    levels = [f"corpus/lang=l{i}/meta/" for i in range(4)]
    assert asked == sorted([*folders, *levels, "corpus/meta/", f"GET /{url[5:]}/meta/counts.csv"])
    proxy.clear()
    plan(url, proxy.options, sources=None)
    folders = [f"corpus/{name}/" for name in ("large", "meta", *(f"lang=l{i}" for i in range(4)))]
    assert sorted(listed(proxy)) == sorted(["corpus/", *folders, f"GET /{url[5:]}/meta/counts.csv"])
    proxy.clear()
    plan(url, proxy.options, sources={"all": {"path": "lang=l0"}, "some": {"path": "lang=l0/dataset=d0"}})
    assert [prefix for prefix in listed(proxy) if "lang=" in prefix] == ["corpus/lang=l0/"]


def test_without_counts_shards_are_read_by_ranges(on_s3: Elsewhere, proxy: FaultProxy, tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    write_source(tmp_path / "web", documents(rng, 3000, longest=2000), shards=20, rows=50)
    there = on_s3.copy(tmp_path)
    read_counts(there / "web")
    size = sum(entry.size for entry in list_shards(there / "web").entries)
    assert size > 6_000_000
    read = sum(record.sent for record in proxy.records if record.request.range)
    assert 0 < read < 20 * 100_000
    assert not proxy.asked("HEAD")
    assert 1 < proxy.requests.most <= 32


def test_planning_survives_what_clouds_do(on_s3: Elsewhere, proxy: FaultProxy, home: Path) -> None:
    there = on_s3.copy(home)
    expected = plan(home).fingerprint
    proxy.rule = faulty(0.3, seed=1)
    assert plan(there, storage__retries=20).fingerprint == expected
    assert write_index(Location(there, storage=PATIENT)).exists()
    proxy.rule = faulty(0.3, seed=2)
    assert plan(there, storage__retries=20).fingerprint == expected
    assert any(record.status >= 500 for record in proxy.records)


# What goes wrong


def test_what_is_not_there_is_named_with_what_to_check(on_s3: Elsewhere, home: Path) -> None:
    there = on_s3.copy(home)
    bucket = there.parent.url
    cases: list[tuple[Callable[[], Any], type[DataError], str]] = [
        (
            lambda: plan("s3://no-such-bucket/corpus", there.options),
            MissingError,
            "s3://no-such-bucket/.*bucket's name",
        ),
        (
            lambda: plan(f"{bucket}/nowhere", there.options),
            DataError,
            f"{bucket}/nowhere: no such folder; check `path`",
        ),
        (lambda: plan(f"{bucket}/no", there.options, sources=None), DataError, f"{bucket}/no: no such folder"),
        (
            lambda: plan(there, sources__wbe={"weight": 1}),
            DataError,
            f"source 'wbe': there is no folder {there}/wbe; .* 'web'",
        ),
        (
            lambda: plan(there, sources={"wiki": {"path": "lang=de/wki"}}),
            DataError,
            f"source 'wiki': there is no folder {there}/lang=de/wki; did you mean 'wiki'",
        ),
        (
            lambda: fmsdata.ShardReader(there / "web/part-0.arrow"),
            DataError,
            f"{there}/web/part-0.arrow: is a file, not a folder; check `path` of the source",
        ),
        (
            lambda: fmsdata.ShardReader(there / "no"),
            DataError,
            f"{there}/no: no such folder; check `path` of the source",
        ),
        (lambda: write_index(there / "no"), DataError, f"{there}/no: no files ending in .arrow, .parquet, .* below it"),
    ]
    for call, kind, words in cases:
        with pytest.raises(kind, match=words):
            call()


def test_a_folder_without_shards_is_named(on_s3: Elsewhere, home: Path) -> None:
    there = on_s3.copy(home)
    (there / "news/readme.md").write_bytes(b"nothing here")
    with pytest.raises(DataError, match=f"{there}/news: no shards; a source is a folder with files ending in .arrow"):
        plan(there, sources__news={"weight": 1})
    with pytest.raises(DataError, match=f"{there}/news: no sub-folder holds shards"):
        plan(there / "news", sources=None)


def test_a_wrong_secret_is_named_and_not_shown(on_s3: Elsewhere, proxy: FaultProxy, home: Path) -> None:
    there = on_s3.copy(home)
    wrong = storage_options(proxy.endpoint, secret="hunter2")
    for call in (
        lambda: plan(there.url, wrong),
        lambda: plan(there.url, wrong, sources=None),
        lambda: write_index(Location(there.url, wrong)),
    ):
        time.sleep(0.3)  # what the call before it had requested at the same time as what failed
        proxy.clear()
        with pytest.raises(DeniedError, match=f"{there.parent}.*denied.*check the credentials") as caught:
            call()
        assert "hunter2" not in str(caught.value)
        asked = [record.request.query for record in proxy.records]
        assert len(asked) == len(set(asked)) <= 3, "asked again and again, and not once for the counts and each source"


def test_credentials_may_be_for_the_corpus_alone(on_s3: Elsewhere, proxy: FaultProxy, home: Path) -> None:
    """Looking for counts above it is refused then, and that is no matter. Within it, it is."""
    there = on_s3.copy(home, "data/corpus")

    def only(prefix: str) -> Callable[[Request], Action]:
        return lambda one: (
            never(one) if f"prefix={prefix}" in one.query or not one.query else answer(403, "AccessDenied")
        )

    proxy.rule = only("data%2Fcorpus%2F")
    assert plan(there).fingerprint == plan(home).fingerprint
    proxy.rule = only("data%2Fcorpus%2Fweb")
    with pytest.raises(DeniedError, match=f"{there}/lang=de/wiki.*denied"):
        plan(there)


def test_a_counts_file_that_is_wrong_is_named(on_s3: Elsewhere, home: Path) -> None:
    there = on_s3.copy(home)
    file = there / "meta/counts.csv"
    for text, words in (
        (b"\xff\xfe", "not a readable CSV file"),
        (b"a;b;c\n", "the header is"),
        (f"{HEADER}web/part-0.arrow,x,1\n".encode(), ":2: .* is not a row"),
        (f"{HEADER}web/gone.arrow,1,1\n".encode(), "web/gone.arrow, but there is no such file.*fmsdata index"),
    ):
        file.write_bytes(text)
        with pytest.raises(CountsError, match=f"{file}.*{words}"):
            plan(there)
    file.write_bytes(f"{HEADER}web/part-0.arrow,0,0\n".encode())
    with pytest.raises(CountsError, match=f"{there}/web: counts say 0 documents in part-0.arrow.*in {there}/meta"):
        plan(there)


def test_a_torn_shard_is_named(on_s3: Elsewhere, home: Path) -> None:
    there = on_s3.copy(home)
    (there / "meta/counts.csv").write_bytes(b"as it was")
    shard = there / "web/part-1.arrow"
    shard.write_bytes(shard.read_bytes()[:-20])
    with pytest.raises(DataError, match=f"{shard}.*truncated"):
        write_index(there)
    assert (there / "meta/counts.csv").read_bytes() == b"as it was"


def test_when_the_budget_is_used_up_it_says_so(on_s3: Elsewhere, proxy: FaultProxy, home: Path) -> None:
    there = on_s3.copy(home)
    proxy.rule = always(answer(503, "SlowDown"))
    with pytest.raises(StorageError, match=f"{there}/.*3 attempts.*503"):
        plan(there, storage__retries=2)


# The configuration and the commands


def test_the_storage_section_is_what_workers_read_with(home: Path) -> None:
    told = read_config(
        {**CONFIG, "path": "s3://bucket/corpus"},
        {"storage": {"prefetch_bytes": "1.5GiB", "timeout": 3, "cache": {"path": "/scratch", "limit": "200 GB"}}},
    )
    cache = CacheSettings(path="/scratch", limit=200 * 10**9)
    assert told.storage == Storage(prefetch_bytes=3 << 29, timeout=3.0, cache=cache)
    assert read_config({**CONFIG, "path": "x", "storage": None}).storage == Storage()
    sizes = {256 << 20: 256 << 20, "256MB": 256 * 10**6, "64 MiB": 64 << 20, "0.5kB": 500, 1e9: 10**9, 0: 0}
    for written, size in sizes.items():
        assert read_config({**CONFIG, "path": "x"}, {"storage.prefetch_bytes": written}).storage.prefetch_bytes == size
    reader = mixture_of(plan(home, storage__connections=3)).sources["web"]
    assert isinstance(reader, fmsdata.ShardReader)
    assert reader.path.storage == Storage(connections=3)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"storage.prefetch_bytes": "much"}, r"storage.prefetch_bytes is 'much'; it must be .* 256MB or 1.5GiB"),
        ({"storage.prefetch_bytes": "5"}, r"storage.prefetch_bytes is '5'; it must be"),
        ({"storage.prefetch_bytes": "-5MB"}, r"storage.prefetch_bytes is '-5MB'; it must be"),
        ({"storage.prefetch_bytes": True}, r"storage.prefetch_bytes is True; it must be"),
        ({"storage.prefetch_bytes": -1}, r"storage.prefetch_bytes is -1; it must be at least 0"),
        ({"storage.connections": 0}, r"storage.connections is 0; it must be at least 1"),
        ({"storage.deadline": 0}, r"storage.deadline is 0; it must be above 0"),
        ({"storage.cache.path": "x"}, r"storage.cache.limit is missing"),
        ({"storage.cache": {"path": "s3://b/x", "limit": "1GB"}}, r"storage.cache.path is 's3://b/x'; .* local disk"),
        ({"storage.cache": {"path": "x", "limit": 0}}, r"storage.cache.limit is 0"),
        ({"storage.retires": 3}, r"storage.retires: unknown key; did you mean 'retries'"),
        ({"prefetch_bytes": 3}, r"prefetch_bytes: unknown key; did you mean 'storage.prefetch_bytes'"),
    ],
    ids=str,
)
def test_a_wrong_value_in_the_storage_section_is_named(overrides: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_config({**CONFIG, "path": "s3://bucket/corpus"}, overrides)


def test_storage_options_are_written_on_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PASSWORD_OF_MINE", "12345")
    given = ['{"anon": false, "client_kwargs": {"a": 1}}', "client_kwargs.b=x=y", "secret=${env:PASSWORD_OF_MINE}"]
    told = {"anon": False, "client_kwargs": {"a": 1, "b": "x=y"}, "secret": "12345"}
    assert parse_storage_options(given) == told
    assert parse_storage_options(None) == {}
    for wrong in ("hunter2", "=hunter2", "key=[hunter2", "{hunter2", "key=${env:NOT_SET}"):
        with pytest.raises(ConfigError, match="--storage-options") as caught:
            parse_storage_options([wrong])
        assert "hunter2" not in str(caught.value)


def test_the_commands_work_on_an_object_store(on_s3: Elsewhere, proxy: FaultProxy, home: Path, tmp_path: Path) -> None:
    there = on_s3.copy(home)

    def run(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [FMSDATA, *args], capture_output=True, text=True, timeout=120, env={**os.environ, **environment}
        )

    endpoint = f"client_kwargs.endpoint_url={proxy.endpoint}"
    done = run("index", there.url, "-o", endpoint, "-o", f"key={KEY}", "--storage-options", "secret=${env:S}", S=SECRET)
    assert done.returncode == 0, done.stderr
    counts, manifest = done.stdout.splitlines()
    assert re.fullmatch(rf"wrote {there}/meta/counts.csv: \d+ shards, [\d,]+ documents, [\d,]+ tokens", counts)
    assert manifest.startswith(f"wrote {there}/meta/fmsdata-manifest.ipc")
    by_environment = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_ENDPOINT_URL": proxy.endpoint}
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump({**CONFIG, "sources": SOURCES, "path": there.url}))
    proxy.clear()
    done = run("plan", str(config), "--json", "storage.prefetch_bytes=1GB", **by_environment)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["memory_per_worker_bytes"] > report["remote_shards_per_worker_bytes"] == 10**9
    assert {name: (one["documents"], one["counts"]) for name, one in report["sources"].items()} == {
        "web": (60, "file"),
        "wiki": (23, "file"),
    }
    assert not [path for path in listed(proxy) if path.endswith(".arrow")]


def test_a_run_of_fms_fsdp_plans_on_an_object_store(
    on_s3: Elsewhere, proxy: FaultProxy, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = on_s3.copy(home)
    for name, value in (("ACCESS_KEY_ID", KEY), ("SECRET_ACCESS_KEY", SECRET), ("ENDPOINT_URL", proxy.endpoint)):
        monkeypatch.setenv(f"AWS_{name}", value)
    told = {
        "datasets": "web,lang=de/wiki",
        "weights": "3,1",
        "logical_shards": 4,
        "ckpt_save_path": str(tmp_path / "c"),
    }
    loader = fms_fsdp.get_data_loader(SimpleNamespace(data_path=there.url, **told), 0, 1)
    here = fms_fsdp.get_data_loader(SimpleNamespace(data_path=str(home), **told), 0, 1)
    assert loader.data.fingerprint == here.data.fingerprint
    with pytest.raises(ConfigError, match=f"dataset 'wbe': there is no folder {there}/wbe"):
        fms_fsdp.get_data_loader(SimpleNamespace(data_path=there.url, **{**told, "datasets": "wbe,web"}), 0, 1)


@pytest.mark.parametrize("where", ["disk", "memory"])
def test_a_range_of_a_file_is_all_of_it_or_an_error(tmp_path: Path, where: str) -> None:
    root = Location(tmp_path if where == "disk" else f"memory://ranges-{tmp_path.name}", error=DataError)
    (root / "a").write_bytes(b"0123456789")
    assert (root / "a").read_range(2, 5) == b"234"
    assert (root / "a").read_range(4, 4) == b""
    with pytest.raises(DataError, match="a"):
        (root / "a").read_range(8, 12)
