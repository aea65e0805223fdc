"""Windows that were left to choose: a run that resumes keeps those that it was saved with."""

import copy
import logging
from functools import cached_property
from typing import TYPE_CHECKING

from fmsdata.core.state import State

if TYPE_CHECKING:
    from fmsdata.run.rescalable import Rescalable

log = logging.getLogger("fmsdata")


def with_windows_of(data: "Rescalable", pipeline: State) -> "Rescalable":
    """The same data, with the saved windows wherever the configuration gives no number."""
    lines = data.lines.settled(data.lanes, pipeline.get("lines"))
    if lines is data.lines:
        return data
    log.info("the windows of the saved run are kept; give shuffle.window as a number to change them")
    other = copy.copy(data)
    other.lines = lines
    for name, value in vars(type(data)).items():
        if isinstance(value, cached_property):  # computed from the other lines
            vars(other).pop(name, None)
    return other
