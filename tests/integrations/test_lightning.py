"""The real Lightning, on 1 and 2 processes: exact, or an error that shows the line to write."""

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
)

PROGRAM = (Path(__file__).parent / "programs" / "lightning_ways.py").read_text()


@pytest.fixture(scope="module")
def results(folder: Path, stream: list[int]) -> dict[str, Result]:
    script = script_of("lightning.md")
    jobs = [
        Job("two", script, 2, kill_after=9, arguments=["2"]),
        Job("one", script, 1, kill_after=5, arguments=["1"]),
        Job("two again", script, 2, arguments=["2"]),
        Job("epochs, killed", PROGRAM, 1, 10, ["epochs"], folder="epochs"),
        Job("epochs", PROGRAM, 1, None, ["epochs"], folder="epochs"),
        Job("tensor parallel", PROGRAM, 2, None, ["tensor parallel"], folder="tensor parallel"),
        *(Job(name, PROGRAM, 1, None, [name], folder=name) for name in ("launcher", "map-style", "refused")),
    ]
    return run_jobs(folder, jobs, ["lightning", "fmsdata.config.build"])


def test_a_run_that_is_killed_resumes_on_another_number_of_processes(
    results: dict[str, Result], stream: list[int]
) -> None:
    """Steps of 2 batches, saved after every second one: after batch 8, and after batch 4 of the second run."""
    two, one, again = results["two"].check_killed(), results["one"].check_killed(), results["two again"].check()
    check_chain(stream, (two, 8), (one, 4), (again, None))
    assert [len(rank) for rank in again.trained] == [8, 8], "up to max_steps"


def test_each_evaluation_reads_its_set_from_the_top(results: dict[str, Result], folder: Path) -> None:
    """Also the first one, before training, which Lightning does as a check."""
    expected = read_stream(folder / "evaluation.yaml")[:8]
    for name, times in (("two", 2), ("one", 1), ("two again", 1)):
        ranks = results[name].evaluated
        each = len(expected) // 2 // len(ranks)
        assert {len(rank) for rank in ranks} == {times * each}
        for begin in range(0, times * each, each):
            assert in_order([rank[begin : begin + each] for rank in ranks]) == expected


def test_a_run_in_epochs_resumes_at_the_end_of_one(results: dict[str, Result], stream: list[int]) -> None:
    """Lightning restores the state of a loader only in the middle of an epoch; that of a DataModule always."""
    check_chain(stream, (results["epochs, killed"].check_killed(), 8), (results["epochs"].check(), None))
    assert [len(rank) for rank in results["epochs"].trained] == [4]
    assert results["epochs"].found == [3]


def test_processes_that_lightning_starts_itself_have_the_right_ranks(
    results: dict[str, Result], stream: list[int]
) -> None:
    two, one = results["launcher"].check().found[0]
    assert in_order(two) == stream[:16]
    assert in_order(one) == stream[16:28]


def test_processes_of_one_tensor_parallel_group_read_the_same(results: dict[str, Result], stream: list[int]) -> None:
    first, second = results["tensor parallel"].check().trained
    assert first == second
    assert in_order([first]) == stream[:8], "four steps, the last two of them resumed"


def test_rows_in_epochs_resume_within_an_epoch(results: dict[str, Result]) -> None:
    trained, expected = results["map-style"].check().found[0]
    assert trained == expected


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("loader", 'data = fmsdata.integrations.lightning.DataModule("run.yaml")'),
        ("loader in a module", "this loader was built before Lightning knew its ranks"),
        ("no length", "Give Trainer(max_steps=...), or the loader `steps`"),
        ("limit", "no error"),
        ("overfit", "the stream goes on in every epoch"),
        ("evaluation of a stream", "write `evaluation: true`, or `{samples: N}`"),
        ("own folder", "Remove the section `checkpoint`"),
        ("foreign", "foreign.ckpt has no state of DataModule"),
        ("other rank", "the loader is rank 1 of 2, but Lightning says rank 0 of 1"),
        ("no loader", "it must return a StatefulDataLoader"),
        ("function", "no error"),
    ],
)
def test_what_would_be_silently_wrong_is_refused(results: dict[str, Result], way: str, message: str) -> None:
    assert message in results["refused"].check().found[0][way]
