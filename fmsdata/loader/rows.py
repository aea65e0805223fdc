"""The loader of map-style rows: what `StatefulDataLoader(rows, sampler=...)` creates.

It has no position of its own. Batches are read ahead of the sampler's cursor, and the cursor moves
when one is handed out. If the cursor was moved by anything else (a state that was loaded, an epoch
that was set, another loader), what was read ahead is thrown away, and the loader follows.
"""

import inspect
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fmsdata.core.checks import check_parameters, flag, whole
from fmsdata.core.outline import Outline, facts_of
from fmsdata.core.state import State
from fmsdata.core.wording import counted, shown
from fmsdata.epochs.cursor import Cursor, RowRequest
from fmsdata.epochs.fine_tuning import FineTuningRows
from fmsdata.epochs.rows import length
from fmsdata.epochs.sampler import EpochSampler
from fmsdata.errors import ConfigError, DataError, FmsdataError
from fmsdata.loader.device import replaced
from fmsdata.loader.fields import Fields
from fmsdata.loader.fork_server import MOST_DESCRIPTORS, ForkServer
from fmsdata.loader.line_reader import LineRecipe
from fmsdata.loader.loader import StatefulDataLoader, can_pin, checked_method
from fmsdata.loader.patience import StallLimits, Watcher
from fmsdata.loader.row_reader import RowIds, RowRecipe, field_names
from fmsdata.loader.row_workers import BatchRecipe, LocalRows, RowSource, WorkerRows
from fmsdata.loader.saving import Saving
from fmsdata.loader.trainers import check_trainer
from fmsdata.loader.turns import Turns
from fmsdata.loader.worker_pool import DEFAULT_METHOD

PREFETCH_FACTOR = 2  # batches that a worker reads ahead
MOST_PREFETCH = MOST_DESCRIPTORS - 8
END = object()  # instead of a batch, at the end of an epoch


