"""The state of a run as plain data: what is in it, and whether it belongs to the run that resumes.

The keys `version`, `step`, `history` and `pipeline` have the same value on all ranks, and lanes are
keyed by their number. So the states of any number of ranks can be merged into one dict, as
torch.distributed.checkpoint does. A lane and the pipeline are JSON texts: one value each to store,
and nothing that a caller can modify in place.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fmsdata.core.state import EDITED, State, is_count, number, parse, require_version
from fmsdata.core.wording import few, shown
from fmsdata.errors import StateError
from fmsdata.planning.schedule import Segment

VERSION = 2
SHOWN = 8  # lanes in a message
LANE = re.compile(r"[0-9]{1,18}")


class Saved(NamedTuple):
    """The content of saved states, for some lanes."""

    step: int
    history: list[Segment]
    pipeline: State  # the description that was saved
    lanes: dict[int, State]


def pack_state(pipeline: str, lanes: Mapping[str, str], *, step: int, history: Sequence[Segment]) -> State:
    """The state of one rank: its lanes, the description of the pipeline, the history of the run."""
    return {
        "version": VERSION,
        "step": step,
        "history": [list(segment) for segment in history],
        "pipeline": pipeline,
        "lanes": dict(lanes),
    }


def unpack_states(states: State | Sequence[State], description: State, lanes: Sequence[int]) -> Saved:
    """What is saved of these lanes, in the state of one rank or in those of several ranks.

    Raises if the states do not belong together, or not to this run. The description is that of the
    run that resumes: the seed and the number of lanes must be the same. Whether it can resume with
    the other differences is decided by `fmsdata.run.edits`.
    """
    if not isinstance(states, Mapping | list | tuple):
        raise StateError(f"a state must be a dict, or the list of the dicts of all ranks, not {type(states).__name__}")
    many = [states] if isinstance(states, Mapping) else list(states)
    requested = set(map(str, lanes))
    found: dict[str, str] = {}
    for state in many:
        _check(state, description)
        for name in ("step", "history", "pipeline"):
            if state[name] != many[0][name]:
                raise StateError(
                    f"the states differ in {name}: {many[0][name]} and {state[name]}; "
                    "give the states of one step of one run"
                )
        for lane in requested & state["lanes"].keys():
            if found.setdefault(lane, state["lanes"][lane]) != state["lanes"][lane]:
                raise StateError(f"lane {lane} is in two states, at different positions; give the states of one run")
    missing = [lane for lane in lanes if str(lane) not in found]
    if missing:
        given = sorted({int(lane) for state in many for lane in state["lanes"]})
        held = f"lanes {few(given, SHOWN)}" if given else "no lanes"
        raise StateError(
            f"no state for lane {few(missing, SHOWN)}: the given states hold {held}"
            + (f", saved by one of {many[0]['history'][-1][1]} ranks" if len(many) == 1 else "")
            + "; give the list of the states of all ranks, or save one for all of them with state_dict(gather=True)"
        )
    step = many[0]["step"] if many else 0
    history = [Segment(*segment) for segment in many[0]["history"]] if many else []
    pipeline = _pipeline(many[0]) if many else description
    return Saved(step, history, pipeline, {lane: _lane(lane, found[str(lane)], step) for lane in lanes})


def _lane(lane: int, text: str, step: int) -> State:
    """The state of one lane."""
    state = parse(text, f"the state of lane {lane}")
    if number(state, "step") != step:
        raise StateError(
            f"the state of lane {lane} is from step {state['step']}, but the run is at step {step}: "
            "they were not saved together"
        )
    return state


def _check(state: Any, description: State) -> None:
    if not isinstance(state, Mapping) or not isinstance(state.get("version"), int):
        raise StateError("this is not the state of a loader: it has no version")
    require_version(state, VERSION, "the state")
    number(dict(state), "step")
    saved = _pipeline(state)
    if not isinstance(state.get("lanes"), Mapping) or not all(map(LANE.fullmatch, map(str, state["lanes"]))):
        raise StateError(f"the state has no lanes: {EDITED}")
    if not _is_history(state.get("history"), state["step"]):
        raise StateError(f"the history in the state is {shown(state.get('history'))}: {EDITED}")
    for name, why in (
        ("seed", "the order of the stream depends on it"),
        ("lanes", "it is fixed for a run"),
        ("epochs", "it is fixed for a run: a finite pass does not become longer, shorter or endless"),
    ):
        if saved.get(name) != description.get(name):
            raise StateError(
                f"the state was saved with {name} {saved.get(name)} and this run has {name} {description.get(name)}; "
                f"{why}"
            )


def _pipeline(state: Mapping[str, Any]) -> State:
    return parse(state.get("pipeline"), "the description of the pipeline in the state")


def _is_history(history: Any, step: int) -> bool:
    """Whether these are segments of a run up to a step.

    It has fewer samples than 64 bits can count.
    """
    return (
        isinstance(history, list)
        and bool(history)
        and all(
            isinstance(segment, list)
            and len(segment) == 3
            and all(map(is_count, segment))
            and min(segment[1:]) > 0
            and max(step, segment[0]) * segment[1] * segment[2] < 1 << 62
            for segment in history
        )
    )
