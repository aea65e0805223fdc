"""Progress for the trainer: what was consumed of each source, how fast, and how long the trainer waited.

A lane that reads a chunk of lines knows in which order they will be taken. So it counts once, for the whole chunk,
the tokens of each source in the first k lines, for every k: a tally. It travels with the lines, and the loader
looks up how many of them were taken. Nothing is counted line by line, and what was read ahead does not count.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from fmsdata.core.keys import Ints
from fmsdata.errors import ConfigError
from fmsdata.storage.stats import StorageStats

if TYPE_CHECKING:
    from fmsdata.run.lanes import Places
    from fmsdata.run.rescalable import Rescalable
from fmsdata.run.shares import wanted_shares


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
