"""The spool of a process: what it returns is what was stored, and nothing is left of it."""

import errno
import gc
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fmsdata.core import memory
from fmsdata.errors import ConfigError
from fmsdata.storage import spool as module
from fmsdata.storage.settings import SpoolSettings
from fmsdata.storage.spool import Spool, SpoolLost, default_folder, is_in_memory


def spool(folder: Path, limit: int = 1 << 20) -> Spool:
    return Spool(SpoolSettings(path=str(folder), limit=limit))


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.int64, ">u4"])
def test_tokens_are_returned_as_they_were_stored(tmp_path: Path, dtype: Any) -> None:
    spooled = spool(tmp_path)
    rng = np.random.default_rng(1)
    many = [rng.integers(0, 100, size).astype(dtype) for size in (1, 0, 7, 1000, 4096, 4097)]
    stored = [spooled.store(tokens) for tokens in many]
    for tokens, kept in zip(many, stored, strict=True):
        assert kept is not None
        assert kept.dtype == tokens.dtype
        assert np.array_equal(kept[0 : len(tokens)], tokens)
        places = np.arange(len(tokens))[::-1]
        assert np.array_equal(kept.take(places), tokens[::-1])
    part = spooled.store(many[-1][1::2])  # not contiguous
    assert part is not None
    assert np.array_equal(part[3:9], many[-1][1::2][3:9])


def test_the_place_of_what_nobody_uses_is_used_again(tmp_path: Path) -> None:
    spooled = spool(tmp_path, limit=100_000)
    for number in range(50):
        kept = spooled.store(np.full(90_000, number % 100, np.uint8))
        assert kept is not None, spooled.problem
        assert kept[89_999:90_000] == number % 100
        del kept
    gc.collect()
    assert spooled.bytes == 0


def test_the_limit_holds_and_is_named(tmp_path: Path) -> None:
    spooled = spool(tmp_path, limit=10_000)
    first = spooled.store(np.zeros(9_000, np.uint8))
    assert spooled.store(np.zeros(2_000, np.uint8)) is None
    assert "storage.spool.limit (10,000 bytes) is reached" in spooled.problem
    del first
    assert spooled.store(np.zeros(2_000, np.uint8)) is not None
    assert not spooled.problem


def test_a_full_disk_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the middle of a write. What was stored before stays."""
    spooled = spool(tmp_path)
    kept = spooled.store(np.arange(1000))
    write, room = os.pwrite, [1000]

    def limited(fd: int, data: Any, place: int) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        room[0], now = 0, room[0]
        return write(fd, data[:now], place)

    monkeypatch.setattr(os, "pwrite", limited)
    assert spooled.store(np.ones(1000)) is None  # type: ignore[arg-type]
    assert spooled.problem == "No space left on device"
    assert spooled.bytes == 8000
    monkeypatch.undo()
    assert spooled.store(np.ones(1000, np.int64)) is not None
    assert kept is not None
    assert np.array_equal(kept[0:1000], np.arange(1000))


def test_the_last_part_of_a_disk_is_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spooled = spool(tmp_path)
    monkeypatch.setattr(module, "KEPT_FREE", 1.1)
    assert spooled.store(np.zeros(10, np.uint8)) is None
    assert "of the disk are free" in spooled.problem


def test_a_folder_that_cannot_be_used_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (str(tmp_path / "file"), "/proc/spool"):
        with pytest.raises(ConfigError, match=rf"storage\.spool\.path {re.escape(repr(path))} can't be used: .*null"):
            Spool(SpoolSettings(path=path))
    spool(tmp_path / "not" / "there").store(np.arange(3))


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"storage\.spool\.path is 's3://b/x'"):
        SpoolSettings(path="s3://b/x")
    with pytest.raises(ConfigError, match=r"storage\.spool\.limit is 0"):
        SpoolSettings(limit=0)


def test_the_default_folder_is_on_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    assert default_folder() == str(tmp_path)
    monkeypatch.setattr(module, "is_in_memory", lambda folder: folder == str(tmp_path))
    assert default_folder() != str(tmp_path)
    monkeypatch.setattr(module, "is_in_memory", lambda _: True)
    spooled = Spool(SpoolSettings())
    assert spooled.store(np.arange(3)) is None
    assert "is a writable folder on a disk (not tmpfs); set TMPDIR or storage.spool.path" in spooled.problem


def test_a_filesystem_in_memory_is_recognized(tmp_path: Path) -> None:
    kinds = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    inside = [mount for _, mount, kind, *_ in kinds if kind == "tmpfs" and os.path.isdir(mount)]
    assert "/dev/shm" in inside
    assert is_in_memory("/dev/shm")
    assert not is_in_memory("/proc")


def test_nothing_has_a_name_and_nothing_is_left_after_sigkill(tmp_path: Path) -> None:
    code = (
        "import sys, numpy as np; from fmsdata.storage.spool import Spool; from fmsdata.storage.settings import *;"
        "spool = Spool(SpoolSettings(path=sys.argv[1])); kept = spool.store(np.ones(10_000_000, np.int64));"
        "print(spool.bytes, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert int(child.stdout.readline()) == 80_000_000
        assert not list(tmp_path.iterdir())
        links = [os.readlink(link) for link in Path(f"/proc/{child.pid}/fd").iterdir()]
        assert [link for link in links if link.startswith(str(tmp_path))], "the file is elsewhere"
        child.send_signal(signal.SIGKILL)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("by_system", [True, False])
def test_in_a_forked_child_what_was_stored_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_system: bool
) -> None:
    """The parent may use its place again."""
    if not by_system:
        monkeypatch.setattr(memory, "system_copy", lambda: None)
    spooled = spool(tmp_path)
    kept = spooled.store(np.arange(1000))
    assert kept is not None
    child = os.fork()
    if not child:
        try:
            kept[0:10]
        except SpoolLost:
            os._exit(0 if spooled.store(np.arange(3)) is None else 2)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert np.array_equal(kept[0:1000], np.arange(1000))


def test_a_disk_that_fails_is_noticed(tmp_path: Path) -> None:
    """What can't be read is lost, which does not end the process."""
    spooled = spool(tmp_path)
    kept = spooled.store(np.arange(100_000))
    assert kept is not None
    fd, *_ = [  # mmap has another for the same file
        int(link.name) for link in Path("/proc/self/fd").iterdir() if link.is_symlink() and _reads(link, tmp_path)
    ]
    os.ftruncate(fd, 0)
    with pytest.raises(SpoolLost, match="the disk of the spool reports an error"):
        kept[0:10]
    with pytest.raises(SpoolLost):
        kept.take(np.array([5]))


def _reads(link: Path, folder: Path) -> bool:
    try:
        return os.readlink(link).startswith(str(folder))
    except OSError:
        return False