class RowLoader(StatefulDataLoader):
    """Batches of rows, epoch after epoch. See `StatefulDataLoader`."""

    sampler: EpochSampler

    def __init__(
        self,
        data: Any,
        *,
        sampler: EpochSampler | None,
        batch_size: int | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
        persistent_workers: bool = True,
        drop_last: bool | None = None,
        row_ids: bool = True,
        outputs: Sequence[str] = (),
        padding_segment: bool | None = None,
        multiprocessing_context: str | None = None,
        stall_warning: float = 30.0,
        stall_timeout: float | None = None,
        **others: Any,
    ) -> None:
        _refuse(others)
        if not isinstance(sampler, EpochSampler):
            raise ConfigError(f"sampler is {shown(sampler)}; it must be an EpochSampler, as in EpochSampler(rows, ...)")
        if (size := length(data)) != (rows := len(sampler.rows)):
            raise ConfigError(
                f"the loader reads {counted(size, 'row')}, but its sampler was made for {rows}; give both the same"
            )
        if data is not sampler.rows and isinstance(sampler.rows, FineTuningRows):
            raise ConfigError("the loader and its sampler have different FineTuningRows; give both the same")
        if drop_last is not None and drop_last != sampler.drop_last:
            raise ConfigError(f"drop_last is {drop_last}, but it is {sampler.drop_last} in the sampler: set it there")
        self.data: Any = data
        self.sampler = sampler
        self.rank, self.world_size = sampler.rank, sampler.world_size
        self.batch_size = _checked_batch(batch_size, sampler)
        self.num_workers = whole("num_workers", num_workers)
        self._prefetch = self._checked_prefetch(prefetch_factor)
        self._persistent_workers = flag("persistent_workers", persistent_workers)
        self._pin = can_pin() if flag("pin_memory", pin_memory) else False
        self._method = checked_method(multiprocessing_context)
        self._stall_limits = StallLimits.checked(stall_warning, stall_timeout)
        if stall_timeout is not None and not self.num_workers:
            raise ConfigError(
                "stall_timeout needs num_workers: without them the trainer's own thread reads the rows, "
                "and nothing can interrupt it"
            )
        if collate_fn is not None and not callable(collate_fn):
            raise ConfigError(f"collate_fn is {shown(collate_fn)}; it must be a function that takes a list of rows")
        self._collates = collate_fn is not None
        names = field_names(flag("row_ids", row_ids), sampler.drop_last)
        self._recipe: BatchRecipe
        if sampler.packing is not None:
            if collate_fn is not None:
                raise ConfigError(
                    "FineTuningRows make batches themselves: leave out collate_fn, and change the batches"
                )
            self._recipe = LineRecipe.of(
                data, sampler.packing, outputs=outputs, padding_segment=padding_segment, names=names
            )
        else:
            _refuse(
                {name: given for name, given in (("outputs", outputs), ("padding_segment", padding_segment)) if given}
            )
            self._recipe = RowRecipe(rows=data, seed=sampler.seed, collate=collate_fn, names=names)
        if self.num_workers and self._method == DEFAULT_METHOD:
            ForkServer.shared()  # it imports what workers need while the trainer prepares other things
        self._source: RowSource | None = None
        self._process = os.getpid()
        self._turns = Turns()
        self._planned: Cursor | None = None  # the sampler's, if the source continues from there
        self._last: RowRequest | None = None
        self._saving = Saving(None, sampler.ranks)

    @property
    def dataset(self) -> Any:
        """The rows."""
        return self.data

    @property
    def seed(self) -> int:
        return self.sampler.seed

    def describe(self) -> State:
        """The loader and its sampler as plain data."""
        return {**self._settings(), "sampler": self.sampler.describe()}

    def outline(self) -> Outline:
        return Outline(StatefulDataLoader.__name__, facts_of(self._settings()), below=(self.sampler.outline(),))

    def _settings(self) -> State:
        names = ("rank", "world_size", "batch_size", "num_workers")
        return {name: getattr(self, name) for name in names}

    @property
    def last_rows(self) -> RowIds:
        """Which rows the last batch has: `index`, `epoch_id` and `is_padding`, for rows that are no dicts.

        >>> loader.last_rows.is_padding     # doctest: +SKIP
        tensor([False, False, True])
        """
        if self._last is None:
            raise ConfigError("no batch was handed out yet, so there are no last rows")
        return RowIds.of(self._last)

    def __iter__(self) -> Iterator[Any]:
        try:
            check_trainer(self.sampler.epoch + self.sampler.position, self.data)
            self._begin_epoch()
            while (batch := self._next_rows()) is not END:
                yield batch
        finally:
            if not self._persistent_workers:
                self._stop()

    def __next__(self) -> Any:
        """The next batch, of the next epoch if this one has ended."""
        with self._turns.mine():
            self._begin_epoch()
            batch = self._next_rows()
        if batch is END:  # only after set_epoch
            raise StopIteration
        return batch

    def __len__(self) -> int:
        """The batches of an epoch, also if a part of it was handed out before."""
        return len(self.sampler) // self.batch_size

    def set_epoch(self, epoch: int) -> None:
        """The same as `sampler.set_epoch`."""
        self.sampler.set_epoch(epoch)

    def _begin_epoch(self) -> None:
        self.sampler.ranks.check("loader")
        self.sampler.begin_epoch(self.batch_size)

    def _next_rows(self) -> Any:
        """The next batch of the epoch; `END` at its end. If anything goes wrong, the position does not change."""
        with self._turns.mine():
            sampler = self.sampler
            try:
                if self._process != self._turns.process:  # a fork has no workers
                    self._source, self._process = None, self._turns.process
                sampler.ranks.check("loader")
                if self._source is None:
                    sampler.ranks.check_sharing("loader")
                    self._source, self._planned = self._start(), None
                if self._planned is not sampler.cursor:
                    self._source.follow(sampler.plan(self.batch_size))
                    self._planned = sampler.cursor
                with self._watcher:
                    read = self._source.next()
                if read is not None and self._pin and not self.num_workers:
                    read = read._replace(batch=replaced(read.batch, lambda tensor: tensor.pin_memory()))
            except BaseException as error:
                stalled = None if self._source is None else self._watcher.stalled
                self._stop()
                if stalled is not None and isinstance(error, FmsdataError):
                    raise stalled from error
                if isinstance(error, StopIteration):  # it would end the loop
                    raise DataError(
                        "a row or a collate_fn raised StopIteration, perhaps by next(...) on an iterator at its end; "
                        "give next a default, or catch it"
                    ) from error
                raise
            if read is None:
                return END
            batch, (self._last, self._planned) = read
            sampler.cursor = self._planned
            return Fields(batch) if type(batch) is dict and not self._collates else batch

    def _start(self) -> RowSource:
        source: RowSource
        if self.num_workers:
            source = WorkerRows(
                self._recipe, workers=self.num_workers, prefetch=self._prefetch, method=self._method, pin=self._pin
            )
        else:
            source = LocalRows(self._recipe)
        self._watcher = Watcher(self._stall_limits, lambda: "\n".join(source.silent()), source.wake)
        self._forget = weakref.finalize(self, _close, source, self._watcher)
        return source

    def _stop(self) -> None:
        source, self._source = self._source, None
        self._planned = None
        if source is not None:
            self._forget()

    def close(self) -> None:
        """End the worker processes. The loader stays usable: iterating starts new ones."""
        self._stop()

    @property
    def worker_pids(self) -> list[int]:
        return [] if self._source is None else list(self._source.pids)

    def state_dict(self, *, gather: bool | None = None, at: State | None = None) -> State:
        """The position after the last batch that was handed out: see `EpochSampler.state_dict`."""
        return self.sampler.state_dict(gather=bool(gather), at=at)

    def load_state_dict(self, state: State | Sequence[State]) -> None:
        """Resume from a state: see `EpochSampler.load_state_dict`. An open iteration continues from there."""
        self.sampler.load_state_dict(state)

    def stats(self) -> Any:
        raise ConfigError("stats() counts the tokens of a stream; for rows see sampler.epoch, .position and .step")

    def save(self) -> str:
        raise ConfigError(NO_FOLDER)

    def load(self, step: int | None = None) -> None:  # noqa: ARG002
        raise ConfigError(NO_FOLDER)

    def _checked_prefetch(self, prefetch: int | None) -> int:
        if prefetch is None:
            return PREFETCH_FACTOR
        if not self.num_workers:
            raise ConfigError(
                f"prefetch_factor is {prefetch!r}, but there are no workers to read ahead; set num_workers"
            )
        if whole("prefetch_factor", prefetch, least=1) > MOST_PREFETCH:
            raise ConfigError(f"prefetch_factor is {prefetch}; it must be at most {MOST_PREFETCH}")
        return prefetch


