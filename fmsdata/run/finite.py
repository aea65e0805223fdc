"""Finite passes: the stream of a run that ends after a number of epochs.

Each lane reads every document that is its own `epochs` times, and then ends; its last line is filled
up with padding. So lane `l` has a number of lines `n_l`, which only planning it can tell. The stream is
the samples `line * L + lane` with `line < n_lane`, in ascending order: rounds over the lanes, in which
lanes that have ended are skipped. As in an endless run, lane `l` belongs to rank `l mod W`, and a rank
hands out its lowest sample that was not taken yet. The pass ends at the step at which no rank has a
line left. A rank that has none before that hands out rows of padding, which are marked.

Every rank plans the lines of all lanes, so all ranks know the same last step, and ask nobody. Planning
runs the stages without copying tokens, in a thread, and its result is kept in a file.
"""

import atexit
import hashlib
import json
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fmsdata.core.chunk import Chunk
from fmsdata.core.fork_gate import ForkGate
from fmsdata.core.iterator import Exhausted, StageIterator
from fmsdata.core.keys import Ints
from fmsdata.core.limits import start_thread
from fmsdata.core.spans import PADDING, Buffer
from fmsdata.core.stage import Stage
from fmsdata.core.state import is_count
from fmsdata.core.tokens import constant
from fmsdata.errors import ConfigError, DataError, FmsdataError
from fmsdata.planning.schedule import NO_LIMIT, after_samples
from fmsdata.prefetch.open_files import OpenFiles
from fmsdata.run.lengths_only import LengthsOnly, check_text
from fmsdata.stages.mixture import Mixture
from fmsdata.stages.pack import Pack
from fmsdata.stages.shard_reader import ShardReader
from fmsdata.stages.shuffle import Shuffle
from fmsdata.stages.tokenize import Tokenize
from fmsdata.storage.location import Location

if TYPE_CHECKING:
    from fmsdata.run.rescalable import Rescalable

KEPT_SECONDS = 1.0  # a plan that took longer is kept in a file
JOIN_SECONDS = 2.0  # how long the interpreter waits for a thread when it ends
log = logging.getLogger("fmsdata")


class PassPlan(NamedTuple):
    """How many lines each lane has in a pass, or in the first samples of it."""

    lines: Ints
    is_whole: bool = True  # whether each lane ends there, and has no further line

    def first(self, samples: int | None) -> "PassPlan":
        """The first samples of the pass, or all of it."""
        if samples is None or samples >= self.lines.sum():
            return self
        return PassPlan(after_samples(np.zeros_like(self.lines), self.lines, samples), is_whole=False)


def check_finite(lines: Stage) -> Pack:
    """Raise if a pipeline can't be read in a finite pass. Returns the stage that packs its lines."""
    packs: list[Pack] = []
    check_text(stage for stage in _stages(lines) if isinstance(stage, Tokenize))
    for stage in _stages(lines):
        if isinstance(stage, Pack):
            packs.append(stage)
        if isinstance(stage, Mixture) and stage.phases:
            raise ConfigError(
                "a finite pass (epochs) reads every source to its end, and has no phases; remove `phases` or `epochs`"
            )
        if not stage.children() and not isinstance(stage, ShardReader) and not stage.ends():
            raise ConfigError(
                f"a finite pass (epochs) needs sources that end, and {type(stage).__name__} never does; "
                "its ends() must return True, and its iterator raise Exhausted"
            )
    if not packs:
        raise ConfigError("a finite pass (epochs) needs a Pack in the pipeline, which fills up the last lines")
    return packs[0]


def filler_line(pack: Pack) -> Chunk:
    """A line of nothing but padding, for the rows of a rank that has no line left."""
    span = np.array([[0, 0, pack.seq_len, PADDING, 0, 1, 0]], np.int64)
    return Chunk([Buffer(constant(pack.fill, pack.seq_len))], span, np.array([0, 1], np.int64))


def _stages(stage: Stage) -> Iterator[Stage]:
    yield stage
    for child in stage.children().values():
        yield from _stages(child)


class _PlannedLane:
    """A lane whose lines are counted."""

    def __init__(self, data: "Rescalable", index: int, host: OpenFiles) -> None:
        lines = data.lines
        while isinstance(lines, Shuffle):  # it changes their order, not their number
            lines = lines.below
        lane = replace(data.lane(index, host), lengths_only=True)
        self._iterator: StageIterator | None = lines.open(lane)  # None: it has ended
        self.lines = 0

    @property
    def ended(self) -> bool:
        return self._iterator is None

    def count(self, most: int, gate: AbstractContextManager[None], stopped: Callable[[], bool]) -> None:
        """Count lines until the lane ends, or there are this many."""
        while self._iterator is not None and self.lines < most and not stopped():
            try:
                with gate:
                    self.lines += len(self._iterator.read())
            except Exhausted:
                self._iterator = None


