"""Stats for the trainer: tokens consumed of each source, throughput, and time spent waiting.

Tokens are looked up in the tallies of the lanes (`fmsdata.run.tally`), and shares are compared with
the planned ones (`fmsdata.run.shares`). A `Meter` measures the time.
"""

import html
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from fmsdata.core.keys import Ints
from fmsdata.core.wording import counted
from fmsdata.errors import ConfigError
from fmsdata.run.shares import planned_shares
from fmsdata.storage.stats import StorageStats

if TYPE_CHECKING:
    from fmsdata.run.positions import Positions
    from fmsdata.run.rescalable import Rescalable


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """A period of training: its length, its tokens, and how long the trainer waited for batches."""

    seconds: float = 0.0
    tokens: int = 0
    waited: float = 0.0  # seconds

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def waited_share(self) -> float:
        return self.waited / self.seconds if self.seconds else 0.0

    def since(self, earlier: "Throughput") -> "Throughput":
        return Throughput(
            seconds=self.seconds - earlier.seconds,
            tokens=self.tokens - earlier.tokens,
            waited=self.waited - earlier.waited,
        )


@dataclass(frozen=True, kw_only=True)
class SourceStats:
    """One source: tokens and epochs since the start of the run, and its share of the recent tokens.

    Recent tokens are those since the loader was created or resumed. `planned` is the planned share
    of them, from the weights of the phases in which they came.
    """

    tokens: int
    recent_tokens: int
    share: float
    planned: float
    epochs: float
    epoch_tokens: int  # tokens of one epoch
    earlier_epochs: tuple[tuple[int, int], ...] = ()  # of a source that has grown: how many epochs had how many tokens


