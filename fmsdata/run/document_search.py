"""Search for documents in a past run.

A document is in one block, and each epoch gives that block to one lane, at one place of its order.
So only that lane has to be replayed, and only if some lane of the run has come that far.
"""

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple, TypeAlias

import numpy as np

from fmsdata.core.checks import suggestion
from fmsdata.core.chunk import Item, provenance
from fmsdata.core.spans import DOCUMENT
from fmsdata.core.state import part
from fmsdata.core.wording import counted
from fmsdata.errors import ConfigError
from fmsdata.planning.blocks import BlockPlan
from fmsdata.planning.lane_order import place_of
from fmsdata.run.replay import Replay, Seen, at_block, block_of, blocks_done
from fmsdata.run.rescalable import Rescalable
from fmsdata.stages.mixture import Mixture, stages_down_to_mixture
from fmsdata.stages.shard_reader import ShardReader
from fmsdata.stages.tokenize import reader_of, with_max_epochs

NAME = re.compile(r"(.+)#([0-9]{1,18})")


@dataclass(frozen=True, kw_only=True)
class Found:
    """A document, and all that was seen of it: an epoch holds its tokens `start` to `stop`.

    The two are equal for a document that is skipped because too few tokens are left after
    stripping.
    """

    source: str
    shard: str
    document: int
    start: int
    stop: int
    seen: tuple[Seen, ...]


class _Document(NamedTuple):
    """A document of a source, and the range of its tokens that stripping leaves."""

    source: str
    shard: str
    number: int
    row: int  # of its shard, in the plan
    plan: BlockPlan  # of the source
    start: int
    stop: int


_Occurrences: TypeAlias = dict[tuple[_Document, int], int]  # the place of the block, by document and epoch


def find_documents(replay: Replay, names: Iterable[str], until: int) -> list[Found]:
    """Where documents, written `source/shard#number`, were seen in the first `until` steps."""
    requested = [_document(replay, name) for name in names]
    seen: dict[_Document, list[Seen]] = {document: [] for document in requested}
    lanes = _lanes_of(replay, [document for document in seen if document.start < document.stop], until)
    for done, (lane, occurrences) in enumerate(sorted(lanes.items())):
        for document, part_seen in _search(replay, lane, occurrences, until=until, done=done, lanes=len(lanes)):
            seen[document].append(part_seen)
    return [
        Found(
            source=document.source,
            shard=document.shard,
            document=document.number,
            start=document.start,
            stop=document.stop,
            seen=tuple(sorted(seen[document], key=lambda part_seen: (part_seen.epoch, part_seen.start))),
        )
        for document in requested
    ]


def read_document(replay: Replay, name: str) -> list[int]:
    """The tokens that an epoch holds of a document."""
    _, items = _read(replay, name)
    return [token for item in items for token in item.tokens.tolist()]


def _document(replay: Replay, name: str) -> _Document:
    """The document with this name, and the tokens that an epoch holds of it."""
    document, items = _read(replay, name)
    spans = [span for item in items for span in item.spans]
    if not spans:
        return document
    return document._replace(start=min(span.start for span in spans), stop=max(span.stop for span in spans))


def _read(replay: Replay, name: str) -> tuple[_Document, list[Item]]:
    """The document with this name, and what the first epoch makes of it: mostly one item, or none."""
    readers = _readers(replay.data)
    source, shard, number = _parse(name, readers)
    reader = readers[source]
    plan = reader.plan(replay.data.lanes)
    document = _Document(source, shard, number, reader.counts.shards.index(shard), plan, 0, 0)
    lane, place = next(at for epoch in count() if (at := _place(replay.data, document, epoch)) is not None)
    stage = with_max_epochs(stages_down_to_mixture(replay.data.lines)[-1].children()[source], None)
    reading = replay.lane(lane).named(source)
    iterator = stage.open(reading, at_block(stage.open(reading).state(0), place))
    while True:  # a source that is tokenized gives a block in several chunks
        chunk = iterator.read()
        found = [i for i, spans in enumerate(provenance(chunk)) if any(span[:3] == document[:3] for span in spans)]
        if found or block_of(iterator.state(len(chunk))) > place:
            return document, [chunk[i] for i in found]


def _place(data: Rescalable, document: _Document, epoch: int) -> tuple[int, int] | None:
    """The lane that reads a document in an epoch, and the place of its block in the lane.

    None if the shard was appended later.
    """
    plan = document.plan.of_epoch(epoch)
    if not plan.documents[document.row]:
        return None
    return place_of(
        plan.block_of(document.row, document.number),
        epoch,
        plan=document.plan,
        lanes=data.lanes,
        seed=data.seed,
        source=document.source,
    )


