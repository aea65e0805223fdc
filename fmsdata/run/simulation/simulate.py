"""The simulation of a run: sampled ranks, all blocks that they read, and what these cost.

Nothing here reads the stream. The real code cuts the blocks, orders them for each lane, mixes the
sources, and asks for byte ranges; this module adds up.
"""

import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, TypeVar

import numpy as np

from fmsdata.core.stage import Stage
from fmsdata.core.wording import counted
from fmsdata.errors import ConfigError
from fmsdata.planning.blocks import cut_blocks
from fmsdata.planning.drift import SPREAD, have_one_length
from fmsdata.planning.lane_order import LaneOrder
from fmsdata.prefetch.remote_source import LAYOUT_BYTES
from fmsdata.run.rescalable import Rescalable
from fmsdata.run.shares import expected_tokens
from fmsdata.run.simulation.costs import SourceCosts, sample_costs
from fmsdata.run.simulation.mix import MadeUpLengths, realised_shares
from fmsdata.run.simulation.walk import Floats, Stretch, at, walk
from fmsdata.stages.mixture import Mixture
from fmsdata.stages.shard_reader import ShardReader

Value = TypeVar("Value")
ROWS = 1024  # documents whose list offsets are fetched together, where they are kept: a record batch
AHEAD = 1.5  # windows that are fetched ahead of what is read, on average
BLOCKS_AHEAD = 1.5  # and of each source: the rest of the block that is read, and the last that is fetched
BEHIND_ALL = 1 << 40  # a place behind the last block of a source that has ended
MIX_TOKENS = 1 << 20  # of a lane, for each sample of the realised mix


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """What a simulation needs beside the configuration."""

    nodes: int
    gpus: int  # of a node; each is a data-parallel rank
    tokens: int  # of the whole run
    tokens_per_second: float  # of a rank
    price_per_million_requests: float  # in dollars
    price_per_gb: float
    ranks: int = 4  # that are sampled
    lanes: int = 32  # of each process, at most
    points: int = 16  # moments of the run
    blocks: int = 16  # of each source, whose requests are planned
    most_blocks: int = 4096  # that are walked of each lane and source

    @property
    def world_size(self) -> int:
        return self.nodes * self.gpus

    @property
    def seconds(self) -> float:
        """How long the run takes."""
        return self.tokens / (self.tokens_per_second * self.world_size)


def check_lanes(data: Rescalable, world_size: int) -> None:
    """Raise if there are more ranks than lanes."""
    if world_size > data.lanes:
        raise ConfigError(
            f"{counted(world_size, 'rank')} need at least as many lanes, and this run has {data.lanes}: add "
            f"lanes={world_size} to the command, or a multiple of it, or use fewer ranks"
        )


