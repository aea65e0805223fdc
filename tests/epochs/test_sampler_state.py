"""States of samplers that come from elsewhere: other rows, other settings, damaged or edited values."""

import copy
import json
import random
from typing import Any

import numpy as np
import pytest
import torch

import fmsdata
from fmsdata.core.state import State
from fmsdata.epochs.fingerprint import fingerprint
from fmsdata.errors import FmsdataError, StateError
from tests.epochs.helpers import Rows


def sampler(rows: Any, **options: Any) -> fmsdata.EpochSampler:
    return fmsdata.EpochSampler(rows, **{"global_batch": 4, "rank": 0, "world_size": 1, **options})


def plain() -> fmsdata.EpochSampler:
    return sampler(Rows(39))


def mixed() -> fmsdata.EpochSampler:
    mix = fmsdata.RowMixture({"a": Rows(30, "a"), "b": Rows(9, "b")}, {"a": 2, "b": 1})
    found = sampler(mix)
    found.exclude([3])
    for _ in range(3):
        found.cursor = next(found.plan(4)).after
    found.exclude([4], mode="immediate")
    found.set_weights({"a": 1, "b": 1}, step=30)
    found.set_weights({"a": 1, "b": 3})
    return found


@pytest.mark.parametrize("name", ["seed", "shuffle"])
def test_the_order_must_be_the_same(name: str) -> None:
    state = sampler(range(20)).state_dict()
    with pytest.raises(StateError, match=f"saved with {name}=.* and this sampler has {name}="):
        sampler(range(20), **{name: {"seed": 7, "shuffle": False}[name]}).load_state_dict(state)


def test_rows_of_another_number_are_refused() -> None:
    with pytest.raises(StateError, match="had 20 rows when the state was saved, and has 21 now"):
        sampler(Rows(21)).load_state_dict(sampler(Rows(20)).state_dict())


def test_rows_of_other_content_are_refused_unless_the_check_is_off() -> None:
    state = sampler(Rows(20)).state_dict()
    sampler(Rows(20)).load_state_dict(state)
    with pytest.raises(StateError, match=r"has other content than when the state was saved; .*fingerprint=False"):
        sampler(Rows(20, "others")).load_state_dict(state)
    sampler(Rows(20, "others"), fingerprint=False).load_state_dict(state)
    named = sampler(Rows(20), fingerprint="v1").state_dict()
    sampler(Rows(20, "others"), fingerprint="v1").load_state_dict(named)
    with pytest.raises(StateError, match="other content"):
        sampler(Rows(20), fingerprint="v2").load_state_dict(named)


class Strange(Rows):
    """Rows that draw, that differ each time, that fail, and of every kind."""

    reads = 0

    def __getitem__(self, row: int) -> Any:
        self.reads += 1
        if row == 0:
            return {"t": torch.rand(3), "n": np.random.randn(2), "p": random.random(), "b": torch.ones(2).bool()}  # noqa: NPY002
        if row == 5:
            return object(), time_of(self)
        if row == 10:
            raise OSError("no such file")
        if row == 15:
            return [None, b"x", np.array([object()]), torch.tensor([]), {1: torch.ones(2, dtype=torch.bfloat16)}]
        return {"nested": [[["deep"] * 3]], "set": {1, 2}}


def time_of(rows: Strange) -> int:
    return rows.reads


def test_the_fingerprint_reads_a_few_rows_and_touches_no_generator() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]  # noqa: NPY002
    first, second = Strange(21), Strange(21)
    assert fingerprint(first, True) == fingerprint(second, True)
    assert first.reads <= 12
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]  # noqa: NPY002
    assert torch.equal(after[0], before[0])
    assert after[1:] == before[1:]

    class Named(Strange):
        fingerprint = "corpus v3"

    assert fingerprint(Named(21), True) == {"rows": 21, "content": "corpus v3"}


@pytest.mark.parametrize(
    "state",
    [None, 3, [], [None], {}, "x", {"version": 2, "lanes": {}}, {"kind": "rows"}, {"kind": "rows", "version": 9}],
)
def test_what_is_no_state_is_refused(state: Any) -> None:
    with pytest.raises(StateError):
        sampler(range(20)).load_state_dict(state)


WRONG: list[Any] = [
    None,
    -1,
    1.5,
    10**20,
    "x",
    [],
    {},
    True,
    "{}",
    "[]",
    "null",
    '{"place": -1}',
    '{"place": 99}',
    '{"changes": 3}',
]


def test_no_damaged_state_breaks_anything() -> None:
    """Every value is replaced by every wrong one: an error of fmsdata, or a state that works."""
    for make in (plain, mixed):
        good = make().state_dict()
        make().load_state_dict(json.loads(json.dumps(good)))
        for damaged in damaged_states(good):
            fresh = make()
            before = fresh.state_dict()
            try:
                fresh.load_state_dict(damaged)
            except FmsdataError:
                assert fresh.state_dict() == before
                continue
            rows = [row for _ in range(2) for row in list(fresh)]
            assert set(rows) <= set(range(39))


def damaged_states(good: State) -> list[State]:
    found = [{**good, name: wrong} for name in good for wrong in WRONG]
    found += [{key: value for key, value in good.items() if key != name} for name in good]
    for name in ("order", "weights", "rows"):
        inner = json.loads(good[name])
        for key in inner:
            for wrong in (*WRONG, {"a": 2.0}, {"a": 0.5, "b": 2.0}, [[1, {"a": 1}]], [None]):
                damaged = copy.deepcopy(inner)
                damaged[key] = wrong
                found.append({**good, name: json.dumps(damaged)})
    return found


def test_an_earlier_position_takes_the_rows_that_are_excluded_now() -> None:
    run = sampler(Rows(20))
    earlier = run.state_dict()
    run.cursor = next(run.plan(4)).after
    run.exclude([5])
    assert run.state_dict(at=earlier) == {**earlier, "next_excluded": "[5]"}
    for wrong in (3, {}, sampler(Rows(20), seed=9).state_dict()):
        with pytest.raises(StateError, match="must be an earlier state of the same sampler"):
            run.state_dict(at=wrong)  # type: ignore[arg-type]
