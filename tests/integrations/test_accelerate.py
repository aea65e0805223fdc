"""The real Accelerate, on 1 and 2 processes: exact, or an error that shows the line to write."""

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

PROGRAM = (Path(__file__).parent / "programs" / "accelerate_ways.py").read_text()
LINE = "fmsdata.integrations.accelerate.register(accelerator, loader)"


@pytest.fixture(scope="module")
def results(folder: Path, stream: list[int]) -> dict[str, Result]:
    ways = [Job(f"ways, {count}", PROGRAM, count, folder=f"ways, {count}") for count in (1, 2)]
    jobs = [*resumed_jobs(script_of("accelerate.md"), kill_after=10), *ways]
    return run_jobs(folder, jobs, ["accelerate"])


def test_the_page_resumes_exactly_on_another_number_of_processes(results: dict[str, Result], stream: list[int]) -> None:
    """Saved after 6 batches, which are 3 steps of the optimizer, and killed after 10."""
    check_resumed(results, stream, saved_after=6)


def test_evaluation_in_between_reads_the_same_set_each_time(results: dict[str, Result]) -> None:
    check_evaluations(results, samples=8)


@pytest.fixture(params=[1, 2])
def ways(request: pytest.FixtureRequest, results: dict[str, Result]) -> Result:
    return results[f"ways, {request.param}"].check()


def test_the_naive_ways_show_the_right_line(ways: Result) -> None:
    for found in ways.found:
        assert "accelerate is in use, and its checkpoints do not hold the position" in found["not registered"]
        assert "a loader has no 'dataset'" in found["skips"]
        assert "ConfigError: accelerator.save_state leaves out the position of a loader" in found["left out"]
        assert found["saved by the user"] == "no error"
        for way in ("not registered", "left out"):
            assert '    loader.keeper = "own"' in found[way]
        for way in ("not registered", "left out", "skips"):
            assert f"    {LINE}" in found[way]
        if len(ways.found) > 1:
            assert "accelerate saves the state of one rank only" in found["registered as it is"]
            assert LINE in found["registered as it is"]
        else:
            assert found["registered as it is"] == "no error", "it holds all lanes"


def test_two_loaders_are_saved_and_restored_beside_each_other(ways: Result) -> None:
    for found in ways.found:
        assert found["two, resumed"] == found["two, on"]
        assert found["two, on"][0] != found["two, on"][1]


def test_a_checkpoint_within_a_gradient_accumulation_is_refused(ways: Result) -> None:
    for found in ways.found:
        assert "between the batches of one gradient accumulation" in found["within an accumulation"]
        assert "if accelerator.sync_gradients:" in found["within an accumulation"]


def test_a_checkpoint_without_a_position_is_refused(ways: Result) -> None:
    for found in ways.found:
        assert "foreign has no fmsdata.json, the position in the stream" in found["foreign"]


def test_a_loader_that_is_registered_after_a_state_was_loaded_is_reported(ways: Result) -> None:
    error = ways.found[0]["registered too late"]
    assert "if a state with late.json was loaded, the loader did not get its position" in error


def test_a_name_for_two_loaders_and_what_is_no_loader_are_refused(ways: Result) -> None:
    for found in ways.found:
        assert "another loader is registered as fmsdata.json" in found["one name for two"]
        assert "register takes a loader, as fmsdata.build_loader returns it, not 'run.yaml'" in found["a path"]
