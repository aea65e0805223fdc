"""Text files whose lines are documents, read in blocks: mapped, or as byte ranges.

A block decompresses the stretches that its lines are in (see `line_index.py`), cuts them into
lines, and parses its own. Stretches are kept for the blocks around, so that small blocks do not
decompress the same bytes again and again.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fmsdata.core.blocks import Block
from fmsdata.core.keys import offsets
from fmsdata.core.tokens import Tokens
from fmsdata.core.wording import counted
from fmsdata.errors import CountsError
from fmsdata.formats.base import Blocks, Data, Decoded, Keep, Reading, ShardBytes, find_kept, keep_nothing
from fmsdata.formats.compression import decompressor
from fmsdata.formats.damage import Guarded
from fmsdata.formats.line_index import LineIndex
from fmsdata.formats.lines import Lines, Parse, split_lines

OWN = 512  # bytes of a layout besides its points


class LineFile:
    """What both ways to read a file share: its index, and how its bytes become documents."""

    text = True

    def __init__(self, name: str, parse: Parse, index: LineIndex, keep: Keep = keep_nothing) -> None:
        self.name, self.keep = name, keep
        self._parse, self._index = parse, index
        self.documents = index.documents
        self.known_tokens: int | None = index.nbytes
        self.blocks: Blocks | None = None

    def _require_size(self, size: int) -> None:
        if self._index.size != size:
            raise CountsError(
                f"{self.name}: the file has {counted(size, 'byte')}, and {self._index.size:,} when it was indexed; run "
                "`fmsdata index` to rebuild the index"
            )

    def _decode(self, stretch: int, data: Data) -> Decoded:
        """The lines of a stretch, whose stored bytes are these."""
        index = self._index
        begin, end = index.inside(stretch)
        with Guarded(self.name):
            decompress = decompressor(self.name)
            plain = b"".join(piece.data for piece in decompress.feed(data))
            decompress.finish()
        text = plain[begin:end]
        first, stop = index.lines(stretch)
        lines = split_lines(text, first)
        # Only the last line of the file has no newline.
        ends = stop == self.documents or text[-1:] == b"\n"
        if len(text) != end - begin or len(lines) != stop - first or not ends:
            raise CountsError(
                f"{self.name}: lines {first + 1} to {stop} are not where the index of the file says; the file "
                "is not the one that was indexed: run `fmsdata index` to rebuild the index"
            )
        return Decoded(lines.tokens, lines.ends, lines.tokens.nbytes + lines.ends.nbytes)

    def _block(self, first: int, stop: int, decoded: Sequence[Decoded]) -> Block[Any]:
        """Documents `first` to `stop - 1`, from the stretches that they are in."""
        parts: list[Tokens] = []
        lengths = []
        for stretch, (tokens, ends, _) in zip(self._index.stretches(first, stop), decoded, strict=True):
            low, high = self._index.lines(stretch)
            lines = Lines(tokens, ends, low).between(max(first, low) - low, min(stop, high) - low)
            documents = self._parse(self.name, lines, False)
            parts.append(documents.tokens)
            lengths.append(np.diff(documents.ends))
        length = np.concatenate(lengths)
        # A copy: a view would keep the whole stretch in memory.
        tokens = parts[0].copy() if len(parts) == 1 else np.concatenate(parts)
        return Block([tokens], np.zeros(len(length), np.int64), offsets(length)[:-1], length, [None])


class LineShard(LineFile):
    """A text file whose bytes are in memory or mapped."""

    plain = False

    def __init__(self, data: ShardBytes, name: str, parse: Parse, index: LineIndex) -> None:
        super().__init__(name, parse, index)
        self._require_size(data.size)
        self._data = data

    def read(self, first: int, stop: int) -> Block[Any]:
        """The documents `first` to `stop - 1`, of which there must be at least one."""
        stretches = self._index.stretches(first, stop)
        return self._block(first, stop, [self.keep(stretch, lambda s=stretch: self._read(s)) for stretch in stretches])  # type: ignore[misc]

    def tokens(self) -> int:
        """The number of bytes in the decompressed file."""
        return self._index.nbytes

    def _read(self, stretch: int) -> Decoded:
        return self._decode(stretch, self._data.read(*self._index.stored(stretch)))


class LineLayout(LineFile):
    """A remote text file."""

    def __init__(self, name: str, size: int, parse: Parse, index: LineIndex, keep: Keep) -> None:
        super().__init__(name, parse, index, keep)
        self._require_size(size)
        self.nbytes = OWN + index.points.nbytes

    def block(self, first: int, stop: int) -> Reading[Block[Tokens]]:
        """The documents `first` to `stop - 1`, of which there must be at least one."""
        stretches = self._index.stretches(first, stop)
        found = {stretch: find_kept(self.keep, stretch) for stretch in stretches}
        missing = [stretch for stretch, decoded in found.items() if decoded is None]
        if missing:
            for stretch, data in zip(missing, (yield [self._index.stored(each) for each in missing]), strict=True):
                decoded = self._decode(stretch, data)
                found[stretch] = self.keep(stretch, lambda decoded=decoded: decoded)  # type: ignore[misc]
        return self._block(first, stop, [decoded for decoded in found.values() if decoded is not None])

    def tokens(self) -> Reading[int]:
        """The number of bytes in the decompressed file."""
        yield from ()
        return self._index.nbytes
