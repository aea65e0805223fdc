"""Megatron-core: its GPT, its schedule of microbatches and its groups, killed and resumed at another size."""

from pathlib import Path

import pytest

from tests.integrations.helpers import (
    Job,
    Result,
    check_chain,
    in_order,
    read_stream,
    run_jobs,
    script_of,
    write_numbered,
)

ON_CPU = "tests.integrations.programs.megatron_on_cpu"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("megatron")
    write_numbered(folder)
    return folder


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, Result]:
    """Killed after the checkpoint of step 4, again after that of step 6, and then to step 10."""
    script = script_of("megatron.md")
    jobs = [Job("two", script, 2, kill_after=9), Job("one", script, 1, kill_after=5), Job("two again", script, 2)]
    return run_jobs(folder, jobs, [ON_CPU])


def test_a_run_that_is_killed_resumes_at_another_size(runs: dict[str, Result], folder: Path) -> None:
    runs["two"].check_killed()
    runs["one"].check_killed()
    runs["two again"].check()
    stream = read_stream(folder / "run.yaml", seq_len=32)
    check_chain(stream, (runs["two"], 8), (runs["one"], 4), (runs["two again"], None))
    assert [len(rank) for rank in runs["two again"].trained] == [8, 8], "4 steps of 2 microbatches"


def test_each_evaluation_reads_its_set_from_the_top(runs: dict[str, Result], folder: Path) -> None:
    """The set has 8 samples, the 2 microbatches of 2 ranks. One rank reads the half of it."""
    expected = read_stream(folder / "evaluation.yaml", seq_len=32)[:8]
    assert in_order(runs["two"].evaluated) == expected
    assert in_order(runs["one"].evaluated) == expected[:4]
    assert in_order(runs["two again"].evaluated) == expected
