"""The shards of a source as files: where they are, and what is known of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from fmsdata.core.keys import Ints
from fmsdata.core.wording import counted
from fmsdata.errors import CountsError, DataError
from fmsdata.formats.base import Layout, Shard
from fmsdata.formats.line_index import LineIndex
from fmsdata.planning.counts import Counts
from fmsdata.storage.clients.base import Entry
from fmsdata.storage.location import Location


class CountedText(NamedTuple):
    """Text files whose tokens were counted, as they were then."""

    root: Location  # the folder that was indexed
    files: tuple[tuple[Entry, str | None], ...]  # each with its column; names are relative to the root


@dataclass(frozen=True, eq=False, kw_only=True)
class ShardFiles:
    """The shards of one source."""

    location: Location  # the folder that the names of shards are relative to
    column: str | None
    counts: Counts
    entries: Sequence[Entry] = ()  # sizes and versions, if they are not local
    sizes: Ints | None = None  # if a manifest says: of any files
    lines: Mapping[int, LineIndex] = field(default_factory=dict)  # of text files whose documents are lines
    copies: Mapping[int, Path] = field(default_factory=dict)  # of text files that can't be entered in the middle
    counted: CountedText | None = None  # of text files, if the tokens of all of them were
    tokens: int = field(init=False)  # of all shards
    stored: int = field(init=False)  # bytes of all shards, if they are not local

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", int(self.counts.tokens.sum()))
        sizes = self.sizes if self.entries else None
        stored = sum(entry.size for entry in self.entries) if sizes is None else int(sizes.sum())
        object.__setattr__(self, "stored", stored)

    def path(self, shard: int) -> Path:
        """The path of a shard on a local disk."""
        if self.location.local is None:
            raise RuntimeError(f"{self.location} is not local, and is read by ranges")
        return self.location.local / self.counts.shards[shard]

    def require_size(self, shard: int, size: int, source: str) -> None:
        """Raise if a local file has another size than its manifest says."""
        if self.sizes is not None and size != self.sizes[shard]:
            raise CountsError(
                f"source {source!r}: the manifest lists {self.counts.shards[shard]} with "
                f"{counted(int(self.sizes[shard]), 'byte')}, but the file has {size:,}; run `fmsdata index` to "
                f"count it again (the manifest is in {self.counts.csv_root}/meta)"
            )

    def require(self, shard: int, opened: Shard | Layout, source: str) -> None:
        """Raise if a file does not hold what the counts say."""
        name = self.counts.shards[shard]
        if opened.text != self.counts.text:
            kinds = ("text", "tokens") if opened.text else ("tokens", "text")
            raise DataError(f"source {source!r}: {name} holds {kinds[0]}, but others hold {kinds[1]}; select one kind")
        self.counts.require(shard, documents=opened.documents, tokens=opened.known_tokens, source=source)
