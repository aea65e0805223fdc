"""Rescalable: the lanes of a run, and which of them a rank reads.

Sample `g` of the canonical stream is the next line of lane `g mod L`. World size, workers and batch
size decide who executes a lane, never what it yields. Rescaling only moves lanes from one rank to
another.
"""

import copy
import json
import logging
import multiprocessing
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from multiprocessing.context import get_spawning_popen
from typing import NamedTuple

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import IterableDataset, get_worker_info

from fmsdata.core.blocks import Host
from fmsdata.core.checks import whole
from fmsdata.core.chunk import Item
from fmsdata.core.lane import Lane
from fmsdata.core.outline import Outline, facts_of, outline_of
from fmsdata.core.stage import Stage, endless, tokens_only
from fmsdata.core.state import State
from fmsdata.core.wording import counted, shown
from fmsdata.errors import ConfigError, StateError
from fmsdata.planning.schedule import Segment
from fmsdata.prefetch.open_files import OpenFiles
from fmsdata.run.appended import take_up, unread
from fmsdata.run.edits import edit_between, saved_weights
from fmsdata.run.finite import PlanInBackground, check_finite
from fmsdata.run.gather import gather_state
from fmsdata.run.lanes import Lanes, restoring
from fmsdata.run.ranks import Ranks
from fmsdata.run.samples import Samples
from fmsdata.run.settled import as_saved, with_shards_of
from fmsdata.run.shared_numbers import SharedNumbers
from fmsdata.run.shares import earlier_epochs, source_sizes
from fmsdata.run.state import unpack_states
from fmsdata.run.wrappers import refuse_to_save, refuse_wrappers
from fmsdata.storage.location import Location
from fmsdata.storage.mapped import Versions

log = logging.getLogger("fmsdata")


