"""StatefulDataLoader: batches for one rank, and a state that is exact at any moment.

The loader only keeps account: of the samples in each batch that it hands out, and of what their
lanes passed. Batches come from a batch source, on demand or read ahead by a thread.
"""

import inspect
import multiprocessing
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from fmsdata.core.checks import whole
from fmsdata.core.options import PREFETCH
from fmsdata.core.outline import Outline, facts_of, outline_of
from fmsdata.core.state import State, plain
from fmsdata.core.wording import counted, shown
from fmsdata.errors import ConfigError, FmsdataWarning, StageError, StateError
from fmsdata.loader.batches import BatchFinisher, BatchSource, LocalBatchSource
from fmsdata.loader.device import checked_device
from fmsdata.loader.ends import Ends
from fmsdata.loader.fields import Fields
from fmsdata.loader.fork_server import ForkServer
from fmsdata.loader.pass_end import PassEnd, checked_evaluation, mark_padding
from fmsdata.loader.patience import StallLimits
from fmsdata.loader.read_ahead import OnDemand, ReadAhead
from fmsdata.loader.saving import Saving
from fmsdata.loader.trainers import NotHere, advice, check_caller, check_trainer, refuse_client_state, watch_accelerate
from fmsdata.loader.turns import Turns
from fmsdata.loader.worker_batches import WorkerBatchSource
from fmsdata.loader.worker_pool import DEFAULT_METHOD
from fmsdata.planning.schedule import Segment, continued
from fmsdata.run.checkpoints import Checkpoints
from fmsdata.run.gather import gather_state
from fmsdata.run.lanes import Lanes
from fmsdata.run.positions import Positions
from fmsdata.run.rescalable import Rescalable
from fmsdata.run.state import pack_state
from fmsdata.run.stats import Meter, Stats
from fmsdata.run.wrappers import refuse_endless_evaluation, refuse_to_save
from fmsdata.storage.stats import StorageStats
from fmsdata.tasks.base import Task
from fmsdata.tasks.batch import check_outputs
from fmsdata.tasks.causal_lm import CausalLM
from fmsdata.tasks.collate import Collate

if TYPE_CHECKING:
    from fmsdata.epochs.rows import Rows
    from fmsdata.epochs.sampler import EpochSampler

NO_STATE = "an evaluation has no state: it reads its set from the top at each iteration"


