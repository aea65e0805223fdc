"""The protocol that every stage follows.

A stage is a recipe; its iterator holds the state. Never the two in one object.

An iterator works for one lane. It has two methods: `read` gives the next chunk of items, and `state(taken)`
tells where it stood after that many items of the chunk, as plain data from which `Stage.open` starts a new
iterator. Where chunks begin and end has no meaning; the order of items has.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import NamedTuple

from torch.utils.data import IterableDataset

from fmsdata.core.chunk import Chunk, Item
from fmsdata.core.keys import key_of, mix
from fmsdata.core.lane import Lane
from fmsdata.core.state import State, number, part, plain
from fmsdata.errors import ConfigError, StageError

PATIENCE = 20  # epochs without a single item before a stage gives up


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
            name: plain(value)
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

    def window_tokens(self) -> int:
        """About how many tokens a lane plans at once: those of a shuffle window, above; else of a line, or 1."""
        below = self.children().get("below")
        return 1 if below is None else below.window_tokens()

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


def endless(stage: Stage, who: str) -> Stage:
    """The stage, if its items never end."""
    if isinstance(stage, Stage) and stage.ends():
        raise ConfigError(
            f"{who} reads a source with max_epochs, which would end at another step on every rank; "
            "mix it with one that has no max_epochs, or leave max_epochs away and count steps"
        )
    return stage


def _count(stage: Stage, kind: type[Stage]) -> int:
    below = max((_count(child, kind) for child in stage.children().values()), default=0)
    return below + (type(stage) is kind)
