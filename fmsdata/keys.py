"""Keyed randomness. Every random choice of a run is a pure function of a key, and keys come from names.

There is no generator object anywhere whose state would have to be saved: whoever knows the seed, the source's
name and a position can make the same choice again.
"""

import hashlib
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

Ints: TypeAlias = npt.NDArray[np.int64]
Keys: TypeAlias = npt.NDArray[np.uint64]
KeyLike = TypeVar("KeyLike", int, Keys)

MASK = (1 << 64) - 1


def key_of(*parts: int | str) -> int:
    """A 64-bit key for a tuple of names and numbers, the same on every machine.

    >>> key_of(42, "web", 0) == key_of(42, "web", 0)
    True
    >>> key_of("a", "bc") == key_of("ab", "c")
    False
    """
    text = "\x1f".join(f"{type(part).__name__[0]}{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def mix(x: KeyLike) -> KeyLike:
    """The splitmix64 finalizer: every input bit changes every output bit with probability one half.

    Works on a Python int and on an array of uint64 alike.
    """
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def keyed_order(n: int, key: int) -> Ints:
    """The numbers 0 to n-1 in the order that the key decides: sorted by mixed values, of which no two are the same.

    >>> sorted(keyed_order(5, key=1).tolist())
    [0, 1, 2, 3, 4]
    """
    if n == 1:
        return np.zeros(1, np.int64)
    return np.argsort(mix(np.arange(n, dtype=np.uint64) ^ np.uint64(mix(key))))


def offsets(counts: Ints | npt.NDArray[np.bool_]) -> Ints:
    """0, and the running sum of the counts."""
    out = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=out[1:])
    return out
