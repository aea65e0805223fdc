"""ShardReader: the documents of one source, in the order that is planned for each lane.

The plan gives a lane its blocks, and a key of the block gives the order of the documents in it. So
the state is two numbers: the next block of the lane, and the next document in it.
"""

import copy
import math
from collections.abc import Collection, Mapping
from typing import Any

from fmsdata.core.checks import whole
from fmsdata.core.iterator import StageIterator
from fmsdata.core.lane import Lane
from fmsdata.core.outline import facts_of
from fmsdata.core.stage import Size, Stage
from fmsdata.core.state import State
from fmsdata.core.wording import counted, shown
from fmsdata.corpus.counts import open_source
from fmsdata.corpus.selection import SourcePath, locate
from fmsdata.errors import ConfigError, DataError
from fmsdata.planning.blocks import BlockPlan
from fmsdata.planning.generations import Timeline, describe_timeline, plan_blocks, saved_timeline, tokens_in
from fmsdata.planning.lane_order import LaneOrder
from fmsdata.prefetch.shard_files import ShardFiles
from fmsdata.stages.shard_documents import ReaderIterator
from fmsdata.stages.strip import checked_strip
from fmsdata.storage.settings import Storage

BLOCK_TOKENS = 1 << 18
TOKEN_BYTES = 4  # of text, for each token of a block
DENSE = 1 / 16  # of the lanes: if this many are read together, they share the planning of blocks


