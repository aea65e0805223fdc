"""Ranges: runs of bytes of a file, or of tokens of a source, and merging those that are close."""

from typing import NamedTuple


class Range(NamedTuple):
    """From `start` up to, but not including, `stop`."""

    start: int
    stop: int
