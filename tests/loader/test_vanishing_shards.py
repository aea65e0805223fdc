"""A shard that vanishes in the middle of a run: the batches before the error are the right ones, and none is lost."""

from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fmsdata
from fmsdata.core import native
from fmsdata.errors import DataError
from tests.helpers import documents, write_source

STEPS = 220


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("corpus")
    write_source(root / "web", documents(np.random.default_rng(0), 600, shortest=5), shards=40)
    return root


def build(root: Path, lanes: int, prefetch: int, **more: Any) -> fmsdata.StatefulDataLoader:
    config = {
        "path": str(root),
        "sources": {"web": {}},
        "pack": {"seq_len": 15},
        "shuffle": {"window": 100},
        "lanes": lanes,
        "loader": {"batch_size": 2, "prefetch": prefetch},
        **more,
    }
    return fmsdata.build_loader(config, rank=0, world_size=1)


@pytest.mark.parametrize("pure", [False, True])
@pytest.mark.parametrize("prefetch", [0, 4])
@pytest.mark.parametrize("lanes", [4, 24])
@pytest.mark.parametrize("vanishes", [1, 61, 75, 90, 100, 120])
def test_batches_up_to_the_error_are_those_of_their_steps(
    root: Path, lanes: int, prefetch: int, vanishes: int, pure: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the same run when the shard is back, and in one that is resumed from the state after the error."""
    if pure:
        monkeypatch.setattr(native, "kernel", None)
    expected = [batch["input_ids"].tolist() for batch in islice(build(root, lanes, 0), STEPS)]
    found: list[Any] = []
    loader, shard = build(root, lanes, prefetch), root / "web" / "part-7.arrow"
    away = shard.with_suffix(".away")
    try:
        with pytest.raises(DataError, match="part-7"):
            for batch in loader:
                found.append(batch["input_ids"].tolist())
                if len(found) == vanishes:
                    shard.rename(away)
                if len(found) == STEPS:
                    break
    finally:
        away.rename(shard)
    assert found == expected[: len(found)]
    state = loader.state_dict()
    assert state["step"] == len(found)
    resumed = build(root, lanes, prefetch)
    resumed.load_state_dict(state)
    for again in (loader, resumed):
        rest = [batch["input_ids"].tolist() for batch in islice(again, STEPS - len(found))]
        assert found + rest == expected
        again.close()


@pytest.mark.parametrize("prefetch", [0, 4])
def test_no_line_of_a_finite_pass_is_lost(root: Path, prefetch: int) -> None:
    whole = [batch["input_ids"].tolist() for batch in build(root, 4, 0, epochs=1)]
    found: list[Any] = []
    loader, shard = build(root, 4, prefetch, epochs=1), root / "web" / "part-7.arrow"
    away = shard.with_suffix(".away")
    while len(found) < len(whole):
        try:
            for batch in loader:
                found.append(batch["input_ids"].tolist())
                if len(found) == 70:
                    shard.rename(away)
        except DataError:
            away.rename(shard)
    assert Counter(map(str, found)) == Counter(map(str, whole))
    assert not away.exists()
    loader.close()
