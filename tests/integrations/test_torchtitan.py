"""The real Trainer of torchtitan, with FSDP2 on the CPU: killed, and resumed at another data-parallel degree."""

from pathlib import Path

import pytest
import tokenizers

from tests.integrations.helpers import (
    Job,
    Result,
    check_chain,
    in_order,
    locked,
    read_stream,
    run_jobs,
    script_of,
)

PROGRAM = (Path(__file__).parent / "programs" / "torchtitan_ways.py").read_text()
ON_CPU = "tests.integrations.programs.torchtitan_on_cpu"


@pytest.fixture(scope="module")
def folder(folder: Path) -> Path:
    """With the tokenizer that the trainer wants to find."""
    with locked(folder):
        if not (folder / "assets").exists():
            (folder / "assets").mkdir()
            words = tokenizers.models.WordLevel({"a": 0}, unk_token="a")
            tokenizers.Tokenizer(words).save(str(folder / "assets" / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, Result]:
    """Killed after the checkpoint of step 2, again after that of step 4, and then to step 8."""
    script = script_of("torchtitan.md")
    jobs = [Job("two", script, 2, kill_after=5), Job("one", script, 1, kill_after=9), Job("two again", script, 2)]
    return run_jobs(folder, [*jobs, Job("ways", PROGRAM, folder="ways")], [ON_CPU])


def test_a_run_that_is_killed_resumes_at_another_degree(runs: dict[str, Result], folder: Path) -> None:
    runs["two"].check_killed()
    runs["one"].check_killed()
    runs["two again"].check()
    stream = read_stream(folder / "run.yaml", seq_len=32)
    check_chain(stream, (runs["two"], 4), (runs["one"], 8), (runs["two again"], None))
    assert [len(rank) for rank in runs["two again"].trained] == [8, 8], "4 steps, each of 2 batches per rank"


def test_each_evaluation_reads_its_set_from_the_top(runs: dict[str, Result], folder: Path) -> None:
    expected = read_stream(folder / "evaluation.yaml", seq_len=32)
    for run, times in (("two", 1), ("one", 1), ("two again", 1)):
        ranks = runs[run].evaluated
        for time in range(times):
            assert in_order([rank[2 * time : 2 * time + 2] for rank in ranks]) == expected[: 4 * len(ranks)]
        assert all(len(rank) == 2 * times for rank in ranks)


def test_batches_are_those_of_the_loader_with_the_sizes_of_torchtitan(runs: dict[str, Result]) -> None:
    found = runs["ways"].check().found[0]
    assert found["batch"] == found["ours"]


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("no file", "dataset_path is not set"),
        ("shift", "torchtitan does not shift labels"),
        ("endless", "is an endless stream, and torchtitan reads its data to the end"),
        ("finite", "no error"),
        ("own folder", "Remove the section `checkpoint`"),
    ],
)
def test_what_would_be_silently_wrong_is_refused(runs: dict[str, Result], way: str, message: str) -> None:
    assert message in runs["ways"].check().found[0][way]
