"""Pieces: a line as runs of tokens, each with its origin."""

from collections.abc import Iterator
from typing import NamedTuple

from fmsdata.core.chunk import Chunk
from fmsdata.core.spans import BEGINS, BUFFER, DOCUMENT, LENGTH, POSITION, TAIL, Span


class Piece(NamedTuple):
    """Consecutive tokens of one row. Tokens that are in no shard, such as EOS and padding, have no origin."""

    tokens: list[int]
    begins: bool  # a new document, or padding
    origin: Span | None = None
    epoch: int = 0


def pieces_of(lines: Chunk, row: int, tokens: list[int]) -> Iterator[Piece]:
    """The pieces of a line, whose tokens are these."""
    place = 0
    for span in lines.slice(row, row + 1).spans.tolist():
        end = place + span[LENGTH]
        stored_end, begins = end - (span[TAIL] > 0), bool(span[BEGINS] & 1)
        if span[DOCUMENT] < 0:
            yield Piece(tokens[place:stored_end], begins)
        elif place < stored_end:
            buffer = lines.buffers[span[BUFFER]]
            stop = span[POSITION] + stored_end - place
            origin = Span(buffer.source, buffer.shard, span[DOCUMENT], span[POSITION], stop)
            yield Piece(tokens[place:stored_end], begins, origin, buffer.epoch)
        if stored_end < end:
            yield Piece(tokens[stored_end:end], place == stored_end and begins)
        place = end
