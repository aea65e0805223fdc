"""Exact duplicates: documents whose tokens (or bytes, for text) are the same, found by 128-bit hashes."""

import hashlib
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from fmsdata.core.keys import Ints
from fmsdata.core.tokens import Tokens

HASH = np.dtype([("high", np.uint64), ("low", np.uint64)])


def document_hashes(tokens: Tokens, ends: Ints) -> npt.NDArray[np.void]:
    """A hash of each document, of its bytes in memory.

    >>> hashes = document_hashes(np.array([1, 2, 1, 2, 3], np.uint8), np.array([0, 2, 4, 5]))
    >>> bool(hashes[0] == hashes[1]), bool(hashes[1] == hashes[2])
    (True, False)
    """
    width = tokens.dtype.itemsize
    data = memoryview(tokens.tobytes())
    places = pairwise((ends * width).tolist())
    digests = [hashlib.blake2b(data[start:stop], digest_size=16).digest() for start, stop in places]
    return np.frombuffer(b"".join(digests), HASH)


def repeated(hashes: npt.NDArray[np.void]) -> tuple[Ints, Ints]:
    """The documents that were there before, by number in ascending order, and of each the first that is equal."""
    order = np.lexsort((np.arange(len(hashes)), hashes["low"], hashes["high"]))
    ordered = hashes[order]
    same = np.zeros(len(order), bool)
    same[1:] = ordered[1:] == ordered[:-1]
    group = np.maximum.accumulate(np.where(same, 0, np.arange(len(order))))
    later, first = order[same], order[group[same]]
    back = np.argsort(later)
    return later[back], first[back]


def joined(hashes: Sequence[npt.NDArray[np.void]]) -> npt.NDArray[np.void]:
    """All hashes in one array, of which there may be none."""
    return np.concatenate(hashes) if hashes else np.empty(0, HASH)
