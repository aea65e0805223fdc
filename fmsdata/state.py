"""The state of a run as plain data: what is in it, and whether it belongs to the run that wants to go on with it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fmsdata.errors import StateError
from fmsdata.stage import State, number, part

VERSION = 1


def pack_state(description: State, lanes: Mapping[str, State], *, step: int, rank: int, world_size: int) -> State:
    """One rank's state: its lanes, and a description of all that their order depends on."""
    return {
        "version": VERSION,
        "step": step,
        "rank": rank,
        "world_size": world_size,
        "pipeline": description,
        "lanes": dict(lanes),
    }


def unpack_states(
    states: State | Sequence[State], description: State, lanes: Sequence[int]
) -> tuple[int, dict[str, State]]:
    """The step and the states of these lanes, from one rank's state or from those of several ranks.

    Raises if they do not belong here, or not together.
    """
    if not isinstance(states, Mapping | list | tuple):
        raise StateError(f"a state is a dict, or the list of all ranks' dicts, not {type(states).__name__}")
    many = [states] if isinstance(states, Mapping) else list(states)
    found: dict[str, State] = {}
    for state in many:
        _check(state, description)
        if state["step"] != many[0]["step"]:
            raise StateError(
                f"the states are of different steps: rank {many[0]['rank']} of step {many[0]['step']}, "
                f"rank {state['rank']} of step {state['step']}; give those of one step"
            )
        for lane in state["lanes"]:
            mine = part(state["lanes"], lane) or {}
            if found.setdefault(lane, mine) != mine:
                raise StateError(f"lane {lane} is in two states, at different places; give the states of one run")
    missing = [lane for lane in lanes if str(lane) not in found]
    if missing:
        of = ", ".join(f"rank {state['rank']} of {state['world_size']}" for state in many[:4]) or "none"
        raise StateError(
            f"no state for lane {_few(missing)}: given were the states of {of}; "
            "on another number of ranks, give the list of all ranks' states"
        )
    return many[0]["step"], {str(lane): found[str(lane)] for lane in lanes}


def _check(state: Any, description: State) -> None:
    if not isinstance(state, Mapping) or not isinstance(state.get("version"), int):
        raise StateError("this is not a loader's state: it has no version")
    if state["version"] != VERSION:
        raise StateError(
            f"the state has version {state['version']} and this fmsdata reads version {VERSION}; "
            + ("use a newer fmsdata" if state["version"] > VERSION else "use the fmsdata that wrote it")
        )
    if torn := [name for name in ("pipeline", "lanes") if not isinstance(state.get(name), Mapping)]:
        raise StateError(f"the state lacks {', '.join(torn)}: it is torn or was edited")
    for name in ("step", "rank", "world_size"):
        number(dict(state), name)
    saved = state["pipeline"]
    for name, why in (
        ("seed", "the order of everything follows from it"),
        ("lanes", "it is fixed for a run"),
    ):
        if saved.get(name) != description[name]:
            raise StateError(
                f"the state was saved with {name} {saved.get(name)} and this run has {name} {description[name]}; {why}"
            )
    differences = list(_compare(saved.get("lines"), description["lines"], ""))
    if differences:
        raise StateError("the state belongs to another pipeline: " + "; ".join(differences))


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


def _few(lanes: Sequence[int]) -> str:
    return ", ".join(map(str, lanes[:8])) + (f" and {len(lanes) - 8} more" if len(lanes) > 8 else "")
