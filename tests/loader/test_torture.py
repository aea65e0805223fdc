"""A run that is killed again and again, at random world sizes.

Trainers and workers are killed, also during a save and during a load. Each rank is a real process,
killed with SIGKILL. It notes every batch when it is done with it. In the end all that was noted is
held against an uninterrupted run, sample by sample, and by provenance against the corpus.
"""

import json
import multiprocessing
import os
import random
import signal
import time
import warnings
from collections import Counter, defaultdict
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil

import fmsdata
from fmsdata import Checkpoints, FmsdataWarning, StatefulDataLoader, WorkerError, testing
from fmsdata.storage import location
from tests.helpers import documents, maker, write_source

LANES, EVERY, KILLS = 12, 4, 24
WORLD_SIZES = [1, 2, 3, 4, 6]
KINDS = ["trainer", "worker", "caught worker", "save", "load"]
FORK = multiprocessing.get_context("fork")


def kill_at_call(owner: Any, name: str, count: int) -> None:
    """This process is killed when a function is called for the count-th time."""
    calls, plain = 0, getattr(owner, name)

    def deadly(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(*args, **kwargs)

    setattr(owner, name, deadly)


def rank_main(
    data: fmsdata.Rescalable,
    folder: Path,
    notes: Path,
    settings: dict[str, Any],
    barrier: Any,
    *,
    trap: tuple[str, int] | None,
    catch: bool,
    last: int,
) -> None:
    """One rank of a trainer. With `catch`, it continues after the death of a worker."""
    if trap:
        owner = os if trap[0] == "fsync" else location.Location
        kill_at_call(owner, *trap)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FmsdataWarning)
        loader = StatefulDataLoader(
            data,
            **settings,
            outputs=["provenance", "epochs"],
            checkpoint=Checkpoints(str(folder), every=EVERY, keep=2),
        )
    state = loader.state_dict()
    steps = [segment[0] for segment in state["history"]] + [state["step"]]
    start = sum((steps[i + 1] - steps[i]) * segment[1] * segment[2] for i, segment in enumerate(state["history"]))
    last = max(last, start + 500)
    with notes.open("w") as file:
        file.write(json.dumps({"start": start, "step": state["step"], **settings}) + "\n")
        file.flush()
        batches = iter(loader)
        while start < last:
            try:
                batch = next(batches)
            except WorkerError:
                if not catch:
                    raise
                batches = iter(loader)
                continue
            rows = zip(batch["input_ids"].tolist(), batch["provenance"], batch["epochs"], strict=True)
            file.write(json.dumps([[row, spans, epochs] for row, spans, epochs in rows]) + "\n")
            file.flush()
            barrier.wait(60)
            start += settings["batch_size"] * settings["world_size"]
    loader.close()


def descendants_of(pid: int) -> list[int]:
    """Workers, and the fork servers that they come from."""
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.Error:
        return []


