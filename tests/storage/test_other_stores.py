"""Azure Blob Storage and Google Cloud Storage: what holds for S3 holds there, against their emulators.

`any_store` runs further tests on them: tests/servers/test_servers.py, tests/run/test_checkpoints_s3.py and
test_connection.py.
"""

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fmsdata
from fmsdata.corpus.index import write_index
from fmsdata.errors import ConfigError, DeniedError, MissingError, StorageError
from fmsdata.storage.clients.connect import connect
from fmsdata.storage.connection import Connection, close_connections
from fmsdata.storage.location import Location
from fmsdata.storage.settings import Storage
from tests.helpers import documents, write_source
from tests.servers.fault_proxy import FaultProxy, answer, faulty, first
from tests.servers.object_store import Server
from tests.servers.other_stores import AzureStore, account_key
from tests.storage.test_connection import FAULTS

DATA = random.Random(0).randbytes(300_000)
QUICK = Storage(retries=3, timeout=5.0, deadline=30.0)


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    close_connections()
    yield
    close_connections()


@pytest.fixture(params=["azure_store", "gcs_store"])
def store(request: pytest.FixtureRequest) -> Server:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Server)
    return found


@pytest.fixture
def proxy(store: Server) -> Iterator[FaultProxy]:
    with FaultProxy(store.endpoint) as proxy:
        yield proxy


@pytest.fixture
def url(store: Server) -> str:
    url = store.bucket("other")
    store.put(f"{url}/a", DATA)
    return url


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_tried_again_once(store: Server, proxy: FaultProxy, url: str, fault: str) -> None:
    """An answer with an error by this package alone, a broken connection perhaps by the libraries, but without their
    waits.
    """
    connection = Connection.to(url, store.options_at(proxy.endpoint), QUICK)
    path = connection.path(f"{url}/a")
    version = connection.run(connection.info(path)).version
    proxy.clear()
    proxy.rule = first(1, FAULTS[fault])
    began = time.monotonic()
    assert connection.run(connection.read(path, 1000, 200_000, version)).data == DATA[1000:200_000]
    assert time.monotonic() - began < 5
    assert len(proxy.records) == 2
    assert connection.traffic.retries == 1 or not fault.isdigit()
    proxy.clear()
    assert connection.run(connection.list(connection.path(url))).files[0].size == len(DATA)
    assert connection.run(connection.read_all(path)) == DATA


def test_many_faults_change_nothing(store: Server, proxy: FaultProxy, url: str) -> None:
    connection = Connection.to(url, store.options_at(proxy.endpoint), QUICK)
    path = connection.path(f"{url}/a")
    proxy.rule = faulty(0.2, seed=1)
    for start in range(0, 300_000, 10_000):
        assert connection.run(connection.read(path, start, start + 7000)).data == DATA[start : start + 7000]
    assert connection.traffic.retries
    assert connection.traffic.errors == 0


@pytest.mark.parametrize(
    ("status", "code", "error", "words", "attempts"),
    [
        (403, "AuthorizationPermissionMismatch", DeniedError, "access is denied: 403", 1),
        (404, "BlobNotFound", MissingError, "it is gone; it was there when the shards were listed", 1),
        (412, "ConditionNotMet", StorageError, "it was replaced during the run", 1),
        (400, "InvalidInput", StorageError, "can't be read: 400", 1),
        (409, "BlobArchived", StorageError, None, None),
        (429, "TooManyRequests", StorageError, "could not be read in 4 attempts .* last error: 429", 4),
        (500, "InternalError", StorageError, "could not be read in 4 attempts .* last error: 500", 4),
        (503, "ServerBusy", StorageError, "could not be read in 4 attempts .* last error: 503", 4),
    ],
)
def test_errors_are_understood(
    store: Server,
    proxy: FaultProxy,
    url: str,
    status: int,
    code: str,
    error: Any,
    words: str | None,
    attempts: int | None,
) -> None:
    connection = Connection.to(url, store.options_at(proxy.endpoint), QUICK)
    path = connection.path(f"{url}/a")
    connection.run(connection.info(path))
    proxy.clear()
    proxy.rule = lambda _: answer(status, code)
    if words is None:  # the code makes the difference, and Google's store has no such thing
        azure = isinstance(store, AzureStore)
        words, attempts = ("move it to a tier", 1) if azure else ("last error: 409", 4)
    with pytest.raises(error, match=words) as caught:
        connection.run(connection.read(path, 0, 100))
    assert type(caught.value) is error
    assert f"{url}/a" in str(caught.value)
    assert len(proxy.records) == attempts


