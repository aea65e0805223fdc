"""The shards of a source as files: where they are, and what is known of them."""

from dataclasses import dataclass, field
from pathlib import Path

from fmsdata.planning.counts import Counts
from fmsdata.storage.clients.base import Entry
from fmsdata.storage.location import Location


@dataclass(frozen=True, eq=False, kw_only=True)
class ShardFiles:
    """The shards of one source."""

    location: Location  # the folder that the names of shards are relative to
    column: str | None
    counts: Counts
    entries: tuple[Entry, ...] = ()  # sizes and versions, if they are not local
    tokens: int = field(init=False)  # of all shards

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", int(self.counts.tokens.sum()))

    def path(self, shard: int) -> Path:
        """The path of a shard on a local disk."""
        if self.location.local is None:
            raise RuntimeError(f"{self.location} is not local, and is read by ranges")
        return self.location.local / self.counts.shards[shard]
