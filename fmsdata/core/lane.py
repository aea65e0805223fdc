"""Lane: what an iterator knows about the lane that it works for."""

from dataclasses import dataclass, field, replace

from fmsdata.core.blocks import Host


@dataclass(eq=False)
class Clock:
    """How far a lane has read, in tokens: when the block that it began last was due."""

    time: float = 0.0


@dataclass(eq=False)
class Pace:
    """The share of one source in what a lane reads. Mixtures set it."""

    share: float = 1.0
    within: "Pace | None" = None

    @property
    def of_lane(self) -> float:
        return self.share * (1.0 if self.within is None else self.within.of_lane)


@dataclass(frozen=True, kw_only=True)
class Lane:
    """Which lane of the run an iterator works for, and what its random choices are keyed by."""

    index: int = 0
    count: int = 1
    seed: int = 0
    source: str = ""
    host: Host | None = None  # opens files, for all lanes that are read together; None: each reader on its own
    window_tokens: int = 0  # about how many tokens it reads at once, when a window is filled
    clock: Clock = field(default_factory=Clock)
    pace: Pace = field(default_factory=Pace)
    epochs: int | None = None  # how often each source is read before it ends, in a finite pass
    marks: bool = False  # replace provenance by offsets into the source of the mixture (for live edits)

    def named(self, name: str) -> "Lane":
        """The same lane, for what lies below one name of a mixture."""
        return replace(self, source=full_name(self.source, name), pace=Pace(within=self.pace))


def full_name(source: str, name: str) -> str:
    """The name of a source of a mixture that may itself be the source of another.

    >>> full_name("", "web"), full_name("english", "web")
    ('web', 'english/web')
    """
    return f"{source}/{name}" if source else name