def attempt(data: fmsdata.Rescalable, folder: Path, notes: Path, kind: str, chance: random.Random, last: int) -> bool:
    """Start all ranks, and kill as the kind says. Whether the run ended by that."""
    world_size = chance.choice(WORLD_SIZES)
    workers = chance.choice([1, 2]) if "worker" in kind else chance.choice([0, 0, 1])
    victim = chance.randrange(world_size)
    trap: Any = {"save": ("fsync", chance.randint(1, 8)), "load": ("read_bytes", 1)}.get(kind)
    barrier = FORK.Barrier(world_size)
    notes.mkdir()
    common = {
        "batch_size": chance.choice([1, 2, 12 // world_size]),
        "num_workers": min(workers, LANES // world_size),
        "world_size": world_size,
        "multiprocessing_context": chance.choice(["fork", "fork", "forkserver"]),
    }
    ranks, struck = [], True
    for rank in range(world_size):
        process = FORK.Process(
            target=rank_main,
            args=(data, folder, notes / f"{rank}.jsonl", {**common, "rank": rank}, barrier),
            kwargs={"trap": trap if rank == victim else None, "catch": kind == "caught worker", "last": last},
        )
        process.start()
        ranks.append(process)
    strikes = {"trainer": ["trainer"], "worker": ["worker"], "caught worker": ["worker", "trainer"]}.get(kind, [])
    strike = time.monotonic() + chance.uniform(0.1, 0.8)
    give_up = time.monotonic() + (240 if kind == "none" else 15)
    while all(process.is_alive() for process in ranks):
        time.sleep(0.005)
        if strikes and time.monotonic() > strike:
            pid = ranks[victim].pid or 0
            if victims := [pid] if strikes[0] == "trainer" else descendants_of(pid):
                os.kill(chance.choice(victims), signal.SIGKILL)
                strikes.pop(0)
                strike += chance.uniform(0.5, 2)
        if time.monotonic() > give_up:  # no checkpoint to load yet, no worker to be found
            ranks[victim].kill()
            ranks[victim].join()
            struck = False
    failed = [process for process in ranks if process.exitcode]
    for process in ranks:
        if failed:
            process.kill()  # as a launcher does when one rank has failed
        process.join()
    return bool(failed) and struck


def test_a_run_that_is_killed_again_and_again_reads_the_same_stream(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    write_source(tmp_path / "web", documents(rng, 400, longest=120))
    write_source(tmp_path / "wiki", documents(rng, 150, longest=90), layout="batch")
    make = maker(tmp_path, lanes=LANES, shuffle__window=16)
    data = make(0, 1).data
    chance = random.Random(7)
    kinds: Counter[str] = Counter()
    runs: list[Path] = []
    deadline = time.monotonic() + 240
    last, done = 10**9, False
    while not done:
        assert time.monotonic() < deadline, kinds
        enough = kinds.total() >= KILLS and all(kinds[kind] >= 3 for kind in KINDS)
        kind = "none" if enough else chance.choice([kind for kind in KINDS if kinds[kind] < 6])
        if enough:
            last = 10_000
        runs.append(tmp_path / f"attempt-{len(runs)}")
        killed = attempt(data, tmp_path / "checkpoints", runs[-1], kind, chance, last)
        kinds[kind] += killed
        done = kind == "none"
        assert not (done and killed), "nobody was killed, and yet the run did not come to its end"
    print(f"\n{len(runs)} attempts, {kinds.total()} kills: {dict(kinds)}")
    check(runs, make, tmp_path)


def check(runs: list[Path], make: testing.MakeLoader, corpus: Path) -> None:
    """What all attempts noted against an uninterrupted run, and against the corpus."""
    attempts = [[read(path) for path in sorted(folder.glob("*.jsonl"))] for folder in runs]
    attempts = [[rank for rank in ranks if rank] for ranks in attempts]
    attempts = [ranks for ranks in attempts if ranks]
    starts = []
    for ranks in attempts:
        assert len({rank[0]["start"] for rank in ranks}) == 1, "all ranks went on from the same place"
        starts.append(ranks[0][0]["start"])
    assert starts == sorted(starts), "a checkpoint that a run resumed from is not lost"
    assert len(set(starts)) > 5
    reference: dict[int, Any] = {}
    for g, (batch,) in enumerate(zip(islice(make(0, 1), 200_000))):
        reference[g] = [
            batch["input_ids"][0].tolist(),
            [list(span) for span in batch["provenance"][0]],
            *batch["epochs"],
        ]
        if g > max(starts) + 20_000:
            break
    noted: dict[int, Any] = {}
    for ranks, start, stop in zip(attempts, starts, [*starts[1:], None], strict=True):
        seen = {}
        for settings, *batches in ranks:
            world_size, rank = settings["world_size"], settings["rank"]
            g = start + (rank - start) % world_size
            for row in (row for batch in batches for row in batch):
                assert row == reference[g], (settings, g)
                seen[g] = row
                g += world_size
        stop = max(seen) + 1 if stop is None else stop
        for g in range(start, stop):
            assert g not in noted
            noted[g] = seen[g]
    assert sorted(noted) == list(range(len(noted)))
    exactly_once(noted, testing.stored_documents({name: corpus / name for name in ("web", "wiki")}))


def read(path: Path) -> list[Any]:
    """The notes of a rank; the last line may be cut short by its death."""
    lines = path.read_text().split("\n")
    return [json.loads(line) for line in lines[:-1]]


def exactly_once(noted: dict[int, Any], stored: testing.Stored) -> None:
    spans: dict[Any, list[tuple[int, int]]] = defaultdict(list)
    for _, row_spans, epochs in noted.values():
        for (source, shard, document, start, stop), epoch in zip(row_spans, epochs, strict=True):
            spans[source, shard, document, epoch].append((start, stop))
    for (source, shard, document), tokens in stored.items():
        for epoch in (0, 1):
            place = 0
            for start, stop in sorted(spans[source, shard, document, epoch]):
                assert start == place, (source, shard, document, epoch)
                place = stop
            assert place == len(tokens), (source, shard, document, epoch)
    for document, document_spans in spans.items():
        ends = sorted(document_spans)
        assert all(before[1] <= after[0] for before, after in pairwise(ends)), document
