"""The state of a sampler as plain data, and whether it belongs to the dataset that resumes.

It is the same on every rank. All values are numbers and texts, under the same keys at all times: so
torch.distributed.checkpoint can store it, and nothing in it can be modified in place.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fmsdata.core.keys import key_of
from fmsdata.core.state import EDITED, Restoring, State, is_count, number, parse
from fmsdata.core.wording import shown
from fmsdata.epochs.cursor import Change, Cursor
from fmsdata.epochs.exclusions import Exclusions
from fmsdata.epochs.line_order import LineOrder
from fmsdata.epochs.order import OrderRecipe
from fmsdata.errors import StateError

VERSION = 1
KIND = "rows"
COMMON = ("version", "kind", "seed", "shuffle", "rows")  # the same in all states of a sampler
DIFFERENT_ROWS = (
    "resume with the rows it was saved with, or create the sampler with fingerprint=False to compare only their number"
)


class NextEpoch(NamedTuple):
    """What holds from the next epoch on."""

    excluded: Exclusions
    weights: tuple[Mapping[str, float] | None] | None  # None: as at the end of this epoch


class NewWeights(NamedTuple):
    """Weights that were set since the sampler was created or resumed, which a state from before lacks."""

    epoch: int = -1  # the epoch in which `next` was set
    next: tuple[Mapping[str, float] | None] | None = None
    changes: tuple[Change, ...] = ()


class Saved(NamedTuple):
    """The content of a state."""

    seed: int
    shuffle: bool
    global_batch: int
    rows: State  # the fingerprint, and the weights that a mixture was created with
    cursor: Cursor
    next: NextEpoch


def pack(saved: Saved) -> State:
    """The content as a state."""
    cursor = saved.cursor
    return {
        "version": VERSION,
        "kind": KIND,
        "seed": saved.seed,
        "shuffle": saved.shuffle,
        "rows": json.dumps(saved.rows),
        "epoch": cursor.epoch,
        "position": cursor.position,
        "ended": cursor.ended,
        "global_batch": saved.global_batch,
        "cut": cursor.cut,
        "step": cursor.step,
        "start": cursor.start,
        "order": json.dumps(cursor.order.state()),
        "excluded": cursor.order.excluded.text,
        "next_excluded": saved.next.excluded.text,
        "weights": json.dumps({"next": saved.next.weights, "changes": cursor.changes}),
    }


def unpack(states: State | Sequence[State], own: Saved, orders: OrderRecipe, size: int) -> Saved:
    """The content of the state of a rank, or of equal states of several ranks.

    `own` is that of the sampler that resumes, for a dataset of `size` rows.
    """
    state = _same(states)
    _check(state, own)
    rows = parse(state.get("rows"), "the description of the rows in the state")
    _check_rows(rows.get("rows"), own.rows["rows"])
    if state.get("position") != 0:
        _check_lines(rows["rows"].get("settings"), own.rows["rows"].get("settings"))
    with Restoring("the state of the rows"):
        excluded = Exclusions.parse(state.get("excluded"), size)
        order = orders.restored(number(state, "epoch"), excluded, parse(state.get("order"), "the order"))
        position, start, cut = (number(state, name) for name in ("position", "start", "cut"))
        weights = parse(state.get("weights"), "weights")
        batch = number(state, "global_batch")
        if not (start <= position and cut <= position and batch):
            raise StateError(f"the position is {position}, after {start} and {cut}, with batches of {batch}: {EDITED}")
        changes = tuple(Change(number({"step": step}, "step"), dict(change)) for step, change in weights["changes"])
        ended = state.get("ended", False)  # the first states did not have it
        if not isinstance(ended, bool):
            raise StateError(f"ended is {shown(ended)}: {EDITED}")
        cursor = Cursor(number(state, "epoch"), position, order, start, cut, number(state, "step"), changes, ended)
        next_excluded = Exclusions.parse(state.get("next_excluded"), size)
        new_weights = _next_weights(weights["next"])
        if rows.get("weights") != own.rows["weights"]:  # those of the mixture were edited
            new_weights = (own.rows["weights"],)
        for shares in [*(change.weights for change in changes), *(new_weights or ())]:
            orders.size(next_excluded, shares)
        if isinstance(order, LineOrder) and (start or changes):
            raise StateError(f"lines change within the epoch, from {start} on: {EDITED}")
        if any(change.step < cursor.step + (position - cut) // batch for change in changes):
            raise StateError(f"weights change at steps before {cursor.step}: {EDITED}")
    return Saved(own.seed, own.shuffle, batch, own.rows, cursor, NextEpoch(next_excluded, new_weights))


def moved(state: Any, earlier: Any, new: NewWeights, changed: Mapping[int, int]) -> State:
    """A state at the position of an earlier one, with the exclusions and weights that were set since.

    `changed` has epochs before this one in which rows were excluded at once, and a key of those that were
    excluded in the end.
    """
    if not isinstance(earlier, Mapping) or any(earlier.get(name) != state[name] for name in COMMON):
        raise StateError(f"at is {shown(earlier)}; it must be an earlier state of the same sampler")
    epoch, excluded = earlier.get("epoch"), earlier.get("excluded")
    at_its_end = changed.get(epoch) if isinstance(epoch, int) else None
    before = at_its_end not in (None, key_of(str(excluded)))
    if before or (epoch == state["epoch"] and excluded != state["excluded"]):
        raise StateError(
            "rows were excluded or included at once (mode='immediate') since that state, which it can't take up; "
            "save the state of now, or use mode='next_epoch' where batches are in flight"
        )
    return {**earlier, "next_excluded": state["next_excluded"], "weights": _with_weights(dict(earlier), new)}


def _with_weights(earlier: State, new: NewWeights) -> str:
    """The weights of an earlier state, and those that were set for its next epoch and its later steps."""
    saved = parse(earlier.get("weights"), "weights")
    with Restoring("the earlier state"):
        handed_out = number(earlier, "position") - number(earlier, "cut")
        step = number(earlier, "step") + handed_out // number(earlier, "global_batch")
        changes = dict(saved["changes"]) | {
            change.step: change.weights for change in new.changes if change.step >= step
        }
        following = new.next if new.epoch >= number(earlier, "epoch") else saved["next"]
        return json.dumps({"next": following, "changes": sorted(changes.items())})


def _next_weights(saved: Any) -> tuple[Mapping[str, float] | None] | None:
    if saved is None:
        return None
    (weights,) = saved
    return (None if weights is None else dict(weights),)


def _same(states: Any) -> State:
    """The state, which must be the same on all ranks."""
    many = [states] if isinstance(states, Mapping) else list(states) if isinstance(states, list | tuple) else []
    if not many or not all(isinstance(state, Mapping) for state in many):
        raise StateError(f"a state must be a dict, or the list of the dicts of all ranks, not {shown(states)}")
    first: Mapping[str, Any] = many[0]
    for rank, state in enumerate(many):
        for name in sorted({*first, *state}):
            if state.get(name) != first.get(name):
                what = {"excluded": "the excluded rows", "next_excluded": "the excluded rows of the next epoch"}
                raise StateError(
                    f"the states differ in {what.get(name, name)}: {shown(first.get(name))} in the first and "
                    f"{shown(state.get(name))} in number {rank}; ranks must exclude the same rows, "
                    "and their states must be of the same step"
                )
    return dict(first)


def _check(state: Mapping[str, Any], own: Saved) -> None:
    if "lanes" in state or state.get("kind") != KIND:
        raise StateError("this is not the state of an EpochSampler: pass what state_dict() of its loader returned")
    if state.get("version") != VERSION:
        newer = is_count(state.get("version")) and state["version"] > VERSION
        raise StateError(
            f"the state has version {shown(state.get('version'))} and this fmsdata reads version {VERSION}; "
            + ("use a newer fmsdata" if newer else "use the fmsdata that wrote it")
        )
    for name, value in (("seed", own.seed), ("shuffle", own.shuffle)):
        if state.get(name) != value:
            raise StateError(
                f"the state was saved with {name}={shown(state.get(name))} and this sampler has {name}={value}; "
                "the order of the rows depends on it"
            )


def _check_lines(saved: Any, own: Mapping[str, Any] | None) -> None:
    """Raise if the lines of the epoch in progress would be others."""
    saved, own = saved if isinstance(saved, Mapping) else {}, own or {}
    changed = [name for name in sorted({*saved, *own}) if saved.get(name) != own.get(name)]
    if changed:
        before, now = (", ".join(f"{name}={shown(given.get(name))}" for name in changed) for given in (saved, own))
        raise StateError(
            f"the state was saved with {before}, and now it is {now}: the lines of the epoch in progress depend on it; "
            "resume with what it was saved with. It may change between epochs, in a state that is saved after "
            "sampler.reshuffle()"
        )


def _check_rows(saved: Any, own: State, name: str = "the dataset") -> None:
    """Raise if the saved fingerprint is that of other rows."""
    if not isinstance(saved, Mapping):
        raise StateError(f"the state describes no rows: {EDITED}")
    if isinstance(own.get("rows"), int):
        if saved.get("rows") != own["rows"]:
            raise StateError(
                f"{name} had {shown(saved.get('rows'))} rows when the state was saved, and has {own['rows']} now; "
                "resume with the rows it was saved with"
            )
        if saved.get("content") != own["content"] and saved.get("content") and own["content"]:
            raise StateError(f"{name} has other content than when the state was saved; {DIFFERENT_ROWS}")
        return
    if saved.keys() != own.keys():
        raise StateError(
            f"the state was saved with the sources {', '.join(sorted(map(str, saved)))} and this mixture has "
            f"{', '.join(sorted(own))}; resume with the same sources (one with weight 0 is not read)"
        )
    for source, described in own.items():
        _check_rows(saved[source], described, f"source {source!r}")
