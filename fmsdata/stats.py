"""Progress for the trainer: what was consumed of each source, how fast, and how long the trainer waited.

A lane that reads a chunk of lines knows in which order they will be taken. So it counts once, for the whole chunk,
the tokens of each source in the first k lines, for every k: a tally. It travels with the lines, and the loader
looks up how many of them were taken. Nothing is counted line by line, and what was read ahead does not count.
"""

import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fmsdata.chunk import BUFFER, DOCUMENT, LENGTH, TAIL, Chunk
from fmsdata.errors import ConfigError
from fmsdata.keys import Ints
from fmsdata.mixture import Mixture, expected_tokens
from fmsdata.stage import Stage, State, below_name, number
from fmsdata.storage_stats import StorageStats

if TYPE_CHECKING:
    from fmsdata.lanes import Places, Rescalable


class Tally(NamedTuple):
    """The stored tokens per source in the first 0, 1, 2, ... lines of a chunk that a lane began after `lines` lines.

    The columns are the sources of the pipeline in the order of their names, and one for all others.
    """

    lane: int
    lines: int
    tokens: Ints


def count_tokens(chunk: Chunk, columns: Mapping[str, int]) -> Ints:
    """The table of a tally: (lines + 1, sources + 1)."""
    width, spans = len(columns) + 1, chunk.spans
    column = np.array([columns.get(buffer.source, width - 1) for buffer in chunk.buffers], np.int64)
    stored = (spans[:, LENGTH] - (spans[:, TAIL] > 0)) * (spans[:, DOCUMENT] >= 0)
    row = np.repeat(np.arange(width, width * len(chunk.first), width), np.diff(chunk.first))
    cells = np.bincount(row + column.take(spans[:, BUFFER]), stored, width * len(chunk.first))
    return np.cumsum(cells.reshape(-1, width), axis=0).astype(np.int64)


class Tallies:
    """What was taken of some lanes. Never changed, but replaced, as places are."""

    def __init__(self, before: Ints, current: Mapping[int, Tally], refilled: Ints) -> None:
        self._before = before  # tokens of all lanes in front of their tallies
        self._current = current
        self.refilled = refilled  # tokens of lines that were taken before the lanes were opened, in their tallies

    @classmethod
    def at(cls, data: "Rescalable", anchors: Iterable[str]) -> "Tallies":
        """Of lanes that stand at these states and have read nothing yet."""
        before = np.zeros(len(data.columns) + 1, np.int64)
        for anchor in anchors:
            for name, tokens in _taken(data.lines, json.loads(anchor)):
                before[data.columns.get(name, -1)] += tokens
        return cls(before, {}, np.zeros_like(before))

    def after(self, passed: Sequence[Tally], lines: Mapping[int, int]) -> "Tallies":
        """These tallies one step on, in which chunks were begun. `lines` are those taken before the step."""
        if not passed:
            return self
        before, current, refilled = self._before.copy(), dict(self._current), self.refilled
        for tally in passed:
            last = current.get(tally.lane)
            if last is not None:  # the lane got as far as here, or was opened here again
                before += last.tokens[tally.lines - last.lines]
            if tally.lane not in self._current:
                taken = min(max(0, lines[tally.lane] - tally.lines), len(tally.tokens) - 1)
                refilled = refilled + tally.tokens[taken]
            current[tally.lane] = tally
        return Tallies(before, current, refilled)

    def tokens(self, lines: Mapping[int, int]) -> Ints:
        """Per column, the tokens of all lanes when this many lines of each are taken."""
        rows = [tally.tokens[lines[lane] - tally.lines] for lane, tally in self._current.items()]
        total: Ints = np.concatenate([self._before, *rows]).reshape(len(rows) + 1, -1).sum(axis=0)
        return total


def source_sizes(stage: Stage) -> dict[str, int]:
    """All sources of a pipeline by their full names, in order, and the tokens of one epoch of each."""
    return {name: leaf.size().tokens for name, leaf, _ in sorted(leaves(stage), key=lambda leaf: leaf[0])}


def wanted_shares(data: "Rescalable", begin: float, end: float) -> dict[str, float]:
    """The share that each source should have of the tokens between two moments of the run, counted in tokens."""
    return {name: share for name, _, share in leaves(data.lines, begin, end)}


def leaves(
    stage: Stage, begin: float = 0, end: float = 0, source: str = "", share: float = 1.0
) -> Iterator[tuple[str, Stage, float]]:
    """The stages that everything comes from, with their full names and their shares of the mix."""
    children = stage.children()
    if not children:
        yield source or str(getattr(stage, "name", type(stage).__name__)), stage, share
    shares = _shares_between(stage, begin * share, end * share) if isinstance(stage, Mixture) else None
    for name, child in children.items():
        if shares is not None:
            yield from leaves(child, begin, end, below_name(source, name), share * shares[name])
        else:
            yield from leaves(child, begin, end, source, share if len(children) == 1 else math.nan)


