"""Ray Train on a real cluster of this machine: workers are killed, and another number of them resumes."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import ray.train.torch
import torch

import fmsdata
from fmsdata.integrations.ray import restore
from tests.integrations.helpers import (
    Job,
    Result,
    check_chain,
    in_order,
    read_stream,
    run_jobs,
    script_of,
)


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, Result]:
    """Killed after the checkpoint of step 8, again after a later one, and then to step 20."""
    script = script_of("ray.md")
    jobs = [
        Job("two", script, 2, kill_after=9, arguments=["2"]),
        Job("one", script, 1, kill_after=9, arguments=["1"]),
        Job("two again", script, 2, arguments=["2"]),
    ]
    return run_jobs(folder, jobs, program="tests.integrations.programs.ray_runs")


def saved_after(killed: Result, resumed: Result, stream: list[int], begun: int) -> int:
    """The batches per rank up to the checkpoint that a run resumed from: one that Ray knew of when workers died."""
    place = stream.index(resumed.trained[0][0][0]) - begun
    batches, rest = divmod(place, 2 * len(killed.trained))
    assert rest == 0
    assert batches in range(4, len(killed.trained[0]) + 1, 4)
    return batches


def test_workers_that_are_killed_are_resumed_by_another_number_of_them(runs: dict[str, Result], folder: Path) -> None:
    two, one, again = runs["two"], runs["one"], runs["two again"].check()
    stream = read_stream(folder / "run.yaml")
    for killed, batches in ((two, 9), (one, 9)):
        assert "The actor is dead because its worker process has died" in killed.logs[0]
        assert {len(rank) for rank in killed.trained} == {batches}
    first = saved_after(two, one, stream, 0)
    second = saved_after(one, again, stream, first * 4)
    check_chain(stream, (two, first), (one, second), (again, None))
    assert {len(rank) for rank in again.trained} == {20 - first - second}


def test_each_evaluation_reads_its_set_from_the_top(runs: dict[str, Result], folder: Path) -> None:
    expected = read_stream(folder / "evaluation.yaml")[:8]
    for run in runs.values():
        each = 8 // 2 // len(run.evaluated)
        for begin in range(0, len(run.evaluated[0]), each):
            assert in_order([rank[begin : begin + each] for rank in run.evaluated]) == expected
        assert run.evaluated[0]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_loader_that_ray_prepares_is_refused(folder: Path, workers: int) -> None:
    """With 1 worker, Ray looks up nothing of the loader, but reads a batch ahead."""
    loader = fmsdata.build_loader(folder / "run.yaml", rank=0, world_size=1)
    prepare: Any = ray.train.torch.prepare_data_loader
    context = Mock(get_world_size=lambda: workers, get_world_rank=lambda: 0)
    with (
        patch("ray.train.get_context", lambda: context),
        patch("ray.train.torch.get_device", lambda: torch.device("cpu")),
        pytest.raises(fmsdata.FmsdataError) as refused,
    ):
        iter(prepare(loader))
    assert "checkpoint = fmsdata.integrations.ray.restore(loader)            # and no prepare_data_loader" in str(
        refused.value
    )


def test_a_checkpoint_without_a_position_is_refused(folder: Path, tmp_path: Path) -> None:
    loader = fmsdata.build_loader(folder / "run.yaml", rank=0, world_size=1)
    checkpoint = ray.train.Checkpoint.from_directory(str(tmp_path))
    message = r"has no fmsdata\.json, the position in the stream"
    with patch("ray.train.get_checkpoint", lambda: checkpoint), pytest.raises(fmsdata.CheckpointError, match=message):
        restore(loader)


def test_two_places_to_resume_from_are_refused(folder: Path, tmp_path: Path) -> None:
    loader = fmsdata.build_loader(folder / "run.yaml", {"checkpoint": {"path": str(tmp_path)}}, rank=0, world_size=1)
    with pytest.raises(fmsdata.ConfigError, match="Remove the section `checkpoint`"):
        restore(loader)
    loader.close()
