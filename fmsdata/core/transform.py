"""The iterator of stages that transform items one by one."""

from typing import TYPE_CHECKING

from fmsdata.core.chunk import Chunk, Item
from fmsdata.core.iterator import StageIterator
from fmsdata.core.keys import key_of, mix
from fmsdata.core.lane import Lane
from fmsdata.core.state import State, number, part
from fmsdata.core.wording import counted, shown
from fmsdata.errors import StageError, StateError

if TYPE_CHECKING:
    from fmsdata.core.stage import Stage

PATIENCE = 20  # epochs without a single item before a stage gives up


class TransformIterator(StageIterator):
    """Applies the `transform` of a stage to each item.

    The state has two parts: the state of the stage below before the current item, and how many
    outputs of that item were taken.
    """

    def __init__(self, stage: "Stage", lane: Lane, state: State | None) -> None:
        self._stage = stage
        self._below = stage.below.open(lane, part(state, "below"))
        self._skip = number(state, "skip")  # outputs of the first item that were taken before
        self._salt = key_of(type(stage).__name__, stage.twins_below())
        self._parents: list[int] = []  # for each output of this chunk, the item that it was made from
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
                outputs = self._transform(item)
                if i == 0 and self._skip:
                    if self._skip > len(outputs):
                        name = type(self._stage).__name__
                        raise StateError(f"'skip' is {self._skip}, but {name} makes only {len(outputs)} of this item")
                    outputs = outputs[self._skip :]
                items += outputs
                self._parents += [i] * len(outputs)
            if items:
                return Chunk.join([item.chunk for item in items])
            self._skip = 0
            dropped += int(chunk.lengths().sum())
            if dropped > self._patience:
                raise StageError(
                    f"{type(self._stage).__name__} dropped {counted(dropped, 'token')} in a row, "
                    f"{PATIENCE} epochs of what it reads: nothing passes it"
                )

    def state(self, taken: int) -> State:
        if taken == len(self._parents):
            return {"skip": 0 if self._read else self._skip, "below": self._below.state(self._read)}
        parent = self._parents[taken]
        skip = taken - self._parents.index(parent)
        return {"skip": skip + (self._skip if parent == 0 else 0), "below": self._below.state(parent)}

    def _transform(self, item: Item) -> list[Item]:
        name = type(self._stage).__name__
        returned = self._stage.transform(item, mix(item.key ^ self._salt))
        if returned is None or isinstance(returned, Item):
            raise StageError(f"{name}.transform returned {shown(returned)}, expected a list of Items or a generator")
        outputs = list(returned)
        for output in outputs:
            if not isinstance(output, Item):
                raise StageError(
                    f"{name}.transform returned a {type(output).__name__}, expected an Item; use item.replace(tokens)"
                )
        return [output.numbered(i) for i, output in enumerate(outputs) if len(output)]