def _shares_between(mixture: Mixture, begin: float, end: float) -> dict[str, float]:
    """The weights, on average over the phases between two moments, and without sources that have ended."""
    if any(stage.ends() for stage in mixture.sources.values()) and begin < end:
        before, after = (expected_tokens(mixture, tokens) for tokens in (begin, end))
        return {name: (after[name] - before[name]) / (end - begin) for name in mixture.sources}
    ends = [phase.until_tokens for phase in mixture.phases if phase.until_tokens and begin < phase.until_tokens < end]
    if not ends:
        return dict(mixture.phase_at(int(begin)).weights)
    parts = [(mixture.phase_at(int(a)).weights, (b - a) / (end - begin)) for a, b in pairwise([begin, *ends, end])]
    return {name: math.fsum(weights[name] * part for weights, part in parts) for name in mixture.sources}


def _taken(stage: Stage, state: State, source: str = "") -> Iterator[tuple[str, int]]:
    """What mixtures have taken of each source, according to a state of this stage."""
    if isinstance(stage, Mixture):
        for name, mine in state["sources"].items():  # also those that were removed from the mix
            full = below_name(source, name)
            inner = list(_taken(stage.sources[name], mine["below"], full)) if name in stage.sources else []
            yield from inner or [(full, number(mine, "taken"))]
        return
    for child in stage.children().values():
        below = state.get("below")  # a stage that keeps no state of its own tells that of the one below
        yield from _taken(child, below if isinstance(below, dict) else state, source)


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Some time of a training: how long, how many tokens came, and how long the trainer waited for batches."""

    seconds: float = 0.0
    tokens: int = 0
    waited: float = 0.0  # seconds

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def waited_share(self) -> float:
        return self.waited / self.seconds if self.seconds else 0.0

    def since(self, earlier: "Pace") -> "Pace":
        return Pace(
            seconds=self.seconds - earlier.seconds,
            tokens=self.tokens - earlier.tokens,
            waited=self.waited - earlier.waited,
        )


@dataclass(frozen=True, kw_only=True)
class SourceStats:
    """One source: its tokens and epochs since the run began, its share since the loader was made or loaded.

    `wanted` is the share that it should have had of these: with the weights of the phases in which they came.
    """

    tokens: int
    recent_tokens: int  # since the loader was made or loaded
    share: float
    wanted: float
    epochs: float
    epoch_tokens: int  # that one epoch has


@dataclass(frozen=True, kw_only=True)
class Stats:
    """What a rank has consumed of its lanes since the run began, and how fast since the loader was made or loaded.

    Tokens are stored ones: delimiters and padding don't count.

    >>> for step, batch in enumerate(loader):                            # doctest: +SKIP
    ...     train(batch)
    ...     stats = loader.stats()
    ...     print(stats, stats.sources["web"].share, stats.recent.tokens_per_second)
    """

    step: int
    samples: int
    tokens: int
    overall: Pace  # since the first batch that this loader was asked for
    recent: Pace  # since the last call of stats()
    sources: dict[str, SourceStats]
    lanes: int  # that were counted ...
    lanes_of_run: int  # ... of this many
    storage: StorageStats = field(default_factory=StorageStats)  # of shards that are not on a local disk

    @classmethod
    def total(cls, ranks: Sequence["Stats"]) -> "Stats":
        """The stats of all ranks together. Tokens add up; of times, the longest counts, as ranks wait for each other.

        >>> total = Stats.total(gathered)     # doctest: +SKIP
        """
        if not ranks:
            raise ConfigError("there are no stats to add up; give those of every rank")
        first = ranks[0]
        lanes = sum(one.lanes for one in ranks)
        for one in ranks:
            if one.step != first.step or one.sources.keys() != first.sources.keys():
                raise ConfigError(
                    f"stats of step {first.step} with sources {', '.join(first.sources)} and of step {one.step} with "
                    f"sources {', '.join(one.sources)} don't add up; give those of one step of one run"
                )
        if lanes > first.lanes_of_run:
            raise ConfigError(f"these are {lanes} lanes of {first.lanes_of_run}: give the stats of each rank once")
        return cls(
            step=first.step,
            samples=sum(one.samples for one in ranks),
            tokens=sum(one.tokens for one in ranks),
            overall=_together([one.overall for one in ranks]),
            recent=_together([one.recent for one in ranks]),
            sources={
                name: _source(
                    sum(one.sources[name].tokens for one in ranks),
                    sum(one.sources[name].recent_tokens for one in ranks),
                    total=sum(one.recent_tokens for two in ranks for one in two.sources.values()),
                    wanted=source.wanted,
                    epoch_tokens=source.epoch_tokens,
                    lanes=lanes / first.lanes_of_run,
                )
                for name, source in first.sources.items()
            },
            lanes=lanes,
            lanes_of_run=first.lanes_of_run,
            storage=sum((one.storage for one in ranks), StorageStats()),
        )

    def as_scalars(self, prefix: str = "data") -> dict[str, float]:
        """All numbers by name, for TensorBoard and the like: `data/tokens`, `data-share/web` and so on.

        >>> for name, value in loader.stats().as_scalars().items():     # doctest: +SKIP
        ...     writer.add_scalar(name, value, step)
        """
        scalars: dict[str, float] = {
            f"{prefix}/samples": self.samples,
            f"{prefix}/tokens": self.tokens,
            f"{prefix}/tokens_per_second": self.recent.tokens_per_second,
            f"{prefix}/tokens_per_second_overall": self.overall.tokens_per_second,
            f"{prefix}/waited": self.overall.waited,
            f"{prefix}/waited_share": self.recent.waited_share,
            f"{prefix}/waited_share_overall": self.overall.waited_share,
        }
        if self.storage:
            scalars |= {f"{prefix}-storage/{one.name}": getattr(self.storage, one.name) for one in fields(self.storage)}
        for name, source in self.sources.items():
            scalars |= {
                f"{prefix}-{what}/{name}": getattr(source, what) for what in ("tokens", "share", "wanted", "epochs")
            }
        return {name: float(value) for name, value in scalars.items()}

    def __str__(self) -> str:
        sources = "; ".join(
            f"{name} {source.share:.2%} (wanted {source.wanted:.2%}), {source.epochs:.3g} epochs"
            for name, source in self.sources.items()
        )
        return (
            f"step {self.step}: {self.samples:,} samples, {self.tokens:,} tokens, "
            f"{self.recent.tokens_per_second:,.0f} tokens/s, waited {self.recent.waited_share:.1%} of the time; "
            + sources
            + (f"; storage: {self.storage}" if self.storage else "")
        )


def _together(paces: Sequence[Pace]) -> Pace:
    return Pace(
        seconds=max(pace.seconds for pace in paces),
        tokens=sum(pace.tokens for pace in paces),
        waited=max(pace.waited for pace in paces),
    )


def _source(tokens: int, recent: int, *, total: int, wanted: float, epoch_tokens: int, lanes: float) -> SourceStats:
    """`lanes` is the part of the run's lanes that was counted: the others are taken to be like them."""
    return SourceStats(
        tokens=tokens,
        recent_tokens=recent,
        share=recent / total if total else 0.0,
        wanted=wanted,
        epochs=tokens / lanes / epoch_tokens if epoch_tokens else 0.0,
        epoch_tokens=epoch_tokens,
    )


