"""Replay: plans the lanes of a past run again, without reading tokens or writing anything.

The world and batch sizes of the run, which a checkpoint holds, say which samples were in which
step. The content of a sample comes from planning its lane up to there, from the start of the run or
from a checkpoint.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import NamedTuple

from fmsdata.core.checks import whole
from fmsdata.core.chunk import Chunk, epochs, provenance
from fmsdata.core.lane import Lane
from fmsdata.core.state import State, number, parse, part
from fmsdata.core.wording import counted
from fmsdata.errors import CheckpointError, ConfigError, StateError
from fmsdata.planning.schedule import Schedule, Segment, continued
from fmsdata.prefetch.open_files import OpenFiles
from fmsdata.run.checkpoints import Checkpoints
from fmsdata.run.lanes import restoring
from fmsdata.run.positions import lines_taken
from fmsdata.run.rescalable import Rescalable, Resumed
from fmsdata.stages.delimit import Delimit
from fmsdata.stages.mixture import stages_down_to_mixture
from fmsdata.stages.pack import MODES, Pack

Watch = Callable[[float, int], None]  # is called with the lanes read so far, and the number of lanes to read


class Seen(NamedTuple):
    """A span of stored tokens, and where in the run it was seen.

    Steps count from 0: step `n` is the batch that a loader returns when
    `loader.state_dict()["step"]` is `n`. `row` is the row in the batch of that rank.
    """

    step: int
    rank: int
    row: int
    sample: int
    source: str
    shard: str
    document: int
    start: int
    stop: int
    epoch: int


class Replay:
    """A run, as its checkpoints and the current configuration describe it."""

    def __init__(
        self,
        data: Rescalable,
        *,
        checkpoints: Checkpoints | None = None,
        world_size: int | None = None,
        batch_size: int | None = None,
        from_start: bool = False,
        watch: Watch = lambda _done, _lanes: None,
    ) -> None:
        self.data = data
        self._checkpoints = checkpoints
        self._watch = watch
        self._host = OpenFiles(versions=data.versions)
        steps = [] if checkpoints is None else [step for step in checkpoints.steps() if checkpoints.is_complete(step)]
        self.newest = max(steps, default=0)
        self._pipeline: State | None = None  # of the newest checkpoint
        self._edited = 0  # the first step after the last edit of the mix
        history = self._history() if steps else []
        self._assumed = world_size is not None
        if world_size is not None:
            data.lanes_of(0, whole("world size", world_size))
            history = continued(history, Segment(self.newest, world_size, whole("batch size", batch_size, least=1)))
        if not history:
            where = "" if checkpoints is None else f" in {checkpoints}"
            raise ConfigError(
                f"there is no complete checkpoint{where}, so the world size of the run is unknown: "
                "give it (--world-size)"
            )
        self._last: int | None = None  # the step at which a finite pass ends
        if self.data.epochs is None:
            self.schedule = Schedule(history, data.lanes)
        else:
            self.schedule = Schedule(history, data.lanes, self.data.plan().result().lines)
            self._last = self.schedule.end(history[-1])
        if steps and self.schedule.lines(self.newest)[0] != self._first_lane_lines:
            raise StateError(
                f"{checkpoints}: the run did not begin at the start of the stream: it was started from another one, "
                "or its steps are numbered from those of a model; the content of its steps is unknown"
            )
        self._starts = [] if self._edited else [0]  # the steps at which a replay can start
        if not from_start:
            self._starts += sorted(step for step in steps if step >= max(1, self._edited))

    def __repr__(self) -> str:
        where = "" if self._checkpoints is None else f" of {self._checkpoints}"
        lanes = counted(self.data.lanes, "lane")
        return f"{type(self).__name__}{where}: {lanes}, newest checkpoint at step {self.newest}"

    @property
    def since(self) -> int:
        """The first step that can be replayed: 0, unless the mix of the run was edited."""
        return self._starts[0] if self._starts else self._edited

    def start(self, step: int) -> int:
        """The last step, up to this one, where a replay can start: that of a checkpoint, or 0."""
        usable = self.starts(step)
        if not usable:
            raise StateError(
                f"the mix was edited at step {self._edited}, and there is no checkpoint "
                f"of the steps from there to {step} to start from"
            )
        return usable[-1]

    def starts(self, until: int) -> list[int]:
        """All steps at which a replay can start, up to this one."""
        return [step for step in self._starts if step <= until]

    def require_step(self, step: int) -> None:
        """Raise if a step can't be replayed with this configuration."""
        if self._last is not None and step >= self._last:
            raise ConfigError(
                f"there is no step {step}: the pass ends after {counted(self._last, 'step')}, 0 to {self._last - 1}"
            )
        if step < self._edited:
            raise StateError(
                f"the mix was edited at step {self._edited}, after step {step}: to trace step {step}, use the "
                "configuration from before the edit, and a folder whose newest checkpoint is from before the edit"
            )
        if self._assumed and step < self.newest:
            raise ConfigError(
                f"the checkpoint of step {self.newest} holds the world size of step {step}: "
                "omit --world-size, it is only for later steps"
            )

    def states(self, step: int, lanes: Sequence[int]) -> dict[int, State | None]:
        """The states of these lanes at a step where a replay can start; None at step 0."""
        if step == 0:
            return dict.fromkeys(lanes)
        saved, _ = self._load(step, lanes)
        lines = self.schedule.lines(step).tolist()
        for lane, state in saved.lanes.items():
            if number(state, "lines") != lines[lane]:
                raise StateError(
                    f"{self._checkpoints}/step-{step}: {state['lines']} lines of lane {lane} were taken, but "
                    f"{lines[lane]} according to the newest checkpoint; it is from another run: move it away"
                )
        return dict(saved.lanes)

    def open(self, lane: int, state: State | None) -> "ReplayedLane":
        return ReplayedLane(self.data, self.lane(lane), state)

    def lane(self, index: int) -> Lane:
        return self.data.lane(index, self._host)

    def read(self, opened: "ReplayedLane", stop: int, done: int, lanes: int) -> Iterator[tuple[int, Chunk]]:
        """The chunks of a lane up to a line, each with the number of its first line.

        `done` of `lanes` lanes were read before.
        """
        begin = opened.line
        while (first := opened.line) < stop:
            yield first, opened.read()
            self._watch(done + min(1.0, (opened.line - begin) / (stop - begin)), lanes)

    def seen(self, lane: int, first: int, chunk: Chunk, rows: Iterable[int]) -> Iterator[Seen]:
        """What these rows of a chunk hold, and when they were handed out. Row 0 is line `first`."""
        for row in rows:
            line = chunk.slice(row, row + 1)
            sample = (first + row) * self.data.lanes + lane
            step, rank, batch_row = self.schedule.when(sample)
            for span, epoch in zip(provenance(line)[0], epochs(line)[0], strict=True):
                yield Seen(step, rank, batch_row, sample, *span, epoch)

    def _history(self) -> list[Segment]:
        saved, pipeline = self._load(self.newest, [0])
        self.data, self._pipeline = saved.data, pipeline
        self._edited = max(pipeline.get("edits", []), default=0)
        self._first_lane_lines = number(saved.lanes[0], "lines")
        return saved.history

    def _load(self, step: int, lanes: Sequence[int]) -> tuple[Resumed, State]:
        """What a checkpoint holds of these lanes, and the pipeline that it was saved with."""
        if self._checkpoints is None:
            raise CheckpointError(f"there is no folder with a checkpoint of step {step}")
        states = self._checkpoints.read(step, lanes)
        try:
            own = parse(states[0]["pipeline"], "the description of the pipeline")
            saved = self.data.resume(states, lanes, later=self._pipeline or own)
            if saved.changes and step != self._edited:  # at that step, the run resumed with this mix
                raise StateError(f"the state belongs to a different mix: {'; '.join(saved.changes)}")
        except StateError as error:
            raise StateError(
                f"{self._checkpoints}/step-{step}: {error}; use the configuration that the run had at that step"
            ) from None
        return saved, own


