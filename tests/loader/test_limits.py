"""Limits of the system: each is an error that names the limit, and leaves nothing open."""

import os
from pathlib import Path

import numpy as np
import pytest

from tests.helpers import documents, write_source
from tests.programs.launch import run
from tests.text_files import write_source as write_text


@pytest.fixture
def large(tmp_path: Path) -> Path:
    write_source(tmp_path / "web", documents(np.random.default_rng(1), 2000, shortest=2))
    return tmp_path


LIMITED = """
import resource, os, sys
import fmsdata
lines = fmsdata.Pack(fmsdata.ShardReader("web"), seq_len=33)
data = fmsdata.Rescalable(lines, lanes=16, seed=1)
def loader(workers):
    return fmsdata.StatefulDataLoader(data, batch_size=2, num_workers=workers, multiprocessing_context=sys.argv[1])
first = loader(1)
next(first)
first.close()
held = len(os.listdir("/proc/self/fd"))
enough, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
for limit in range(held, held + 56, 3):
    limited = loader(4)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        for _ in range(3):
            next(limited)
        message = "fine"
    except fmsdata.WorkerError as error:
        message = str(error).replace(f"limit of {limit} on", "limit of N on")
    resource.setrlimit(resource.RLIMIT_NOFILE, (enough, hard))
    limited.close()
    print(len(os.listdir("/proc/self/fd")) - held, message)
"""
NAMED = "Too many open files: the limit of N on open files of a process (ulimit -n) is reached; raise it, or use fewer"


@pytest.mark.parametrize("method", ["forkserver", "fork"])
def test_too_few_file_descriptors_are_an_error_that_names_the_limit(large: Path, method: str) -> None:
    """Whichever descriptor it is that there is none for."""
    outcomes = run(["-c", LIMITED], method, cwd=large).splitlines()
    assert len(outcomes) == 19
    assert {outcome.split()[0] for outcome in outcomes} == {"0"}, "nothing is left open"
    failed = [outcome for outcome in outcomes if not outcome.endswith(" fine")]
    assert all(NAMED in outcome for outcome in failed), "every error names the limit"
    assert any("worker 0 of 4 could not be started" in outcome for outcome in failed)
    assert outcomes[-1] == "0 fine"


READING = """
import resource
import fmsdata
enough, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
for source in ("large", "small", "jsonl", "gz", "parquet"):
    reader = fmsdata.ShardReader(source)
    if source in ("jsonl", "gz", "parquet"):
        reader = fmsdata.Tokenize(reader, "bytes")
    lines = fmsdata.Pack(reader, seq_len=33)
    loader = fmsdata.StatefulDataLoader(fmsdata.Rescalable(lines, lanes=4), batch_size=2, rank=0, world_size=1)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        next(loader)
    except fmsdata.DataError as error:
        print(error)
    resource.setrlimit(resource.RLIMIT_NOFILE, (enough, hard))
    next(loader)
    loader.close()
"""


def test_a_shard_that_no_descriptor_is_left_for_is_an_error_that_names_the_limit(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    write_source(tmp_path / "large", documents(rng, 20000, shortest=20), shards=1)
    assert (tmp_path / "large" / "part-0.arrow").stat().st_size > 1 << 16, "it is mapped"
    write_source(tmp_path / "small", documents(rng, 20), shards=1)
    texts = ["some text of a document"] * 200
    for folder, suffix in (("jsonl", "jsonl"), ("gz", "jsonl.gz"), ("parquet", "parquet")):
        write_text(tmp_path / folder, texts, suffix, shards=1)
    messages = run(["-c", READING], cwd=tmp_path).splitlines()
    assert len(messages) == 5
    for message in messages:
        assert "cannot be read: Too many open files: the limit of 3 on open files of a process (ulimit -n)" in message


PROCESSES = """
import ctypes, os, resource, sys, threading
import fmsdata
from fmsdata.loader.fork_server import ForkServer

def become_a_user_without_privileges():
    # Limits on processes do not hold for root. The right to read all files stays: Python may be in root's home.
    libc = ctypes.CDLL(None)
    assert libc.prctl(8, 1, 0, 0, 0) == 0  # PR_SET_KEEPCAPS
    os.setgroups([]); os.setgid(51234); os.setuid(51234)
    to_read = 1 << 2  # CAP_DAC_READ_SEARCH
    assert libc.capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)(to_read, to_read, to_read)) == 0
    assert libc.prctl(47, 2, 2, 0, 0) == 0  # PR_CAP_AMBIENT_RAISE, for the programs that are started

become_a_user_without_privileges()
lines = fmsdata.Pack(fmsdata.ShardReader("web"), seq_len=33)
data = fmsdata.Rescalable(lines, lanes=16, seed=1)
def loader(workers):
    return fmsdata.StatefulDataLoader(data, batch_size=2, num_workers=workers, multiprocessing_context=sys.argv[1])
first = loader(1)
next(first)
first.close()
held = len(os.listdir("/proc/self/fd"))
enough = resource.getrlimit(resource.RLIMIT_NPROC)
limited_processes = [os.getpid()]
if sys.argv[1] == "forkserver":
    limited_processes.append(ForkServer.shared()._process.pid)
for limit in range(1, 18):
    limited = loader(3)
    for process in limited_processes:
        resource.prlimit(process, resource.RLIMIT_NPROC, (limit, enough[1]))
    try:
        for _ in range(3):
            next(limited)
        message = "fine"
    except fmsdata.WorkerError as error:
        message = str(error)
    for process in limited_processes:
        resource.prlimit(process, resource.RLIMIT_NPROC, enough)
    limited.close()
    print(len(os.listdir("/proc/self/fd")) - held, message)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="another user is played by a process that gives up root")
@pytest.mark.parametrize("method", ["forkserver", "fork"])
def test_too_few_processes_are_an_error_that_names_the_limit(large: Path, method: str) -> None:
    """Whichever process or thread it is that there is none for."""
    outcomes = run(["-c", PROCESSES], method, cwd=large).splitlines()
    assert len(outcomes) == 17
    assert {outcome.split()[0] for outcome in outcomes} == {"0"}, "nothing is left open"
    failed = [outcome for outcome in outcomes if not outcome.endswith(" fine")]
    assert all("the limit on processes and threads (ulimit -u" in outcome for outcome in failed)
    for named in ("the thread fmsdata-read-ahead could not be started", "could not be ", "fmsdata-watch-trainer"):
        assert any(named in outcome for outcome in failed), named
    assert outcomes[-1] == "0 fine"
