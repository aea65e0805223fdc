"""The cache on disk gives back what was put into it or nothing, and keeps its limit, whatever happens around it."""

import ctypes
import errno
import itertools
import logging
import multiprocessing
import os
import pickle
import random
import resource
import shutil
import signal
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fmsdata.storage.disk_cache
import fmsdata.storage.file_lock
from fmsdata import ConfigError
from fmsdata.storage.disk_cache import HEADER, DiskCache

FORK = multiprocessing.get_context("fork")
MUCH = 1 << 30


def data_of(key: str, size: int) -> bytes:
    return random.Random(key).randbytes(size)


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("??/*.range"))


def unfinished(folder: Path) -> list[Path]:
    return sorted((folder / ".fmsdata-unfinished").iterdir())


def stored_bytes(folder: Path) -> int:
    """All that is there. Exact only while nobody writes."""
    return sum(file.stat().st_size for file in [*entries(folder), *unfinished(folder)])


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.fixture(autouse=True)
def no_file_stays_open(tmp_path: Path) -> Iterator[None]:
    yield
    files = [os.path.realpath(fd) for fd in Path("/proc/self/fd").iterdir()]
    assert [file for file in files if str(tmp_path) in file] == []
    assert not fmsdata.storage.file_lock._open


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every use counts, and a failure does not make the cache rest."""
    monkeypatch.setattr(fmsdata.storage.disk_cache, "TOUCH_AFTER", 0.0)
    monkeypatch.setattr(fmsdata.storage.disk_cache, "REST", 0.0)


# What was put comes back


@pytest.mark.parametrize("size", [0, 1, 4096, 524_288, 3_000_001])
def test_what_was_put_comes_back_to_every_cache_of_the_folder(tmp_path: Path, size: int) -> None:
    one, other = DiskCache(tmp_path, MUCH), DiskCache(str(tmp_path), MUCH)
    data = data_of("k", size)
    one.put("k", data)
    for cache in (one, other, DiskCache(tmp_path, MUCH), pickle.loads(pickle.dumps(one))):
        assert cache.get("k", size) == data
        assert cache.get("another key", size) is None
    assert unfinished(tmp_path) == []


def test_any_text_is_a_key_and_any_bytes_are_data(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "made" / "with its parents", MUCH)
    keys = ["", "/", "../../x", "s3://b/web/a.arrow|etag|0-524288|9f", "é" * 5000, "\udcff", "a\x00b"]
    for key in keys:
        cache.put(key, key.encode(errors="surrogatepass"))
    for key in keys:
        data = key.encode(errors="surrogatepass")
        assert cache.get(key, len(data)) == data
    cache.put("view", memoryview(bytearray(b"0123456789"))[2:5])
    assert cache.get("view", 3) == b"234"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["made"]


def test_the_last_put_counts(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, MUCH)
    cache.put("k", b"old")
    cache.put("k", b"newer")
    assert cache.get("k", 5) == b"newer"
    assert len(entries(tmp_path)) == 1


def test_entries_are_spread_over_folders(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, MUCH)
    for number in range(600):
        cache.put(f"s3://b/{number}", b"x")
    assert len({file.parent for file in entries(tmp_path)}) > 200
    assert max(len(list(folder.iterdir())) for folder in tmp_path.glob("??")) < 20


# Damage


def damages(whole: bytes) -> Iterator[tuple[str, bytes]]:
    for bit in range(8 * len(whole)):
        at = bit // 8
        yield f"bit {bit}", whole[:at] + bytes([whole[at] ^ 1 << bit % 8]) + whole[at + 1 :]
    for at in range(len(whole)):
        yield f"cut at {at}", whole[:at]
        yield f"zeros from {at}", whole[:at] + bytes(len(whole) - at)
        yield f"one byte more at {at}", whole[:at] + b"x" + whole[at:]
        yield f"one byte less at {at}", whole[:at] + whole[at + 1 :]
    for more in (b"\0", bytes(4096), whole):
        yield f"{len(more)} bytes more", whole + more


def test_whatever_is_damaged_is_removed_and_can_be_stored_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = DiskCache(tmp_path, MUCH)
    data = b"\xa7tokens!\x01"
    cache.put("k", data)
    (file,) = entries(tmp_path)
    whole = file.read_bytes()
    for name, damaged in damages(whole):
        assert damaged != whole
        file.write_bytes(damaged)
        assert cache.get("k", len(data)) is None, name
        assert not file.exists(), name
    cache.put("k", data)
    assert cache.get("k", len(data)) == data
    assert file.read_bytes() == whole
    (told,) = warnings_of(caplog)
    assert str(file) in told
    assert "fetched again" in told


def test_a_file_that_was_moved_is_not_believed(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, MUCH)
    cache.put("a", b"tokens of a")
    (a,) = entries(tmp_path)
    cache.put("b", b"tokens of b")
    (b,) = set(entries(tmp_path)) - {a}
    a.replace(b)
    assert cache.get("b", 11) is None
    assert cache.get("a", 11) is None
    assert entries(tmp_path) == []


def test_another_size_than_the_stored_one_is_a_miss(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, MUCH)
    for size in (0, 10, 12, 1 << 40):
        cache.put("k", b"tokens of k")
        assert cache.get("k", size) is None
        assert entries(tmp_path) == []


def test_what_stands_in_the_place_of_an_entry_and_is_none_is_a_miss(
    tmp_path: Path, exact: None, caplog: pytest.LogCaptureFixture
) -> None:
    cache = DiskCache(tmp_path, MUCH)
    cache.put("k", b"data")
    (file,) = entries(tmp_path)
    file.unlink()
    file.symlink_to(tmp_path / "nowhere")
    assert cache.get("k", 4) is None
    assert not file.is_symlink(), "a link is removed, not followed"
    (file / "a file of somebody").mkdir(parents=True)
    assert cache.get("k", 4) is None
    cache.put("k", b"data")
    assert cache.get("k", 4) is None
    assert (file / "a file of somebody").exists()
    cache.put("another", b"data")
    assert cache.get("another", 4) == b"data"
    assert len([text for text in warnings_of(caplog) if "continuing without the cache" in text]) == 1
    assert unfinished(tmp_path) == []


def test_too_many_open_files_are_not_the_entry_s_fault(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = DiskCache(tmp_path, MUCH)
    cache.put("k", b"data")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        assert cache.get("k", 4) is None
        cache.put("other", b"data")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert cache.get("k", 4) == b"data"
    (told,) = warnings_of(caplog)
    assert os.strerror(errno.EMFILE) in told


# The limit, and who has to go


def test_the_least_recently_used_go_first(tmp_path: Path, exact: None) -> None:
    size = 1000 - HEADER.size
    cache = DiskCache(tmp_path, 10_000)
    for number in range(10):
        cache.put(str(number), data_of(str(number), size))
    assert cache.get("0", size) == data_of("0", size)
    cache.put("10", data_of("10", size))
    kept = [number for number in range(11) if cache.get(str(number), size) is not None]
    assert kept == [0, 3, 4, 5, 6, 7, 8, 9, 10], "one to make room, one to have some"


def test_on_a_slow_disk_no_more_is_removed_than_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fmsdata.storage.disk_cache, "LONGEST", -1.0)
    monkeypatch.setattr(fmsdata.storage.disk_cache, "BATCH", 2)
    cache = DiskCache(tmp_path, 100_000)
    for number in range(100):
        cache.put(str(number), bytes(1000 - HEADER.size))
    cache.put("large", bytes(5000 - HEADER.size))
    assert cache.get("large", 5000 - HEADER.size) is not None
    kept = [number for number in range(100) if cache.get(str(number), 1000 - HEADER.size) is not None]
    assert kept == list(range(6, 100))


def test_a_use_within_a_minute_is_not_noted_again(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, MUCH)
    cache.put("k", b"data")
    (file,) = entries(tmp_path)
    for age, noted in ((30, False), (90, True), (-90, True)):
        then = time.time() - age
        os.utime(file, (then, then))
        assert cache.get("k", 4) == b"data"
        assert (abs(file.stat().st_mtime - time.time()) < 20) == noted


Operations = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 7), st.integers(0, 500)),
        st.tuples(st.just("get"), st.integers(0, 7), st.just(0)),
        st.tuples(st.just("open"), st.integers(1, 1500), st.just(0)),
        st.tuples(st.just("damage"), st.integers(0, 7), st.just(0)),
    ),
    max_size=40,
)


class Model:
    """A cache in memory that does what the one on disk should."""

    def __init__(self, limit: int) -> None:
        self.limit, self.ledger = limit, 0
        self.kept: OrderedDict[str, bytes] = OrderedDict()

    def stored(self) -> int:
        return sum(HEADER.size + len(data) for data in self.kept.values())

    def make_room(self, size: int) -> None:
        while self.kept and self.stored() > self.limit - self.limit // 10 - size:
            self.kept.popitem(last=False)
        self.ledger = self.stored()

    def put(self, key: str, data: bytes) -> None:
        size = HEADER.size + len(data)
        if size <= self.limit:
            if self.ledger + size > self.limit:
                self.make_room(size)
            self.ledger += size
            self.kept[key] = data
            self.kept.move_to_end(key)

    def open(self, limit: int) -> None:
        self.limit = limit
        if self.ledger > limit:
            self.make_room(0)


@settings(max_examples=120, deadline=None)
@given(limit=st.integers(1, 1500), operations=Operations)
def test_it_keeps_what_a_cache_in_memory_would_keep(
    tmp_path_factory: pytest.TempPathFactory, limit: int, operations: list[tuple[str, int, int]]
) -> None:
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fmsdata.storage.disk_cache, "TOUCH_AFTER", 0.0)
        cache, model = DiskCache(folder, limit), Model(limit)
        for step, (operation, number, size) in enumerate(operations):
            key = f"key {number}"
            if operation == "open":
                cache = DiskCache(folder, number)
                model.open(number)
            elif operation == "put":
                data = data_of(f"{step}", size)
                cache.put(key, data)
                model.put(key, data)
            elif operation == "get":
                expected = model.kept.get(key)
                assert cache.get(key, len(expected or b"")) == expected
                if expected is not None:
                    model.kept.move_to_end(key)
            elif key in model.kept:
                file = Path(cache._file(fmsdata.storage.disk_cache._digest(key)))
                file.write_bytes(file.read_bytes()[:-1] + b"?!")
                assert cache.get(key, len(model.kept.pop(key))) is None
            assert stored_bytes(folder) == model.stored() <= cache.limit
    shutil.rmtree(folder)


def test_an_entry_larger_than_the_limit_is_not_stored_and_drives_nobody_out(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 500)
    cache.put("small", b"data")
    cache.put("large", bytes(501 - HEADER.size))
    assert cache.get("large", 501 - HEADER.size) is None
    assert cache.get("small", 4) == b"data"
    cache.put("as large as can be", bytes(500 - HEADER.size))
    assert cache.get("as large as can be", 500 - HEADER.size) is not None
    assert stored_bytes(tmp_path) == 500
    tiny = DiskCache(tmp_path / "tiny", 1)
    tiny.put("k", b"")
    assert tiny.get("k", 0) is None


def test_a_smaller_limit_holds_from_the_start(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 100_000)
    for number in range(100):
        cache.put(str(number), bytes(900))
    DiskCache(tmp_path, 20_000)
    assert 15_000 < stored_bytes(tmp_path) <= 20_000
    assert cache.get("99", 900) is not None
    for number in range(100):
        cache.put(str(number), bytes(900))
    assert 90_000 < stored_bytes(tmp_path) <= 100_000
    small = DiskCache(tmp_path, 20_000)
    small.put("k", bytes(900))
    assert stored_bytes(tmp_path) <= 20_000
    assert small.get("k", 900) is not None


@pytest.mark.parametrize("text", [None, b"", b"fmsledg1", b"x" * 32, b"x" * 4000, "another boot"])
def test_a_ledger_that_is_lost_or_can_not_be_trusted_is_made_anew(tmp_path: Path, text: Any) -> None:
    cache = DiskCache(tmp_path, 100_000)
    for number in range(100):
        cache.put(str(number), bytes(900))
    ledger = tmp_path / ".fmsdata-ledger"
    if text is None:
        ledger.unlink()
    elif isinstance(text, bytes):
        ledger.write_bytes(text)
    else:
        fields = fmsdata.storage.disk_cache.LEDGER.pack(fmsdata.storage.disk_cache.LEDGER_FORMAT, b"another boot", 3)
        ledger.write_bytes(fields)
        cache = DiskCache(tmp_path, 100_000)
    for number in range(100, 150):
        cache.put(str(number), bytes(900))
        assert stored_bytes(tmp_path) <= 100_000
        assert cache.get(str(number), 900) is not None


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    others = [
        "notes.txt",
        "ledger",
        "ab/" + "c" * 38,  # as in the folder of a version control system
        "ab/" + "C" * 38 + ".range",
        "ab/notes.range",
        "ab/" + "d" * 38 + ".range.bak",
        "abc/" + "d" * 38 + ".range",
        "shards/part-0.arrow",
        ".fmsdata-unfinished/notes",
        ".hidden/x",
    ]
    for name in others:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(bytes(100))
    for limit in (5_000, 300):
        cache = DiskCache(tmp_path, limit)
        for number in range(300):
            cache.put(str(number), bytes(100))
        assert cache.get("299", 100) is not None
    for name in others:
        assert (tmp_path / name).read_bytes() == bytes(100), name


# A reader and those who remove


def test_a_reader_that_has_the_file_open_is_not_disturbed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = DiskCache(tmp_path, 100_000)
    data = data_of("k", 90_000)
    cache.put("k", data)
    read = os.fstat
    driven_out = []

    def drive_out(fd: int) -> os.stat_result:
        monkeypatch.setattr(os, "fstat", read)
        DiskCache(tmp_path, 100_000).put("another", data)
        driven_out.append(len(entries(tmp_path)) == 1)
        return read(fd)

    monkeypatch.setattr(os, "fstat", drive_out)
    assert cache.get("k", len(data)) == data
    assert driven_out == [True]
    assert cache.get("k", len(data)) is None


def test_files_that_vanish_while_they_are_counted_are_no_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = DiskCache(tmp_path, 50_000)
    listing, vanished = os.scandir, []

    class Listing:
        """The names of what was there, of which every third file vanishes before it is looked at."""

        def __init__(self, folder: str) -> None:
            self._found = list(listing(folder))

        def __enter__(self) -> Iterator[os.DirEntry[str]]:
            for file in self._found[::3]:
                os.unlink(file)
                vanished.append(file.name)
            return iter(self._found)

        def __exit__(self, *_: object) -> None:
            pass

    for number in range(300):
        with monkeypatch.context() as patch:
            patch.setattr(os, "scandir", Listing)
            cache.put(str(number), bytes(900))
        assert cache.get(str(number), 900) is not None
        assert stored_bytes(tmp_path) <= 50_000
    assert len(vanished) > 50


# Troubles


@pytest.mark.parametrize("path", ["file", "file/below", "/proc/cache", "a\x00b"])
def test_a_path_that_can_not_be_used_is_an_error_at_once(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").write_bytes(b"somebody's")
    with pytest.raises(ConfigError, match="can't be used as a cache"):
        DiskCache(tmp_path / path, MUCH)
    assert (tmp_path / "file").read_bytes() == b"somebody's"


@pytest.mark.parametrize("limit", [0, -1, 1.5, "1GB", None, True])
def test_a_limit_that_is_none_is_an_error(tmp_path: Path, limit: Any) -> None:
    with pytest.raises(ConfigError, match="limit is"):
        DiskCache(tmp_path, limit)


def test_a_folder_that_is_deleted_in_the_middle_is_done_without_and_not_made_again(
    tmp_path: Path, exact: None, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "cache"
    cache = DiskCache(folder, MUCH)
    cache.put("k", b"data")
    shutil.rmtree(folder)
    for _ in range(3):
        assert cache.get("k", 4) is None
        cache.put("k", b"data")
    assert not folder.exists()
    (told,) = warnings_of(caplog)
    assert str(folder) in told
    folder.mkdir()
    cache.put("k", b"data")
    assert cache.get("k", 4) == b"data"
    shutil.rmtree(folder)
    folder.write_bytes(b"a file now")
    cache.put("k", b"data")
    assert cache.get("k", 4) is None
    assert folder.read_bytes() == b"a file now"


def test_after_a_failure_it_rests_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = DiskCache(tmp_path / "cache", MUCH)
    shutil.rmtree(tmp_path / "cache")
    cache.put("k", b"data")
    (tmp_path / "cache").mkdir()
    cache.put("k", b"data")
    assert cache.get("k", 4) is None
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 11)
    cache.put("k", b"data")
    assert cache.get("k", 4) == b"data"


def in_a_child(work: Callable[[], None]) -> int | None:
    """Run in a process of its own: 0 if all is well, 77 if it can't be tried here."""
    process = FORK.Process(target=work)
    process.start()
    process.join(60)
    return process.exitcode


