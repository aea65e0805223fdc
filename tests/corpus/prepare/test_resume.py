"""A run that was stopped, in whatever way, continues: the same bytes, and nothing is done twice."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from fmsdata.errors import ConfigError
from fmsdata.prepare import prepare_corpus
from tests.corpus.prepare.texts import SMALL, documents, tree, write_file
from tests.programs.slow_prepare import Slow

ROOT = Path(__file__).parents[3]
WORK = ".fmsdata-prepare"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    for seed, name in enumerate(("web/a.jsonl", "web/b.txt", "wiki/c.txt.gz")):
        write_file(tmp_path / "in" / name, documents(60, seed))
    return tmp_path / "in"


def start(source: Path, output: Path, **options: Any) -> "subprocess.Popen[str]":
    arguments = {"source": str(source), "output": str(output), **SMALL, **options}
    return subprocess.Popen(
        [sys.executable, "-c", "from tests.programs.slow_prepare import main; main()", json.dumps(arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def await_files(folder: Path, pattern: str, count: int, process: "subprocess.Popen[str]") -> list[Path]:
    """Wait until there are so many files."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = sorted(folder.glob(pattern))
        if len(found) >= count:
            return found
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    raise AssertionError(f"no {count} files {pattern} in {folder}")


def reference(source: Path, output: Path) -> dict[str, bytes]:
    prepare_corpus(source, output, Slow(0), processes=1, **SMALL)
    return tree(output)


@pytest.mark.parametrize("stage", ["units", "shards"])
def test_after_a_kill_finished_work_stays_untouched_and_the_bytes_are_the_same(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    monkeypatch.setitem(SMALL, "shard_tokens", 400)  # many of them
    wanted = reference(source, tmp_path / "whole")
    output = tmp_path / "killed"
    first = start(source, output, processes=2, seconds=0.2 if stage == "units" else 0.0)
    await_files(output / WORK, f"{stage}/*.json", 2, first)
    workers = psutil.Process(first.pid).children(recursive=True)
    first.kill()
    first.communicate()
    psutil.wait_procs(workers, timeout=10)  # they notice that their parent is gone
    assert not [worker for worker in workers if worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE]
    if not (output / WORK).exists():
        pytest.fail("the run had finished before it was killed")
    units = [json.loads(path.read_bytes()) for path in (output / WORK / "units").glob("*.json")]
    shards = len(list((output / WORK / "shards").glob("*.json")))
    kept = {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in output.glob("w*/*.arrow")}
    assert units if stage == "units" else min(shards, len(kept)) >= 2
    encoded: list[int] = []

    def encode_batch(self: Slow, texts: list[str]) -> list[list[int]]:
        encoded.append(len(texts))
        return [list(text.encode()) for text in texts]

    monkeypatch.setattr(Slow, "encode_batch", encode_batch)
    assert prepare_corpus(source, output, Slow(0), processes=1, **SMALL).continued
    assert sum(encoded) == 180 - sum(unit["lines"] for unit in units)
    assert tree(output) == wanted
    again = [path for path, stamp in kept.items() if (path.stat().st_ino, path.stat().st_mtime_ns) != stamp]
    assert len(again) <= len(kept) - shards  # only what was not recorded as done


def test_an_interrupt_ends_all_workers_and_a_second_run_continues(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "stopped"
    first = start(source, output, processes=2, seconds=0.2)
    await_files(output / WORK, "units/*.json", 1, first)
    workers = psutil.Process(first.pid).children(recursive=True)
    first.send_signal(signal.SIGINT)
    out, errors = first.communicate(timeout=30)
    assert (first.returncode, out.strip(), errors) == (130, "interrupted", "")
    assert not [worker for worker in workers if worker.is_running()]
    prepare_corpus(source, output, Slow(0), processes=1, **SMALL)
    assert tree(output) == reference(source, tmp_path / "whole")


def test_a_worker_that_is_killed_is_an_error_that_names_it(source: Path, tmp_path: Path) -> None:
    run = start(source, tmp_path / "out", processes=2, seconds=0.3)
    await_files(tmp_path / "out" / WORK, "units/*.json", 1, run)
    worker = psutil.Process(run.pid).children()[0]
    worker.kill()
    out, _ = run.communicate(timeout=30)
    assert run.returncode == 1
    assert f"error: worker process {worker.pid} was killed by SIGKILL" in out
    assert "while tokenizing w" in out
    assert "run again to continue" in out


def test_a_second_run_to_the_same_output_is_refused_while_the_first_lives(source: Path, tmp_path: Path) -> None:
    first = start(source, tmp_path / "out", processes=1, seconds=0.3)
    await_files(tmp_path / "out" / WORK, "units/*.json", 1, first)
    with pytest.raises(ConfigError, match="another run of `fmsdata prepare` writes there"):
        prepare_corpus(source, tmp_path / "out", Slow(0), processes=1, **SMALL)
    first.kill()
    first.communicate()
    assert prepare_corpus(source, tmp_path / "out", Slow(0), processes=1, **SMALL).continued


@pytest.mark.parametrize("finished", [False, True])
def test_other_options_and_changed_files_are_errors_that_name_the_difference(
    source: Path, tmp_path: Path, finished: bool
) -> None:
    output = tmp_path / "out"
    if finished:
        prepare_corpus(source, output, Slow(0), processes=1, **SMALL)
    else:
        run = start(source, output, processes=1, seconds=0.3)
        await_files(output / WORK, "units/*.json", 1, run)
        run.kill()
        run.communicate()

    def refused(words: str, **options: Any) -> None:
        with pytest.raises(ConfigError, match=words):
            prepare_corpus(source, output, options.pop("tokenizer", Slow(0)), processes=1, **{**SMALL, **options})

    refused("--seed was 0 and is 1 now", seed=1)
    refused("--shuffle was on and is off now", shuffle=False)
    refused("--shard-tokens was 3000 and is 10 now", shard_tokens=10)
    refused("--validation was 0.0 and is 0.5 now", validation=0.5)
    refused("the tokenizer was .* and is ", tokenizer="bytes")
    write_file(source / "web" / "new.txt", ["new"])
    refused("the file web/new.txt is new")
    (source / "web" / "new.txt").unlink()
    data = (source / "web" / "b.txt").read_bytes()
    (source / "web" / "b.txt").write_bytes(data + b"more\n")
    refused("the file web/b.txt has changed")
    (source / "web" / "b.txt").unlink()
    refused("the file web/b.txt is gone")


def test_a_run_that_had_finished_writes_nothing(source: Path, tmp_path: Path) -> None:
    wanted = reference(source, tmp_path / "out")
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    done = prepare_corpus(source, tmp_path / "out", Slow(0), processes=1, **SMALL)
    assert done.continued
    assert done.tokens > 0
    assert tree(tmp_path / "out") == wanted
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")} == stamps


def test_a_full_disk_is_an_error_and_a_second_run_continues(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = 0
    fsync = os.fsync

    def full(fd: int) -> None:
        nonlocal written
        written += 1
        if written == 20:
            raise OSError(28, "No space left on device")
        fsync(fd)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(Exception, match="No space left on device"):
        prepare_corpus(source, tmp_path / "out", Slow(0), processes=1, **SMALL)
    prepare_corpus(source, tmp_path / "out", Slow(0), processes=1, **SMALL)
    assert tree(tmp_path / "out") == reference(source, tmp_path / "whole")
