"""Shards that change during a run: an error that says so, never other tokens, and never a signal."""

import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pytest

import fmsdata
from fmsdata.core import memory
from fmsdata.errors import DataError
from fmsdata.storage.mapped import MappedFile, MappedFiles
from tests.helpers import documents, open_file, write_source

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "programs" / "changing_shard.py"
KINDS = ["list", "batch", "stream", "compressed", "small"]


def write_corpus(root: Path, kind: str) -> Path:
    """Documents with tokens from 10 to 59, in one shard or two."""
    rng = np.random.default_rng(1)
    some = [np.append(each % 50 + 10, 3) for each in documents(rng, 40 if kind == "small" else 1500, 700, 1)]
    if kind == "compressed":
        (root / "web").mkdir(parents=True)
        table = pa.table({"tokens": pa.array([each.tolist() for each in some], pa.list_(pa.uint16()))})
        pyarrow.feather.write_feather(table, root / "web" / "part-0.arrow", compression="lz4", chunksize=200)
        return root
    layout: Any = "list" if kind == "small" else {"stream": "batch"}.get(kind, kind)
    write_source(
        root / "web", some, shards=1 if kind == "small" else 2, layout=layout, stream=kind == "stream", rows=100
    )
    return root


def shrink(shard: Path) -> None:
    os.truncate(shard, shard.stat().st_size // 3)


def empty(shard: Path) -> None:
    os.truncate(shard, 0)


def overwrite(shard: Path) -> None:
    with open(shard, "r+b") as file:
        file.write(b"\xff" * shard.stat().st_size)


def replace(shard: Path) -> None:
    copy = shard.with_suffix(".new")
    copy.write_bytes(b"\xff" * shard.stat().st_size)
    copy.rename(shard)


def append(shard: Path) -> None:
    with open(shard, "ab") as file:
        file.write(b"\xff" * 100)


CHANGES: dict[Callable[[Path], None], str] = {
    shrink: r"shrank from [\d,]+ to [\d,]+ bytes during the run; .*resume",
    empty: r"shrank from [\d,]+ to 0 bytes",
    overwrite: "was written to during the run",
    replace: "was replaced by another file during the run",
    append: r"grew from [\d,]+ to [\d,]+ bytes",
    Path.unlink: "the file is gone",
}


def run(*arguments: object, then: Callable[[], None]) -> str:
    """The last line of the program, which must end by itself. `then` is called when it has started."""
    command = [sys.executable, str(PROGRAM), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        if arguments[0] == "once":
            assert program.stdout.readline() == "started\n"
            then()
        rest = program.communicate("\n", timeout=120)[0]
    assert program.returncode == 0, (program.returncode, rest)
    return rest.splitlines()[-1]


@pytest.mark.parametrize(
    ("kind", "change", "workers", "stage"),
    [
        ("list", shrink, 0, "none"),
        ("batch", shrink, 1, "none"),
        ("stream", empty, 0, "own"),
        ("compressed", shrink, 0, "none"),
        ("small", overwrite, 0, "none"),
        ("list", overwrite, 1, "own"),
    ],
)
def test_a_program_that_reads_a_shard_that_changes_ends_with_an_error(
    tmp_path: Path, kind: str, change: Callable[[Path], None], workers: int, stage: str
) -> None:
    write_corpus(tmp_path, kind)

    def change_all() -> None:
        for shard in (tmp_path / "web").iterdir():
            change(shard)

    last = run("once", tmp_path, workers, stage, then=change_all)
    assert last.startswith("DataError: ")
    assert re.search(CHANGES[change], last)


@pytest.mark.parametrize("kind", ["list", "batch", "compressed"])
def test_a_shard_that_changes_at_any_moment_never_ends_the_process(tmp_path: Path, kind: str) -> None:
    last = run("rounds", write_corpus(tmp_path, kind), 40, then=lambda: None)
    changed, damaged = map(int, last.split())
    assert changed + damaged == 40
    assert changed >= 10


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_shard_that_changes_between_batches_is_an_error(
    tmp_path: Path, kind: str, change: Callable[[Path], None]
) -> None:
    lines = fmsdata.Pack(fmsdata.ShardReader(write_corpus(tmp_path, kind) / "web", strip=[3]), seq_len=64)
    loader = fmsdata.StatefulDataLoader(
        fmsdata.Rescalable(lines, lanes=4), batch_size=2, rank=0, world_size=1, prefetch=0
    )
    batches = iter(loader)
    next(batches)
    for shard in (tmp_path / "web").iterdir():
        change(shard)
    with pytest.raises(DataError, match=CHANGES[change]):
        for _ in range(5000):
            assert 10 <= int(next(batches)["input_ids"].min()) <= int(next(batches)["input_ids"].max()) < 60


def test_a_link_to_a_pipe_is_an_error_and_not_waited_for(tmp_path: Path) -> None:
    write_source(tmp_path / "web", documents(np.random.default_rng(1), 9), shards=1)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "web" / "part-1.arrow").symlink_to(tmp_path / "pipe")
    with pytest.raises(DataError, match=r"part-1\.arrow: not a regular file; remove it"):
        fmsdata.ShardReader(tmp_path / "web")


def test_a_file_that_changed_while_it_was_not_mapped_is_an_error(tmp_path: Path) -> None:
    shard = write_corpus(tmp_path, "list") / "web" / "part-0.arrow"
    files = MappedFiles()
    assert files.get(shard) is not None  # and nobody keeps it
    append(shard)
    with pytest.raises(DataError, match="grew"):
        files.get(shard)


def test_other_changes_of_a_file_are_ignored(tmp_path: Path) -> None:
    shard = write_corpus(tmp_path, "list") / "web" / "part-0.arrow"
    file = MappedFile(shard)
    shard.chmod(0o400)
    os.link(shard, tmp_path / "link")
    file.check()


def test_a_process_may_change_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_corpus(tmp_path, "list")
    monkeypatch.chdir(tmp_path)
    file = MappedFile(Path("web/part-0.arrow"))
    monkeypatch.chdir("/")
    file.check()


def test_pieces_that_vanish_are_reported_wherever_they_are(tmp_path: Path) -> None:
    """More pieces than the system copies in one call, and the page that is gone in any of them."""
    path = tmp_path / "a"
    for gone in (0, 700, 1500, 2999):
        path.write_bytes(np.arange(3000 * 4096, dtype=np.uint32).view(np.uint8)[: 3000 * 4096].tobytes())
        file = MappedFile(path)
        whole = np.frombuffer(path.read_bytes(), np.uint32)
        places = np.random.default_rng(0).permutation(3000) * 1024 + 5
        assert (file.tokens(np.uint32).take(places) == whole[places]).all()
        os.truncate(path, gone * 4096)
        with pytest.raises(DataError, match="shrank"):
            file.tokens(np.uint32).take(places)
        with pytest.raises(DataError, match="shrank"):
            file.read(0, file.size)


@pytest.mark.parametrize("kind", KINDS)
def test_without_help_of_the_system_changes_are_errors_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(memory, "system_copy", lambda: None)
    reader = fmsdata.ShardReader(write_corpus(tmp_path, kind) / "web", strip=[3])
    found = iter(reader)
    assert set(next(found).tokens.tolist()) <= set(range(10, 60))
    for shard in (tmp_path / "web").iterdir():
        shrink(shard)
    with pytest.raises(DataError, match="shrank"):
        for item in found:
            assert set(item.tokens.tolist()) <= set(range(10, 60))


def test_a_pickled_item_has_its_own_tokens_and_not_those_of_the_shard(tmp_path: Path) -> None:
    documents = fmsdata.Delimit(fmsdata.ShardReader(write_corpus(tmp_path, "list") / "web"), bos=1, eos=2)
    for item, _ in zip(fmsdata.Pack(documents, seq_len=3000), range(5), strict=False):
        data = pickle.dumps(item)
        copy = pickle.loads(data)
        assert len(data) < 12_000
        assert copy.tokens.tolist() == item.tokens.tolist()
        assert (copy.spans, copy.epochs, copy.key) == (item.spans, item.epochs, item.key)


def test_damage_is_reported_at_its_byte_in_the_file(tmp_path: Path) -> None:
    shard = write_corpus(tmp_path, "batch") / "web" / "part-0.arrow"
    data = bytearray(shard.read_bytes())
    place = data.index(b"\xff\xff\xff\xff", 300_000)  # a record batch in the middle
    data[place : place + 4] = b"\0\0\0\0"
    shard.write_bytes(data)
    mapped = open_file(shard)
    with pytest.raises(DataError, match=f"no record batch at byte {place}"):
        mapped.read(0, mapped.documents)
