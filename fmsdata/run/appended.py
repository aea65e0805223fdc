"""Appended shards: how a run that resumes takes up what `fmsdata index --append` added to its sources.

A source goes on with the new shards at the start of an epoch that no lane has begun: the one after
that in which the furthest lane is. So all lanes change over at the same place of the same order, and
no epoch that any of them has begun changes. How far a lane is, its state says; and the lines in
progress are planned again, as for a resume, to see how far they reach.

All of that follows from the states of all lanes. A process that has only some of them goes on with
the shards that the run has read until now.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from fmsdata.core.blocks import Address, Block, InShards, LaneBlocks, Located
from fmsdata.core.iterator import Exhausted, StageIterator
from fmsdata.core.keys import Ints
from fmsdata.core.lane import Lane
from fmsdata.core.stage import Stage
from fmsdata.core.state import State, is_count, part
from fmsdata.core.tokens import StoredTokens
from fmsdata.core.wording import counted
from fmsdata.planning.generations import describe_timeline, extended
from fmsdata.planning.lane_order import LaneOrder
from fmsdata.prefetch.open_files import OpenFiles
from fmsdata.prefetch.shard_files import ShardFiles
from fmsdata.run.lanes import restoring
from fmsdata.run.positions import lines_taken
from fmsdata.run.settled import with_choices
from fmsdata.run.shares import leaves
from fmsdata.stages.shard_reader import ShardReader

if TYPE_CHECKING:
    from fmsdata.run.rescalable import Rescalable

log = logging.getLogger("fmsdata")


class TakenUp(NamedTuple):
    """The data with the appended shards, and what changed, in words."""

    data: "Rescalable"
    changes: list[str]


def unread(lines: Stage) -> dict[str, ShardReader]:
    """The sources with appended shards that no epoch reads yet, by full name."""
    return {
        leaf.name: leaf.stage for leaf in leaves(lines) if isinstance(leaf.stage, ShardReader) and leaf.stage.appended
    }


def take_up(data: "Rescalable", before: Stage, lanes: Mapping[int, State]) -> TakenUp:
    """Let all appended shards be read from the next epoch of their source on.

    `before` is the pipeline that `lanes`, the states of all lanes, were saved with.
    """
    readers = unread(data.lines)
    log.info("shards were appended to %s: planning the lines in progress of all lanes", ", ".join(readers))
    read = _furthest(data, before, lanes)
    switches = {}
    for name, reader in readers.items():
        plan = reader.plan(data.lanes)
        indices = (lane + place * data.lanes for lane, state in lanes.items() for place in _places(state, name))
        switches[name] = 1 + max([read.get(name, 0), *(plan.at(index).epoch for index in indices)])
    described = _with_switches(data.lines.describe(), readers, switches)
    changes = [
        f"source {name!r} reads {counted(readers[name].appended, 'appended shard')} from epoch {epoch} on"
        for name, epoch in sorted(switches.items())
    ]
    return TakenUp(with_choices(data, described), changes)


def _with_switches(description: Any, readers: Mapping[str, ShardReader], switches: Mapping[str, int]) -> Any:
    """The description of a pipeline whose sources read all shards from these epochs on."""
    if not isinstance(description, Mapping):
        return description
    name = str(description.get("source"))
    if description.get("stage") == "ShardReader" and name in switches:
        return {**description, **_appended(readers[name], switches[name])}
    return {key: _with_switches(value, readers, switches) for key, value in description.items()}


def _appended(reader: ShardReader, epoch: int) -> State:
    """What the description of a source says that reads all shards from this epoch on."""
    counts = reader.shard_files.counts
    return describe_timeline(counts, extended(reader.timeline, epoch, counts.newest))


def _furthest(data: "Rescalable", before: Stage, lanes: Mapping[int, State]) -> dict[str, int]:
    """The furthest epoch of each source that any lane is in, at the end of the lines that it has in progress."""
    host = _NotingHost(data)
    try:
        opened: deque[tuple[int, StageIterator]] = deque()
        for index, state in lanes.items():
            lane = replace(data.lane(index, host), only_plans=False, frugal=True, marks=True)
            with restoring(index):
                taken = lines_taken(state, before, data.lanes)[1]
                opened.append((taken, before.open(lane, part(state, "anchor"))))
        while opened:  # one after the other, so that each gives back what it holds
            _plan_again(*opened.popleft())
        return host.furthest()
    finally:
        host.close()


def _plan_again(lines: int, iterator: StageIterator) -> None:
    """Plan the chunk in progress, of which this many lines were taken, or the next one."""
    planned = 0
    with suppress(Exhausted):
        while planned < max(1, lines):
            planned += len(iterator.read())


def _places(state: State, source: str) -> Iterator[int]:
    """The next block of a source, according to a state.

    A lane with leftovers opens the source further back, and a lane where the source was removed does not open it.
    """
    found: Any = state.get("anchor")
    while isinstance(found, Mapping) and "sources" not in found and "below" in found:
        found = found["below"]
    if isinstance(found, Mapping) and isinstance(mixed := found.get("sources"), Mapping):
        pending = [mixed[name] for name in mixed if source == name or source.startswith(f"{name}/")]
    else:
        pending = [found]
    while pending:
        found = pending.pop()
        if isinstance(found, Mapping):
            if is_count(place := found.get("block")):
                yield place
            pending += found.values()


class _NotingHost(OpenFiles):
    """Notes how far each source is read. It reads block by block, so that nothing is read before it is needed."""

    def __init__(self, data: "Rescalable") -> None:
        super().__init__(1.0, versions=data.versions)
        self._noted: list[_NotedBlocks] = []

    def open_blocks(self, files: ShardFiles, order: LaneOrder, lane: Lane) -> LaneBlocks:
        noted = _NotedBlocks(super().open_blocks(files, order, lane), order)
        self._noted.append(noted)
        return noted

    def furthest(self) -> dict[str, int]:
        """The furthest epoch of each source."""
        found: dict[str, int] = {}
        for noted in self._noted:
            found[noted.source] = max(found.get(noted.source, 0), noted.epoch)
        return found


class _NotedBlocks:
    """The blocks of a source for a lane, and how far they were read."""

    tokens_at_once = 0.0

    def __init__(self, blocks: LaneBlocks, order: LaneOrder) -> None:
        self._blocks, self._order, self._place = blocks, order, -1

    @property
    def source(self) -> str:
        return self._order.source

    @property
    def epoch(self) -> int:
        """The epoch that the lane is in."""
        order = self._order
        return 0 if self._place < 0 else order.plan.at(order.lane + self._place * order.lanes).epoch

    def start(self, place: int) -> None:
        self._place = max(self._place, place)
        self._blocks.start(place)

    def read(self, place: int, address: Address) -> Block[StoredTokens]:
        self._place = max(self._place, place)
        return self._blocks.read(place, address)

    def read_all(self, place: int, addresses: Ints, announce: Callable[[Address], None]) -> Located | InShards:
        self._place = max(self._place, place + len(addresses) - 1)
        return self._blocks.read_all(place, addresses, announce)

    def check(self) -> None:
        self._blocks.check()

    def look_up(self, address: Address) -> Block[StoredTokens]:
        return self._blocks.look_up(address)