class StatefulDataLoader:
    """Batches of the lanes that belong to this rank, endlessly.

    A loader has one position in the stream. Iterating again continues where the last iteration
    stopped, and `state_dict()` is the state after the last batch that was handed out, however much
    was read ahead. With `steps`, an iteration ends at every multiple of that many steps.

    A thread makes `prefetch` batches ahead (0: each batch is made on demand). `num_workers`
    processes read for it; tokenized data needs none. With `device`, the thread also copies the
    batches there. With `checkpoint`, the loader saves itself at the steps that the `Checkpoints`
    name, and resumes from the newest complete checkpoint when it is created.

    If `data` is a finite pass (`epochs`), the loader stops after its last batch, at the same step on
    every rank, and has a length. Batches then have a field `is_padding`, which is true for rows that
    only fill up the last batches. With `evaluation` every iteration reads the pass from the top, or
    its first samples (`evaluation={"samples": 1000}`), and there is no state.

    >>> loader = StatefulDataLoader(data, batch_size=8, rank=0, world_size=1)     # doctest: +SKIP
    >>> for batch in loader:                                                      # doctest: +SKIP
    ...     train(batch["input_ids"], batch["labels"])

    With `sampler`, the data are map-style rows: anything with a length and `[]`. A `for` loop is
    one epoch, and the next loop is the next; `next(loader)` goes from one to the other. See
    docs/epochs.md. `batch_size` is that of a rank; `collate_fn`, `prefetch_factor`, `drop_last`,
    `pin_memory` and `persistent_workers` are as in torch. Batches of dicts get `index`, `epoch_id`
    and `is_padding`, unless `row_ids` is False.

    >>> sampler = EpochSampler(rows, global_batch=64, rank=0, world_size=8)              # doctest: +SKIP
    >>> loader = StatefulDataLoader(rows, sampler=sampler, batch_size=8, num_workers=2)  # doctest: +SKIP
    """

    dataset: Any = NotHere()
    sampler: Any = NotHere()
    batch_sampler: Any = NotHere()
    evaluation: bool = False
    keeper: str | None = None  # the trainer whose checkpoints hold the state

    def __new__(cls, *_: Any, sampler: "EpochSampler | None" = None, **__: Any) -> "StatefulDataLoader":
        if cls is StatefulDataLoader and sampler is not None:
            from fmsdata.loader.rows import RowLoader

            cls = RowLoader  # a subclass, whose __init__ is called next
        return super().__new__(cls)

    def __init__(
        self,
        data: "Rescalable | Rows",
        *,
        batch_size: int | None = None,
        num_workers: int = 0,
        sampler: "EpochSampler | None" = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        prefetch_factor: int | None = None,
        drop_last: bool | None = None,
        row_ids: bool = True,
        rank: int | None = None,
        world_size: int | None = None,
        mesh: DeviceMesh | None = None,
        process_group: ProcessGroup | None = None,
        outputs: Sequence[str] = (),
        padding_segment: bool | None = None,
        task: Task | None = None,
        prefetch: int = PREFETCH,
        pin_memory: bool = False,
        device: str | int | torch.device | None = None,
        persistent_workers: bool = True,
        multiprocessing_context: str | None = None,
        checkpoint: Checkpoints | None = None,
        stall_warning: float = 30.0,
        stall_timeout: float | None = None,
        steps: int | None = None,
        evaluation: bool | Mapping[str, int | None] = False,
    ) -> None:
        if not isinstance(data, Rescalable):
            raise ConfigError(
                f"a loader reads a Rescalable, or rows with sampler=EpochSampler(rows, ...), not {shown(data)} alone"
            )
        for_rows = (sampler, collate_fn, prefetch_factor, drop_last)
        if any(argument is not None for argument in for_rows) or not row_ids:
            raise ConfigError(
                "sampler, collate_fn, prefetch_factor, drop_last and row_ids are for map-style rows, "
                "and this loader reads a Rescalable: leave them out"
            )
        self.data = data
        if batch_size is None:
            raise ConfigError("batch_size is missing: the lines of a step on this rank")
        self.batch_size = whole("batch_size", batch_size, least=1)
        check_outputs(outputs)
        self.outputs = tuple(outputs)
        self.task: Task = task or CausalLM()
        self.sources = tuple(data.source_sizes)  # the names that `source_ids` number
        self._ranks = data.ranks(rank, world_size, mesh, process_group)
        self.rank, self.world_size = self._ranks.rank, self._ranks.world_size
        self._mine = data.lanes_of(self.rank, self.world_size)
        self.num_workers = self._enough_workers(whole("num_workers", num_workers))
        self.prefetch = whole("prefetch", prefetch)
        self.evaluation, self.evaluation_samples = checked_evaluation(evaluation, data, checkpoint)  # None: all samples
        self._pass = None if data.epochs is None else PassEnd(data, self.evaluation_samples, checkpoint)
        self._iteration = 0  # the number of the evaluation in progress
        self._finish = BatchFinisher(
            collate=Collate(self.task, self.outputs, sources=self.sources, padding_segment=padding_segment),
            pin_memory=can_pin() if pin_memory else False,
            device=checked_device(device),
            mark=None if self._pass is None else mark_padding,
        )
        self._persistent_workers = persistent_workers
        self._method = checked_method(multiprocessing_context)
        self._stall_limits = StallLimits.checked(stall_warning, stall_timeout)
        if stall_timeout is not None and not self.prefetch and not self.num_workers:
            raise ConfigError(
                "stall_timeout needs prefetch or num_workers: without them the trainer's own thread makes the batches, "
                "and nothing can interrupt it"
            )
        if self.num_workers and self._method == DEFAULT_METHOD:
            ForkServer.shared()  # it imports what workers need while the trainer prepares other things
        self._engine: ReadAhead | OnDemand | None = None  # makes the batches
        self._engine_process = os.getpid()
        self._turns = Turns()
        self._fetched = StorageStats()  # by engines that have ended
        self.steps = None if steps is None else whole("steps", steps, least=1)
        self._ends = Ends(self.steps)
        self._opened: Lanes | None = None  # for the next engine, if it reads in this process
        self._positions: Positions
        self._saving = Saving(checkpoint, self._ranks)
        states = None if checkpoint is None else checkpoint.load(self._mine)
        if states is None:
            self._start_at(0, [], data.start(self._mine))
            self._saving.begin(None)
        else:
            self._load(states)

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return self.data.seed

    @property
    def checkpoint(self) -> Checkpoints | None:
        """The folder that the loader saves itself to."""
        return self._saving.checkpoint

    @checkpoint.setter
    def checkpoint(self, checkpoint: Checkpoints | None) -> None:
        checked_evaluation(self.evaluation, self.data, checkpoint)
        self._saving.checkpoint = checkpoint

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if self.steps is None and self._pass is None:
            refuse_endless_evaluation()
        if self.evaluation:
            self._from_the_top()
        else:
            check_trainer(self._positions.step, self.task)
            check_caller(inspect.currentframe())
        self._ends.begin(self._positions.step, inspect.currentframe() if self._pass is None else None)
        return self._batches(self._iteration)

    def _batches(self, iteration: int) -> Iterator[dict[str, Any]]:
        with self._saving.on_sigterm(self._state):
            try:
                if self.ended:
                    self._warn_that_pass_is_over()
                while True:
                    with self._turns.mine():
                        if self._at_end():
                            break
                        batch = self._next_batch()
                    yield batch
                    if iteration != self._iteration:
                        raise ConfigError(
                            "another evaluation with this loader has begun, from the top; end one before the next "
                            "begins, or build a loader for each"
                        )
            finally:
                if not self._persistent_workers:
                    self._stop_engine()

    def __next__(self) -> dict[str, Any]:
        """The next batch. With `steps`, StopIteration once at each end; the next call goes on.

        At the end of a finite pass, StopIteration at every call; an evaluation begins again after it.
        """
        if self._saving.handles_sigterm:
            raise ConfigError(
                "on_sigterm saves while an iteration over the loader runs, and next(loader) is none; "
                "create one with batches = iter(loader), and call next(batches)"
            )
        with self._turns.mine():
            if self._at_end():
                if self.evaluation and self.ended:
                    self._from_the_top()
                raise StopIteration
            return self._next_batch()

    def __len__(self) -> int:
        """The steps of a finite pass from its start to its end, or `steps`, if that is less."""
        if self._pass is not None:
            end = self._pass.step(self._positions, self._history)
            return end if self.steps is None else min(end, self.steps)
        if self.steps is None:
            raise TypeError(
                "the stream has no end, so a loader has no length; give it one with steps= or epochs=, or count steps"
                + advice()
            )
        return self.steps

    @property
    def pass_lines(self) -> list[int]:
        """How many lines each lane has in a finite pass. Waits until that is planned.

        >>> sum(loader.pass_lines)     # doctest: +SKIP
        18264
        """
        if self._pass is None:
            raise ConfigError("the stream has no end: give the Rescalable epochs=1, or the configuration `epochs: 1`")
        lines: list[int] = self._pass.plan.lines.tolist()
        return lines

    @property
    def ended(self) -> bool:
        """Whether the loader is at the end of a finite pass. An endless stream never is."""
        return self._pass is not None and self._positions.step >= self._pass.step(self._positions, self._history)

    def _warn_that_pass_is_over(self) -> None:
        warnings.warn(
            f"the pass has ended at step {self._positions.step}: there are no more batches. To read the documents more "
            "often, start with a larger epochs=; to read a set again and again, use evaluation",
            FmsdataWarning,
            stacklevel=3,
        )

    def _from_the_top(self) -> None:
        """Begin a new evaluation."""
        self._iteration += 1
        if self._positions.step:
            self._stop_engine()
            self._start_at(0, [], self.data.start(self._mine))

    def __bool__(self) -> bool:
        return True

    def __reduce__(self) -> NoReturn:
        raise ConfigError("a loader can't be sent or copied; send its `data` and its `state_dict()`")

    def _next_batch(self) -> dict[str, Any]:
        """The next batch.

        If anything goes wrong on the way to it, the loader's position does not change.
        """
        try:
            if self._engine_process != os.getpid():  # a fork has neither the thread nor the workers
                self._engine, self._engine_process = None, os.getpid()
            self._ranks.check("loader")
            with self._meter:
                if self._engine is None:
                    self._ranks.check_sharing("loader")
                    if not (self.evaluation or self.keeper or self.checkpoint or self._positions.step):
                        watch_accelerate(self)
                    self._engine = self._start_engine()
                batch = self._engine.next()
                if batch.wait is not None:
                    batch.wait()
        except BaseException as error:
            self._ends.interrupt()
            self._stop_engine()
            if isinstance(error, StopIteration):  # it would end the iteration
                raise StageError(
                    "a stage or a task raised StopIteration, perhaps by next(...) on an iterator at its end; "
                    "give next a default, or catch it"
                ) from error
            raise
        self._positions = self._positions.after(batch.samples, batch.passed)
        self._saving.advance(self._positions.step)
        return Fields(batch.fields)

    def _start_engine(self) -> ReadAhead | OnDemand:
        open_source, finish = self._batch_source(), self._finish.opened()
        engine = (
            ReadAhead(open_source, finish, self.prefetch, self._stall_limits)
            if self.prefetch
            else OnDemand(open_source, finish, self._stall_limits)
        )
        # A loader that is dropped does not wait for its thread here: Python would swallow an
        # interrupt meanwhile.
        self._forget_engine = weakref.finalize(self, engine.stop)
        return engine

    def _batch_source(self) -> Callable[[], BatchSource]:
        """A function that opens the source of the batches from here on."""
        lanes, self._opened = self._opened, None
        plan, filler = (None, None) if self._pass is None else (self._pass.plan, self._pass.filler)
        if self.num_workers:
            return partial(
                WorkerBatchSource,
                self.data,
                self._positions,
                workers=self.num_workers,
                batch_size=self.batch_size,
                extra_tokens=self.task.extra_tokens,
                needs_lines=self._finish.collate.needs_lines,
                method=self._method,
                plan=plan,
                filler=filler,
            )
        lanes = lanes or self.data.start(self._mine, self._positions.states(self._mine))
        lanes.expect(plan)
        return partial(
            LocalBatchSource,
            lanes,
            self._positions.turns(None if plan is None else plan.lines),
            batch_size=self.batch_size,
            extra_tokens=self.task.extra_tokens,
            filler=filler,
            shifted=type(self.task) is CausalLM,  # a subclass may change the tokens first
        )

    def close(self) -> None:
        """End the thread and the processes that read ahead, and let other runs save to its folder.

        The loader stays usable: iterating starts new ones. Steps that are in no checkpoint are
        logged: `save()` them before.
        """
        self._stop_engine()
        self._ends.interrupt()
        self._saving.close()

    def _stop_engine(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            self._fetched = replace(self._fetched + engine.stats(), held_bytes=0, spooled_bytes=0)
            self._forget_engine.detach()
            engine.close()

    @property
    def worker_pids(self) -> list[int]:
        """The process ids of the workers; empty if none is running.

        >>> loader.worker_pids     # doctest: +SKIP
        [4711, 4712]
        """
        return [] if self._engine is None else self._engine.pids

    def describe(self) -> State:
        """The loader and its pipeline as plain data: for logs, and to compare runs.

        >>> loader.describe()["batch_size"]     # doctest: +SKIP
        8
        """
        return {**self._settings(), "step": self._positions.step, "pipeline": self.data.describe()}

    def outline(self) -> Outline:
        """The loader and its pipeline as a tree for people: what `repr` prints."""
        facts = {**self._settings(), "step": self._positions.step}
        facts |= {name: None for name, value in facts.items() if value is False or value == []}
        return Outline(type(self).__name__, facts_of(facts), below=(self.data.outline(),))

    def _settings(self) -> State:
        names = ("rank", "world_size", "batch_size", "num_workers", "prefetch", "steps", "evaluation")
        settings = {name: plain(getattr(self, name)) for name in names}
        return {**settings, "task": shown(self.task), "outputs": list(self.outputs)}

    def __repr__(self) -> str:
        return outline_of(self).text()

    def _repr_html_(self) -> str:
        return outline_of(self).html()

    def stats(self) -> Stats:
        """What this rank has consumed, how fast, and how long it waited.

        It is cheap enough to log at every step.

        >>> print(loader.stats())     # doctest: +SKIP
        """
        fetched = self._fetched + (StorageStats() if self._engine is None else self._engine.stats())
        return self._meter.stats(self.data, self._positions, fetched)

    def state_dict(self, *, gather: bool | None = None) -> State:
        """The position of this rank, as plain data: JSON-able, and without tokens.

        With `gather`, the position of all ranks, which loads anywhere, at any world size. This is a
        collective over the loader's process group: call it on all ranks after the same step. The state
        of an evaluation is empty. On several ranks of DeepSpeed, which keeps what one rank has, say which:
        `gather=False` if you save the states of all ranks yourself.

        >>> state = loader.state_dict(gather=True)     # doctest: +SKIP
        """
        if self.evaluation:
            return {}
        refuse_to_save(self._ranks, bool(gather))
        if gather:
            return gather_state(lambda: self._state(self._positions), self._ranks, self.data.lanes)
        if self.world_size > 1 and gather is None:
            refuse_client_state()
        return self._state(self._positions)

    def _state(self, positions: Positions) -> State:
        return pack_state(self._pipeline, positions.state(), step=positions.step, history=self._history)

    def load_state_dict(self, state: State | Sequence[State]) -> None:
        """Resume from a state: this rank's own, or the list of the states of all ranks.

        The world size may differ. The mix and the lines may differ from those that the state was
        saved with: see docs/live-edits.md.
        """
        if self.evaluation:
            if any(state if isinstance(state, list | tuple) else [state]):
                raise StateError(NO_STATE)
            return
        saved = self.data.resume(state, self._mine)
        lanes = saved.data.start(self._mine, saved.lanes)
        self._stop_engine()
        if self._pass is not None and saved.data.fingerprint != self.data.fingerprint:
            self._pass = PassEnd(saved.data, self.evaluation_samples, self.checkpoint)
        self.data = saved.data
        self._start_at(saved.step, saved.history, lanes)
        self._pipeline = saved.pipeline
        if self.rank == 0:
            saved.log_changes()

    def _start_at(self, step: int, history: Sequence[Segment], lanes: Lanes) -> None:
        """Take the position at which these lanes were opened."""
        self._positions = lanes.positions(step)  # after the last batch that was handed out
        self._history = continued(history, Segment(step, self.world_size, self.batch_size))
        self._opened = lanes
        if self._pass is not None:
            self._pass.move()
        self._ends.move_to(step)
        self._saving.move_to(self._positions)
        self._pipeline = self.data.fingerprint
        self._meter = Meter(begun=self._positions.tokens())

    def save(self) -> str:
        """Write a checkpoint of this rank now, unless it exists, and return the step's folder.

        Of the ranks of a `mesh` that share their data, one writes.
        """
        self._refuse_folder()
        return self._saving.save(self._positions, self._state)

    def load(self, step: int | None = None) -> None:
        """Load the newest complete checkpoint of the folder again, or go back to a named step.

        After going back, the later steps are set aside at the next save: they stay in the folder,
        and no run resumes from them. Call it on every rank.

        >>> loader.load(step=12_000)     # doctest: +SKIP
        """
        self._refuse_folder()
        self._load(self._saving.load(self._mine, None if step is None else whole("step", step)))

    def _refuse_folder(self) -> None:
        if self.evaluation:
            raise ConfigError(f"{NO_STATE}, so there is nothing to save or load; save the loader of the training")

    def _load(self, states: Sequence[State]) -> None:
        """Resume from states of the checkpoint folder."""
        if self.data.needs_all_lanes(states[0]):
            states = self._saving.folder.read(states[0]["step"], range(self.data.lanes))
        self.load_state_dict(states)
        self._saving.begin(self._positions)

    def _at_end(self) -> bool:
        """Whether the iteration ends here. Called when the trainer asks for a batch: saves what is due."""
        ended = self._ends.reached(self._positions.step)
        over = self._pass is not None and self.ended
        if self._saving.checkpoint is not None:
            self._saving.save_if_due(self._positions, self._state, ended=ended or over)
        if ended:
            self._ends.move_to(self._positions.step)
        if over:
            self._stop_engine()
        return ended or over

    def _enough_workers(self, requested: int) -> int:
        if requested > len(self._mine):
            warnings.warn(
                f"num_workers is {requested}, but rank {self.rank} of {self.world_size} has {len(self._mine)} of the "
                f"{counted(self.data.lanes, 'lane')}: it uses {len(self._mine)} workers",
                FmsdataWarning,
                stacklevel=3,
            )
        return min(requested, len(self._mine))


def can_pin() -> bool:
    if not torch.accelerator.is_available():
        warnings.warn("pin_memory has no effect without an accelerator; it is ignored", FmsdataWarning, stacklevel=3)
        return False
    return True


def checked_method(method: str | None) -> str:
    if method is not None and method not in multiprocessing.get_all_start_methods():
        known = ", ".join(map(repr, multiprocessing.get_all_start_methods()))
        raise ConfigError(f"multiprocessing_context is {method!r}; it must be one of {known}")
    return method or DEFAULT_METHOD
