"""Edits: a run goes on with another mix, or other lines, than those that it was saved with.

The lines in progress were planned for the old mix. They are planned once more, as they were; those that the trainer
has taken are done with, and the tokens of the others go back to their sources, which give them first (see
`fmsdata.rest`). So the new weights hold from the first new line on, a removed source is gone at once and keeps its
place, and no token of an unfinished epoch comes twice or not at all.

What may not change is what a place in a source means: the seed, the lanes, its shards, and how they are read.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fmsdata.core.chunk import Chunk
from fmsdata.core.lane import Lane
from fmsdata.core.stage import Stage
from fmsdata.core.state import State, number, part
from fmsdata.errors import DataError, StateError
from fmsdata.stages.delimit import Delimit
from fmsdata.stages.filter import Filter
from fmsdata.stages.leftovers import Rest, SourceState, marked_runs, merged, pack_sources, unpack_sources
from fmsdata.stages.mixture import Mixture, Phase, down_to_mixture
from fmsdata.stages.pack import Pack
from fmsdata.stages.shard_reader import ShardReader
from fmsdata.stages.shuffle import Shuffle
from fmsdata.stages.token_run import Run

# The stages that may stand above an edited mixture, and what of each may change. They keep documents as they are, so
# that the tokens of a line can go back.
EDITABLE: dict[type[Stage], tuple[str, ...]] = {
    Shuffle: ("window",),
    Pack: ("seq_len", "mode", "bol", "eol", "pad"),
    Delimit: ("bos", "eos"),
    Filter: (),
}
FREE = ("max_epochs", "folder")  # what may change in how a source is read


class Edit(NamedTuple):
    """How a saved run goes on: what is different, what to save as its pipeline, and what becomes of a lane."""

    changes: list[str]
    pipeline: State
    convert: Callable[[Lane, State], State]


def edit_between(saved: State, now: State, lines: Stage, step: int) -> Edit:
    """The edit that turns a saved pipeline into this one.

    Raises if it is not one that a run can go on with.
    """
    removed, edits = dict(saved.get("removed", {})), list(saved.get("edits", []))
    if _without_folders(saved.get("lines")) == _without_folders(now["lines"]):
        return Edit([], _pipeline(now, removed, edits), lambda _, state: state)
    new = down_to_mixture(lines)
    was, told = _described(saved.get("lines"), len(new)), _described(now["lines"], len(new))
    _require_editable(saved.get("lines"), now["lines"], new, was)
    mixture: Any = new[-1]
    children = {**removed, **was[-1]["children"]}
    for name in sorted(children.keys() & mixture.sources.keys()):
        _require_same(children[name], told[-1]["children"][name], name)
    old: Stage = _old_mixture(mixture, was[-1])
    for stage, description in zip(new[-2::-1], was[-2::-1], strict=True):
        old = _old_stage(stage, description, old)
    away = {name: one for name, one in children.items() if name not in mixture.sources}
    changes = [*_changes_above(was[:-1], told[:-1]), *_changes_of_mix(was[-1], told[-1], removed)]
    return Edit(changes, _pipeline(now, away, [*edits, step]), _Recut(down_to_mixture(old), new))


class _Recut:
    """Gives the lines that a lane has in progress back to their sources."""

    def __init__(self, old: Sequence[Stage], new: Sequence[Stage]) -> None:
        self._old, self._new = old, new
        self._pack = next((i for i, stage in enumerate(old) if isinstance(stage, Pack)), None)

    def __call__(self, lane: Lane, state: State) -> State:
        mixture: Any = self._old[-1]
        start, end, lines = self._replay(lane, state)
        before, after = unpack_sources(self._states(start)[-1]), unpack_sources(self._states(end)[-1])
        last, half_used = self._finish_document(lane, end)
        in_lines, in_document = (marked_runs(part) if part else {} for part in (lines, half_used))
        sources = dict(last)
        for name in mixture.sources:
            origin = _Origin(before[name])
            marks = 0 if after[name].rest else origin.place(after[name])
            runs = in_lines.get(name, []) + [(a + marks, b + marks) for a, b in in_document.get(name, [])]
            sources[name] = origin.with_rest(last[name], runs)
        for name, stage in self._new[-1].children().items():
            if name not in sources:
                sources[name] = SourceState(below=stage.open(lane.named(name)).state(0))
        return {**state, "skip": 0, "anchor": self._anchor(end, pack_sources(sources))}

    def _replay(self, lane: Lane, state: State) -> tuple[State, State, Chunk | None]:
        """The state at the start of the lines in progress, the one behind them, and those that were not taken."""
        start = part(state, "anchor") or {}
        row = number(state, "skip")
        if row == 0:
            return start, start, None
        iterator = self._old[0].open(lane, start)
        chunk = iterator.read()
        while row >= len(chunk):
            row -= len(chunk)
            start = iterator.state(len(chunk))
            if row == 0:
                return start, start, None
            # Marks count from where the iterator was opened.
            iterator = self._old[0].open(lane, start)
            chunk = iterator.read()
        return start, iterator.state(len(chunk)), chunk.slice(row, len(chunk))

    def _finish_document(self, lane: Lane, end: State) -> tuple[dict[str, SourceState], Chunk | None]:
        """The sources behind the document that a line ended in, and what was not used of it."""
        states = self._states(end)
        used = 0 if self._pack is None else number(states[self._pack], "used")
        if self._pack is None or not used:
            return unpack_sources(states[-1]), None
        iterator = self._old[self._pack + 1].open(lane, states[self._pack + 1])
        document = Run(iterator.read().slice(0, 1))
        states = self._states(iterator.state(1), self._pack + 1)
        return unpack_sources(states[-1]), document.cut(np.array([used, int(document.document_ends[-1])]))

    def _states(self, state: State, first: int = 0) -> list[State]:
        """The state of each stage from one on down to the mixture."""
        states = [state]
        for stage in self._old[first:-1]:
            states.append(states[-1] if isinstance(stage, Delimit) else part(states[-1], "below") or {})
        return [{}] * first + states

    def _anchor(self, end: State, mixture: State) -> State:
        """The state of the new stages, with a line of its own to begin with."""
        anchor = mixture
        for stage, state in reversed(list(zip(self._new[:-1], self._states(end)[:-1], strict=True))):
            if isinstance(stage, Shuffle):
                anchor = {"window": state["window"], "taken": 0, "below": anchor}
            elif isinstance(stage, Pack):
                anchor = {"used": 0, "below": anchor}
            elif isinstance(stage, Filter):
                anchor = {"skip": 0, "below": anchor}
        return anchor


class _Origin(NamedTuple):
    """A source at the start of the lines in progress: the place from which their tokens are counted."""

    state: SourceState

    def place(self, later: SourceState) -> int:
        """How many tokens lie between there and a later state, of one that has no rest any more."""
        rest = self.state.rest
        since = later.taken - self.state.taken
        return since if rest is None else rest.length + since - rest.tokens

    def with_rest(self, last: SourceState, runs: list[tuple[int, int]]) -> SourceState:
        """The source at its last state, with these tokens to be given first, and no lead."""
        start = self.state.below if self.state.rest is None else self.state.rest.start
        length = self.place(last) if last.rest is None else last.rest.length
        taken = last.taken - sum(end - begin for begin, end in runs)
        runs = merged(runs + (last.rest.runs if last.rest else []))
        rest = Rest(start=start or {}, runs=runs, length=length) if runs else None
        return SourceState(taken=taken, shift=-taken, rest=rest, below=last.below)


def _pipeline(now: State, removed: State, edits: list[int]) -> State:
    return {**now, **({"removed": removed} if removed else {}), **({"edits": edits} if edits else {})}


def _described(lines: Any, depth: int) -> list[State]:
    """The descriptions of as many stages, from the top down."""
    described: list[State] = []
    while len(described) < depth and isinstance(lines, Mapping):
        described.append(dict(lines))
        lines = lines.get("children", {}).get("below")
    return described


def _require_editable(saved: Any, now: State, new: Sequence[Stage], was: Sequence[State]) -> None:
    """Raise unless the same stages are above the mixture, and tokens can go back through all of them."""
    if [one.get("stage") for one in was] == [type(stage).__name__ for stage in new] and isinstance(new[-1], Mixture):
        packs = sum(isinstance(stage, Pack) for stage in new)
        fixed = [
            type(stage).__name__
            for stage, one in zip(new[:-1], was[:-1], strict=True)
            if type(stage) not in EDITABLE or (isinstance(stage, Filter) and stage.parameters() != _parameters(one))
        ]
        if not fixed and packs <= 1:
            return
        why = f"; with {fixed[0] if fixed else 'two Packs'} above the mixture, a run can't go on with another mix"
    else:
        why = ""
    raise StateError("the state belongs to another pipeline: " + "; ".join(_compare(saved, now, "")) + why)


def _require_same(saved: State, now: State, name: str) -> None:
    """Raise if places in a source don't mean what they meant."""
    before, after = ({key: value for key, value in one.items() if key not in FREE} for one in (saved, now))
    if differences := list(_compare(before, after, name)):
        raise StateError(
            f"the state belongs to another pipeline: {'; '.join(differences)}; "
            f"bring back what was, or give source {name!r} another name to read it afresh"
        )


