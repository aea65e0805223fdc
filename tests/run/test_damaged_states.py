"""Edited and damaged states: an error that says so, at once, and the loader stays where it was."""

import json
import time
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import fmsdata
from fmsdata.errors import CheckpointError, StateError
from tests.helpers import closed, maker, opened

SMALL: dict[str, Any] = {"lanes": 2, "loader__batch_size": 4, "loader__prefetch": 0}
OTHER_MIX: dict[str, Any] = {"web": {"weight": 1}, "wiki": {"weight": 9}}


def saved(root: Path, steps: int, **overrides: Any) -> dict[str, Any]:
    """A state whose texts are data."""
    loader = maker(root, **SMALL, **overrides)(0, 1)
    for _ in islice(loader, steps):
        pass
    return opened(loader.state_dict())


def refuse(root: Path, state: dict[str, Any], words: str, **overrides: Any) -> None:
    loader = maker(root, **SMALL, **overrides)(0, 1)
    before, begun = loader.state_dict(), time.monotonic()
    with pytest.raises(StateError, match=words):
        loader.load_state_dict(closed(state))
    assert time.monotonic() - begun < 30
    assert loader.state_dict() == before
    assert next(iter(loader))["input_ids"].shape[0] == 4


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("skip", 400, "'skip' is 400 of"),
        ("skip", 1 << 50, "'skip' is"),
        ("lines", 1 << 61, "'lines' is .* more than there can be"),
        ("lines", True, "'lines' is True, expected a count"),
        ("anchor", [], r"'anchor' is \[\], expected a state"),
        ("step", -1, "'step' is -1"),
    ],
)
def test_a_position_that_no_lane_can_have_is_refused_at_once(corpus: Path, name: str, value: Any, words: str) -> None:
    """Also where finding it would take forever: a lane skips less than it plans at once."""
    state = saved(corpus, 30)
    state["lanes"]["1"] |= {"lines": max(state["lanes"]["1"]["lines"], 1 << 55)} if name == "skip" else {}
    state["lanes"]["1"][name] = value
    refuse(corpus, state, words)


def test_lines_without_a_window_are_not_searched_forever_either(corpus: Path) -> None:
    data = fmsdata.Rescalable(fmsdata.Pack(fmsdata.ShardReader(corpus / "web"), seq_len=16), lanes=1)
    loader = fmsdata.StatefulDataLoader(data, batch_size=1, rank=0, world_size=1, prefetch=0)
    state = opened(loader.state_dict())
    state["lanes"]["0"] |= {"lines": 1 << 55, "skip": 1 << 50}
    with pytest.raises(StateError, match="the anchor is at most"):
        loader.load_state_dict(closed(state))


def test_a_stage_above_the_window_resumes_anywhere_in_it(corpus: Path) -> None:
    """Its chunks are as long as the window, however many tokens that has."""
    packed = fmsdata.Pack(fmsdata.ShardReader(corpus / "web"), seq_len=16)
    lines = fmsdata.Map(fmsdata.Shuffle(packed, window=300), lambda tokens: tokens)
    data = fmsdata.Rescalable(lines, lanes=1)
    loader = fmsdata.StatefulDataLoader(data, batch_size=1, rank=0, world_size=1, prefetch=0)
    rows = [batch["input_ids"].tolist() for batch in islice(loader, 250)]
    state = loader.state_dict()
    assert opened(state)["lanes"]["0"]["skip"] == 250
    following = next(iter(loader))["input_ids"].tolist()
    loader.load_state_dict(state)
    assert next(iter(loader))["input_ids"].tolist() == following
    assert len(rows) == 250


@pytest.mark.parametrize("tokens", [1 << 61, -1, 10**30, 1.5])
def test_tokens_that_no_source_has_given_are_refused(corpus: Path, tokens: Any) -> None:
    state = saved(corpus, 10)
    state["lanes"]["0"]["anchor"]["below"]["below"]["sources"]["web"]["taken"] = tokens
    refuse(corpus, state, "lane 0 can't be used: .*(taken|tokens)")


@pytest.mark.parametrize(
    "rest",
    [
        {"start": {"block": 0, "document": 0}, "runs": [[0, 10**15]], "length": 10**15},
        {"start": {"block": 0, "document": 0}, "runs": [[0.5, 3]], "length": 4},
        {"start": {"block": 0, "document": 0}, "runs": [[3, 1]], "length": 4},
        {"start": {"block": 0, "document": 0}, "runs": [[1, 3]], "length": float("inf")},
        {"start": [], "runs": [[1, 3]], "length": 4},
        "rest",
    ],
    ids=["beyond the source", "fraction", "backwards", "endless", "no position", "text"],
)
def test_a_leftover_that_no_edit_can_leave_is_refused(corpus: Path, rest: Any) -> None:
    state = saved(corpus, 10)
    mixture = state["lanes"]["0"]["anchor"]["below"]["below"]
    if isinstance(rest, dict) and rest["length"] == 10**15:
        rest["runs"] = [[10**15 - 5, 10**15]]
    mixture["edited"] = json.dumps({"web": {"shift": 0, "rest": rest}})
    refuse(corpus, state, "lane 0 can't be used: .*(leftover|'rest')")


@pytest.mark.parametrize(
    ("stage", "name", "value"),
    [
        (0, "window", -3),
        (0, "window", "8"),
        (1, "seq_len", 0),
        (1, "mode", "zigzag"),
        (2, "eos", [0]),
        (3, "weights", {"web": float("nan"), "wiki": 0.3}),
        (3, "phases", [{"until_tokens": 5}]),
        (3, "phases", [{"until_tokens": -5, "weights": {"web": 1.0, "wiki": 0.0}}]),
        (3, "children", {"web": 3}),
    ],
)
def test_a_description_that_no_pipeline_has_is_refused(corpus: Path, stage: int, name: str, value: Any) -> None:
    """It differs from the pipeline, so it looks like an edit, but there was no such pipeline to edit."""
    state = saved(corpus, 10)
    described = state["pipeline"]["lines"]
    for _ in range(stage):
        described = described["children"]["below"]
    described[name] = value
    refuse(corpus, state, "state", sources=OTHER_MIX)


@pytest.mark.parametrize("text", ["[" * 100_000, "[1, 2]", "nan", '{"step": 1'])
def test_texts_that_are_not_the_json_of_a_lane_are_refused(corpus: Path, text: str) -> None:
    loader = maker(corpus, **SMALL)(0, 1)
    state = loader.state_dict()
    for broken in ({**state, "lanes": {**state["lanes"], "1": text}}, {**state, "pipeline": text}):
        with pytest.raises(StateError, match=r"not JSON|can't be used|expected a count"):
            loader.load_state_dict(broken)


def test_a_name_with_a_huge_number_of_ranks_is_an_incomplete_checkpoint(corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "step-5"
    folder.mkdir(parents=True)
    (folder / f"rank-0-of-{10**17}.00000000.2.json").write_bytes(b"{}")
    (folder / "complete").write_bytes(b"")
    data = maker(corpus, **SMALL)(0, 1).data
    with pytest.raises(CheckpointError, match="rank 1 of 100000000000000000 is missing"):
        fmsdata.StatefulDataLoader(
            data, batch_size=1, rank=0, world_size=1, checkpoint=fmsdata.Checkpoints(str(folder.parent))
        )