def plan_pass(
    data: "Rescalable",
    samples: int | None = None,
    *,
    gate: AbstractContextManager[None] | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> PassPlan | None:
    """Count the lines of all lanes, or as many as the first samples need. None if it was stopped."""
    host, gate = LengthsOnly(_stages(data.lines), data.versions), gate or nullcontext()
    most = NO_LIMIT if samples is None else -(-samples // data.lanes)
    lanes: list[_PlannedLane] = []
    try:
        for index in range(data.lanes):
            lane = _PlannedLane(data, index, host)
            lane.count(most, gate, stopped)
            lanes.append(lane)
            if stopped():
                return None
        while samples is not None and sum(min(lane.lines, most) for lane in lanes) < samples:
            most *= 2  # some lanes have ended: the others have to give more
            if all(lane.ended for lane in lanes):
                break
            for lane in lanes:
                lane.count(most, gate, stopped)
            if stopped():
                return None
    finally:
        host.close()
    lines = np.array([lane.lines for lane in lanes], np.int64)
    if not lines.any():
        raise DataError(
            "there is nothing to read in a finite pass: every document is empty, or shorter than min_length after "
            "stripping"
        )
    if samples is None:
        return PassPlan(lines)
    plan = PassPlan(np.minimum(lines, most)).first(samples)
    return plan._replace(is_whole=plan.is_whole and all(lane.ended for lane in lanes))


class PlanInBackground:
    """Plans a pass in a thread, from the moment it is created. `result` waits for it.

    `folder` is where the plan is kept, for the next start and for other ranks. Without one it is not.
    """

    def __init__(self, data: "Rescalable", samples: int | None, folder: Location | None) -> None:
        self._plan: PassPlan | None = None
        self._error: BaseException | None = None
        self._process = os.getpid()
        self._stop = threading.Event()
        self._gate = ForkGate()
        file = None if folder is None or samples is not None else PlanFile.of(data, folder)
        self._thread = threading.Thread(
            target=self._run, args=(data, samples, file), name="fmsdata-plan-pass", daemon=True
        )
        start_thread(self._thread)
        _RUNNING.add(self)

    @property
    def is_usable(self) -> bool:
        """Whether this process gets a plan from it: it has not failed, and a fork has no thread of its parent."""
        return self._plan is not None or (self._error is None and self._process == os.getpid())

    def result(self) -> PassPlan:
        """The plan."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        if self._plan is None:
            raise RuntimeError("the plan was stopped")
        return self._plan

    def stop(self) -> None:
        """End the thread soon."""
        self._stop.set()
        self._thread.join(JOIN_SECONDS)

    def _run(self, data: "Rescalable", samples: int | None, file: "PlanFile | None") -> None:
        began = time.monotonic()
        try:
            self._plan = None if file is None else file.read()
            if self._plan is not None:
                return
            looked = began

            def stopped() -> bool:
                """Whether the plan is not needed any more: another rank may have written it."""
                nonlocal looked
                if file is not None and time.monotonic() > looked + KEPT_SECONDS:
                    self._plan, looked = file.read(), time.monotonic()
                return self._plan is not None or self._stop.is_set()

            plan = plan_pass(data, samples, gate=self._gate, stopped=stopped)
            self._plan = self._plan or plan
            if plan is not None and file is not None and time.monotonic() > began + KEPT_SECONDS:
                file.write(plan)
        except BaseException as error:
            self._error = error


@dataclass(frozen=True)
class PlanFile:
    """The file that keeps the plan of a pass. Its name depends on everything that the plan depends on."""

    location: Location
    lanes: int

    @classmethod
    def of(cls, data: "Rescalable", folder: Location) -> "PlanFile":
        depends_on = data.fingerprint + json.dumps(data.source_sizes)  # of text, the sizes are tokens that were counted
        digest = hashlib.blake2b(depends_on.encode(), digest_size=8).hexdigest()
        return cls(folder / f"pass-{digest}.json", data.lanes)

    def read(self) -> PassPlan | None:
        """The plan, if it is there and whole."""
        try:
            lines = json.loads(self.location.read_bytes())["lines"] if self.location.exists() else None
        except (FmsdataError, OSError, ValueError, TypeError, LookupError):
            return None
        if not isinstance(lines, list) or len(lines) != self.lanes or not all(map(is_count, lines)) or not any(lines):
            return None
        return PassPlan(np.array(lines, np.int64))

    def write(self, plan: PassPlan) -> None:
        """Keep a plan. Without the file, the next start plans again."""
        try:
            self.location.write_bytes(json.dumps({"version": 1, "lines": plan.lines.tolist()}).encode())
        except (FmsdataError, OSError) as error:
            log.warning("the plan of the pass can't be kept in %s: %s", self.location, error)


_RUNNING: "weakref.WeakSet[PlanInBackground]" = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    for plan in list(_RUNNING):
        plan.stop()