@pytest.mark.parametrize(("status", "code"), [(403, "AuthenticationFailed"), (401, "InvalidAuthenticationInfo")])
def test_expired_credentials_are_looked_for_again(
    store: Server, proxy: FaultProxy, url: str, monkeypatch: pytest.MonkeyPatch, status: int, code: str
) -> None:
    made: list[Any] = []

    async def counted(*arguments: Any) -> Any:
        made.append(arguments)
        return await connect(*arguments)

    monkeypatch.setattr("fmsdata.storage.connection.connect", counted)
    connection = Connection.to(url, store.options_at(proxy.endpoint), QUICK)
    path = connection.path(f"{url}/a")
    assert connection.run(connection.read(path, 0, 100)).data == DATA[:100]
    if status == 403 and not isinstance(store, AzureStore):
        status, code = 401, "authError"  # Google's store says it so
    proxy.clear()
    proxy.rule = first(1, answer(status, code))
    assert connection.run(connection.read(path, 100, 200)).data == DATA[100:200]
    assert len(made) == 2
    proxy.clear()
    proxy.rule = lambda _: answer(status, code)
    with pytest.raises(StorageError, match="the credentials were rejected, and refreshing them did not help: "):
        connection.run(connection.read(path, 200, 300))
    assert len(made) == 5


def test_a_wrong_key_is_refused_and_not_shown(azure_store: AzureStore) -> None:
    """Azure itself says AuthenticationFailed. The emulator of Google's store takes requests of anybody."""
    url = azure_store.bucket()
    wrong = account_key("not-the-secret")
    with pytest.raises(StorageError, match=r"can't be listed: access is denied: 403 AuthorizationFailure") as error:
        Location(url, azure_store.options_at(azure_store.endpoint, wrong)).files((".arrow",))
    assert wrong not in str(error.value)


def test_a_read_names_the_version_that_it_wants(store: Server, proxy: FaultProxy, url: str) -> None:
    connection = Connection.to(url, store.options_at(proxy.endpoint), QUICK)
    path = connection.path(f"{url}/a")
    version = connection.run(connection.info(path)).version
    proxy.clear()
    connection.run(connection.read(path, 0, 100, version))
    (record,) = proxy.records
    if isinstance(store, AzureStore):
        assert record.request.headers["If-Match"] == f'"{version}"'
        store.put(f"{url}/a", DATA[::-1])
        with pytest.raises(StorageError, match="replaced during the run"):
            connection.run(connection.read(path, 0, 100, version))
    else:
        assert f"ifGenerationMatch={version}" in record.request.query
        store.put(f"{url}/a", DATA[::-1])
        with pytest.raises(StorageError, match=f"replaced during the run: its version is [0-9]+, not {version}"):
            connection.run(connection.check(path, str(version)))


