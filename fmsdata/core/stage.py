"""Stage: the protocol that every stage follows.

A stage is a recipe; its iterator holds the state. Never the two in one object.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset

from fmsdata.core.chunk import Item
from fmsdata.core.iterator import Exhausted, StageIterator
from fmsdata.core.lane import Lane
from fmsdata.core.outline import Outline, facts_of, outline_of
from fmsdata.core.own import OwnName
from fmsdata.core.state import State, plain
from fmsdata.core.transform import TransformIterator
from fmsdata.core.wording import shown
from fmsdata.errors import ConfigError


class Size(NamedTuple):
    """What one epoch of a stage holds, according to the counts."""

    documents: int
    tokens: int


class MadeBy(NamedTuple):
    """How a configuration names a stage of the user's own: its name, and the arguments."""

    name: OwnName
    arguments: State

    def __reduce__(self) -> Any:
        """In another process the module is imported first, from the same folders."""
        return _imported, (tuple(self.name), self.arguments)


class Stage(IterableDataset[Item]):
    """A recipe for a sequence of items, usually made from the stage below it.

    A stage of your own overrides `transform`. State, lanes and rescaling come from this class:

    >>> class Reverse(Stage):
    ...     def transform(self, item, key):
    ...         yield item.replace(item.tokens[::-1])
    """

    def __init__(self, below: "Stage") -> None:
        if not isinstance(below, Stage):
            raise ConfigError(f"{type(self).__name__} takes the stage below it, not {shown(below)}")
        self.below = below

    def transform(self, item: Item, key: int) -> Iterable[Item]:
        """What one item becomes: no item, one or several. Draw everything random from `key`."""
        raise NotImplementedError(f"{type(self).__name__} must override transform() or open()")

    def open(self, lane: Lane, state: State | None = None) -> StageIterator:
        """An iterator for this lane, from its start or from the state of an earlier iterator."""
        return TransformIterator(self, lane, state)

    def children(self) -> Mapping[str, "Stage"]:
        """The stages below, by name."""
        return {"below": self.below}

    def parameters(self) -> State:
        """What the items and their order depend on: by default, the public attributes."""
        children = set(map(id, self.children().values()))
        return {
            name: plain(value)
            for name, value in sorted(vars(self).items())
            if not name.startswith("_") and id(value) not in children
        }

    def describe(self, source: str = "") -> State:
        """The stage and all below it as plain data, saved with the state of a run.

        A state can be resumed by a pipeline with the same description.
        """
        below = {name: stage.describe(source) for name, stage in sorted(self.children().items())}
        made, named = vars(self).get("_made_by"), {}
        if made is not None:  # also arguments that are in no public attribute
            named = {name: plain(value) for name, value in made.arguments.items() if name not in ("stage", "children")}
            if made.name.written.rpartition(":")[2] != type(self).__qualname__:
                named["made_by"] = made.name.written
        return {"stage": type(self).__name__, **named, **self.parameters(), **({"children": below} if below else {})}

    def outline(self, name: str | None = None) -> Outline:
        """The stage and all below it as a tree for people: what `repr` and `fmsdata plan` print."""
        children = self.children()
        if name is None:  # a source alone
            name = "" if children else self.source_name()
        below = tuple(stage.outline("" if name == "below" else name) for name, stage in children.items())
        return Outline(type(self).__name__, self._facts(), name, below)

    def _facts(self) -> str:
        """What is worth knowing about the stage, in one line."""
        made = vars(self).get("_made_by")
        return facts_of({**({} if made is None else made.arguments), **self.parameters()})

    def size(self) -> Size:
        """Documents and tokens of one epoch."""
        sizes = [stage.size() for stage in self.children().values()]
        return Size(sum(size.documents for size in sizes), sum(size.tokens for size in sizes))

    def epoch_items(self) -> int:
        """About how many items one epoch has, according to the counts; 0 if that is unknown."""
        children = self.children().values()
        return sum(stage.epoch_items() for stage in children) if children else self.size().documents

    def settled(self, lanes: int, saved: State | None = None) -> "Stage":
        """The stage as a run with this many lanes reads it: parameters left to choose have a value.

        `saved` is the description of the stage in a saved state. What was chosen when it was saved
        stays. A stage with several stages below overrides this to settle each of them.
        """
        below = getattr(self, "below", None)
        if not isinstance(below, Stage):
            return self
        settled = below.settled(lanes, self.saved_child(saved, "below"))
        if settled is below:
            return self
        stage = copy.copy(self)
        stage.below = settled
        return stage

    def saved_child(self, saved: State | None, name: str) -> State | None:
        """The description of a stage below, in a saved description of this stage."""
        if not isinstance(saved, Mapping) or saved.get("stage") != type(self).__name__:
            return None
        children = saved.get("children")
        return children.get(name) if isinstance(children, Mapping) else None

    def holds_text(self) -> bool:
        """Whether the items are UTF-8 text, as arrays of bytes, and not tokens."""
        return any(stage.holds_text() for stage in self.children().values())

    def tokenizes(self) -> bool:
        """Whether tokens are made from text while they are read, which takes time, and memory until they are used."""
        return any(stage.tokenizes() for stage in self.children().values())

    def only_plans(self) -> bool:
        """Whether reading items is arithmetic alone: their tokens take no time or memory until they are used."""
        return False

    def ends(self) -> bool:
        """Whether the items come to an end.

        Only a source that is mixed with an endless one may end.
        """
        return any(stage.ends() for stage in self.children().values())

    def total_tokens(self) -> float:
        """Tokens of all items until they end, according to the counts; infinite without an end."""
        children = self.children().values()
        return sum(stage.total_tokens() for stage in children) if children and self.ends() else math.inf

    def source_name(self) -> str:
        """The name of a stage with no stage below: its `name`, if it has one, else its class."""
        return str(getattr(self, "name", type(self).__name__))

    def window_tokens(self) -> int:
        """About how many tokens a lane plans at once: those of a shuffle window, or of a line."""
        below = self.children().get("below")
        return 1 if below is None else below.window_tokens()

    def window_items(self) -> int:
        """How many items the stage makes at once at least, of those that `window_tokens` counts."""
        return 1

    def twins_below(self) -> int:
        """How many stages of the same class are below. Keys their random choices apart."""
        return max((_count(stage, type(self)) for stage in self.children().values()), default=0)

    def __repr__(self) -> str:
        return outline_of(self).text()

    def _repr_html_(self) -> str:
        return outline_of(self).html()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """In another process, the module of a stage that a configuration names is found first."""
        reduced, made = super().__reduce_ex__(protocol), vars(self).get("_made_by")
        if made is None or isinstance(reduced, str):
            return reduced
        return _made_again, (made, *reduced[:2]), *reduced[2:]

    def __iter__(self) -> Iterator[Item]:
        """The items, one by one, as a single lane reads them.

        For several ranks, use `Rescalable`.
        """
        iterator = self.open(Lane())
        with suppress(Exhausted):
            while True:
                yield from iterator.read()


