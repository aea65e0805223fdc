"""Real Accelerate and the real Trainer of transformers, on 1 and 2 processes: exact, or refused."""

import re
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import maker
from tests.programs.launch import launch

Rows = list[list[int]]
WORLD_SIZES = (1, 2)


@pytest.fixture(scope="module")
def stream(shared_corpus: Path) -> Rows:
    """The canonical stream, sample by sample."""
    loader = maker(shared_corpus, lanes=12)(0, 1)
    return [row for batch in islice(loader, 72) for row in batch["input_ids"].tolist()]


@pytest.fixture(scope="module", params=WORLD_SIZES)
def accelerated(request: pytest.FixtureRequest, shared_corpus: Path) -> list[Any]:
    return launch("accelerated", "accelerated", request.param, shared_corpus)


@pytest.fixture(scope="module", params=WORLD_SIZES)
def trained(request: pytest.FixtureRequest, shared_corpus: Path) -> list[Any]:
    return launch("accelerated", "trained", request.param, shared_corpus)


def of_rank(stream: Rows, rank: int, world_size: int) -> Rows:
    """What Accelerate gives to a rank: of each global batch, the rank's batch of 2."""
    return [row for first in range(2 * rank, len(stream), 2 * world_size) for row in stream[first : first + 2]]


def test_our_loader_needs_no_preparation_and_the_state_of_one_rank_is_refused(
    accelerated: list[Any], stream: Rows
) -> None:
    world_size = len(accelerated)
    for rank, found in enumerate(accelerated):
        assert found["ours"] == stream[rank::world_size][:12]
        if world_size > 1:
            assert "accelerate saves the state of one rank only" in found["one rank"]
            assert "state_dict(gather=True)" in found["one rank"]
        else:
            assert found["one rank"] == "no error"


@pytest.mark.parametrize("way", ["dispatched", "sliced"])
def test_prepared_loaders_are_exact_with_the_whole_stream_and_refused_with_a_part_of_it(
    accelerated: list[Any], stream: Rows, way: str
) -> None:
    world_size = len(accelerated)
    for rank, found in enumerate(accelerated):
        for workers in (0, 1):
            assert found[f"{way}, {workers}"] == of_rank(stream, rank, world_size)[:12]
            message = found[f"{way}, {workers}, own lanes"]
            if world_size == 1:
                assert message == "no error"
            else:
                wrapper = {"dispatched": "DataLoaderDispatcher", "sliced": "IterableDatasetShard"}[way]
                assert f"{wrapper} splits what it reads among 2 processes" in message
                assert f"reads only the lanes of rank {rank} of 2" in message
                assert "    loader = fmsdata.StatefulDataLoader(data, batch_size=...)\n" in message
                assert "    data = fmsdata.Rescalable(lines, lanes=12, seed=3, rank=0, world_size=1)" in message


@pytest.mark.parametrize("way", ["dispatched", "sliced"])
def test_a_state_that_accelerate_reads_past_is_refused(accelerated: list[Any], stream: Rows, way: str) -> None:
    """Its loaders read ahead. Those of torchdata inside them take the state before, but for the dispatcher's."""
    world_size = len(accelerated)
    for rank, found in enumerate(accelerated):
        if found[f"{way}, stateful, error"] == "no error":
            assert found[f"{way}, stateful"] == of_rank(stream, rank, world_size)[:24]
        else:
            assert (way, world_size) == ("dispatched", 2)
            assert "saves the state after the batches that it read ahead" in found["dispatched, stateful, error"]
        wrapper = "IterableDatasetShard" if (way, world_size) == ("sliced", 2) else "DataLoader(Shard|Dispatcher)"
        assert re.search(f"is read by {wrapper}, ahead of the trainer", found[f"{way}, state ahead"])


def test_versions_of_accelerate_that_resume_slices_elsewhere_are_refused(accelerated: list[Any], stream: Rows) -> None:
    """Before 1.13, on several processes, its loader lowers the count of batches that it saves."""
    world_size = len(accelerated)
    for rank, found in enumerate(accelerated):
        assert found["sliced by an old version, no state"] == of_rank(stream, rank, world_size)[:12]
        message = found["sliced by an old version"]
        if world_size == 1:
            assert message == "no error"
        else:
            assert "Accelerate 1.12.0 with use_stateful_dataloader=True on 2 processes" in message
            assert "pip install 'accelerate>=1.13'" in message


def test_the_trainer_of_transformers_is_exact_or_refused(trained: list[Any], stream: Rows) -> None:
    world_size = len(trained)
    for rank, found in enumerate(trained):
        assert found["whole"] == of_rank(stream, rank, world_size)[:8]
        if world_size == 1:
            assert found["found"] == found["whole"]
        else:
            assert "DataLoaderDispatcher splits what it reads among 2 processes" in found["refused"]


def test_an_evaluation_to_the_end_of_the_stream_is_refused(trained: list[Any]) -> None:
    for found in trained:
        for data in ("0 workers", "1 worker", "our loader"):
            assert "Trainer.evaluate reads its data to the end" in found[f"evaluated, {data}"]
            assert "StatefulDataLoader(data, batch_size=..., steps=...)" in found[f"evaluated, {data}"]
        assert found["evaluated, with an end"] == [True, 3]