def test_listings_come_in_pages(store: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    url = store.bucket("pages")
    names = [f"x/{number:03}.arrow" for number in range(25)]
    for name in names:
        store.put(f"{url}/{name}", name.encode())
    with FaultProxy(store.endpoint) as proxy:
        options = store.options_at(proxy.endpoint)
        assert [entry.name for entry in Location(url, options).files((".arrow",))] == names
        assert len(proxy.records) == 1
        connection = Connection.to(url, options)
        assert [entry.name for entry in connection.run(connection.list(connection.path(f"{url}/x"))).files] == [
            name.removeprefix("x/") for name in names
        ]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("other") / "corpus"
    rng = np.random.default_rng(11)
    write_source(root / "web", documents(rng, 1500, 200), shards=3, rows=64)
    write_source(root / "wiki", documents(rng, 500, 150), shards=2, layout="batch", dtype=np.int32)
    write_index(root)
    return root


def config(path: str, options: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {
        "seed": 5,
        "path": path,
        "storage_options": options or {},
        "sources": {"web": {"weight": 2}, "wiki": {"weight": 1}},
        "pack": {"seq_len": 64},
        "shuffle": {"window": 16},
        "lanes": 6,
        "loader": {"batch_size": 6, "prefetch": 1},
        "storage": {"prefetch_bytes": 50_000},
        **more,
    }


def rows(loader: fmsdata.StatefulDataLoader, steps: int) -> list[Any]:
    try:
        return [batch["input_ids"].tolist() for batch in islice(loader, steps)]
    finally:
        loader.close()


@pytest.mark.parametrize(("workers", "context"), [(0, None), (2, "fork"), (1, "spawn"), (1, "forkserver")])
def test_the_stream_is_the_one_of_local_files(store: Server, corpus: Path, workers: int, context: str | None) -> None:
    url = store.bucket("stream")
    store.upload(corpus, f"{url}/tokens")
    expected = rows(fmsdata.build_loader(config(str(corpus))), 40)
    loader = {"batch_size": 6, "prefetch": 1, "num_workers": workers, "multiprocessing_context": context}
    assert rows(fmsdata.build_loader(config(f"{url}/tokens", store.options, loader=loader)), 40) == expected
    (resumed,) = [fmsdata.build_loader(config(f"{url}/tokens", store.options))]
    list(islice(resumed, 10))
    state = resumed.state_dict()
    resumed.close()
    following = fmsdata.build_loader(config(f"{url}/tokens", store.options, loader=loader))
    following.load_state_dict(state)
    assert rows(following, 10) == expected[10:20]


def test_a_shard_that_is_replaced_is_noticed(store: Server, corpus: Path) -> None:
    url = store.bucket("replaced")
    store.upload(corpus, url)
    loader = fmsdata.build_loader(config(url, store.options, storage={"prefetch_bytes": 0}))
    for shard in sorted(corpus.rglob("*.arrow")):
        store.put(f"{url}/{shard.relative_to(corpus).as_posix()}", shard.read_bytes())
    with pytest.raises(StorageError, match="replaced during the run"):
        rows(loader, 2)


def test_forks_and_a_clean_exit(store: Server, corpus: Path) -> None:
    """A child reads through connections of its own, and both processes end without a word."""
    url = store.bucket("forks")
    store.upload(corpus, url)
    code = f"""
import os, fmsdata
from itertools import islice
def rows(loader, steps): return [batch["input_ids"].tolist() for batch in islice(loader, steps)]
def make(): return fmsdata.build_loader({config(url, store.options)!r})
loader = make()
mine = rows(loader, 3)
child = os.fork()
again = make()
assert rows(again, 3) == mine
again.close()
if child:
    assert os.waitpid(child, 0)[1] == 0
"""
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", code],
        capture_output=True,
        timeout=120,
        env={**os.environ},
    )
    assert (done.returncode, done.stderr.decode(), done.stdout.decode()) == (0, "", "")


@pytest.mark.parametrize(
    ("url", "library", "extra"),
    [("az://b/c", "adlfs", "azure"), ("abfs://b/c", "adlfs", "azure"), ("gs://b/c", "gcsfs", "gcs")],
)
def test_a_missing_package_is_named_with_its_extra(
    url: str, library: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = f"""
import sys
sys.modules[{library!r}] = None
from fmsdata.storage.location import Location
from fmsdata.errors import ConfigError
try:
    Location({url!r}).files((".arrow",))
except ConfigError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert f"path '{url}' can't be used: " in done.stdout, done.stderr
    assert library in done.stdout
    assert f'pip install "fmsdata[{extra}]"' in done.stdout


@pytest.mark.parametrize(
    ("url", "options", "words"),
    [
        ("az://b/c", {"acount_name": "x"}, "has no option 'acount_name'; did you mean 'account_name'"),
        ("az://b/c", {}, "Azure needs an account_name, with credentials, or a connection_string"),
        ("az://b/c", {"connection_string": "x"}, "storage_options can't be used"),
        ("gs://b/c", {"token": "anon", "access": "some"}, "storage_options can't be used: access must be one of"),
    ],
)
def test_options_that_cannot_be_used_are_told(
    url: str, options: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(os.environ):
        if name.startswith("AZURE_"):
            monkeypatch.delenv(name)
    with pytest.raises((ConfigError, StorageError), match=words):
        Location(url, options, QUICK).files((".arrow",))
