"""Samples: the iteration over a `Rescalable` in loaders of other libraries, sample by sample."""

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch.utils.data import get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map

from fmsdata.core.chunk import Item
from fmsdata.core.state import State
from fmsdata.errors import ConfigError
from fmsdata.planning.schedule import Segment
from fmsdata.run.ranks import Ranks
from fmsdata.run.state import pack_state

if TYPE_CHECKING:
    from fmsdata.run.rescalable import Rescalable, Resumed


def _collate(samples: Sequence[Item], **_: object) -> Any:
    """The batch that a loader without a `collate_fn` makes.

    Tasks are above this folder, hence the late import.
    """
    return import_module("fmsdata.tasks.collate").Collate()(samples)


# torch exports no public name for this registry. Changing it in place is what the documentation of
# `torch.utils.data.default_collate` recommends for other types ("Option 2"). It is done here,
# because every process that iterates over a `Rescalable` imports this module.
default_collate_fn_map[Item] = _collate


class Samples(Iterator[Item]):
    """The samples of some lanes, one by one, with a state after each."""

    def __init__(self, data: "Rescalable", lanes: Sequence[int], ranks: Ranks) -> None:
        self._data, self._mine, self._ranks = data, lanes, ranks
        self._checked = get_worker_info() is not None  # there, torch.distributed may be that of another process
        self._pipeline = data.fingerprint
        self._resumed: Resumed | None = None
        self.refusal: ConfigError | None = None  # raised at the first sample: torch reports errors of `iter` badly
        self._start(0, None)

    def _start(self, step: int, states: Mapping[int, State] | None) -> None:
        self._lanes = self._data.start(self._mine, states)
        self._positions = self._lanes.positions(step)
        self._turns = self._positions.turns()

    def __next__(self) -> Item:
        if self.refusal is not None:
            raise self.refusal
        if not self._mine:  # more worker processes than lanes
            raise StopIteration
        if not self._checked:
            self._ranks.check("dataset")
            self._ranks.check_sharing("dataset")
            self._checked = True
        try:
            samples = self._turns.take(1)
            ((chunk, row),), passed = self._lanes.take(samples)
            item = chunk[row]
        except BaseException:
            self._start(self._positions.step, self._positions.states(self._mine))
            raise
        self._positions = self._positions.after(samples, passed)
        return item

    def state_dict(self) -> State:
        """The state of these lanes."""
        return pack_state(
            self._pipeline,
            self._positions.state(),
            step=self._positions.step,
            history=[Segment(0, self._ranks.world_size, 1)],
        )

    def load_state_dict(self, state: State | Sequence[State]) -> None:
        """Resume from a state."""
        self.resume(state)
        self.log_changes()

    def resume(self, state: State | Sequence[State]) -> None:
        """Resume from a state, without logging the changes."""
        self._resumed = self._data.resume(state, self._mine)
        self._data = self._resumed.data
        self._start(self._resumed.step, self._resumed.lanes)
        self._pipeline = self._resumed.pipeline

    def log_changes(self) -> None:
        """Log what changed since the state was saved, on one rank and worker."""
        if 0 in self._mine and self._resumed is not None:
            self._resumed.log_changes()
