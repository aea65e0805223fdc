"""Ranks: which part of the stream a process reads, on real meshes of 4 processes, and gathered states."""

import json
import warnings
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint

import fmsdata
from fmsdata.run.ranks import Ranks
from tests.helpers import maker
from tests.programs.launch import launch

dcp: Any = torch.distributed.checkpoint  # its functions are not declared as public

Rows = list[list[int]]


@pytest.fixture(scope="module")
def stream(shared_corpus: Path) -> Rows:
    """The canonical stream, sample by sample."""
    loader = maker(shared_corpus, lanes=12)(0, 1)
    return [row for batch in islice(loader, 96) for row in batch["input_ids"].tolist()]


@pytest.fixture(scope="module")
def meshes(shared_corpus: Path) -> list[Any]:
    return launch("ranks", "meshes", 4, shared_corpus)


LAYOUTS = {  # the data-parallel rank of each of 4 processes
    "dp_replicate-dp_shard": [0, 1, 2, 3],
    "dp-cp": [0, 0, 1, 1],
    "pp-dp": [0, 1, 0, 1],
    "dp-tp": [0, 0, 1, 1],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_that_share_data_read_the_same_rows_and_all_others_the_rest(
    meshes: list[Any], stream: Rows, layout: str
) -> None:
    here = [rank[layout] for rank in meshes]
    world_size = max(LAYOUTS[layout]) + 1
    assert [(one["rank"], one["world_size"]) for one in here] == [(rank, world_size) for rank in LAYOUTS[layout]]
    for one in here:
        mine = stream[one["rank"] :: world_size]
        assert one["rows"] == mine[:12]
        assert one["plain"] == mine[:4], "the sub-mesh, given to Rescalable, is the same"
        assert one.get("by group", one["plain"]) == one["plain"], "and so is its process group"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_checkpoints_of_ranks_that_share_data_are_whole_and_load_anywhere(
    meshes: list[Any], stream: Rows, shared_corpus: Path, layout: str
) -> None:
    world_size = max(LAYOUTS[layout]) + 1
    following = stream[12 * world_size :]
    for one in (rank[layout] for rank in meshes):
        assert one["resumed"] == [6, *following[one["rank"] :: world_size][:4]], "our own folder"
    loader = maker(shared_corpus, lanes=12)(0, 1)
    with warnings.catch_warnings():  # torch warns of its own use without process groups
        warnings.simplefilter("ignore", UserWarning)
        dcp.load({"loader": loader}, checkpoint_id=shared_corpus / "meshes-4" / layout / "dcp", no_dist=True)
    assert [batch["input_ids"].tolist()[0] for batch in islice(loader, 8)] == following[:8], "torch's"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gathered_state_is_the_same_on_all_ranks_and_loads_at_any_world_size(
    meshes: list[Any], stream: Rows, shared_corpus: Path, layout: str
) -> None:
    world_size = max(LAYOUTS[layout]) + 1
    for name, taken in (("gathered", 12), ("plain gathered", 4)):
        gathered = meshes[0][layout][name]
        assert all(rank[layout][name] == gathered for rank in meshes)
        assert list(gathered["lanes"]) == [str(lane) for lane in range(12)]
        first = taken * world_size
        for other in (1, 2, 3):
            make = maker(shared_corpus, lanes=12)
            for sample in range(first, first + other):
                loader = make(sample % other, other)
                loader.load_state_dict(json.loads(json.dumps(gathered)))
                assert next(iter(loader))["input_ids"].tolist()[0] == stream[sample]
                loader.close()


def test_a_rank_that_is_unclear_is_refused(meshes: list[Any]) -> None:
    errors = meshes[1]["errors"]
    assert "reads as rank 1 of 4, the global rank, but the process group 'cp' says" in errors["global rank"]
    assert "some ranks share their data; pass mesh=" in errors["global rank, plain"]
    assert "its 2 dimensions have no names; name them, or pass the data-parallel sub-mesh" in errors["unnamed"]
    assert "it is not clear whether ranks along 'ep' share data; pass the data-parallel" in errors["unclear"]
    assert "mesh is tp 2: it has no data-parallel dimension" in errors["no data"]
    assert "rank= and world_size= and mesh= are given" in errors["both"]


def test_what_was_built_before_the_process_group_is_refused(shared_corpus: Path, stream: Rows) -> None:
    """In a spawned rank without RANK, or before the fork of a rank: all would read as rank 0 of 1."""
    ranks = launch("ranks", "early", 2, shared_corpus)
    for rank, found in enumerate(ranks):
        for name, message in found["errors"].items():
            assert message.startswith("ConfigError: this "), (name, message)
            assert "opened as rank 0 of 1 (from the default, without torch.distributed or RANK)" in message
            assert f"torch.distributed says rank {rank} of 2; build it after init_process_group, or pass" in message
        assert list((shared_corpus / "early-2").glob("checkpoints/*")) == [], "nothing is saved as the wrong rank"
        assert found["given"] == stream[:2], "a rank that was given counts"
        assert found["plain"] == stream[rank::2][:4], "a dataset finds its rank when it is iterated"


def test_a_dataset_that_was_sent_to_spawned_ranks_is_read_as_their_rank(shared_corpus: Path, stream: Rows) -> None:
    """Also by worker processes of any start method, and from the state that it had when it was sent."""
    for rank, found in enumerate(launch("ranks", "spawned", 2, shared_corpus)):
        assert set(found) == {"fork", "spawn"}
        for method, rows in found.items():
            assert rows == stream[24 + rank :: 2][:8], method


def test_disagreement_of_ranks_is_an_error_on_all_of_them(shared_corpus: Path, stream: Rows) -> None:
    ranks = launch("ranks", "gathering", 2, shared_corpus)
    for rank, found in enumerate(ranks):
        mine = stream[rank::2]
        assert [*found["taken"], *found["after"]] == mine[:10]
        assert found["gathered"] == ranks[0]["gathered"]
        errors = found["errors"]
        assert "ranks 0 and 1 differ in step: 9 and 10; call state_dict(gather=True)" in errors["differing"]
        assert "a copy can't take part in its collectives" in errors["forked"]
        assert "hold 8 of the 12 lanes, as ranks [0, 1] of 3; pass the mesh=" in errors["incomplete"]
    failed = "StageError: a stage of rank 1 failed"
    assert ranks[0]["errors"]["one fails"] == f"StateError: rank 1 of 2 has no state to gather: {failed}"
    assert ranks[1]["errors"]["one fails"] == failed


def test_gathering_on_one_rank_is_its_own_state_and_on_several_needs_a_process_group(corpus: Path) -> None:
    make = maker(corpus)
    alone = make(0, 1)
    assert alone.state_dict(gather=True) == alone.state_dict()
    assert alone.data.state_dict(gather=True) == alone.data.state_dict()
    with pytest.raises(fmsdata.ConfigError, match=r"rank 0 of 2 .* needs torch.distributed, which is not initialized"):
        make(0, 2).state_dict(gather=True)


def test_the_state_of_one_rank_is_refused_by_others_with_the_way_out(corpus: Path) -> None:
    make = maker(corpus)
    state = make(0, 2).state_dict()
    with pytest.raises(
        fmsdata.StateError, match=r"saved by one of 2 ranks; .* or save one .* state_dict\(gather=True\)"
    ):
        make(1, 2).load_state_dict(state)


@pytest.mark.parametrize(
    "module", ["lightning.pytorch.utilities.combined_loader", "pytorch_lightning.loops.fit_loop", "accelerate.utils"]
)
def test_the_state_of_one_rank_is_refused_when_a_trainer_saves_it_for_all(corpus: Path, module: str) -> None:
    trainer: dict[str, Any] = {"__name__": module}  # who asks is known by the name of its module
    exec("def saved(loader): return loader.state_dict()", trainer)
    make = maker(corpus)
    assert trainer["saved"](make(0, 1)) == make(0, 1).state_dict(), "one rank is all ranks"
    with pytest.raises(fmsdata.ConfigError, match=r"saves the state of one rank only.*\n?.*state_dict\(gather=True\)"):
        trainer["saved"](make(0, 2))


def test_a_rank_given_twice_must_be_the_same(corpus: Path) -> None:
    lines = maker(corpus)(0, 1).data.lines
    data = fmsdata.Rescalable(lines, lanes=12, rank=1, world_size=2)
    loader = fmsdata.StatefulDataLoader(data, batch_size=1)
    assert (loader.rank, loader.world_size) == (1, 2)
    fmsdata.StatefulDataLoader(data, batch_size=1, rank=1, world_size=2)
    with pytest.raises(fmsdata.ConfigError, match=r"loader is rank 0 of 2 .* its Rescalable is rank 1 of 2"):
        fmsdata.StatefulDataLoader(data, batch_size=1, rank=0, world_size=2)
    with pytest.raises(fmsdata.ConfigError, match="rank is 2 of world size 2"):
        fmsdata.Rescalable(lines, lanes=12, rank=2, world_size=2)
    with pytest.raises(fmsdata.ConfigError, match="mesh is 'dp'; it must be a DeviceMesh"):
        Ranks.given_by(mesh="dp")  # type: ignore[arg-type]
    with pytest.raises(fmsdata.ConfigError, match="process_group is 'dp'; it must be a ProcessGroup"):
        Ranks.given_by(process_group="dp")  # type: ignore[arg-type]
