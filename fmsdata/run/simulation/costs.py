"""What a block costs: the requests and bytes of blocks and layouts, sampled from a source.

The readers of formats are sans I/O: they name the byte ranges that they need, step by step. Here they
run on the bytes of a few blocks, and each step is merged into requests by the rule of the range queue.
"""

import os
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from fmsdata.core.blocks import Address
from fmsdata.core.ranges import Range, merge
from fmsdata.formats import read_layout
from fmsdata.formats.base import Data, Layout, Reading
from fmsdata.planning.blocks import BlockPlan
from fmsdata.prefetch.decoded import DecodedBatches
from fmsdata.prefetch.range_queue import RangeQueues
from fmsdata.prefetch.remote_source import LayoutCache, RemoteSource
from fmsdata.prefetch.shard_files import ShardFiles
from fmsdata.storage.local import file_entry

Value = TypeVar("Value")


@dataclass(frozen=True)
class Cost:
    """Requests and bytes."""

    requests: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.requests + other.requests, self.bytes + other.bytes)

    def __mul__(self, times: float) -> "Cost":
        return Cost(self.requests * times, self.bytes * times)


@dataclass(frozen=True, kw_only=True)
class SourceCosts:
    """The mean costs of a source: `block` without its tokens' bytes, which are `bytes_per_token` each."""

    block_requests: float
    bytes_per_token: float
    first: Cost  # more, for a block whose list offsets are not kept yet
    layout: Cost
    layout_memory: float
    blocks: int  # that were sampled


def sample_costs(files: ShardFiles, plan: BlockPlan, source: str, *, share: float, blocks: int) -> SourceCosts:
    """Sample blocks of a source that `share` of is read by one process."""
    sampled = _SampledSource(files, plan, source, share)
    # From the middle of as many parts: the ends of shards, which cost less, are not more frequent than in the source.
    numbers = (np.arange(0.5, min(blocks, plan.blocks)) * plan.blocks / min(blocks, plan.blocks)).astype(np.int64)
    layouts: dict[int, Layout] = {}
    layout_cost, first_cost, again_cost = Cost(), Cost(), Cost()
    tokens = 0
    for number in numbers.tolist():
        address = plan.address(number)
        if address.shard not in layouts:
            layouts[address.shard], cost = sampled.layout(address.shard)
            layout_cost += cost
        first_cost += sampled.block(layouts[address.shard], address)[1]
        held, cost = sampled.block(layouts[address.shard], address)
        again_cost += cost
        tokens += held
    count, opened = len(numbers), len(layouts)
    more = Cost(first_cost.requests - again_cost.requests, first_cost.bytes - again_cost.bytes)
    return SourceCosts(
        block_requests=again_cost.requests / count,
        bytes_per_token=again_cost.bytes / max(1, tokens),
        first=more * (1 / count),
        layout=layout_cost * (1 / opened),
        layout_memory=sum(layout.nbytes for layout in layouts.values()) / opened,
        blocks=count,
    )


class _SampledSource(RemoteSource):
    """A source whose readings are run at once, on the bytes of its files wherever they are."""

    def __init__(self, files: ShardFiles, plan: BlockPlan, source: str, share: float) -> None:
        local = files.location.local
        if local is not None:
            files = replace(files, entries=tuple(file_entry(local, name) for name in files.counts.shards))
        storage = files.location.storage
        super().__init__(
            files=files,
            plan=plan,
            source=source,
            share=share,
            queues=RangeQueues(replace(storage, cache=None)),
            layouts=LayoutCache(),
            decoded=DecodedBatches(storage.prefetch_bytes),
        )

    def layout(self, shard: int) -> tuple[Layout, Cost]:
        files = self._files
        name = files.counts.shards[shard]
        reading = read_layout(
            name,
            files.entries[shard].size,
            files.column,
            self._plan.bounds(shard),
            dense=self._dense,
            index=files.lines.get(shard),
        )
        return self._run(reading, shard)

    def block(self, layout: Layout, address: Address) -> tuple[int, Cost]:
        """The tokens that a block really has, and what it costs."""
        block, cost = self._run(layout.block(address.first, address.stop), address.shard)
        return int(block.length.sum()), cost

    def _run(self, reading: Reading[Value], shard: int) -> tuple[Value, Cost]:
        cost = Cost()
        try:
            ranges = next(reading)
            while True:
                merged = merge(ranges, bridge=True)
                cost += Cost(len(merged), sum(stop - start for start, stop in merged))
                ranges = reading.send([self._read(shard, requested) for requested in ranges])
        except StopIteration as end:
            value: Value = end.value
            return value, cost

    def _read(self, shard: int, requested: Range) -> Data:
        local = self._files.location.local
        if local is None:
            return self.fetch_range(shard, *requested).result()
        with open(local / self._files.counts.shards[shard], "rb") as file:
            return os.pread(file.fileno(), requested.stop - requested.start, requested.start)