@dataclass
class Meter:
    """Times a trainer from its first batch on: `with meter:` is around the waiting for one."""

    begun: Ints  # the tokens that a loader began with, by the columns of tallies
    _began: float | None = None
    _waiting_since: float = 0.0
    _waited: float = 0.0
    _last: Pace = field(default_factory=Pace)

    def __enter__(self) -> None:
        self._waiting_since = time.perf_counter()
        if self._began is None:
            self._began = self._waiting_since

    def __exit__(self, *error: object) -> None:
        self._waited += time.perf_counter() - self._waiting_since

    def stats(self, data: "Rescalable", places: "Places", storage: StorageStats) -> Stats:
        """The stats of lanes that stand at these places, for which so much was fetched."""
        columns = places.tokens()
        here = columns - places.tallies.refilled - self.begun
        now = Pace(
            seconds=0.0 if self._began is None else time.perf_counter() - self._began,
            tokens=int(here.sum()),
            waited=self._waited,
        )
        recent, self._last = now.since(self._last), now
        lanes, total = len(places.lines), int(columns.sum())
        all_lanes = data.lanes / lanes  # the others are taken to be like these
        wanted = wanted_shares(data, (total - now.tokens) * all_lanes, total * all_lanes)
        of_sources = int(here[:-1].sum())
        return Stats(
            step=places.step,
            samples=sum(places.lines.values()),
            tokens=total,
            overall=now,
            recent=recent,
            sources={
                name: _source(
                    tokens,
                    recent,
                    total=of_sources,
                    wanted=wanted[name],
                    epoch_tokens=size,
                    lanes=lanes / data.lanes,
                )
                for (name, size), tokens, recent in zip(
                    data.source_sizes.items(), columns[:-1].tolist(), here[:-1].tolist(), strict=True
                )
            },
            lanes=lanes,
            lanes_of_run=data.lanes,
            storage=storage,
        )