def mount(source: str, target: Path, kind: str, flags: int, options: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(source.encode(), str(target).encode(), kind.encode(), flags, options.encode()):
        raise OSError(ctypes.get_errno(), "mount")


def own_mounts() -> None:
    """Let this process mount what nobody else sees."""
    libc = ctypes.CDLL(None, use_errno=True)
    uid, gid = os.geteuid(), os.getegid()
    if libc.unshare(0x10020000):  # CLONE_NEWUSER | CLONE_NEWNS
        os._exit(77)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
    Path("/proc/self/gid_map").write_text(f"0 {gid} 1")


def test_a_disk_that_gets_full_or_read_only(tmp_path: Path) -> None:
    told: list[str] = []

    def work() -> None:
        own_mounts()
        try:
            mount("tmpfs", tmp_path, "tmpfs", 0, "size=1m,mode=700")
        except OSError:
            os._exit(77)
        fmsdata.storage.disk_cache.REST = 0.0
        fmsdata.storage.disk_cache.log.addHandler(Telling(told))
        cache = DiskCache(tmp_path, MUCH)
        for number in range(100):
            cache.put(str(number), data_of(str(number), 50_000))
        kept = [number for number in range(100) if cache.get(str(number), 50_000) == data_of(str(number), 50_000)]
        assert 10 < len(kept) < 25
        assert unfinished(tmp_path) == []
        assert len(told) == 1
        assert os.strerror(errno.ENOSPC) in told[0]
        for number in kept[:5]:
            Path(cache._file(fmsdata.storage.disk_cache._digest(str(number)))).unlink()
        cache.put("there is room again", data_of("k", 50_000))
        assert cache.get("there is room again", 50_000) == data_of("k", 50_000)
        told.clear()
        another = DiskCache(tmp_path, MUCH)
        mount("tmpfs", tmp_path, "tmpfs", 0x21, "")  # MS_REMOUNT | MS_RDONLY
        for _ in range(3):
            another.put("more", b"data")
            assert another.get("more", 4) is None
            assert another.get("there is room again", 50_000) == data_of("k", 50_000)
        assert len(told) == 1
        assert os.strerror(errno.EROFS) in told[0]
        with pytest.raises(ConfigError, match=os.strerror(errno.EROFS)):
            DiskCache(tmp_path, MUCH)

    code = in_a_child(work)
    if code == 77:
        pytest.skip("no right to mount")
    assert code == 0


class Telling(logging.Handler):
    def __init__(self, told: list[str]) -> None:
        super().__init__()
        self._told = told

    def emit(self, record: logging.LogRecord) -> None:
        self._told.append(record.getMessage())


def test_a_write_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    told: list[str] = []

    def work() -> None:
        fmsdata.storage.disk_cache.REST = 0.0
        fmsdata.storage.disk_cache.log.addHandler(Telling(told))
        cache = DiskCache(tmp_path, MUCH)
        cache.put("small", bytes(100))
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        for _ in range(3):
            cache.put("large", bytes(50_000))
        assert cache.get("large", 50_000) is None
        assert cache.get("small", 100) == bytes(100)
        assert len(told) == 1
        assert unfinished(tmp_path) == []

    assert in_a_child(work) == 0


# Threads and processes


def test_threads_of_one_process(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 200_000)
    wrong: list[str] = []
    found = []

    def work(seed: int) -> None:
        choice = random.Random(seed)
        for _ in range(150):
            key = f"key {choice.randrange(60)}"
            data = cache.get(key, 8_000)
            if data is None:
                cache.put(key, data_of(key, 8_000))
            elif data == data_of(key, 8_000):
                found.append(key)
            else:
                wrong.append(key)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(found) > 50
    assert stored_bytes(tmp_path) <= 200_000
    assert unfinished(tmp_path) == []


def wait_for(what: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not what():
        assert time.monotonic() < end
        time.sleep(0.002)


def wait_until_stopped(process: BaseProcess) -> None:
    stat = Path(f"/proc/{process.pid}/stat")
    wait_for(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")


def signal_to(process: BaseProcess, number: int) -> None:
    assert process.pid is not None
    os.kill(process.pid, number)


def stop_in_the_middle(cache: DiskCache, size: int) -> None:
    """Store an entry, and be stopped when half of it is written."""
    write = fmsdata.storage.disk_cache._write

    def write_half(fd: int, data: memoryview) -> None:
        if len(data) == size:
            write(fd, data[: size // 2])
            os.kill(os.getpid(), signal.SIGSTOP)
            data = data[size // 2 :]
        write(fd, data)

    fmsdata.storage.disk_cache._write = write_half
    cache.put("k", data_of("k", size))


def test_unfinished_files_of_killed_processes_go_and_those_of_living_ones_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = DiskCache(tmp_path, 100_000)
    writers = [FORK.Process(target=stop_in_the_middle, args=(cache, 20_000)) for _ in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        wait_until_stopped(writer)
    signal_to(writers[0], signal.SIGKILL)
    writers[0].join()
    DiskCache(tmp_path, 100_000)
    assert len(unfinished(tmp_path)) == 2, "they are young"
    monkeypatch.setattr(fmsdata.storage.disk_cache, "ABANDONED_AFTER", 0.0)
    DiskCache(tmp_path, 100_000)
    assert len(unfinished(tmp_path)) == 1
    for number in range(40):  # what the other one will write is reserved
        cache.put(str(number), bytes(5_000))
        assert stored_bytes(tmp_path) <= 100_000
        assert cache.get(str(number), 5_000) is not None
    signal_to(writers[1], signal.SIGCONT)
    writers[1].join(20)
    assert writers[1].exitcode == 0
    assert cache.get("k", 20_000) == data_of("k", 20_000)
    assert unfinished(tmp_path) == []
    assert stored_bytes(tmp_path) <= 100_000


def test_making_room_cleans_up_after_killed_processes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = DiskCache(tmp_path, 100_000)
    for _ in range(4):
        writer = FORK.Process(target=stop_in_the_middle, args=(cache, 20_000))
        writer.start()
        wait_until_stopped(writer)
        signal_to(writer, signal.SIGKILL)
        writer.join()
    assert len(unfinished(tmp_path)) == 4
    monkeypatch.setattr(fmsdata.storage.disk_cache, "ABANDONED_AFTER", 0.0)
    cache.put("large", bytes(90_000))
    assert cache.get("large", 90_000) is not None
    assert unfinished(tmp_path) == []


@pytest.mark.parametrize("file", [".fmsdata-ledger", ".fmsdata-room"])
def test_a_process_that_is_stopped_with_a_lock_stops_nobody_and_a_killed_one_leaves_none(
    tmp_path: Path, file: str, exact: None, caplog: pytest.LogCaptureFixture
) -> None:
    cache = DiskCache(tmp_path, 1_000)
    cache.put("old", bytes(900))

    def hold() -> None:
        with fmsdata.storage.file_lock.locked(f"{tmp_path}/{file}", patience=1):
            os.kill(os.getpid(), signal.SIGSTOP)

    holder = FORK.Process(target=hold)
    holder.start()
    wait_until_stopped(holder)
    start = time.monotonic()
    cache.put("new", bytes(900))
    assert time.monotonic() - start < 3
    assert cache.get("new", 900) is None
    assert cache.get("old", 900) is not None
    assert len(warnings_of(caplog)) == (file == ".fmsdata-ledger")
    signal_to(holder, signal.SIGKILL)
    holder.join()
    cache.put("new", bytes(900))
    assert cache.get("new", 900) is not None


def test_a_child_that_is_forked_while_a_lock_is_held_does_not_keep_it(tmp_path: Path) -> None:
    DiskCache(tmp_path, MUCH)
    pids, tell = os.pipe()

    def parent() -> None:
        with fmsdata.storage.file_lock.locked(f"{tmp_path}/.fmsdata-ledger", patience=1):
            child = os.fork()
            if child == 0:
                time.sleep(60)
                os._exit(0)
            os.write(tell, str(child).encode())
            time.sleep(60)

    process = FORK.Process(target=parent)
    process.start()
    child = int(os.read(pids, 100))
    try:
        process.kill()
        process.join()
        wait_for(lambda: fmsdata.storage.file_lock.is_free(f"{tmp_path}/.fmsdata-ledger"))
    finally:
        os.kill(child, signal.SIGKILL)
        os.close(pids)
        os.close(tell)


SIZES = (0, 100, 3_000, 20_000, 60_000)
KEYS = 120
LIMIT = 1_000_000
WRITERS = 8


def hammer(folder: Path, seed: int, counts: Any) -> None:
    """Use the cache as fast as can be, until killed. `counts[3 * seed :]` are what was wrong, found, and stored."""
    fmsdata.storage.disk_cache.REST = fmsdata.storage.disk_cache.TOUCH_AFTER = 0.0
    fmsdata.storage.disk_cache.ABANDONED_AFTER = 0.2
    choice = random.Random(seed)
    contents = [data_of(f"key {number}", SIZES[number % len(SIZES)]) for number in range(KEYS)]
    cache = DiskCache(folder, LIMIT)
    while True:
        number = choice.randrange(KEYS)
        data = cache.get(f"key {number}", len(contents[number]))
        if data is None:
            cache.put(f"key {number}", contents[number])
            counts[3 * seed + 2] += 1
        else:
            counts[3 * seed + (data == contents[number])] += 1
        if choice.random() < 0.01:
            cache = DiskCache(folder, LIMIT)


def test_processes_that_are_killed_at_any_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writers on one folder, one of which is killed every few milliseconds.

    The limit is looked at while all of them are stopped, wherever they are: what is seen was there at one moment.
    """
    choice, seeds = random.Random(5), itertools.count()
    counts = FORK.RawArray("q", 3 * 2000)
    writers: list[BaseProcess] = []
    seen, left = [], []

    def start() -> BaseProcess:
        process = FORK.Process(target=hammer, args=(tmp_path, next(seeds), counts))
        process.start()
        return process

    try:
        writers += [start() for _ in range(WRITERS)]
        begin, kills = time.monotonic(), 0
        while time.monotonic() - begin < (6 if kills >= 100 else 25):
            time.sleep(choice.uniform(0, 0.03))
            victim = choice.randrange(WRITERS)
            writers[victim].kill()
            writers[victim].join()
            writers[victim] = start()
            kills += 1
            if choice.random() < 0.3:
                for writer in writers:
                    signal_to(writer, signal.SIGSTOP)
                for writer in writers:
                    wait_until_stopped(writer)
                seen.append(stored_bytes(tmp_path))
                left.append(len(unfinished(tmp_path)))
                for writer in writers:
                    signal_to(writer, signal.SIGCONT)
    finally:
        for writer in writers:
            writer.kill()
            writer.join()
    wrong, found, stored = (sum(counts[kind::3]) for kind in range(3))
    print(f"{kills} kills, {found} found, {stored} stored, at most {max(seen)} bytes and {max(left)} unfinished files")
    assert wrong == 0
    assert max(seen) <= LIMIT, "not by a byte"
    assert max(seen) > 0.8 * LIMIT, "and it is used"
    assert max(left) < 3 * WRITERS, "each has one, and those of the killed go"
    assert min(kills, len(seen), found // 10, stored // 10) >= 10, "all of it was tried"
    monkeypatch.setattr(fmsdata.storage.disk_cache, "ABANDONED_AFTER", 0.0)
    cache = DiskCache(tmp_path, LIMIT)
    assert unfinished(tmp_path) == []
    undamaged = 0
    for number in range(KEYS):
        size = SIZES[number % len(SIZES)]
        data = cache.get(f"key {number}", size)
        assert data in (None, data_of(f"key {number}", size))
        undamaged += data is not None
    assert undamaged == len(entries(tmp_path)) > 5
    cache.put("it goes on", bytes(1000))
    assert cache.get("it goes on", 1000) == bytes(1000)
