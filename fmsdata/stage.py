"""The protocol that every stage follows.

A stage is a recipe; its iterator holds the state. Never the two in one object.

An iterator works for one lane. It has two methods: `read` gives the next chunk of items, and `state(taken)`
tells where it stood after that many items of the chunk, as plain data from which `Stage.open` starts a new
iterator. Where chunks begin and end has no meaning; the order of items has.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from torch.utils.data import IterableDataset

from fmsdata.chunk import Chunk, Item
from fmsdata.courses import Clock, Pace
from fmsdata.errors import ConfigError, StageError, StateError
from fmsdata.files import Files
from fmsdata.keys import key_of, mix

State: TypeAlias = dict[str, Any]
PATIENCE = 20  # epochs without a single item before a stage gives up


def to_nobody(what: str) -> None:
    """Nobody wants to know what is read."""


@dataclass(frozen=True, kw_only=True)
class Lane:
    """Which lane of the run an iterator works for, and what its random choices are keyed by."""

    index: int = 0
    count: int = 1
    seed: int = 0
    source: str = ""
    files: Files = field(default_factory=Files)
    burst: int = 0  # about how many tokens it reads at once, when a window is filled
    clock: Clock = field(default_factory=Clock)
    pace: Pace = field(default_factory=Pace)
    reading: Callable[[str], None] = to_nobody  # is told what is read, before it is
    marks: bool = False  # instead of where tokens come from, tell which tokens of a mixture's source they are

    def named(self, name: str) -> "Lane":
        """The same lane, for what lies below one name of a mixture."""
        return replace(self, source=below_name(self.source, name), pace=Pace(within=self.pace))


class Exhausted(Exception):
    """A source with `max_epochs` has given all that it may in a lane. `last`: and this lane had the last of it."""

    def __init__(self, *, last: bool = False) -> None:
        super().__init__()
        self.last = last


class Size(NamedTuple):
    """What one epoch of a stage holds, as far as counts tell."""

    documents: int
    tokens: int


class StageIterator(ABC):
    """A stage at work for one lane, at some place of its endless sequence of items."""

    @abstractmethod
    def read(self) -> Chunk:
        """The next items, at least one.

        Raises `Exhausted` if there are none, and never will be; `state(0)` is then the state at the end.
        """

    @abstractmethod
    def state(self, taken: int) -> State:
        """The state after the first `taken` items of the chunk that was read last (0 before the first)."""


class Stage(IterableDataset[Item]):
    """A recipe for a sequence of items, usually made from the stage below it.

    A stage of your own overrides `transform`, and has state, lanes and rescaling from here:

    >>> class Reverse(Stage):
    ...     def transform(self, item, key):
    ...         yield item.replace(item.tokens[::-1])
    """

    def __init__(self, below: "Stage") -> None:
        if not isinstance(below, Stage):
            raise ConfigError(f"{type(self).__name__} takes the stage below it, not {below!r}")
        self.below = below

    def transform(self, item: Item, key: int) -> Iterable[Item]:
        """What one item becomes: none, one or several. All that is random in it must be drawn from `key`."""
        raise NotImplementedError(f"{type(self).__name__} must override transform() or open()")

    def open(self, lane: Lane, state: State | None = None) -> StageIterator:
        """An iterator for this lane, at its start or at a state that an earlier one told."""
        return _TransformIterator(self, lane, state)

    def children(self) -> Mapping[str, "Stage"]:
        """The stages below, by name."""
        return {"below": self.below}

    def parameters(self) -> State:
        """What the order or the content of the items depends on: by default, the public attributes."""
        children = set(map(id, self.children().values()))
        return {
            name: _plain(value)
            for name, value in sorted(vars(self).items())
            if not name.startswith("_") and id(value) not in children
        }

    def describe(self, source: str = "") -> State:
        """The stage and all below it as plain data. A saved state belongs to a pipeline with the same description."""
        below = {name: stage.describe(source) for name, stage in sorted(self.children().items())}
        return {"stage": type(self).__name__, **self.parameters(), **({"children": below} if below else {})}

    def size(self) -> Size:
        """Documents and tokens of one epoch."""
        sizes = [stage.size() for stage in self.children().values()]
        return Size(sum(size.documents for size in sizes), sum(size.tokens for size in sizes))

    def ends(self) -> bool:
        """Whether the items come to an end. Only what is mixed with an endless source may."""
        return any(stage.ends() for stage in self.children().values())

    def twins_below(self) -> int:
        """How many stages of the same class lie below, so that two of them don't make the same random choices."""
        return max((_count(stage, type(self)) for stage in self.children().values()), default=0)

    def __iter__(self) -> Iterator[Item]:
        """The items, one by one, as a single lane reads them. To read on several ranks, put a `Rescalable` on top."""
        iterator = self.open(Lane())
        with suppress(Exhausted):
            while True:
                yield from iterator.read()


