"""The real DeepSpeed, on 1 and 2 processes: exact, or an error that shows the line to write."""

from pathlib import Path

import pytest

from tests.integrations.helpers import (
    Job,
    Result,
    check_evaluations,
    check_resumed,
    resumed_jobs,
    run_jobs,
    script_of,
)

PROGRAM = (Path(__file__).parent / "programs" / "deepspeed_ways.py").read_text()
LINE = "    fmsdata.integrations.deepspeed.save_checkpoint(engine, folder, loader)"


@pytest.fixture(scope="module")
def results(folder: Path, stream: list[int]) -> dict[str, Result]:
    ways = [Job(f"ways, {count}", PROGRAM, count, folder=f"ways, {count}") for count in (1, 2)]
    jobs = [*resumed_jobs(script_of("deepspeed.md"), kill_after=10), *ways]
    return run_jobs(folder, jobs, ["tests.integrations.programs.deepspeed_on_cpu"])


def test_the_page_resumes_exactly_on_another_number_of_processes(results: dict[str, Result], stream: list[int]) -> None:
    """Saved after 6 batches, which are 3 steps of the optimizer, and killed after 10."""
    check_resumed(results, stream, saved_after=6)


def test_evaluation_in_between_reads_the_same_set_each_time(results: dict[str, Result]) -> None:
    check_evaluations(results, samples=8)


@pytest.fixture(params=[1, 2])
def ways(request: pytest.FixtureRequest, results: dict[str, Result]) -> Result:
    return results[f"ways, {request.param}"].check()


def test_the_client_state_of_the_user_is_kept_beside_the_loader(ways: Result) -> None:
    for found in ways.found:
        assert found["client state"] == [True, 7, False]
        assert found["resumed"]
        assert found["nothing"] == [None, {}]
        assert "client_state has a key 'fmsdata'" in found["taken key"]


def test_a_checkpoint_within_a_gradient_accumulation_is_refused(ways: Result) -> None:
    for found in ways.found:
        assert "1 batch into a gradient accumulation of 2" in found["within an accumulation"]


def test_the_naive_ways_show_the_right_line(ways: Result) -> None:
    """The engine keeps what one process returns: the others can't resume from it."""
    for rank, found in enumerate(ways.found):
        assert LINE in found["foreign"]
        if len(ways.found) == 1:
            assert found["saved as it is"] == "no error"
        else:
            assert "keeps the client_state of one rank" in found["saved as it is"]
            assert LINE in found["saved as it is"]
            assert "state_dict(gather=False)" in found["saved as it is"]
            assert rank == 0 or "no state for lane 1, 3, 5, 7, 9, 11" in found["one rank"]


def test_another_batch_size_than_that_of_the_loader_is_refused(ways: Result) -> None:
    for found in ways.found:
        for error in found["batch size"]:
            assert "train_micro_batch_size_per_gpu is 2, and the batch size of the loader is 4" in error
            assert 'config["train_micro_batch_size_per_gpu"] = 4' in error
