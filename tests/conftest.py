"""Fixtures for the tests of every folder."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import fmsdata
from tests.helpers import write_corpus
from tests.integrations.environment import summary
from tests.servers.fault_proxy import FaultProxy
from tests.servers.object_store import ObjectStore, S3Server, Server, SwiftStore
from tests.servers.other_stores import AzureStore, GcsStore

# A shell starts jobs in the background with interrupts ignored, and the programs of the tests would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What is kept of text files goes to a folder of the tests, also from the processes that they start."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Two sources of different size and layout, some documents of them empty."""
    return write_corpus(tmp_path)


@pytest.fixture(scope="module")
def shared_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, for all tests of a module."""
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def object_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    """A real object store on loopback. Each test makes buckets of its own in it."""
    with ObjectStore(tmp_path_factory.mktemp("object-store")) as store:
        yield store


@pytest.fixture(scope="session")
def swift_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SwiftStore]:
    """Another one that shares no code with it."""
    with SwiftStore(tmp_path_factory.mktemp("swift")) as store:
        yield store


@pytest.fixture(scope="session")
def azure_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AzureStore]:
    """Azure's."""
    with AzureStore(tmp_path_factory.mktemp("azure")) as store:
        yield store


@pytest.fixture(scope="session")
def gcs_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GcsStore]:
    """Google's."""
    with GcsStore(tmp_path_factory.mktemp("gcs")) as store:
        yield store


@pytest.fixture(params=["object_store", "swift_store"])
def s3_store(request: pytest.FixtureRequest) -> S3Server:
    """Each store that speaks S3."""
    store = request.getfixturevalue(request.param)
    assert isinstance(store, S3Server)
    return store


@pytest.fixture(params=["object_store", "swift_store", "azure_store", "gcs_store"])
def any_store(request: pytest.FixtureRequest) -> Server:
    """Each store."""
    store = request.getfixturevalue(request.param)
    assert isinstance(store, Server)
    return store


@pytest.fixture
def proxy(object_store: ObjectStore) -> Iterator[FaultProxy]:
    """A proxy in front of the store that passes everything, until the test gives it a rule."""
    with FaultProxy(object_store.endpoint) as proxy:
        yield proxy


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Best-fit packing in windows of 6 lines, so that a small corpus fills several."""
    defaults = {**(fmsdata.Pack.__init__.__kwdefaults__ or {}), "window": 6}
    monkeypatch.setattr(fmsdata.Pack.__init__, "__kwdefaults__", defaults)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The trainers that were tested, and what of them could not be."""
    terminalreporter.section("trainers")
    for line in summary():
        terminalreporter.line(line)