def _lanes_of(replay: Replay, documents: Iterable[_Document], until: int) -> dict[int, _Occurrences]:
    """Per lane, the documents and epochs that it may have read in the first `until` steps."""
    reached: dict[str, int] = defaultdict(int)  # the furthest place that any lane has reached in each source
    lines = replay.schedule.lines(until).tolist()
    states = replay.states(replay.start(until), range(replay.data.lanes))
    for done, (lane, state) in enumerate(states.items()):
        opened = replay.open(lane, state)
        for _ in replay.read(opened, lines[lane], done, replay.data.lanes):
            pass
        for source, block in opened.blocks_done().items():
            reached[source] = max(reached[source], block)
    lanes: dict[int, _Occurrences] = defaultdict(dict)
    for document in documents:
        for epoch in count():
            at = _place(replay.data, document, epoch)
            if at is None:
                continue
            lane, place = at
            if place > reached[document.source]:
                break
            lanes[lane][document, epoch] = place
    return lanes


def _search(
    replay: Replay, lane: int, occurrences: _Occurrences, *, until: int, done: int, lanes: int
) -> Iterator[tuple[_Document, Seen]]:
    """Replay a lane from the last checkpoint before these documents, until all are found."""

    def too_late(step: int) -> bool:
        blocks = blocks_done(part(replay.states(step, [lane])[lane], "anchor"))
        return any(blocks[document.source] >= place for (document, _), place in occurrences.items())

    starts = replay.starts(until)
    start = starts[bisect_left(starts[1:], True, key=too_late)]
    by_name = {document[:3]: document for document, _ in occurrences}
    numbers = np.array(sorted({document.number for document, _ in occurrences}))
    missing = {(document, epoch): document.stop - document.start for document, epoch in occurrences}
    opened = replay.open(lane, replay.states(start, [lane])[lane])
    stop = int(replay.schedule.lines(until)[lane])
    for first, chunk in replay.read(opened, stop, done, lanes):
        spans = np.flatnonzero(np.isin(chunk.spans[:, DOCUMENT], numbers))
        rows = np.unique(np.searchsorted(chunk.first, spans, side="right") - 1)
        for seen in replay.seen(lane, first, chunk, rows[rows < stop - first].tolist()):
            document = by_name.get((seen.source, seen.shard, seen.document))
            if document is not None and seen.step >= replay.since:
                missing[document, seen.epoch] -= seen.stop - seen.start
                yield document, seen
        if not any(missing.values()):
            return


def _readers(data: Rescalable) -> dict[str, ShardReader]:
    """The sources, if they are shards that one mixture reads."""
    stage = stages_down_to_mixture(data.lines)[-1]
    readers = {name: reader for name, source in stage.children().items() if (reader := reader_of(source))}
    if not isinstance(stage, Mixture) or len(readers) < len(stage.sources):
        raise ConfigError("documents can only be traced if the pipeline has one Mixture, of ShardReaders")
    return readers


def _parse(name: str, readers: Mapping[str, ShardReader]) -> tuple[str, str, int]:
    """The source, the shard and the number of a document.

    Names of sources may contain slashes: the longest that fits is tried first.
    """
    match = NAME.fullmatch(name)
    if match is None:
        raise ConfigError(f"document {name!r}: expected source/shard#number, such as web/part-0.arrow#17")
    path, number = match[1], int(match[2])
    fitting = [source for source in sorted(readers, key=len, reverse=True) if path.startswith(f"{source}/")]
    if not fitting:
        folder = path.rpartition("/")[0] or path
        raise ConfigError(f"document {name!r}: there is no such source; {suggestion(folder, sorted(readers))}")
    for source in fitting:
        shard, counts = path[len(source) + 1 :], readers[source].counts
        if shard in counts.shards:
            documents = int(counts.documents[counts.shards.index(shard)])
            if not documents and readers[source].appended:
                raise ConfigError(
                    f"document {name!r}: the run has read no document of this shard: it is empty, or was appended later"
                )
            if number >= documents:
                raise ConfigError(
                    f"document {name!r}: the shard has {counted(documents, 'document')}, 0 to {documents - 1}"
                )
            return source, shard, number
    close = suggestion(path[len(fitting[0]) + 1 :], readers[fitting[0]].counts.shards)
    raise ConfigError(f"document {name!r}: source {fitting[0]!r} has no such shard; {close}")