INSTEAD = {  # of arguments that other loaders have
    "shuffle": "the sampler decides the order; give shuffle to the EpochSampler, where it is True by default",
    "batch_sampler": "give batch_size, and global_batch to the EpochSampler, which cuts the batches",
    "generator": "the order comes from the seed of the EpochSampler, and what a row draws from seed, epoch and row",
    "worker_init_fn": "it is not needed for seeds, since what a row draws depends on seed, epoch and row alone; let "
    "the dataset open files when it needs them first",
    "timeout": "use stall_timeout, in seconds, after which a worker that is silent is a StallError",
    "prefetch": "use prefetch_factor, the batches that each of the num_workers reads ahead",
    "in_order": "leave it out, since batches always come in order",
    "snapshot_every_n_steps": "leave it out, since a state is exact after every batch",
    "evaluation": "give the EpochSampler shuffle=False and drop_last=False, and the loss the rows without is_padding",
}
NO_FOLDER = (
    "a loader of rows has no checkpoint folder: its state is small and the same on all ranks; save loader.state_dict() "
    "with the model, or use fmsdata.train_state"
)


def _close(source: RowSource, watcher: Watcher) -> None:
    watcher.stop()
    source.close()


def _refuse(others: dict[str, Any]) -> None:
    for name, value in others.items():
        if name in ("rank", "world_size", "mesh", "process_group"):
            if value is not None:
                raise ConfigError(f"{name} is given to a loader that has a sampler: give it to the EpochSampler")
        elif name == "checkpoint":
            if value is not None:
                raise ConfigError(NO_FOLDER)
        elif name in INSTEAD:
            raise ConfigError(f"{name} is no argument of a loader of rows: {INSTEAD[name]}")
        elif name in inspect.signature(StatefulDataLoader.__init__).parameters:
            raise ConfigError(
                f"{name} is for a loader of a stream, and this one reads rows with a sampler: leave it out"
            )
        else:
            known = set(inspect.signature(RowLoader.__init__).parameters) - {"self", "data", "others"}
            check_parameters("StatefulDataLoader", [name], sorted(known))


def _checked_batch(batch_size: int | None, sampler: EpochSampler) -> int:
    if sampler.max_tokens is not None:
        if batch_size not in (None, 1):
            raise ConfigError(
                f"batch_size is {batch_size}, but the sampler makes batches of max_tokens={sampler.max_tokens} tokens: "
                "leave batch_size out"
            )
        return 1
    if batch_size is None:
        most = sampler.global_batch // sampler.world_size
        raise ConfigError(
            f"batch_size is missing: give the number of rows that this rank gets in a step, such as batch_size={most}"
        )
    step = whole("batch_size", batch_size, least=1) * sampler.world_size
    if sampler.global_batch % step:
        raise ConfigError(
            f"batch_size is {batch_size} on each of {counted(sampler.world_size, 'rank')}, "
            f"{counted(step, 'row')} in all, but global_batch "
            f"is {sampler.global_batch}; it must be that, or a multiple to accumulate gradients over several steps"
        )
    return batch_size
