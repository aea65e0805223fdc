"""Damage: to bytes, and to plain data such as JSON."""

import copy
import struct
from typing import Any

import numpy as np

Rng = np.random.Generator
EDGES = [0, 1, 2, 3, 7, 8, 24, 64, 1000, *(1 << bits for bits in (15, 16, 20, 31, 32, 40, 61, 62, 63))]
DEEP = 3000  # levels of nesting, more than Python's recursion allows


def edge(rng: Rng, bits: int = 64) -> int:
    """A number that arithmetic is likely to get wrong, as a signed one of this many bits."""
    value = int(rng.choice(np.array(EDGES, object))) + int(rng.integers(-2, 3))
    value = -value if rng.random() < 0.3 else value
    return signed(value, bits)


def signed(value: int, bits: int) -> int:
    """The number that these bits are."""
    return (value + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1)


def put_number(rng: Rng, data: bytearray, place: int) -> None:
    """Overwrite the word at a place with an edge, or with what was there plus or minus a little."""
    form = "<q" if rng.random() < 0.5 else "<i"
    size = struct.calcsize(form)
    place = max(0, min(place, len(data) - size))
    if len(data) < size:
        return
    (old,) = struct.unpack_from(form, data, place)
    near = signed(old + int(rng.choice([-64, -8, -4, -1, 1, 4, 8, 64])), 8 * size)
    struct.pack_into(form, data, place, edge(rng, 8 * size) if rng.random() < 0.7 else near)


def damage_bytes(rng: Rng, data: bytes, other: bytes = b"") -> bytes:
    """The bytes with one kind of damage that any file can get."""
    made = bytearray(data)
    size = len(made)
    if not size:
        return rng.bytes(10)
    place = int(rng.integers(size))
    match int(rng.integers(8)):
        case 0 | 1:
            for _ in range(int(rng.integers(1, 5))):
                made[rng.integers(size)] ^= int(rng.integers(1, 256))
        case 2:
            put_number(rng, made, place & -4)
        case 3:
            del made[place:]
        case 4:
            del made[place : place + int(rng.integers(1, 1 + max(1, size // 4)))]
        case 5:
            made[place:place] = made[place : place + int(rng.integers(1, 65))]
        case 6:
            made[place : place + 16] = rng.bytes(16)
        case 7:
            made[place:] = other[-max(1, int(rng.integers(1, 1 + max(1, len(other))))) :] if other else b""
    return bytes(made)


def odd_value(rng: Rng, old: Any) -> Any:
    """Some other value in place of this one, often almost right."""
    if isinstance(old, int) and not isinstance(old, bool) and rng.random() < 0.5:
        return [old + 1, old - 1, -old, old + 1000, float(old), str(old), bool(old), old + (1 << 64)][rng.integers(8)]
    nested: Any = old
    for _ in range(int(rng.integers(1, 4))):
        nested = [nested]
    odd = [None, True, False, -1, 0, 1, edge(rng), 10**30, 0.5, float("nan"), float("inf"), -0.0, "", "0", "x", "é\0"]
    odd += [[], {}, nested, {"": old}, {"a": old}, "9" * 5000, "[" * DEEP, [[0, 0]], [0] * 3, {"below": old}]
    return odd[rng.integers(len(odd))]


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value inside of this one."""
    found = [path] if path else []
    if isinstance(value, dict):
        return found + [each for name, inner in value.items() for each in _places(inner, (*path, name))]
    if isinstance(value, list):
        return found + [each for i, inner in enumerate(value) for each in _places(inner, (*path, i))]
    return found


def _inner(value: Any, path: tuple[Any, ...]) -> Any:
    for part in path:
        value = value[part]
    return value


def damage_numbers(rng: Rng, value: Any) -> Any:
    """A copy of plain data in which a number is another one: a little more or less, of another place, or an edge."""
    made = copy.deepcopy(value)
    numbers = [path for path in _places(made) if type(_inner(made, path)) is int]
    for _ in range(int(rng.choice([1, 1, 1, 2])) if numbers else 0):
        path, other = (numbers[i] for i in rng.integers(len(numbers), size=2))
        old = _inner(made, path)
        values = [old + 1, old - 1, old + int(rng.integers(-50, 50)), _inner(made, other), 2 * old, edge(rng), 1 << 40]
        _inner(made, path[:-1])[path[-1]] = values[rng.integers(len(values))]
    return made


def damage_data(rng: Rng, value: Any, changes: int | None = None) -> Any:
    """A copy of plain data in which values were replaced, removed, added, renamed or exchanged."""
    made = copy.deepcopy(value)
    for _ in range(int(rng.integers(1, 4)) if changes is None else changes):
        places = _places(made)
        if not places:
            break
        # Places near the leaves are many: choose the depth first.
        depths = sorted({len(path) for path in places})
        depth = depths[rng.integers(len(depths))]
        same = [path for path in places if len(path) == depth]
        path = same[rng.integers(len(same))]
        parent, name = _inner(made, path[:-1]), path[-1]
        match int(rng.integers(10)):
            case 0:
                del parent[name]
            case 1:
                other = _inner(made, places[rng.integers(len(places))])
                parent[name] = copy.deepcopy(other)
            case 2:
                other = places[rng.integers(len(places))]
                holder = _inner(made, other[:-1])
                if other[: len(path)] != path and path[: len(other)] != other:
                    parent[name], holder[other[-1]] = holder[other[-1]], parent[name]
            case 3 if isinstance(parent, dict):
                parent[f"{name}x"] = parent.pop(name)
            case 3:
                parent.append(copy.deepcopy(parent[name]))
            case 4 if isinstance(parent[name], str) and parent[name]:
                text = damage_bytes(rng, parent[name].encode())
                parent[name] = text.decode(errors="replace")
            case _:
                parent[name] = odd_value(rng, parent[name])
    return made