class ReplayedLane:
    """A lane that is read chunk by chunk, from its start or from a saved state."""

    def __init__(self, data: Rescalable, lane: Lane, state: State | None) -> None:
        self._stages, self._lane = stages_down_to_mixture(data.lines), lane
        with nullcontext() if state is None else restoring(lane.index):
            taken, skip = lines_taken(state, data.lines, data.lanes)
            self._iterator = data.lines.open(lane, part(state, "anchor"))
        self.line = taken - skip  # the number of the next line
        self._taken = 0

    def read(self) -> Chunk:
        chunk = self._iterator.read()
        self._taken = len(chunk)
        self.line += len(chunk)
        return chunk

    def blocks_done(self) -> dict[str, int]:
        """The number of blocks of each source that the lines so far were made of."""
        end: State | None = self._iterator.state(self._taken)
        state = end
        for stage in self._stages:
            if isinstance(stage, Pack) and stage.mode == "bestfit":  # its state is at the start of its window
                end, _ = MODES[stage.mode].finish(stage, self._lane, state or {})
                break
            state = state if isinstance(stage, Delimit) else part(state, "below") if "below" in (state or {}) else None
        return blocks_done(end)


def blocks_done(state: State | None) -> dict[str, int]:
    """The number of finished blocks of each source, from the state of a lane's pipeline."""
    while state is not None and "sources" not in state:
        state = part(state, "below")
    sources = part(state, "sources") or {}
    return {name: block_of(part(source, "below")) for name, source in sources.items()}


def block_of(state: State | None) -> int:
    """The next block of a source, from the state of its reader or of a stage above it."""
    while state is not None and "block" not in state and "below" in state:
        state = part(state, "below")
    return number(state, "block")


def at_block(state: State, block: int) -> State:
    """The state of a source at the start of a block, in the form of this state."""
    if "block" in state or "below" not in state:
        return {"block": block, "document": 0}
    return {**state, "below": at_block(state["below"], block)}
