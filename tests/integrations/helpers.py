"""Scripts that train in the environment `.trainers`, and the stream that they must have trained on.

The documents of the corpus are as long as a line, and each begins with a token of its own. So the first
token of a row says which sample of the stream it is.
"""

import fcntl
import json
import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import fmsdata
from tests.helpers import write_source
from tests.integrations.environment import PYTHON, ROOT

DOCUMENTS, LENGTH = 500, 8
VOCABULARY = DOCUMENTS + LENGTH
BATCH_SIZE = 2
RUNNER = "tests.integrations.runner"


@dataclass(frozen=True)
class Job:
    """A script to run as some ranks. With `kill_after`, each rank is killed before it trains on another batch."""

    name: str
    script: str
    world_size: int = 1
    kill_after: int | None = None
    arguments: Sequence[str] = ()
    folder: str = "."  # where it runs, below that of all jobs: it gets the same configurations


@dataclass(frozen=True)
class Result:
    """What the ranks of a job did: exit codes, logs, and rows (their first tokens) per batch."""

    codes: list[int]
    logs: list[str]
    found: list[Any]  # what each rank wrote with `report`
    trained: list[list[list[int]]]
    evaluated: list[list[list[int]]]

    def check(self) -> "Result":
        assert not any(self.codes), "\n".join(self.logs)
        return self

    def check_killed(self) -> "Result":
        """All ranks were killed, or lost the connection to one that was."""
        assert all(self.codes), self.codes
        assert -9 in self.codes, "\n".join(self.logs)
        return self


def shared_folder(tmp_path_factory: pytest.TempPathFactory, name: str) -> Path:
    """A folder that all processes of this test run share, so that the tests of a file share its jobs."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"trainer-{name}"
    folder.mkdir(exist_ok=True)
    return folder


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process at a time."""
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def run_jobs(
    folder: Path, jobs: Sequence[Job], imports: Sequence[str] = (), timeout: float = 240, program: str = RUNNER
) -> dict[str, Result]:
    """Run jobs one after the other, in this folder, once. `imports` are the modules that all of them need."""
    with locked(folder):
        if not (folder / "codes.json").exists():
            _run(folder, jobs, imports, timeout, program)
    codes = json.loads((folder / "codes.json").read_text())
    return {job.name: _result(folder, job, codes[job.name]) for job in jobs}


def _run(folder: Path, jobs: Sequence[Job], imports: Sequence[str], timeout: float, program: str) -> None:
    for job in jobs:
        (folder / f"{job.name}.py").write_text(job.script)
        (folder / job.folder).mkdir(exist_ok=True)
        for config in folder.glob("*.yaml") if job.folder != "." else ():
            (folder / job.folder / config.name).write_text(config.read_text())
    plan = [{**vars(job), "script": str(folder / f"{job.name}.py")} for job in jobs]
    (folder / "jobs.json").write_text(json.dumps({"imports": imports, "jobs": plan}))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment |= {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [str(PYTHON), "-m", program, str(folder)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr


def _result(folder: Path, job: Job, codes: list[int]) -> Result:
    logs, found, trained, evaluated = [], [], [], []
    for rank in range(job.world_size):
        logs.append((folder / f"{job.name}-{rank}.log").read_text())
        report = folder / f"{job.name}-{rank}.json"
        found.append(json.loads(report.read_text()) if report.exists() else None)
        path = folder / f"{job.name}-{rank}.jsonl"
        records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        trained.append([record["rows"] for record in records if record["training"]])
        evaluated.append([record["rows"] for record in records if not record["training"]])
    return Result(codes, logs, found, trained, evaluated)


def script_of(page: str) -> str:
    """The script of a page of the docs: its first block of Python."""
    script = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "trainers" / page).read_text(), re.DOTALL)[0]
    assert len(script.splitlines()) < 40
    return str(script)


def write_numbered(folder: Path, *, shift: bool = True, evaluation_samples: int = 8) -> list[int]:
    """Write a corpus, `run.yaml` and `evaluation.yaml`; return the stream: the first token of each sample."""
    with locked(folder):
        if not (folder / "evaluation.yaml").exists():
            _write_numbered(folder, shift, evaluation_samples)
    return read_stream(folder / "run.yaml")


