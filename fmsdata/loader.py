"""StatefulDataLoader: batches for one rank, and a state that is exact at any moment."""

from collections.abc import Iterator, Sequence
from typing import Any

from fmsdata.arguments import whole
from fmsdata.batch import OUTPUTS, check_outputs, collect
from fmsdata.errors import ConfigError
from fmsdata.lanes import Rescalable, rank_and_world_size
from fmsdata.stage import State
from fmsdata.state import pack_state, unpack_states
from fmsdata.tasks import CausalLM, Task


class StatefulDataLoader:
    """Batches of the lanes that belong to this rank, endlessly.

    A loader has one position in the stream. Iterating again goes on where the last iteration stopped, and
    `state_dict()` is the state after the last batch that was handed out.

    >>> loader = StatefulDataLoader(data, batch_size=8, rank=0, world_size=1)     # doctest: +SKIP
    >>> for batch in loader:                                                      # doctest: +SKIP
    ...     train(batch["input_ids"], batch["labels"])
    """

    def __init__(
        self,
        data: Rescalable,
        *,
        batch_size: int,
        num_workers: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        outputs: Sequence[str] = (),
        task: Task | None = None,
    ) -> None:
        if not isinstance(data, Rescalable):
            raise ConfigError(f"a loader reads a Rescalable, not {data!r}")
        if task is not None and not callable(task):
            raise ConfigError(f"task is {task!r}; it must be a task such as CausalLM()")
        if num_workers:
            raise ConfigError(f"num_workers is {num_workers}, but worker processes are not available yet; use 0")
        check_outputs(outputs)
        self.data = data
        self.batch_size = whole("batch_size", batch_size, least=1)
        self.outputs = tuple(outputs)
        self.task: Task = task or CausalLM()
        self.rank, self.world_size = rank_and_world_size(rank, world_size)
        self._mine = data.lanes_of(self.rank, self.world_size)
        self._lanes = data.start(self._mine)
        self._step = 0  # batches handed out since the run began

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            yield self._next_batch()

    def _next_batch(self) -> dict[str, Any]:
        """The next batch. If anything goes wrong on the way to it, the loader stays where it was."""
        try:
            batch = collect(self._lanes.take(self.batch_size), self.task.extra_tokens)
            fields = {**self.task(batch), **{name: OUTPUTS[name](batch) for name in self.outputs}}
        except BaseException:
            self._lanes = self._lanes.undone()
            raise
        self._step += 1
        return fields

    def state_dict(self) -> State:
        """Where this rank stands, as plain data: JSON-able, and without tokens."""
        lanes = self._lanes.state()
        return pack_state(self.data.describe(), lanes, step=self._step, rank=self.rank, world_size=self.world_size)

    def load_state_dict(self, state: State | Sequence[State]) -> None:
        """Go on from a state: this rank's own, or the list of all ranks' from any world size."""
        step, lanes = unpack_states(state, self.data.describe(), self._mine)
        self._lanes = self.data.start(self._mine, lanes)
        self._step = step
