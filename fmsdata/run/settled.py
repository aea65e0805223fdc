"""What was left to choose: a run that resumes keeps the windows and the shards that it was saved with."""

import copy
import logging
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from fmsdata.core.state import State

if TYPE_CHECKING:
    from fmsdata.run.rescalable import Rescalable

log = logging.getLogger("fmsdata")


OF_SHARDS = ("shards", "documents", "tokens", "digest", "generations")  # what a description of a source says of them


def as_saved(data: "Rescalable", pipeline: State) -> "Rescalable":
    """The same data, with the saved windows wherever the configuration gives no number, and without appended shards."""
    return with_choices(data, _with_removed(pipeline.get("lines"), pipeline.get("removed")))


def with_choices(data: "Rescalable", lines: Any) -> "Rescalable":
    """The same data with what was chosen in this description of its lines."""
    settled = data.lines.settled(data.lanes, lines)
    if settled is data.lines:
        return data
    log.info("the windows and shards of the saved run are kept; give shuffle.window as a number to change a window")
    other = copy.copy(data)
    other.lines = settled
    other.forget_plans()
    for name, value in vars(type(data)).items():
        if isinstance(value, cached_property):  # computed from the other lines
            vars(other).pop(name, None)
    return other


def with_shards_of(pipeline: State, later: State) -> State:
    """A saved pipeline, with what a later one of the same run says of the shards of its sources.

    A source that was removed may have grown since: it may be back in the later one.
    """
    lines = _with_removed(later.get("lines"), later.get("removed"))
    settled = {**pipeline, "lines": _with_shards_of(pipeline.get("lines"), lines)}
    if "removed" in pipeline:
        settled["removed"] = _with_shards_of(pipeline["removed"], _sources(lines))
    return settled


def _with_shards_of(saved: Any, later: Any) -> Any:
    """The same for the description of a stage, or those of several."""
    if not isinstance(saved, Mapping) or not isinstance(later, Mapping):
        return saved
    if saved.get("stage") == later.get("stage") == "ShardReader":
        rest = {name: value for name, value in saved.items() if name not in OF_SHARDS}
        return rest | {name: later[name] for name in OF_SHARDS if name in later}
    return {name: _with_shards_of(value, later.get(name)) for name, value in saved.items()}


def _sources(lines: Any) -> Any:
    """The descriptions of the sources in the mixture of a pipeline, by name; None if there is none."""
    while isinstance(lines, Mapping):
        children = lines.get("children")
        if lines.get("stage") == "Mixture":
            return children
        lines = children.get("below") if isinstance(children, Mapping) else None
    return None


def _with_removed(lines: Any, removed: Any) -> Any:
    """The description of a pipeline, with the sources that were removed from its mixture: they may be back."""
    if not removed or not isinstance(removed, Mapping) or not isinstance(lines, Mapping):
        return lines
    children = lines.get("children")
    if not isinstance(children, Mapping):
        return lines
    if lines.get("stage") == "Mixture":
        return {**lines, "children": {**removed, **children}}
    return {**lines, "children": {name: _with_removed(child, removed) for name, child in children.items()}}
