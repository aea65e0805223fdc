"""The real Trainer of torchtitan, with FSDP2 on the CPU: killed, and resumed at another data-parallel degree."""

import subprocess
from itertools import islice
from pathlib import Path

import pytest
import tokenizers

import fmsdata
from tests.integrations.environment import PYTHON, ROOT
from tests.integrations.helpers import Job, Result, check_chain, in_order, run_jobs, script_of, write_numbered

ON_CPU = "tests.integrations.torchtitan_on_cpu"


def first_tokens(config: Path, batches: int) -> list[int]:
    """The stream with the sequence length of the script."""
    loader = fmsdata.build_loader(config, {"pack.seq_len": 32}, rank=0, world_size=1)
    rows = [row for batch in islice(loader, batches) for row in batch["input_ids"][:, 0].tolist()]
    loader.close()
    return rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("torchtitan")
    write_numbered(folder)
    (folder / "assets").mkdir()
    words = tokenizers.models.WordLevel({"a": 0}, unk_token="a")
    tokenizers.Tokenizer(words).save(str(folder / "assets" / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, Result]:
    """Killed after the checkpoint of step 2, again after that of step 4, and then to step 8."""
    script = script_of("torchtitan.md")
    jobs = [Job("two", script, 2, kill_after=5), Job("one", script, 1, kill_after=9), Job("two again", script, 2)]
    return run_jobs(folder, jobs, [ON_CPU])


def test_a_run_that_is_killed_resumes_at_another_degree(runs: dict[str, Result], folder: Path) -> None:
    runs["two"].check_killed()
    runs["one"].check_killed()
    runs["two again"].check()
    stream = first_tokens(folder / "run.yaml", 40)
    check_chain(stream, (runs["two"], 4), (runs["one"], 8), (runs["two again"], None))
    assert [len(rank) for rank in runs["two again"].trained] == [8, 8], "4 steps, each of 2 batches per rank"


def test_each_evaluation_reads_its_set_from_the_top(runs: dict[str, Result], folder: Path) -> None:
    expected = first_tokens(folder / "evaluation.yaml", 4)
    for run, times in (("two", 1), ("one", 1), ("two again", 1)):
        ranks = runs[run].evaluated
        for time in range(times):
            assert in_order([rank[2 * time : 2 * time + 2] for rank in ranks]) == expected[: 4 * len(ranks)]
        assert all(len(rank) == 2 * times for rank in ranks)