def _write_numbered(folder: Path, shift: bool, evaluation_samples: int) -> None:
    numbered = [np.arange(first, first + LENGTH) for first in range(DOCUMENTS)]
    write_source(folder / "corpus" / "numbers", numbered)
    config: dict[str, Any] = {
        "seed": 3,
        "path": str(folder / "corpus"),
        "pack": {"seq_len": LENGTH - shift},
        "shuffle": {"window": 4},
        "task": "causal_lm" if shift else {"name": "causal_lm", "shift": False},
        "lanes": 12,
        "loader": {"batch_size": BATCH_SIZE},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    evaluation = {**config, "seed": 4, "epochs": 1, "evaluation": {"samples": evaluation_samples}}
    (folder / "evaluation.yaml").write_text(yaml.safe_dump(evaluation))


def read_stream(config: Path, samples: int = 200, seq_len: int | None = None) -> list[int]:
    """The first tokens of the first samples of a stream, with the sequence length that a script gives it."""
    overrides = {} if seq_len is None else {"pack.seq_len": seq_len}
    loader = fmsdata.build_loader(config, overrides, rank=0, world_size=1)
    rows = [row for batch in islice(loader, -(-samples // BATCH_SIZE)) for row in batch["input_ids"][:, 0].tolist()]
    loader.close()
    return rows[:samples]


def resumed_jobs(script: str, kill_after: int) -> list[Job]:
    """A script that resumes by itself: on 2 ranks, killed, then on 1; and the other way round."""
    return [
        Job("2-killed", script, 2, kill_after, folder="2-to-1"),
        Job("2-to-1", script, 1, folder="2-to-1"),
        Job("1-killed", script, 1, kill_after, folder="1-to-2"),
        Job("1-to-2", script, 2, folder="1-to-2"),
    ]


def check_resumed(results: dict[str, Result], stream: Sequence[int], saved_after: int) -> None:
    """The results of `resumed_jobs`, whose last checkpoint was saved after `saved_after` batches."""
    for killed, resumed in (("2-killed", "2-to-1"), ("1-killed", "1-to-2")):
        check_chain(stream, (results[killed].check_killed(), saved_after), (results[resumed].check(), None))


def check_evaluations(results: dict[str, Result], samples: int) -> None:
    """Each evaluation of `resumed_jobs` read the same set, once."""
    seen: list[list[int]] = []
    for name in ("2-killed", "2-to-1", "1-killed", "1-to-2"):
        ranks = [[row for batch in rank for row in batch] for rank in results[name].evaluated]
        each = samples // len(ranks)  # of a rank, in one evaluation
        assert {len(rows) % each for rows in ranks} == {0}
        for first in range(0, len(ranks[0]), each):
            seen += [sorted(row for rows in ranks for row in rows[first : first + each])]
    assert len(seen) >= 4
    assert len(set(seen[0])) == samples
    assert all(rows == seen[0] for rows in seen)


def in_order(ranks: Sequence[Sequence[Sequence[int]]], batches: int | None = None) -> list[int]:
    """The rows of the first batches of all ranks, in the order of the stream: sample g is of rank g mod W."""
    per_rank = [[row for batch in rank[:batches] for row in batch] for rank in ranks]
    return [row for rows in zip(*per_rank, strict=True) for row in rows]


def check_chain(stream: Sequence[int], *runs: tuple[Result, int | None]) -> None:
    """Runs that follow each other trained on the stream: each on a number of batches per rank, up to its checkpoint.

    What a run trained on after its last checkpoint is trained on again by the next one, with other ranks.
    """
    seen: list[int] = []
    for result, batches in runs:
        begun = len(seen)
        longest = min(len(rank) for rank in result.trained)
        assert batches is None or longest >= batches
        every = in_order([rank[:longest] for rank in result.trained])
        assert every == list(stream[begun : begun + len(every)])
        seen += in_order(result.trained, batches if batches is not None else longest)
    assert seen == list(stream[: len(seen)])
