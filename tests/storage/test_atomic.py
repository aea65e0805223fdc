"""Files are written completely or not at all."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import fmsdata
from fmsdata.storage.atomic import replacing, write_whole


def test_a_file_is_replaced_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file"
    write_whole(path, b"old")
    with replacing(path) as unfinished:
        unfinished.write_bytes(b"new")
        assert path.read_bytes() == b"old"
        assert unfinished.parent == path.parent
        assert unfinished.name.startswith(".")
    assert path.read_bytes() == b"new"
    assert list(path.parent.iterdir()) == [path]


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_whole(path, b"old")
    with pytest.raises(KeyboardInterrupt), replacing(path) as unfinished:
        unfinished.write_bytes(b"half")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_several_writers_do_not_share_a_temporary_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with replacing(path) as first, replacing(path) as second:
        first.write_bytes(b"first")
        second.write_bytes(b"second")
    assert path.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [path]


def test_the_file_and_its_folder_are_on_the_disk_when_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    synced: list[tuple[str, bool]] = []
    fsync = os.fsync

    def noted(fd: int) -> None:
        synced.append((os.readlink(f"/proc/self/fd/{fd}"), path.exists()))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", noted)
    write_whole(path, b"data")
    (file, before), (folder, after) = synced
    assert (Path(file).name.startswith(".file."), before) == (True, False)
    assert (folder, after) == (str(tmp_path), True)


def test_a_shard_that_can_not_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    def documents() -> Iterator[list[int]]:
        yield [4, 5, 6]
        raise RuntimeError("no more documents")

    path = tmp_path / "part-0.arrow"
    fmsdata.write_shard(path, [[1, 2, 3]])
    before = path.read_bytes()
    with pytest.raises(RuntimeError, match="no more documents"):
        fmsdata.write_shard(path, documents())
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