class Cursor:
    """Takes any number of items from an iterator, and knows the state in between."""

    def __init__(self, iterator: StageIterator) -> None:
        self._iterator = iterator
        self._chunk: Chunk | None = None
        self._taken = 0

    def take(self, count: int) -> Chunk:
        parts = []
        while count:
            if self._chunk is None or self._taken == len(self._chunk):
                self._chunk, self._taken = self._iterator.read(), 0
            stop = min(self._taken + count, len(self._chunk))
            parts.append(self._chunk.slice(self._taken, stop))
            count -= stop - self._taken
            self._taken = stop
        return Chunk.join(parts)

    def state(self) -> State:
        return self._iterator.state(self._taken)


class _TransformIterator(StageIterator):
    """Applies a stage's `transform` to each item.

    The state is the one below before the item in progress, and how much of it was taken.
    """

    def __init__(self, stage: Stage, lane: Lane, state: State | None) -> None:
        self._stage = stage
        self._below = stage.below.open(lane, part(state, "below"))
        self._skip = number(state, "skip")  # outputs of the first item that were taken before
        self._salt = key_of(type(stage).__name__, stage.twins_below())
        self._parents: list[int] = []  # for each output of this chunk, the item it was made of
        self._read = 0  # items of the chunk below
        self._patience = PATIENCE * max(5000, stage.below.size().tokens)

    def read(self) -> Chunk:
        if self._parents:
            self._skip = 0
        dropped = 0
        while True:
            self._parents, self._read = [], 0
            chunk = self._below.read()
            items: list[Item] = []
            self._read = len(chunk)
            for i, item in enumerate(chunk):
                made = self._make(item)[self._skip if i == 0 else 0 :]
                items += made
                self._parents += [i] * len(made)
            if items:
                return Chunk.join([item.chunk for item in items])
            self._skip = 0
            dropped += int(chunk.lengths().sum())
            if dropped > self._patience:
                raise StageError(
                    f"{type(self._stage).__name__} dropped {dropped} tokens in a row, "
                    f"{PATIENCE} epochs of what it reads: nothing passes it"
                )

    def state(self, taken: int) -> State:
        if taken == len(self._parents):
            return {"skip": 0 if self._read else self._skip, "below": self._below.state(self._read)}
        parent = self._parents[taken]
        skip = taken - self._parents.index(parent)
        return {"skip": skip + (self._skip if parent == 0 else 0), "below": self._below.state(parent)}

    def _make(self, item: Item) -> list[Item]:
        given = self._stage.transform(item, mix(item.key ^ self._salt))
        if given is None or isinstance(given, Item):
            raise StageError(
                f"{type(self._stage).__name__}.transform gave {given!r}, not a list of Items or a generator"
            )
        made = list(given)
        for one in made:
            if not isinstance(one, Item):
                raise StageError(
                    f"{type(self._stage).__name__}.transform gave a {type(one).__name__}, not an Item; "
                    "use item.replace(tokens)"
                )
        return [one.numbered(i) for i, one in enumerate(made) if len(one)]


def below_name(source: str, name: str) -> str:
    """The full name of a source of a mixture that may itself be in one."""
    return f"{source}/{name}" if source else name


def number(state: State | None, name: str) -> int:
    """A count in a saved state; 0 if there is no state and the iterator starts from the beginning."""
    if state is None:
        return 0
    value = state.get(name) if isinstance(state, Mapping) else None
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise StateError(f"{name!r} is {value!r} where a count belongs: the state is torn or was edited")
    return value


def whole_number(state: State | None, name: str) -> int:
    """A number in a saved state that may be below zero; 0 if there is no state."""
    value = 0 if state is None else state.get(name) if isinstance(state, Mapping) else None
    if type(value) is not int or not abs(value) < 1 << 62:
        raise StateError(f"{name!r} is {value!r} where a number belongs: the state is torn or was edited")
    return value


def endless(stage: Stage, who: str) -> Stage:
    """The stage, if its items never end."""
    if isinstance(stage, Stage) and stage.ends():
        raise ConfigError(
            f"{who} reads a source with max_epochs, which would end at another step on every rank; "
            "mix it with one that has no max_epochs, or leave max_epochs away and count steps"
        )
    return stage


def part(state: State | None, name: str) -> State | None:
    """A part of a saved state; None if there is no state."""
    if state is None:
        return None
    value = state.get(name) if isinstance(state, Mapping) else None
    if not isinstance(value, dict):
        raise StateError(f"{name!r} is {value!r} where a state belongs: the state is torn or was edited")
    return value


def _count(stage: Stage, kind: type[Stage]) -> int:
    below = max((_count(child, kind) for child in stage.children().values()), default=0)
    return below + (type(stage) is kind)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(one) for one in (sorted(value) if isinstance(value, set | frozenset) else value)]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{value.shape}:{key_of(value.tobytes().hex()):016x}"
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if callable(value):
        return f"{getattr(value, '__module__', '')}:{getattr(value, '__qualname__', type(value).__qualname__)}"
    return type(value).__qualname__