class ShardReader(Stage):
    """The documents of a folder of shards, endlessly: each once per epoch, in a new order each epoch.

    All tokens in `strip` are removed from both ends of a document. Documents that are then empty or
    shorter than `min_length` are skipped. With `max_epochs`, which may be a fraction, the documents
    end after that many epochs. `folder` is saved with the state, to find the source again after it
    was removed from the mix.

    Instead of a folder, `path` may be a pattern, or a list of files; or `files` selects some of the
    folder, by names or patterns relative to it. Their order does not matter.

    The documents of Parquet, JSON lines and text files are text, unless a Parquet file has a list column of
    tokens; they go through a stage that makes tokens of them. `column` is the column, or the field of JSON.

    The folder may be on any filesystem that fsspec supports. `storage_options` go to that filesystem,
    such as credentials, and `storage` says how to read from it. Neither changes the documents.

    >>> reader = ShardReader("corpus/web", strip=[0], min_length=8)             # doctest: +SKIP
    >>> reader = ShardReader(["a.parquet", "b.parquet"])                        # doctest: +SKIP
    >>> reader = ShardReader("s3://bucket/corpus/web", storage_options={"anon": True})     # doctest: +SKIP
    """

    def __init__(
        self,
        path: SourcePath,
        *,
        name: str | None = None,
        files: str | Collection[str] | None = None,
        column: str | None = None,
        strip: Collection[int] = (),
        min_length: int = 1,
        block_tokens: int = BLOCK_TOKENS,
        max_epochs: float | None = None,
        folder: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        storage: Storage | None = None,
    ) -> None:
        location, self.files = locate(path, files, storage_options, storage)
        self.path = location.alone()  # without the listing, which the reader outlives
        self.name = name or self.path.name
        self.column = column
        self.strip = checked_strip(strip)
        self.min_length = whole("min_length", min_length)
        self.block_tokens = whole("block_tokens", block_tokens, least=1)
        self.max_epochs = _checked_epochs(max_epochs)
        self.folder = folder
        self._files = open_source(location, column, self.files)
        self.counts = self._files.counts  # of the shards that the newest of its epochs reads
        self.timeline: Timeline = ()  # which shards each epoch reads, if some were appended during the run
        if not self.counts.documents.sum():
            raise DataError(f"{self.path}: {counted(len(self.counts.shards), 'shard')} without documents")

    def open(self, lane: Lane, state: State | None = None) -> StageIterator:
        return ReaderIterator(self, lane, state)

    def children(self) -> Mapping[str, Stage]:
        return {}

    def parameters(self) -> State:
        size = self.size()
        return {
            "shards": self.counts.number,
            "documents": size.documents,
            "tokens": size.tokens,
            "digest": self.counts.digest,
            **describe_timeline(self._files.counts, self.timeline),
            "column": self.column,
            "strip": list(self.strip),
            "min_length": self.min_length,
            "block_tokens": self.block_tokens,
            "max_epochs": self.max_epochs,
            "folder": self.folder,
            **({} if self.files is None else {"files": list(self.files)}),
        }

    def _facts(self) -> str:
        return facts_of(
            {
                "shards": self.counts.number,
                "strip": list(self.strip) or None,
                "min_length": self.min_length if self.min_length > 1 else None,
                "max_epochs": self.max_epochs,
            }
        )

    def describe(self, source: str = "") -> State:
        return {**super().describe(source), "source": source or self.name}

    def size(self) -> Size:
        return Size(int(self.counts.documents.sum()), int(self.counts.tokens.sum()))

    @property
    def shard_files(self) -> ShardFiles:
        """The shards as files: where they are, with their counts."""
        return self._files

    @property
    def remote_bytes(self) -> int:
        """The size of all shards together, if they are not on a local disk; else 0."""
        return self._files.stored

    def settled(self, lanes: int, saved: State | None = None) -> Stage:  # noqa: ARG002
        """The same source, read as the saved run reads it, if shards were appended since it began."""
        timeline = saved_timeline(self._files.counts, saved)
        if timeline == self.timeline:
            return self
        reader = copy.copy(self)
        reader.timeline = timeline
        reader.counts = self._files.counts.until(timeline[-1].generation) if timeline else self._files.counts
        return reader

    @property
    def appended(self) -> int:
        """The number of shards that were appended for running states, and that no epoch reads yet."""
        return self._files.counts.number - self.counts.number

    def with_max_epochs(self, max_epochs: float | None) -> "ShardReader":
        """The same source with a different end."""
        reader = copy.copy(self)
        reader.max_epochs = max_epochs
        return reader

    def without_short(self, strip: Collection[int], min_length: int) -> "ShardReader":
        """The same source with these tokens stripped, and without documents that are then too short."""
        reader = copy.copy(self)
        reader.strip, reader.min_length = checked_strip(strip), whole("min_length", min_length)
        return reader

    def holds_text(self) -> bool:
        return self.counts.text

    def only_plans(self) -> bool:
        return self.path.local is not None and not self.counts.text

    def ends(self) -> bool:
        return self.max_epochs is not None

    def total_tokens(self) -> float:
        if self.max_epochs is None:
            return math.inf
        return tokens_in(self._files.counts, self.timeline, float(self.max_epochs))

    def source_name(self) -> str:
        return self.name

    @property
    def block_size(self) -> int:
        """The size of blocks in what the counts count: tokens, or bytes of text."""
        return self.block_tokens * (TOKEN_BYTES if self.counts.text else 1)

    def plan(self, lanes: int) -> BlockPlan:
        """How this source is cut into blocks."""
        return plan_blocks(self._files.counts, self.timeline, lanes, self.block_size)

    def block_order(self, lane: Lane) -> LaneOrder:
        """The blocks of this source in the order in which a lane reads them."""
        return LaneOrder(
            self.plan(lane.count),
            lane=lane.index,
            lanes=lane.count,
            seed=lane.seed,
            source=lane.source or self.name,
            epochs=self._epochs_of(lane),
            dense=lane.host is not None and lane.host.share >= DENSE,
        )

    def _epochs_of(self, lane: Lane) -> float | None:
        """After how many epochs the source ends in a lane: `max_epochs`, or earlier if the pass is finite."""
        if self.max_epochs is None or lane.epochs is None:
            return lane.epochs if self.max_epochs is None else self.max_epochs
        return min(self.max_epochs, lane.epochs)


def _checked_epochs(epochs: float | None) -> float | None:
    if epochs is None:
        return None
    if isinstance(epochs, bool) or not isinstance(epochs, int | float) or not 0 < epochs < math.inf:
        raise ConfigError(f"max_epochs is {shown(epochs)}; it must be a number above zero, or None for no end")
    return epochs
