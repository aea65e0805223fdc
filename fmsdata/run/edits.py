"""Edits: a run resumes with a different mix, or different lines, than it was saved with.

The new weights hold from the first new line on, a removed source is gone at once and keeps its
position, and no token of an unfinished epoch is repeated or lost: `fmsdata.run.recut` gives the tokens
of unfinished lines back to their sources, which give them first.

What may not change is the meaning of a position in a source: the seed, the lanes, the shards of the
source, and how they are read.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from fmsdata.core.lane import Lane
from fmsdata.core.stage import Stage
from fmsdata.core.state import EDITED, Restoring, State, is_count
from fmsdata.core.wording import shown
from fmsdata.errors import ConfigError, DataError, StateError
from fmsdata.run.differences import changes_of_lines, changes_of_mixture, differences, lowest, parameters
from fmsdata.run.recut import Recut
from fmsdata.run.shares import leaves
from fmsdata.stages.delimit import Delimit
from fmsdata.stages.filter import Filter
from fmsdata.stages.mixture import Mixture, Phase, check_weights, stages_down_to_mixture
from fmsdata.stages.mixture.weights import checked_phases, weights_for
from fmsdata.stages.pack import Pack
from fmsdata.stages.shard_reader import ShardReader
from fmsdata.stages.shuffle import Shuffle
from fmsdata.stages.tokenize import with_max_epochs

# The stages that may be above an edited mixture, and their parameters that may change. They keep
# documents as they are, so that the tokens of a line can go back to their sources.
EDITABLE: dict[type[Stage], tuple[str, ...]] = {
    Shuffle: ("window", "first_window"),
    Pack: ("seq_len", "mode", "bol", "eol", "pad", "crop", "max_documents", "window", "first_window"),
    Delimit: ("bos", "eos"),
    Filter: (),
}
FREE = ("max_epochs", "folder", "files")  # parameters of a source that may change; the last two change nothing


class Edit(NamedTuple):
    """How a saved run resumes: what changed, the pipeline to save, and how to convert a lane."""

    changes: list[str]
    pipeline: State
    convert: Callable[[Lane, State], State]
    before: Stage  # the pipeline as it was saved


def edit_between(saved: State, now: State, lines: Stage, step: int) -> Edit:
    """The edit that turns a saved pipeline into the current one.

    Raises if a run can't resume with it.
    """
    with Restoring("the description of the pipeline in the state"):
        return _edit_between(saved, now, lines, step)


def _edit_between(saved: State, now: State, lines: Stage, step: int) -> Edit:
    removed, edits = saved.get("removed", {}), saved.get("edits", [])
    if not isinstance(removed, dict) or not isinstance(edits, list) or not all(map(is_count, edits)):
        raise StateError(f"its edits are {shown(edits)}, and it removed {shown(removed)}: {EDITED}")
    if _without(saved.get("lines"), FREE[1:]) == _without(now["lines"], FREE[1:]):
        return Edit([], _pipeline(now, removed, edits), lambda _, state: state, lines)
    stages = stages_down_to_mixture(lines)
    before, after = _descriptions(saved.get("lines"), len(stages)), _descriptions(now["lines"], len(stages))
    _require_editable(saved.get("lines"), now["lines"], stages, before)
    mixture: Any = stages[-1]
    known = {**removed, **before[-1]["children"]}
    for name in sorted(known.keys() & mixture.sources.keys()):
        _require_same(known[name], after[-1]["children"][name], name, mixture.sources[name])
    old: Stage = _old_mixture(mixture, before[-1], now["lanes"])
    for stage, description in zip(stages[-2::-1], before[-2::-1], strict=True):
        old = _old_stage(stage, description, old)
    gone = {name: source for name, source in known.items() if name not in mixture.sources}
    changes = [*changes_of_lines(before[:-1], after[:-1]), *changes_of_mixture(before[-1], after[-1], removed)]
    return Edit(changes, _pipeline(now, gone, [*edits, step]), Recut(stages_down_to_mixture(old), stages), old)


def _without(description: Any, names: Sequence[str]) -> Any:
    """The description of a stage and all below it, without some parameters."""
    if not isinstance(description, Mapping):
        return description
    return {name: _without(value, names) for name, value in description.items() if name not in names}


def _pipeline(now: State, removed: State, edits: list[int]) -> State:
    return {**now, **({"removed": removed} if removed else {}), **({"edits": edits} if edits else {})}


def _descriptions(lines: Any, depth: int) -> list[State]:
    """The descriptions of up to this many stages, from the top down."""
    descriptions: list[State] = []
    while len(descriptions) < depth and isinstance(lines, Mapping):
        descriptions.append(dict(lines))
        lines = lines.get("children", {}).get("below")
    return descriptions


def _require_editable(saved: Any, now: State, stages: Sequence[Stage], before: Sequence[State]) -> None:
    """Raise unless the same stages are above the mixture, and tokens can go back through them."""
    names = [type(stage).__name__ for stage in stages]
    why = ""
    if [description.get("stage") for description in before] == names and isinstance(stages[-1], Mixture):
        fixed = [
            type(stage).__name__
            for stage, description in zip(stages[:-1], before[:-1], strict=True)
            if type(stage) not in EDITABLE
            or (isinstance(stage, Filter) and stage.parameters() != parameters(description))
        ]
        packs = sum(isinstance(stage, Pack) for stage in stages)
        if not fixed and packs <= 1:
            return
        why = f"; with {fixed[0] if fixed else 'two Packs'} above the mixture, a run can't resume with a different mix"
    raise _other_pipeline(differences(saved, now, "", _readers(stages[0])), why)


def _require_same(saved: State, now: State, name: str, source: Stage) -> None:
    """Raise if positions in a source don't mean what they meant."""
    before, after = _without(saved, FREE), _without(now, FREE)
    if before != after and (changes := list(differences(before, after, name, _readers(source, name)))):
        raise _other_pipeline(changes, f"; undo that, or give source {name!r} a new name to read it from its start")


