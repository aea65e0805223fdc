"""StatefulDataLoader: batches for one rank, and a state that is exact at any moment."""

import multiprocessing
import os
import signal
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any, NoReturn

import torch

from fmsdata.core.checks import whole
from fmsdata.core.state import State
from fmsdata.errors import ConfigError, FmsdataWarning
from fmsdata.loader.feed import Direct, Feed, LocalFeed, Make, ReadAhead
from fmsdata.loader.workers import WorkerFeed
from fmsdata.planning.schedule import Segment, continued
from fmsdata.run.checkpoints import Checkpoints
from fmsdata.run.lanes import Lanes, Places
from fmsdata.run.ranks import rank_and_world_size
from fmsdata.run.rescalable import Rescalable
from fmsdata.run.state import pack_state
from fmsdata.run.stats import Meter, Stats
from fmsdata.storage.stats import StorageStats
from fmsdata.tasks.base import Task
from fmsdata.tasks.causal_lm import CausalLM
from fmsdata.tasks.collate import Collate


class StatefulDataLoader:
    """Batches of the lanes that belong to this rank, endlessly.

    A loader has one position in the stream. Iterating again goes on where the last iteration stopped, and
    `state_dict()` is the state after the last batch that was handed out, however much was read ahead.

    `prefetch` batches are made ahead by a thread (0: each when it is asked for). `num_workers` processes read for
    it; tokenized data needs none. With `checkpoint`, the loader saves itself every so many steps, and goes on
    from the newest complete checkpoint when it is made.

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
        prefetch: int = 4,
        pin_memory: bool = False,
        persistent_workers: bool = True,
        multiprocessing_context: str | None = None,
        checkpoint: Checkpoints | None = None,
    ) -> None:
        if not isinstance(data, Rescalable):
            raise ConfigError(f"a loader reads a Rescalable, not {data!r}")
        self.data = data
        self.batch_size = whole("batch_size", batch_size, least=1)
        self.outputs = tuple(outputs)
        self.task: Task = task or CausalLM()
        self.rank, self.world_size = rank_and_world_size(rank, world_size)
        self._mine = data.lanes_of(self.rank, self.world_size)
        self.num_workers = self._enough_workers(whole("num_workers", num_workers))
        self.prefetch = whole("prefetch", prefetch)
        self._make = Make(Collate(self.task, self.outputs), _can_pin() if pin_memory else False)
        self._persistent_workers = persistent_workers
        self._context = _checked_context(multiprocessing_context)
        self._engine: ReadAhead | Direct | None = None
        self._engine_process = os.getpid()
        self._fetched = StorageStats()  # for engines that have ended
        self._saving = self._terminated = False
        self._opened: Lanes | None = None  # for the next engine, if it reads itself
        self._places: Places
        self._saved_step: int | None  # that is in the checkpoint folder already
        self.checkpoint = checkpoint
        states = None if checkpoint is None else checkpoint.load(self._mine)
        if states is None:
            self._start_at(0, [], data.start(self._mine))
        else:
            self.load_state_dict(states)
            self._saved_step = self._places.step

    def __iter__(self) -> Iterator[dict[str, Any]]:
        handle_sigterm = self.checkpoint is not None and self.checkpoint.on_sigterm
        with self._saving_on_sigterm() if handle_sigterm else nullcontext():
            try:
                while True:
                    self._save_if_due()
                    yield self._next_batch()
            finally:
                if not self._persistent_workers:
                    self.close()

    def __len__(self) -> int:
        raise TypeError("the stream has no end, so a loader has no length; count steps, or use itertools.islice")

    def __bool__(self) -> bool:
        return True

    def __reduce__(self) -> NoReturn:
        raise ConfigError("a loader can't be sent or copied; send its `data` and its `state_dict()`")

    def _next_batch(self) -> dict[str, Any]:
        """The next batch. If anything goes wrong on the way to it, the loader stays where it was."""
        try:
            if self._engine_process != os.getpid():  # this is a fork, and threads and workers stayed behind
                self._engine, self._engine_process = None, os.getpid()
            with self._meter:
                if self._engine is None:
                    self._engine = self._start_engine()
                made = self._engine.next()
        except BaseException:
            self.close()
            raise
        self._places = self._places.after(made.samples, made.passed)
        return made.fields

    def _start_engine(self) -> ReadAhead | Direct:
        lanes, self._opened = self._opened, None
        open_feed: Callable[[], Feed]
        if self.num_workers:
            open_feed = partial(
                WorkerFeed,
                self.data,
                self._places,
                workers=self.num_workers,
                batch_size=self.batch_size,
                extra_tokens=self.task.extra_tokens,
                needs_lines=bool(self.outputs) or getattr(self.task, "needs_lines", True),
                context=self._context,
            )
        else:
            lanes = lanes or self.data.start(self._mine, self._places.states(self._mine))
            open_feed = partial(LocalFeed, lanes, self._places.turns(), self.batch_size, self.task.extra_tokens)
        engine = ReadAhead(open_feed, self._make, self.prefetch) if self.prefetch else Direct(open_feed, self._make)
        # A loader that is dropped does not wait here for its thread: Python would swallow an interrupt meanwhile.
        self._forget_engine = weakref.finalize(self, engine.stop)
        return engine

    def close(self) -> None:
        """End the thread and the processes that read ahead. The loader stays usable: iterating starts new ones."""
        engine, self._engine = self._engine, None
        if engine is not None:
            self._fetched = replace(self._fetched + engine.traffic(), held_bytes=0)
            self._forget_engine.detach()
            engine.close()

    def stats(self) -> Stats:
        """What this rank has consumed, how fast, and how long it waited. Costs little: log it every step.

        >>> print(loader.stats())     # doctest: +SKIP
        """
        fetched = self._fetched + (StorageStats() if self._engine is None else self._engine.traffic())
        return self._meter.stats(self.data, self._places, fetched)

    def state_dict(self) -> State:
        """Where this rank stands, as plain data: JSON-able, and without tokens."""
        return self._state(self._places)

    def _state(self, places: Places) -> State:
        return pack_state(self._pipeline, places.state(), step=places.step, history=self._history)

    def load_state_dict(self, state: State | Sequence[State]) -> None:
        """Go on from a state: this rank's own, or the list of all ranks' from any world size.

        The mix and the lines may be others than those that it was saved with: see `fmsdata.edits`.
        """
        saved = self.data.resume(state, self._mine)
        lanes = self.data.start(self._mine, saved.lanes)
        self.close()
        self._start_at(saved.step, saved.history, lanes)
        self._pipeline = saved.pipeline
        if self.rank == 0:
            saved.tell()

    def _start_at(self, step: int, history: Sequence[Segment], lanes: Lanes) -> None:
        """Stand where these lanes were opened."""
        self._places = lanes.places(step)  # after the last batch that was handed out
        self._history = continued(history, Segment(step, self.world_size, self.batch_size))
        self._opened = lanes
        self._done = self._places  # when the trainer last asked for a batch
        self._saved_step = None
        self._pipeline = self.data.fingerprint
        self._meter = Meter(begun=self._places.tokens())

    def save(self) -> str:
        """Write a checkpoint of this rank now, unless it is there already, and tell the step's folder."""
        if self.checkpoint is None:
            raise ConfigError("this loader has no checkpoint folder: make it with checkpoint=Checkpoints(path)")
        self._save(self.checkpoint, self._places)
        return f"{self.checkpoint}/step-{self._places.step}"

    def _save(self, checkpoint: Checkpoints, places: Places) -> None:
        if places.step == self._saved_step:
            return
        self._saving = True
        try:
            checkpoint.save(self._state(places), self.rank, self.world_size)
        finally:
            self._saving = False
        self._saved_step = places.step

    def _save_if_due(self) -> None:
        """Called when the trainer asks for a batch: it is done with all that it has got."""
        checkpoint = self.checkpoint
        if checkpoint is None:
            return
        self._done = self._places
        if checkpoint.is_due(self._done.step) or self._terminated:
            self._save(checkpoint, self._done)
        if self._terminated:
            raise SystemExit(128 + signal.SIGTERM)

    @contextmanager
    def _saving_on_sigterm(self) -> Iterator[None]:
        """While iterating, SIGTERM saves at once where the trainer was when it last asked for a batch.

        And it ends the run when the trainer asks for the next, after saving there too. Ranks that step together
        are at most one step apart, so one of the two steps is saved by all of them.
        """

        process = os.getpid()

        def handle(number: int, frame: FrameType | None) -> None:
            if os.getpid() != process:  # a child that was forked meanwhile: not its business
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                os.kill(os.getpid(), signal.SIGTERM)
                return
            if self._terminated:
                raise SystemExit(128 + number)
            self._terminated = True
            if self.checkpoint is not None and not self._saving:
                self._save(self.checkpoint, self._done)
            if callable(previous):
                previous(number, frame)

        if threading.current_thread() is not threading.main_thread():
            raise ConfigError("on_sigterm works in the main thread only: iterate there, or leave it off")
        previous = signal.signal(signal.SIGTERM, handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, previous)

    def _enough_workers(self, wanted: int) -> int:
        if wanted > len(self._mine):
            warnings.warn(
                f"num_workers is {wanted}, but rank {self.rank} of {self.world_size} has {len(self._mine)} of the "
                f"{self.data.lanes} lanes: it uses {len(self._mine)} workers",
                FmsdataWarning,
                stacklevel=3,
            )
        return min(wanted, len(self._mine))


def _can_pin() -> bool:
    if not torch.accelerator.is_available():
        warnings.warn("pin_memory is of no use without an accelerator, and is left out", FmsdataWarning, stacklevel=3)
        return False
    return True


def _checked_context(context: str | None) -> str | None:
    if context is not None and context not in multiprocessing.get_all_start_methods():
        known = ", ".join(map(repr, multiprocessing.get_all_start_methods()))
        raise ConfigError(f"multiprocessing_context is {context!r}; use one of {known}")
    return context