def is_named(stage: Stage) -> bool:
    """Whether the stage is one of the user's own that a configuration names."""
    return "_made_by" in vars(stage)


def _imported(name: tuple[Any, ...], arguments: State) -> MadeBy:
    """Import the module of a stage before the stage itself is unpickled."""
    made = MadeBy(OwnName(*name), arguments)
    made.name.load()
    return made


def _made_again(_: MadeBy, make: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    return make(*arguments)


def endless(stage: Stage, reader: str) -> Stage:
    """The stage, if its items never end."""
    if isinstance(stage, Stage) and stage.ends():
        raise ConfigError(
            f"{reader} reads a source with max_epochs, which would end at a different step on every rank; "
            "mix it with one that has no max_epochs, or remove max_epochs and count steps"
        )
    return stage


def tokens_only(stage: Stage, reader: str) -> Stage:
    """The stage, if its items are tokens and not text."""
    if isinstance(stage, Stage) and stage.holds_text():
        name = stage.source_name() if not stage.children() else type(stage).__name__
        raise ConfigError(
            f"{reader} reads tokens, but {name!r} holds text; tokenize it: "
            f"fmsdata.Tokenize(stage, 'tokenizer.json') in place of the stage, or documents.tokenizer in YAML"
        )
    return stage


def _count(stage: Stage, kind: type[Stage]) -> int:
    children = stage.children()
    below = max([_count(child, kind) for child in children.values()]) if children else 0
    return below + (type(stage) is kind)