class Rescalable(IterableDataset[Item]):
    """A pipeline, run as `lanes` independent lanes. Their number and the seed are fixed for a run.

    Choose a number of lanes with many divisors, at least as large as the largest world size: the
    stream is the same for every world size that divides it.

    >>> data = Rescalable(lines, lanes=192, seed=42)     # doctest: +SKIP

    It also works in torch's own `DataLoader`: each rank and each worker process reads its own lanes.
    Its state is then that of the newest iteration over it. The rank comes from `rank` and `world_size`,
    from `mesh` (a device mesh with a data-parallel dimension, or that sub-mesh) or from `process_group`,
    else from torch.distributed, else from RANK and WORLD_SIZE, when the iteration begins.

    With `epochs`, the stream is finite: every source is read that many times, or `max_epochs` times if
    that is less, and then it ends, at the same step on every rank. Only `StatefulDataLoader` reads it.
    """

    def __init__(
        self,
        lines: Stage,
        *,
        lanes: int,
        seed: int = 0,
        epochs: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        mesh: DeviceMesh | None = None,
        process_group: ProcessGroup | None = None,
    ) -> None:
        if not isinstance(lines, Stage):
            raise ConfigError(f"Rescalable takes a stage, got {shown(lines)}")
        self.lanes = whole("lanes", lanes, least=1)
        self.lines = tokens_only(endless(lines, "Rescalable"), "Rescalable").settled(self.lanes)
        self.seed = whole("seed", seed, least=None)
        self.epochs = None if epochs is None else whole("epochs", epochs, least=1)
        if self.epochs is not None:
            check_finite(self.lines)
        self._plans: dict[int | None, PlanInBackground] = {}  # of the whole pass, or of its first samples
        self.versions = Versions()  # of the files that were read, in any process
        self._newest: Samples | None = None  # the iteration whose state is that of this dataset
        self._loaded: State | list[State] | None = None  # the states that iterations start from
        self._sent: _SentRanks | None = None  # from the process that sent this dataset here
        self._wrapper: str | None = None  # what reads the newest iteration ahead of the trainer
        self._next_wrapper: str | None = None  # the same for the next iteration
        self._have_workers = SharedNumbers()  # 1 for processes whose workers read it
        self._loads = SharedNumbers()  # the states that processes loaded
        self._loads_here = (0, 0)  # of the process that loaded last, when it did: a worker has that of its start
        self._given = Ranks.given_by(rank, world_size, mesh, process_group)
        if self._given is not None:
            self.lanes_of(self._given.rank, self._given.world_size)

    def lanes_of(self, rank: int, world_size: int) -> range:
        """The lanes that a rank reads."""
        if world_size < 1 or not 0 <= rank < world_size:
            raise ConfigError(f"rank is {rank} of world size {world_size}; it must be from 0 to world size - 1")
        if world_size > self.lanes:
            raise ConfigError(
                f"world size {world_size} is more than the {counted(self.lanes, 'lane')} of this run: "
                "some ranks would have nothing to read; use fewer ranks, or start the run with more lanes"
            )
        return range(rank, self.lanes, world_size)

    def lane(self, index: int, host: Host) -> Lane:
        """One of the lanes, as its iterators know it. Lanes that are read together share a host."""
        return Lane(
            index=index,
            count=self.lanes,
            seed=self.seed,
            host=host,
            window_tokens=self._window_tokens,
            only_plans=self._only_plans,
            epochs=self.epochs,
        )

    def plan(self, samples: int | None = None, folder: Location | None = None) -> "PlanInBackground":
        """Plan a finite pass, or its first samples, in a thread; or what was planned before, if that did not fail.

        `folder` is where the plan is kept.
        """
        plan = self._plans.get(samples)
        if plan is None or not plan.is_usable:
            self._plans[samples] = plan = PlanInBackground(self, samples, folder)
        return plan

    @cached_property
    def _only_plans(self) -> bool:
        return self.lines.only_plans()

    @cached_property
    def _window_tokens(self) -> int:
        return self.lines.window_tokens()

    def start(
        self,
        lanes: Iterable[int],
        states: Mapping[int, State] | None = None,
        host: OpenFiles | None = None,
    ) -> "Lanes":
        """Start to read some of the lanes, or resume from their states."""
        return Lanes(self, list(lanes), states, host)

    def resume(self, states: State | Sequence[State], lanes: Sequence[int], later: State | None = None) -> "Resumed":
        """What some of the lanes resume from, converted to the pipeline as it is now.

        What was left to choose is as in the saved pipeline, and appended shards are taken up if the
        states of all lanes are there. With `later`, a pipeline that the run had afterwards, everything
        is as in that.
        """
        saved = unpack_states(states, self.description, lanes)
        pipeline = saved.pipeline
        if later is not None:
            pipeline = with_shards_of(pipeline, later)
        data = as_saved(self, later or pipeline)
        edit = edit_between(pipeline, json.loads(data.fingerprint), data.lines, saved.step)
        if self.epochs is not None and edit.changes:
            raise StateError(
                f"a finite pass can't be edited, because its length was planned: {'; '.join(edit.changes)}; undo that, "
                f"or start a new pass{saved_weights(edit.before, data.lines)}"
            )
        host = OpenFiles(versions=self.versions)

        def converted(lane: int, state: State) -> State:
            with restoring(lane):
                return edit.convert(replace(data.lane(lane, host), marks=True), state)

        states_now = {lane: converted(lane, state) for lane, state in saved.lanes.items()}
        changes = edit.changes
        if later is None and data.has_appended:
            if self._all_lanes_in(states):
                every = unpack_states(states, self.description, range(self.lanes))
                data, taken_up = take_up(data, edit.before, every.lanes)
                changes = changes + taken_up
            else:
                self._without_appended(states, lanes, ", ".join(map(repr, unread(data.lines))))
        return Resumed(
            saved.step,
            saved.history,
            json.dumps({**edit.pipeline, "lines": data.description["lines"]}),
            changes,
            states_now,
            data,
        )

    def needs_all_lanes(self, state: State) -> bool:
        """Whether lanes resume from the states of all of them: appended shards are to be taken up."""
        saved = unpack_states(state, self.description, ())
        return as_saved(self, saved.pipeline).has_appended

    @property
    def has_appended(self) -> bool:
        """Whether there are appended shards that the run does not read yet. A finite pass never does."""
        return self.epochs is None and bool(unread(self.lines))

    def _all_lanes_in(self, states: State | Sequence[State]) -> bool:
        many = [states] if isinstance(states, Mapping) else states
        return {int(lane) for state in many for lane in state["lanes"]} >= set(range(self.lanes))

    def _without_appended(self, states: State | Sequence[State], lanes: Sequence[int], sources: str) -> None:
        """Go on with the shards of before. All ranks must do that, so a list of some of the states is refused."""
        text = (
            f"shards were appended to source {sources}, and where to begin with them follows from the states of all "
            "lanes; load the list of the states of all ranks, or one that was saved with state_dict(gather=True)"
        )
        if not isinstance(states, Mapping):
            raise StateError(f"{text}: these are of some of them")
        if 0 in lanes:
            log.warning("%s: this is that of one rank, which goes on with the shards of before", text)

    def forget_plans(self) -> None:
        """Plan finite passes again when they are needed."""
        self._plans = {}

    def describe(self) -> State:
        """Everything that the order and the content of the stream depend on, as plain data."""
        return copy.deepcopy(self.description)

    def outline(self) -> Outline:
        """The pipeline as a tree for people: what `repr` and `fmsdata plan` print."""
        facts = {"lanes": self.lanes, "seed": self.seed, "epochs": self.epochs}
        return Outline(type(self).__name__, facts_of(facts), below=(self.lines.outline(""),))

    def __repr__(self) -> str:
        return outline_of(self).text()

    def _repr_html_(self) -> str:
        return outline_of(self).html()

    @cached_property
    def description(self) -> State:
        """Everything that the order and the content of the stream depend on, as plain data."""
        finite = {} if self.epochs is None else {"epochs": self.epochs}
        return {"seed": self.seed, "lanes": self.lanes, **finite, "lines": self.lines.describe()}

    @cached_property
    def fingerprint(self) -> str:
        """The description as JSON."""
        return json.dumps(self.description)

    @cached_property
    def source_sizes(self) -> dict[str, int]:
        """The names of all sources, sorted, and the tokens of one epoch of each."""
        return source_sizes(self.lines)

    @cached_property
    def earlier_epochs(self) -> dict[str, tuple[tuple[int, int], ...]]:
        """Of sources that have grown: how many epochs had how many tokens before."""
        return earlier_epochs(self.lines)

    @cached_property
    def columns(self) -> dict[str, int]:
        """The column of each source in a tally."""
        return {name: column for column, name in enumerate(self.source_sizes)}

    def ranks(
        self,
        rank: int | None = None,
        world_size: int | None = None,
        mesh: DeviceMesh | None = None,
        process_group: ProcessGroup | None = None,
    ) -> Ranks:
        """The rank that a loader of this data reads as: from its arguments, else those of this dataset."""
        ranks, own = Ranks.given_by(rank, world_size, mesh, process_group), self._given
        if ranks is not None and own is not None and (ranks.rank, ranks.world_size) != (own.rank, own.world_size):
            raise ConfigError(f"the loader is {ranks}, and its Rescalable is {own}; give the rank to one of them")
        return ranks or own or Ranks.found()

    def __iter__(self) -> Samples:
        """The samples of this rank, one by one, from the start or from the loaded state."""
        if self.epochs is not None:
            raise ConfigError(
                f"a finite pass (epochs={self.epochs}) ends at the same step on every rank only in the loader of "
                "fmsdata: fmsdata.StatefulDataLoader(data, batch_size=...)"
            )
        refuse_wrappers(self._ranks_here(), self.lanes, self.seed)
        trainer = multiprocessing.parent_process()
        self._newest = self._open()
        if get_worker_info() is None:
            self._have_workers[os.getpid()] = 0
        elif trainer is not None and trainer.pid is not None:
            self._have_workers[trainer.pid] = 1
            self._newest.refusal = self._later_load(trainer.pid)
        self._wrapper, self._next_wrapper = self._next_wrapper, None
        return self._newest

    def _later_load(self, trainer: int) -> ConfigError | None:
        """In a worker of torch: the error if the trainer has loaded a state since this worker was started."""
        process, loads = self._loads_here
        if self._loads[trainer] <= (loads if process == trainer else 0):
            return None
        return ConfigError(
            "a state was loaded into this dataset after its worker processes had been started, so they would begin at "
            "the state before it; load the state first, or create a new DataLoader (with persistent_workers=True, a "
            "DataLoader keeps its workers)"
        )

    def set_epoch(self, epoch: int) -> None:  # noqa: ARG002
        """Does nothing: the stream knows its epochs.

        Wrappers call it before they iterate. Those that can't read the stream exactly are refused.
        """
        self._next_wrapper = refuse_wrappers(self._ranks_here(), self.lanes, self.seed)

    def state_dict(self, *, gather: bool = False) -> State:
        """The state of the newest iteration over this dataset, in this process.

        With `gather`, that of all ranks: a collective, and the same on every rank.
        """
        ranks = self._ranks_here()
        refuse_to_save(ranks, gather, "worker processes" if self._have_workers[os.getpid()] else self._wrapper)
        return gather_state(self._state, ranks, self.lanes) if gather else self._state()

    def _state(self) -> State:
        return (self._newest or self._open()).state_dict()

    def load_state_dict(self, state: State | Sequence[State]) -> None:
        """Begin iterations at a state: that of one rank, or the list of those of all ranks."""
        self._open(state).log_changes()  # raises if the state does not belong here
        self._loaded = copy.deepcopy(state if isinstance(state, Mapping) else list(state))
        self._newest, self._wrapper = None, None
        self._have_workers[os.getpid()] = 0
        if get_worker_info() is None:
            self._loads[os.getpid()] += 1
            self._loads_here = (os.getpid(), self._loads[os.getpid()])

    def _open(self, states: State | Sequence[State] | None = None) -> Samples:
        ranks = self._ranks_here()
        lanes = self.lanes_of(ranks.rank, ranks.world_size)
        worker = get_worker_info()
        samples = Samples(self, lanes if worker is None else lanes[worker.id :: worker.num_workers], ranks)
        states = self._loaded if states is None else states
        if states is not None:
            samples.resume(states)
        return samples

    def _ranks_here(self) -> Ranks:
        """The rank of this process; in a worker process of torch, that of the trainer which started it."""
        if self._given is not None:
            return self._given
        trainer, sent = multiprocessing.parent_process(), self._sent
        if get_worker_info() is not None and sent is not None and trainer is not None and sent.process == trainer.pid:
            return sent.ranks
        return Ranks.found()

    def __getstate__(self) -> State:
        """What is pickled: the recipe, and the loaded state as plain data; not an iteration over it."""
        given = None if self._given is None else replace(self._given, groups=())
        sent = None
        with suppress(ConfigError):  # it is raised where it matters: in the process that reads as this rank
            sent = _SentRanks(os.getpid(), replace(self._ranks_here(), groups=()))
        if get_spawning_popen() is not None:  # to a process that is being started
            self._have_workers[os.getpid()] = 1
        return {**vars(self), "_newest": None, "_given": given, "_sent": sent, "_plans": {}}


class _SentRanks(NamedTuple):
    """The rank of the process that sent a dataset to another one."""

    process: int
    ranks: Ranks


class Resumed(NamedTuple):
    """What a run resumes from."""

    step: int
    history: list[Segment]
    pipeline: str  # to save with its states from now on
    changes: list[str]  # what differs from the saved pipeline, in words
    lanes: dict[int, State]
    data: Rescalable  # to read with: its windows are those of the saved run

    def log_changes(self) -> None:
        """Log the changes, if there are any. Call it on one rank of a run."""
        if self.changes:
            log.warning("resuming from step %d with changes: %s", self.step, "; ".join(self.changes))
