"""Megatron-core: its GPT, its schedule of microbatches and its groups, killed and resumed at another size."""

from pathlib import Path
from typing import Any

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

PROGRAM = (Path(__file__).parent / "programs" / "megatron_ways.py").read_text()
ON_CPU = "tests.integrations.programs.megatron_on_cpu"


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, Result]:
    """Killed after the checkpoint of step 4, again after that of step 6, and then to step 10."""
    script = script_of("megatron.md")
    jobs = [Job("two", script, 2, kill_after=9), Job("one", script, 1, kill_after=5), Job("two again", script, 2)]
    return run_jobs(folder, [*jobs, Job("ways", PROGRAM, 2, folder="ways")], [ON_CPU])


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


@pytest.fixture(scope="module")
def ways(runs: dict[str, Result]) -> list[dict[str, Any]]:
    """What two processes found that are one data-parallel rank."""
    return runs["ways"].check().found


def test_processes_of_one_tensor_parallel_group_read_the_same(ways: list[dict[str, Any]]) -> None:
    assert ways[0] == ways[1]
    assert ways[0]["rank"] == [0, 1]


def test_microbatches_have_the_names_and_the_meaning_that_megatron_has(ways: list[dict[str, Any]]) -> None:
    batch, ours, defaults = ways[0]["batch"], ways[0]["ours"], ways[0]["defaults"]
    (tokens,), (ids,), (labels,) = ours["input_ids"], ours["document_ids"], ours["labels"]
    assert -1 in ids, "padding"
    assert max(ids) == 1, "two documents"
    assert (batch["tokens"], batch["position_ids"]) == ([tokens], ours["position_ids"])
    assert batch["labels"] == [[0 if label == -100 else label for label in labels]]
    assert batch["loss_mask"] == [[float(label != -100) for label in labels]]
    places = range(20)
    within = [[query < key or ids[query] != ids[key] for key in places] for query in places]
    assert batch["attention_mask"] == [[within]], "True is what a token may not see"
    assert defaults["position_ids"] == [list(places)]
    assert defaults["attention_mask"] == [[[[query < key for key in places] for query in places]]]
    assert ways[0]["no mask"] == ["labels", "loss_mask", "position_ids", "tokens"]


def test_the_state_goes_through_the_iterator_of_megatron(ways: list[dict[str, Any]]) -> None:
    assert (ways[0]["saved"], ways[0]["restored"]) == (1, True)


def test_an_evaluation_starts_again_at_its_end(ways: list[dict[str, Any]], folder: Path) -> None:
    expected = read_stream(folder / "evaluation.yaml")[:8]
    assert [row for batch in ways[0]["evaluation"] for row in batch] == expected * 2


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("too early", "build the loader after parallel_state.initialize_model_parallel(...)"),
        ("shift", "Megatron does not shift labels"),
        ("outputs", "give it outputs=['position_ids']"),
    ],
)
def test_what_would_be_silently_wrong_is_refused(ways: list[dict[str, Any]], way: str, message: str) -> None:
    assert message in ways[0][way]