def _readers(stage: Stage, source: str = "") -> dict[str, ShardReader]:
    """The readers of a pipeline, or of a source of it, by full name."""
    return {leaf.name: leaf.stage for leaf in leaves(stage, source=source) if isinstance(leaf.stage, ShardReader)}


def _other_pipeline(changes: Iterable[str], why: str) -> StateError:
    return StateError(f"the state belongs to a different pipeline: {'; '.join(changes)}{why}")


def _old_mixture(mixture: Mixture, before: State, lanes: int) -> Mixture:
    """The mixture as it was saved."""
    old = copy.copy(mixture)
    old.sources = {
        name: _old_source(mixture, name, source, lanes) for name, source in sorted(before["children"].items())
    }
    weights = {name: before["weights"][name] for name in old.sources}
    phases = [Phase(**phase) for phase in before["phases"]]
    try:
        for shares in (weights, *(phase.weights for phase in phases)):
            check_weights(old.sources, shares)
        checked_phases(old.sources, phases)
    except ConfigError as error:
        raise StateError(f"{error}: {EDITED}") from None
    old.set_weights(weights, phases)  # as they were saved, to the last bit
    return old


def _old_source(mixture: Mixture, name: str, before: State, lanes: int) -> Stage:
    stage = mixture.sources.get(name)
    if stage is None:
        stage = _removed_source(mixture, name, before, lanes)
    return with_max_epochs(stage, lowest(before)["max_epochs"]) if "max_epochs" in lowest(before) else stage


def _removed_source(mixture: Mixture, name: str, before: State, lanes: int) -> Stage:
    """A source that was removed from the mix while lines in progress hold its documents."""
    why = "the lines in progress hold documents of it, and can't be given back to the other sources without it"
    if mixture.find is None:
        raise StateError(
            f"source {name!r} was removed: {why}; keep it with weight 0 until the next checkpoint, then remove it"
        )
    try:
        stage = mixture.find(name, before).settled(lanes, before)
    except DataError as error:
        raise StateError(
            f"source {name!r} was removed, and its shards too ({error}): {why}; "
            "restore the shards until the next checkpoint, then remove them"
        ) from None
    _require_same(before, stage.describe(name), name, stage)
    return stage


def saved_weights(before: Stage, now: Stage) -> str:
    """The weights to write for the mix of before, if it is another one now."""
    old, new = (stages_down_to_mixture(lines)[-1] for lines in (before, now))
    if not isinstance(old, Mixture) or not isinstance(new, Mixture) or old.weights == new.weights:
        return ""
    tokens = {name: source.size().tokens for name, source in old.sources.items()}
    weights = weights_for(old.weights, tokens).items()
    listed = ", ".join(f"{name}: {{weight: {int(each) if each.is_integer() else each}}}" for name, each in weights)
    return f" (`natural` weights follow the corpus; the mix of this pass as numbers is {listed})"


def _old_stage(stage: Stage, before: State, below: Stage) -> Stage:
    """A stage above the mixture as it was saved."""
    if isinstance(stage, Filter):
        old = copy.copy(stage)
        old.below = below
        return old
    kind: Any = type(stage)
    try:  # a new one, so that it checks what is in the state
        made: Stage = kind(below, **{name: before[name] for name in EDITABLE[kind] if name in before})
    except ConfigError as error:
        raise StateError(f"{error}: {EDITED}") from None
    return made
