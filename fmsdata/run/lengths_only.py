"""Planning a pass over text from the number of tokens of each document, without reading text.

`fmsdata index --tokenizer` has counted them. `LengthsOnly` is the host of lanes that are planned: the
reader of a text source gets documents of the right lengths from it, and `Tokenize` leaves them as they
are. Some stages compare tokens: `Delimit` adds no EOS to a document that ends with one. So none of the
ids that they compare with may occur in the text; then any other token can stand for those of a document.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from fmsdata.core.blocks import Address, Block, LaneBlocks, Located, read_each
from fmsdata.core.keys import Ints
from fmsdata.core.lane import Lane
from fmsdata.core.stage import Stage
from fmsdata.core.tokens import StoredTokens, Tokens
from fmsdata.core.wording import few
from fmsdata.corpus.token_lengths import kept_lengths
from fmsdata.errors import ConfigError, CountsError
from fmsdata.planning.lane_order import LaneOrder
from fmsdata.prefetch.open_files import OpenFiles
from fmsdata.prefetch.shard_files import ShardFiles
from fmsdata.stages.delimit import Delimit
from fmsdata.stages.pack import Pack
from fmsdata.stages.shard_reader import ShardReader
from fmsdata.stages.tokenize import Tokenize
from fmsdata.storage.mapped import Versions

UNKNOWN = -1  # stands for any token that no stage compares with
SHOWN = 3  # commands in a message
PREPARE = "tokenize the corpus first, with `fmsdata prepare`"


def check_text(sources: Iterable[Tokenize]) -> None:
    """Raise unless the tokens of each document of these sources were counted."""
    uncounted = []
    for source in sources:
        reader = source.below if isinstance(source.below, ShardReader) else None
        if reader is None:
            raise ConfigError(
                "a finite pass (epochs, evaluation) is planned from the number of tokens of each document, which is "
                f"unknown for text that goes through {type(source.below).__name__} before it is tokenized; {PREPARE}"
            )
        if reader.strip or reader.min_length > 1:
            raise ConfigError(
                f"source {source.source_name()!r}: strip and min_length of a ShardReader of text count bytes, and a "
                "finite pass (epochs, evaluation) is planned from tokens; give them to Tokenize instead"
            )
        if not source.is_counted:
            uncounted.append(source)
    if uncounted:
        names = few([repr(source.source_name()) for source in uncounted], SHOWN)
        commands = few(list(dict.fromkeys(source.how_to_count for source in uncounted)), SHOWN, " and ")
        raise ConfigError(
            "a finite pass (epochs, evaluation) is planned from the number of tokens of each document, and those of "
            f"source {names} were not counted with this tokenizer; count them once: {commands}; or {PREPARE}"
        )


class LengthsOnly(OpenFiles):
    """The host of lanes that are planned. The lengths of a text file are read once, and kept."""

    def __init__(self, stages: Iterable[Stage], versions: Versions) -> None:
        super().__init__(versions=versions)
        self._compared = dict(_compared_tokens(stages))
        self._lengths: dict[tuple[ShardFiles, int], npt.NDArray[np.uint32]] = {}

    def open_blocks(self, files: ShardFiles, order: LaneOrder, lane: Lane) -> LaneBlocks:
        if not files.counts.text:
            return super().open_blocks(files, order, lane)
        return LengthBlocks(partial(self._lengths_of, files, order.source))

    def _lengths_of(self, files: ShardFiles, source: str, shard: int) -> npt.NDArray[np.uint32]:
        key = files, shard
        if key not in self._lengths:
            self._lengths[key] = self._read(files, source, shard)
        return self._lengths[key]

    def _read(self, files: ShardFiles, source: str, shard: int) -> npt.NDArray[np.uint32]:
        counts, counted = files.counts, files.counted
        if counted is None or counts.tokenizer is None:
            raise RuntimeError("a pass over text is planned without token counts")
        file, column = counted.files[shard]
        found = kept_lengths(counted.root, file, column, counts.tokenizer, int(counts.documents[shard]))
        if found is None:
            raise CountsError(
                f"source {source!r}: the tokens of each document of {file.name} are missing in {counted.root}/meta, or "
                f"are those of another version of the file; run `fmsdata index {counted.root} --tokenizer TOKENIZER`"
            )
        for token in found.ids[np.isin(found.ids, list(self._compared))].tolist():
            raise ConfigError(
                f"source {source!r}: the text of {file.name} contains token {token}, which is {self._compared[token]}; "
                "the lines of a finite pass over text can only be planned if no text contains that token; choose "
                f"another one, or {PREPARE}"
            )
        return found.lengths


def _compared_tokens(stages: Iterable[Stage]) -> Iterator[tuple[int, str]]:
    """The tokens that stages look for in documents, and what they are."""
    for stage in stages:
        if isinstance(stage, Tokenize):
            yield from ((token, "in `strip`") for token in stage.strip)
        named: dict[str, int | None] = {}
        if isinstance(stage, Delimit):
            named = {"bos": stage.bos, "eos": stage.eos}
        elif isinstance(stage, Pack):
            named = {"bol": stage.bol, "eol": stage.eol}
        yield from ((token, f"`{name}`") for name, token in named.items() if token is not None)


class LengthBlocks:
    """Blocks of documents of which only the lengths are known."""

    tokens_at_once = math.inf

    def __init__(self, lengths_of: "Callable[[int], npt.NDArray[Any]]") -> None:
        self._lengths_of = lengths_of

    def start(self, place: int) -> None:
        pass

    def read(self, place: int, address: Address) -> Block[StoredTokens]:  # noqa: ARG002
        return self.look_up(address)

    def read_all(self, place: int, addresses: Ints, announce: Callable[[Address], None]) -> Located:
        return read_each(self, place, addresses, announce)

    def check(self) -> None:
        pass

    def look_up(self, address: Address) -> Block[StoredTokens]:
        lengths = self._lengths_of(address.shard)[address.first : address.stop].astype(np.int64)
        nothing = np.zeros(len(lengths), np.int64)
        return Block([_UnknownTokens()], nothing, nothing, lengths)


class _UnknownTokens:
    """Tokens of which is only known that no stage compares with them."""

    dtype: np.dtype[Any] = np.dtype(np.int64)

    def __getitem__(self, where: slice) -> Tokens:
        raise ConfigError(
            "a finite pass over text is planned from the number of tokens of each document, but a stage above Tokenize "
            f"reads the tokens; {PREPARE}"
        )

    def take(self, places: Ints) -> Tokens:
        return np.full(len(places), UNKNOWN, np.int64)
