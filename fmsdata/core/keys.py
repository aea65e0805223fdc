"""Keyed randomness: every random choice is a pure function of a key, and keys come from names.

No generator object has a state that would have to be saved. With the seed, the name of the source
and a position, any process can make the same choice again.
"""

import hashlib
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from fmsdata.core import native

Ints: TypeAlias = npt.NDArray[np.int64]
Keys: TypeAlias = npt.NDArray[np.uint64]
MASK = (1 << 64) - 1
STEP = 0x9E3779B97F4A7C15
FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_STEP, _LAST_SHIFT = np.uint64(STEP), np.uint64(31)
_ROUNDS = [(np.uint64(shift), np.uint64(factor)) for shift, factor in zip((30, 27), FACTORS, strict=True)]


def key_of(*parts: int | str) -> int:
    """A 64-bit key for a tuple of names and numbers, the same on every machine.

    >>> key_of(42, "web", 0) == key_of(42, "web", 0)
    True
    >>> key_of("a", "bc") == key_of("ab", "c")
    False
    """
    return int.from_bytes(hashlib.blake2b(ascii(parts).encode(), digest_size=8).digest(), "little")


def prefix_of(*parts: int | str) -> bytes:
    """What `key_of` hashes for these parts and some more, up to where the others begin.

    >>> prefix_of(42, "web")
    b"(42, 'web', "
    """
    return ascii((*parts, 0)).removesuffix("0)").encode()


def keys_of(parts: tuple[int | str, ...], numbers: Ints) -> Keys:
    """`key_of(*parts, number)` for each of these numbers.

    >>> keys_of((42, "web"), np.array([7])).tolist() == [key_of(42, "web", 7)]
    True
    """
    before = prefix_of(*parts)
    if native.kernel is not None:
        keys = np.empty(len(numbers), np.uint64)
        native.kernel.keys_of(before, np.ascontiguousarray(numbers, np.int64), keys)
        return keys
    digests = [hashlib.blake2b(before + b"%d)" % number, digest_size=8).digest() for number in numbers.tolist()]
    return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)


def mix(x: int) -> int:
    """The splitmix64 finalizer, a bijection.

    Every input bit changes every output bit with probability one half.
    """
    x = (x + STEP) & MASK
    x = ((x ^ (x >> 30)) * FACTORS[0]) & MASK
    x = ((x ^ (x >> 27)) * FACTORS[1]) & MASK
    return x ^ (x >> 31)


def mix_array(x: Keys) -> Keys:
    """`mix` for an array."""
    x = x + _STEP
    for shift, factor in _ROUNDS:
        x ^= x >> shift
        x *= factor
    x ^= x >> _LAST_SHIFT
    return x


def uniform(keys: Keys, draw: int) -> npt.NDArray[np.float64]:
    """A random number in [0, 1) for each key. Different values of `draw` give independent numbers.

    >>> bool(uniform(np.array([7], np.uint64), 0)[0] == uniform(np.array([7], np.uint64), 1)[0])
    False
    """
    return (mix_array(keys ^ np.uint64(mix(draw))) >> np.uint64(11)) * np.float64(2**-53)


def keyed_order(n: int, key: int) -> Ints:
    """The numbers 0 to n-1 in an order that depends on the key.

    They are sorted by mixed values, which are all different.

    >>> sorted(keyed_order(5, key=1).tolist())
    [0, 1, 2, 3, 4]
    """
    if n == 1:
        return np.zeros(1, np.int64)
    return np.argsort(mix_array(np.arange(n, dtype=np.uint64) ^ np.uint64(mix(key))))


def keyed_orders(n: int, keys: Keys) -> Ints:
    """`keyed_order` for each of these keys, in rows.

    >>> keyed_orders(5, np.array([1], np.uint64)).tolist() == [keyed_order(5, 1).tolist()]
    True
    """
    return np.argsort(mix_array(np.arange(n, dtype=np.uint64) ^ mix_array(keys)[:, None]))


def offsets(counts: Ints | npt.NDArray[np.bool_]) -> Ints:
    """0, and the running sum of the counts."""
    out = np.empty(len(counts) + 1, np.int64)
    out[0] = 0
    counts.cumsum(out=out[1:])
    return out