@dataclass(frozen=True, kw_only=True, repr=False)
class Stats:
    """What a rank has consumed of its lanes since the start of the run, and how fast.

    Only stored tokens count: not delimiters, not padding.

    >>> for step, batch in enumerate(loader):                            # doctest: +SKIP
    ...     train(batch)
    ...     stats = loader.stats()
    ...     print(stats, stats.sources["web"].share, stats.recent.tokens_per_second)
    """

    step: int
    samples: int
    tokens: int
    overall: Throughput  # since the first batch was requested from this loader
    recent: Throughput  # since the last call of `stats()`
    sources: dict[str, SourceStats]
    lanes: int  # the lanes that were counted
    lanes_of_run: int
    storage: StorageStats = field(default_factory=StorageStats)  # requests for remote shards
    cropped: int = 0  # stored tokens that best-fit packing with `crop` has thrown away

    @property
    def cropped_share(self) -> float:
        """The part of the tokens read that was thrown away."""
        return self.cropped / (self.tokens + self.cropped) if self.cropped else 0.0

    @classmethod
    def total(cls, ranks: Sequence["Stats"]) -> "Stats":
        """The stats of all ranks together: sums of tokens, and the longest times.

        Ranks wait for each other, so times don't add up.

        >>> total = Stats.total(gathered)     # doctest: +SKIP
        """
        if not ranks:
            raise ConfigError("there are no stats to add up; give the stats of every rank")
        first = ranks[0]
        lanes = sum(stats.lanes for stats in ranks)
        for stats in ranks:
            if stats.step != first.step or stats.sources.keys() != first.sources.keys():
                raise ConfigError(
                    f"can't add stats of step {first.step} with sources {', '.join(first.sources)} and of step "
                    f"{stats.step} with sources {', '.join(stats.sources)}; give the stats of one step of one run"
                )
        if lanes > first.lanes_of_run:
            raise ConfigError(
                f"these stats are of {counted(lanes, 'lane')}, but the run has {first.lanes_of_run}; "
                "give the stats of each rank once"
            )
        return cls(
            step=first.step,
            samples=sum(stats.samples for stats in ranks),
            tokens=sum(stats.tokens for stats in ranks),
            overall=_of_all_ranks([stats.overall for stats in ranks]),
            recent=_of_all_ranks([stats.recent for stats in ranks]),
            sources={
                name: _source(
                    sum(stats.sources[name].tokens for stats in ranks),
                    sum(stats.sources[name].recent_tokens for stats in ranks),
                    total=sum(source.recent_tokens for stats in ranks for source in stats.sources.values()),
                    planned=source.planned,
                    epoch_tokens=source.epoch_tokens,
                    earlier=source.earlier_epochs,
                    lanes=lanes / first.lanes_of_run,
                )
                for name, source in first.sources.items()
            },
            lanes=lanes,
            lanes_of_run=first.lanes_of_run,
            storage=sum((stats.storage for stats in ranks), StorageStats()),
            cropped=sum(stats.cropped for stats in ranks),
        )

    def as_scalars(self, prefix: str = "data") -> dict[str, float]:
        """All numbers by name, for TensorBoard and the like: `data/tokens`, `data-share/web`, ...

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
        if self.cropped:
            scalars |= {f"{prefix}/cropped": self.cropped, f"{prefix}/cropped_share": self.cropped_share}
        if self.storage:
            scalars |= {f"{prefix}-storage/{name}": value for name, value in asdict(self.storage).items()}
        for name, source in self.sources.items():
            scalars |= {
                f"{prefix}-tokens/{name}": source.tokens,
                f"{prefix}-share/{name}": source.share,
                f"{prefix}-planned/{name}": source.planned,
                f"{prefix}-epochs/{name}": source.epochs,
            }
        return {name: float(value) for name, value in scalars.items()}

    def __repr__(self) -> str:
        return f"Stats of {counted(self.lanes, 'lane')} of {self.lanes_of_run:,}, {self}"

    def _repr_html_(self) -> str:
        """The stats for a notebook: a line, and a table of the sources."""
        rows = "".join(
            f"<tr><td>{html.escape(name)}</td><td>{source.tokens:,}</td><td>{source.share:.2%}</td>"
            f"<td>{source.planned:.2%}</td><td>{source.epochs:.3g}</td></tr>"
            for name, source in self.sources.items()
        )
        head = "".join(f"<th>{name}</th>" for name in ("source", "tokens", "share", "planned", "epochs"))
        return f"<p>{html.escape(self._total())}</p><table><tr>{head}</tr>{rows}</table>"

    def _total(self) -> str:
        return (
            f"step {self.step}: {counted(self.samples, 'sample')}, {counted(self.tokens, 'token')}, "
            f"{self.recent.tokens_per_second:,.0f} tokens/s, waited {self.recent.waited_share:.1%} of the time"
        )

    def __str__(self) -> str:
        sources = "; ".join(
            f"{name} {source.share:.2%} (planned {source.planned:.2%}), {source.epochs:.3g} epochs"
            for name, source in self.sources.items()
        )
        return (
            f"{self._total()}; {sources}"
            + (f"; {self.cropped_share:.2%} thrown away" if self.cropped else "")
            + (f"; storage: {self.storage}" if self.storage else "")
        )


def _of_all_ranks(ranks: Sequence[Throughput]) -> Throughput:
    return Throughput(
        seconds=max(rank.seconds for rank in ranks),
        tokens=sum(rank.tokens for rank in ranks),
        waited=max(rank.waited for rank in ranks),
    )


def _source(
    tokens: int,
    recent: int,
    *,
    total: int,
    planned: float,
    epoch_tokens: int,
    earlier: tuple[tuple[int, int], ...],
    lanes: float,
) -> SourceStats:
    """`lanes` is the share of all lanes that was counted.

    The others are assumed to be like them.
    """
    return SourceStats(
        tokens=tokens,
        recent_tokens=recent,
        share=recent / total if total else 0.0,
        planned=planned,
        epochs=_epochs(tokens / lanes, epoch_tokens, earlier),
        epoch_tokens=epoch_tokens,
        earlier_epochs=earlier,
    )


def _epochs(tokens: float, epoch_tokens: int, earlier: tuple[tuple[int, int], ...]) -> float:
    done = 0
    for count, size in earlier:
        if tokens < count * size:
            return done + tokens / size
        done, tokens = done + count, tokens - count * size
    return done + tokens / epoch_tokens if epoch_tokens else 0.0


@dataclass
class Meter:
    """Measures time from the first batch on. Put `with meter:` around each wait for a batch."""

    begun: Ints  # the tokens that were taken when the loader started, by the columns of tallies
    _began: float | None = None
    _waiting_since: float = 0.0
    _waited: float = 0.0
    _last: Throughput = field(default_factory=Throughput)

    def __enter__(self) -> None:
        self._waiting_since = time.perf_counter()
        if self._began is None:
            self._began = self._waiting_since

    def __exit__(self, *error: object) -> None:
        self._waited += time.perf_counter() - self._waiting_since

    def stats(self, data: "Rescalable", positions: "Positions", storage: StorageStats) -> Stats:
        """The stats of lanes at these positions."""
        columns = positions.tokens()
        columns, cropped = columns[:-1], int(columns[-1])
        here = columns - (positions.tallies.refilled + self.begun)[:-1]
        now = Throughput(
            seconds=0.0 if self._began is None else time.perf_counter() - self._began,
            tokens=int(here.sum()),
            waited=self._waited,
        )
        recent, self._last = now.since(self._last), now
        lanes, total = len(positions.lines), int(columns.sum())
        all_lanes = data.lanes / lanes  # the others are assumed to be like these
        planned = planned_shares(data, (total - now.tokens) * all_lanes, total * all_lanes)
        of_sources = int(here[:-1].sum())
        return Stats(
            step=positions.step,
            samples=sum(positions.lines.values()),
            tokens=total,
            overall=now,
            recent=recent,
            sources={
                name: _source(
                    tokens,
                    recent,
                    total=of_sources,
                    planned=planned[name],
                    epoch_tokens=size,
                    earlier=data.earlier_epochs.get(name, ()),
                    lanes=lanes / data.lanes,
                )
                for (name, size), tokens, recent in zip(
                    data.source_sizes.items(), columns[:-1].tolist(), here[:-1].tolist(), strict=True
                )
            },
            lanes=lanes,
            lanes_of_run=data.lanes,
            storage=storage,
            cropped=cropped,
        )
