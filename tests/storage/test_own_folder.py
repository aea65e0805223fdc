"""The cache belongs to its user: what others put there is not read, and nothing is written elsewhere for them."""

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from fmsdata.errors import ConfigError
from fmsdata.storage.disk_cache import DiskCache
from tests.storage.test_disk_cache import entries, warnings_of

MUCH = 1 << 30
STRANGER = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="another user is played by a process that gives up root")


def as_stranger(action: Callable[[], object]) -> None:
    """Do something as another user, in a process of theirs."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(STRANGER)
            os.setuid(STRANGER)
            action()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0, "the other user could not do it"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that other users reach and may write to, like /tmp."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o1777)
        yield Path(folder)


def test_nobody_else_can_enter_a_cache_whatever_the_umask_is(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        cache = DiskCache(tmp_path / "new" / "cache", MUCH)
        cache.put("k", b"data")
    finally:
        os.umask(before)
    folder = tmp_path / "new" / "cache"
    assert (mode(folder.parent), mode(folder)) == (0o755, 0o700)
    made = list(folder.rglob("*"))
    assert {mode(path) for path in made if path.is_dir()} == {0o700}
    assert {mode(path) for path in made if path.is_file()} == {0o600}
    assert cache.get("k", 4) == b"data"


def test_a_cache_of_an_earlier_version_is_closed_to_others_and_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = DiskCache(tmp_path / "cache", MUCH)
    cache.put("k", b"data")
    (entry,) = entries(tmp_path / "cache")
    for path, old in ((tmp_path / "cache", 0o755), (entry.parent, 0o775), (entry, 0o644)):
        path.chmod(old)
    assert DiskCache(tmp_path / "cache", MUCH).get("k", 4) == b"data"
    assert mode(tmp_path / "cache") == 0o700
    assert "others could read it (mode 755)" in warnings_of(caplog)[0]


@pytest.mark.parametrize("writable", [0o777, 0o770, 0o720, 0o1777])
def test_a_folder_that_others_can_write_to_is_refused_with_the_way_out(tmp_path: Path, writable: int) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(writable)
    with pytest.raises(ConfigError, match=rf"written by others.*mode {writable:o}.*`chmod 700 .*a folder of their own"):
        DiskCache(folder, MUCH)
    assert list(folder.iterdir()) == []
    folder.chmod(0o700)
    DiskCache(folder, MUCH)


def test_an_entry_that_others_could_write_to_is_fetched_again(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, MUCH)
    cache.put("k", b"data")
    (entry,) = entries(tmp_path)
    entry.chmod(0o666)
    assert cache.get("k", 4) is None
    cache.put("k", b"data")
    assert cache.get("k", 4) == b"data"


@needs_root
def test_a_folder_of_another_user_is_refused_and_not_changed(shared: Path) -> None:
    folder = shared / "cache"
    as_stranger(lambda: DiskCache(folder, MUCH).put("k", b"forged"))
    with pytest.raises(ConfigError, match=r"belongs to nobody.*mode 700.*runs as root.*cache/root"):
        DiskCache(folder, MUCH)
    assert folder.stat().st_uid == STRANGER


@needs_root
def test_a_link_that_another_user_made_is_no_cache(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    mine = tmp_path_factory.mktemp("mine")
    mine.chmod(0o755)
    as_stranger(lambda: os.symlink(mine, shared / "cache"))
    with pytest.raises(ConfigError, match="is a link that nobody made"):
        DiskCache(shared / "cache", MUCH)
    assert mode(mine) == 0o755
    assert list(mine.iterdir()) == []


def test_a_link_of_the_user_leads_to_the_cache(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir(mode=0o700)
    (tmp_path / "cache").symlink_to("disk")
    cache = DiskCache(tmp_path / "cache", MUCH)
    cache.put("k", b"data")
    assert DiskCache(tmp_path / "disk", MUCH).get("k", 4) == b"data"


@needs_root
def test_two_users_have_caches_side_by_side_in_a_shared_folder(shared: Path) -> None:
    as_stranger(lambda: DiskCache(shared / "nobody", MUCH).put("k", b"theirs"))
    cache = DiskCache(shared / "root", MUCH)
    cache.put("k", b"mine")
    assert cache.get("k", 4) == b"mine"


@needs_root
@pytest.mark.parametrize("forged", ["entry", "folder of entries", "whole cache"])
def test_what_another_user_brought_in_is_never_read(tmp_path: Path, shared: Path, forged: str) -> None:
    """As if the folder had been open to all for a while, or were exchanged by who can write to its parent."""
    cache, theirs = DiskCache(shared / "cache", MUCH), shared / "theirs"
    cache.put("k", b"data")
    (entry,) = entries(shared / "cache")
    as_stranger(lambda: DiskCache(theirs, MUCH).put("k", b"evil"))
    inside = entry.relative_to(shared / "cache")
    if forged == "entry":
        os.replace(theirs / inside, entry)
    elif forged == "folder of entries":
        os.rename(entry.parent, shared / "away")
        os.rename(theirs / inside.parent, entry.parent)
    else:
        os.rename(shared / "cache", shared / "away")
        os.rename(theirs, shared / "cache")
    assert cache.get("k", 4) is None
    cache.put("k", b"data")
    assert cache.get("k", 4) == (b"data" if forged == "entry" else None)


FILES, FOLDERS = [".fmsdata-ledger", ".fmsdata-room", "entry"], ["folder", ".fmsdata-unfinished"]
PLANTED = [(place, hard) for place in FILES for hard in (False, True)] + [(place, False) for place in FOLDERS]


@pytest.mark.parametrize(("place", "hard"), PLANTED)  # folders have no hard links
def test_no_link_in_the_folder_lets_a_file_outside_be_changed(tmp_path: Path, place: str, hard: bool) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    precious = outside / "precious"
    precious.write_bytes(b"precious")
    cache = DiskCache(tmp_path / "cache", 4096)
    cache.put("k", b"data")
    (entry,) = entries(tmp_path / "cache")
    target = {"entry": entry, "folder": entry.parent}.get(place, tmp_path / "cache" / place)
    is_folder = place in FOLDERS
    if target.exists():
        os.rename(target, tmp_path / "away")
    if hard:
        os.link(precious, target)
    else:
        target.symlink_to(outside if is_folder else precious)
    with suppress(ConfigError):
        DiskCache(tmp_path / "cache", 4096)
    for key in "kabcdef":
        cache.get(key, 4)
        cache.put(key, bytes(1000))
    assert precious.read_bytes() == b"precious"
    assert list(outside.iterdir()) == [precious]


def test_a_pipe_in_place_of_an_entry_stops_nobody(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, MUCH)
    cache.put("k", b"data")
    (entry,) = entries(tmp_path)
    entry.unlink()
    os.mkfifo(entry)
    assert cache.get("k", 4) is None
    cache.put("k", b"data")
    assert cache.get("k", 4) == b"data"


CHILD = """
import os, sys
from fmsdata.storage.disk_cache import DiskCache
os.setgroups([]); os.setgid(65534); os.setuid(65534)
cache = DiskCache(sys.argv[1], 1 << 30)
cache.put("k", b"data")
assert cache.get("k", 4) == b"data"
"""


@needs_root
def test_a_user_without_rights_has_a_cache_of_their_own(shared: Path) -> None:
    folder: Any = shared / "own"
    subprocess.run([sys.executable, "-c", CHILD, folder], check=True, timeout=60)
    assert (folder.stat().st_uid, mode(folder)) == (STRANGER, 0o700)