def _old_mixture(mixture: Mixture, was: State) -> Mixture:
    """The mixture as it was saved."""
    old = copy.copy(mixture)
    old.sources = {name: _old_source(mixture, name, child) for name, child in sorted(was["children"].items())}
    old.set_weights({name: was["weights"][name] for name in old.sources}, [Phase(**one) for one in was["phases"]])
    return old


def _old_source(mixture: Mixture, name: str, was: State) -> Stage:
    stage = mixture.sources.get(name)
    if stage is None:
        stage = _removed_source(mixture, name, was)
    if isinstance(stage, ShardReader) and stage.max_epochs != was["max_epochs"]:
        stage = copy.copy(stage)
        stage.max_epochs = was["max_epochs"]
    return stage


def _removed_source(mixture: Mixture, name: str, was: State) -> Stage:
    """A source that is not in the mix any more, but in the lines in progress."""
    why = "the lines in progress hold documents of it, and can't be given back to the other sources without it"
    if mixture.find is None:
        raise StateError(
            f"source {name!r} was removed: {why}; keep it with weight 0 until the next checkpoint, then it can go"
        )
    try:
        stage = mixture.find(name, was)
    except DataError as error:
        raise StateError(
            f"source {name!r} was removed, and its shards too ({error}): {why}; "
            "bring the shards back until the next checkpoint, then they can go"
        ) from None
    _require_same(was, stage.describe(name), name)
    return stage