def simulate(
    data: Rescalable, mixture: Mixture, readers: Mapping[str, ShardReader], workers: int, given: Assumptions
) -> dict[str, Any]:
    """What a run asks of its store, and how it behaves, as plain data.

    `workers` are the processes of a rank that read, at least 1.
    """
    check_lanes(data, given.world_size)
    ranks = _spread_out(given.world_size, given.ranks)
    share = -(-len(data.lanes_of(0, given.world_size)) // workers) / data.lanes
    ends = np.linspace(0, given.tokens, given.points + 1)
    taken = [expected_tokens(mixture, tokens, data.epochs) for tokens in ends.tolist()]
    # What was fetched is ahead of what was read: the window in progress, half used, and the next one.
    ahead = AHEAD * data.lines.window_tokens() * data.lanes
    fetched = [taken[0], *(expected_tokens(mixture, tokens + ahead, data.epochs) for tokens in ends[1:].tolist())]
    units = {name: _units(mixture, name, reader) for name, reader in readers.items()}
    plans = {name: cut_blocks(reader.counts, data.lanes, reader.block_size) for name, reader in readers.items()}
    reach = {name: np.array([tokens[name] for tokens in fetched]) / data.lanes * units[name] for name in readers}
    for name, reader in readers.items():
        reach[name][reach[name] > 0] += BLOCKS_AHEAD * reader.size().tokens / plans[name].blocks
    read = {name: np.array([tokens[name] for tokens in taken]) / data.lanes for name in readers}
    costs = {
        name: sample_costs(
            reader.shard_files,
            plans[name],
            name,
            share=share,
            blocks=given.blocks,
        )
        for name, reader in readers.items()
    }
    requests, bytes_, layouts = np.zeros(given.points), np.zeros(given.points), np.zeros(given.points)
    epochs: dict[str, list[Floats]] = {name: [] for name in readers}
    shares: list[list[dict[str, float]]] = [[] for _ in range(given.points)]
    walked = 0
    mix_tokens = min(MIX_TOKENS, max(1, given.tokens // data.lanes // given.points))
    shards = {name: len(reader.counts.shards) for name, reader in readers.items()}
    for rank, worker in product(ranks, range(workers)):
        mine = list(data.lanes_of(rank, given.world_size))[worker::workers]
        chosen = [mine[number] for number in _spread_out(len(mine), given.lanes)]
        if not chosen:
            continue
        scale = len(mine) / len(chosen)
        events: list[tuple[Floats, Sequence[Stretch], str]] = []
        for lane in chosen:
            stretches = {
                name: _walk(data, reader, name, lane, reach[name][-1], given) for name, reader in readers.items()
            }
            for name, found in stretches.items():
                walked += sum(len(stretch.before) for stretch in found)
                events.append((reach[name], found, name))
                epochs[name].append(at(found, read[name] * units[name], lambda s: s.epochs) if found else ends * 0)
            if lane == chosen[0] and not worker:
                _sample_mix(data, mixture, lane, stretches, read, units, shares, mix_tokens)
        traffic = _traffic(events, costs, shards, given.points, LAYOUT_BYTES / scale)
        requests, bytes_, layouts = (
            before + now * scale for before, now in zip((requests, bytes_, layouts), traffic, strict=True)
        )
    per_point = given.seconds / given.points
    scale = given.world_size / len(ranks)
    total_requests, total_bytes = float(requests.sum() * scale), float(bytes_.sum() * scale)
    return {
        "world_size": given.world_size,
        "lanes": data.lanes,
        "tokens": given.tokens,
        "seconds": given.seconds,
        "sampled": {"ranks": ranks, "blocks": walked, "blocks_of_requests": {n: c.blocks for n, c in costs.items()}},
        "requests": total_requests,
        "requests_of_layouts": float(layouts.sum() * scale),
        "bytes": total_bytes,
        "requests_per_second": (requests * scale / per_point).tolist(),
        "bytes_per_second_per_node": (bytes_ * scale / per_point / given.nodes).tolist(),
        "bytes_per_node": total_bytes / given.nodes,
        "bytes_per_request": total_bytes / max(1.0, total_requests),
        "at_tokens": ends.tolist(),
        "sources": {
            name: _source(mixture.sources[name], reader, costs[name], epochs[name], float(taken[-1][name]))
            for name, reader in readers.items()
        },
        "mix": _mix(data, mixture, shares, ends, mix_tokens),
        "cost_dollars": total_requests / 1e6 * given.price_per_million_requests
        + total_bytes / 1e9 * given.price_per_gb,
        **_start(data, ranks[0], given, costs, readers, units, mixture),
    }


def _spread_out(count: int, most: int) -> list[int]:
    return sorted({round(number) for number in np.linspace(0, count - 1, min(count, most)).tolist()})


def _units(mixture: Mixture, name: str, reader: ShardReader) -> float:
    """What the counts count, for each token of the mixture: 1, or bytes of text."""
    return max(1, reader.size().tokens) / max(1, mixture.sources[name].size().tokens)


def _order(data: Rescalable, reader: ShardReader, name: str, lane: int) -> LaneOrder:
    return reader.block_order(data.lane(lane, MadeUpLengths(0.0)).named(name))


def _walk(
    data: Rescalable, reader: ShardReader, name: str, lane: int, tokens: float, given: Assumptions
) -> list[Stretch]:
    spread = 0.0 if have_one_length(reader.counts) else SPREAD
    order = _order(data, reader, name, lane)
    return walk(order, tokens, stretches=given.points, most=given.most_blocks, spread=spread)


def _traffic(
    events: Sequence[tuple[Floats, Sequence[Stretch], str]],
    costs: Mapping[str, SourceCosts],
    shards: Mapping[str, int],
    points: int,
    memory: float,
) -> tuple[Floats, Floats, Floats]:
    """Requests, bytes, and requests of layouts between the moments of a run, of lanes of one process."""
    requests, bytes_, layouts = np.zeros(points), np.zeros(points), np.zeros(points)
    reads: list[tuple[float, int, str, int, int, float]] = []
    blocks: Counter[str] = Counter()
    whole = True
    for reach, stretches, name in events:
        total, cost = max(1e-9, float(reach[-1])), costs[name]
        for stretch in stretches:
            if not len(stretch.before):
                continue
            weight = 1.0
            if len(stretches) > 1:
                whole = False
                weight = total / len(stretches) / float(stretch.tokens.sum())
            point = np.clip(np.searchsorted(reach, stretch.before, "right") - 1, 0, points - 1)
            np.add.at(requests, point, weight * cost.block_requests)
            np.add.at(bytes_, point, weight * cost.bytes_per_token * stretch.tokens)
            blocks[name] += round(weight * len(point))
            when, rows = (stretch.before / total).tolist(), stretch.addresses[:, :2].tolist()
            reads += [(t, p, name, *row, weight) for t, p, row in zip(when, point.tolist(), rows, strict=True)]
    if not whole and sum(shards[name] * costs[name].layout_memory for name in shards) <= memory:
        for name, count in blocks.items():  # each layout is read once, and stays
            opened = shards[name] * -math.expm1(-count / shards[name])
            layouts[0] += opened * costs[name].layout.requests
            bytes_[0] += opened * costs[name].layout.bytes
        return requests + layouts, bytes_, layouts
    kept: OrderedDict[tuple[str, int], set[int]] = OrderedDict()
    used = 0.0
    for _, now, name, shard, first, weight in sorted(reads):
        cost, key = costs[name], (name, shard)
        if key not in kept:
            kept[key] = set()
            used += cost.layout_memory
            layouts[now] += weight * cost.layout.requests
            bytes_[now] += weight * cost.layout.bytes
            while used > memory and len(kept) > 1:
                used -= costs[kept.popitem(last=False)[0][0]].layout_memory
        kept.move_to_end(key)
        if first // ROWS not in kept[key]:
            kept[key].add(first // ROWS)
            requests[now] += weight * cost.first.requests
            bytes_[now] += weight * cost.first.bytes
    return requests + layouts, bytes_, layouts


def _sample_mix(
    data: Rescalable,
    mixture: Mixture,
    lane: int,
    stretches: Mapping[str, list[Stretch]],
    read: Mapping[str, Floats],
    units: Mapping[str, float],
    shares: list[list[dict[str, float]]],
    tokens: int,
) -> None:
    """Add the realised mix of a lane at each moment to the shares."""
    known = replace(data.lane(lane, MadeUpLengths(0.0)), lengths_only=True)
    places = {
        name: at(found, read[name] * units[name], lambda s: s.first + np.arange(len(s.before), dtype=np.float64))
        if found
        else read[name] * 0
        for name, found in stretches.items()
    }
    for name, place in places.items():
        place[read[name] * data.lanes >= mixture.sources[name].total_tokens() - 1] = BEHIND_ALL
    for point, found in enumerate(shares):
        where = {name: (int(read[name][point]), int(places[name][point])) for name in stretches}
        found.append(realised_shares(mixture, known, where, tokens))


def _mix(
    data: Rescalable,
    mixture: Mixture,
    shares: Sequence[Sequence[Mapping[str, float]]],
    ends: Floats,
    tokens: int,
) -> dict[str, Any]:
    """The realised mix of the sampled lanes, and the planned one while all lanes read as many tokens."""
    names = list(mixture.sources)
    realised = {name: [float(np.mean([lane[name] for lane in point])) for point in shares] for name in names}
    planned: dict[str, list[float]] = {name: [] for name in names}
    for start in ends[:-1].tolist():
        before, after = (expected_tokens(mixture, t, data.epochs) for t in (start, start + tokens * data.lanes))
        for name in names:
            planned[name].append((after[name] - before[name]) / (tokens * data.lanes))
    apart = max(abs(a - b) for name in names for a, b in zip(realised[name], planned[name], strict=True))
    return {"tokens_of_a_lane": tokens, "realised": realised, "planned": planned, "largest_difference": apart}


def _source(
    stage: Stage, reader: ShardReader, costs: SourceCosts, epochs: Sequence[Floats], tokens: float
) -> dict[str, Any]:
    each = np.array(epochs)
    return {
        "tokens": tokens,
        "epochs_read": tokens / max(1, stage.size().tokens),
        "shards": len(reader.counts.shards),
        "requests_per_block": costs.block_requests,
        "bytes_per_token": costs.bytes_per_token,
        "requests_per_layout": costs.layout.requests,
        "epochs": {
            "mean": each.mean(axis=0).tolist(),
            "least": each.min(axis=0).tolist(),
            "most": each.max(axis=0).tolist(),
        },
        "drift": float((each.max(axis=0) - each.min(axis=0)).max()),
    }


def _start(
    data: Rescalable,
    rank: int,
    given: Assumptions,
    costs: Mapping[str, SourceCosts],
    readers: Mapping[str, ShardReader],
    units: Mapping[str, float],
    mixture: Mixture,
) -> dict[str, Any]:
    """Really open the lanes of a rank, save their state, and open them there again."""
    mine = data.lanes_of(rank, given.world_size)
    opened, lanes = _timed(lambda: data.start(mine))
    positions = lanes.positions(0)
    description, fingerprint = _timed(lambda: data.fingerprint)
    texts, states = positions.state(), positions.states(mine)
    lane_bytes = sum(map(len, texts.values())) / len(texts)
    resumed, again = _timed(lambda: data.start(mine, states))
    for each in (lanes, again):
        each.files.close()
    window = data.lines.window_tokens()
    weights = mixture.phase_at(0).weights
    needed = sum(weights[name] * units[name] * costs[name].bytes_per_token for name in readers) * window
    return {
        "state": {
            "bytes_of_a_lane": lane_bytes,
            "bytes_of_all_ranks": lane_bytes * data.lanes + len(fingerprint),
            "bytes_of_a_rank": lane_bytes * len(mine) + len(fingerprint),
        },
        "start": {
            "seconds_to_open": opened,
            "seconds_to_describe": description,
            "seconds_to_resume": resumed,
            "bytes_of_a_window": needed,
            "lanes_of_a_rank": len(mine),
        },
    }


def _timed(work: Callable[[], Value]) -> tuple[float, Value]:
    began = time.perf_counter()
    value = work()
    return time.perf_counter() - began, value