def _old_stage(stage: Stage, was: State, below: Stage) -> Stage:
    """A stage above the mixture as it was saved."""
    old = copy.copy(stage)
    old.below = below
    for name in EDITABLE[type(stage)]:
        setattr(old, name, was[name])
    return old


def _changes_above(was: Sequence[State], now: Sequence[State]) -> Iterator[str]:
    for old, new in zip(was, now, strict=True):
        for name, value in _parameters(new).items():
            if old[name] != value:
                what = "lines of" if name == "seq_len" else f"{new['stage'].lower()} {name}"
                yield f"{what} {old[name]} -> {value}" + (" tokens" if name == "seq_len" else "")


def _changes_of_mix(was: State, now: State, removed: State) -> Iterator[str]:
    for name in sorted(was["children"].keys() | now["children"].keys()):
        old, new = was["weights"].get(name), now["weights"].get(name)
        if new is None:
            yield f"source {name!r} is removed, and keeps its place"
        elif old is None:
            how = "back where it was" if name in removed else "new"
            yield f"source {name!r} is {how}, with {new:.4%} of the tokens"
        elif old != new:
            yield f"share of {name!r} {old:.4%} -> {new:.4%}"
        epochs = [one["children"].get(name, {}).get("max_epochs") for one in (was, now)]
        if old is not None and new is not None and epochs[0] != epochs[1]:
            yield f"max_epochs of {name!r} {epochs[0]} -> {epochs[1]}"
    if was["phases"] != now["phases"]:
        yield f"phases {_in_words(was['phases'])} -> {_in_words(now['phases'])}"


def _in_words(phases: Sequence[State]) -> str:
    def one(phase: State) -> str:
        until = "to the end" if phase["until_tokens"] is None else f"until {phase['until_tokens']:,} tokens"
        return f"{until} " + ", ".join(f"{name} {share:.4%}" for name, share in phase["weights"].items() if share)

    return f"({'; '.join(map(one, phases))})" if phases else "none"


def _parameters(description: State) -> State:
    return {name: value for name, value in description.items() if name not in ("stage", "children")}


def _without_folders(description: Any) -> Any:
    if not isinstance(description, Mapping):
        return description
    return {name: _without_folders(value) for name, value in description.items() if name != "folder"}


def _compare(saved: Any, now: Any, where: str) -> Iterator[str]:
    """In words, where two descriptions differ."""
    if isinstance(saved, Mapping) and isinstance(now, Mapping):
        if saved.get("stage") == now.get("stage") == "ShardReader" and saved.get("digest") != now["digest"]:
            yield (
                f"the shards of source {where or 'below'!r} changed: "
                f"{_shards(saved)} when it was saved, {_shards(now)} now"
            )
            return
        if saved.get("stage") != now.get("stage"):
            yield f"{saved.get('stage')} where there is {now.get('stage')} now"
            return
        for name in sorted(set(saved) | set(now)):
            inner = where if name in ("children", "below") else f"{where}/{name}".lstrip("/")
            if name not in now:
                yield f"{inner} is gone"
            elif name not in saved:
                yield f"{inner} is new"
            else:
                yield from _compare(saved[name], now[name], inner)
    elif saved != now:
        yield f"{where} was {saved} when it was saved and is {now} now"


def _shards(reader: Mapping[str, Any]) -> str:
    told = {name: reader.get(name, "?") for name in ("shards", "documents", "tokens", "digest")}
    return "{shards} shards, {documents} documents, {tokens} tokens ({digest:.6})".format(**told)
