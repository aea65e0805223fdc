"""EpochSampler: which rows each rank reads, epoch after epoch.

It holds the position of the run. A loader plans batches from the sampler's cursor, and moves it when
a batch is handed out.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from fmsdata.core.checks import flag, whole
from fmsdata.core.keys import key_of
from fmsdata.core.outline import Outline, facts_of, outline_of
from fmsdata.core.state import State
from fmsdata.core.wording import counted, shown
from fmsdata.epochs.cursor import Change, Cursor, Layout, PlannedBatch
from fmsdata.epochs.exclusions import Exclusions, checked_ids
from fmsdata.epochs.fingerprint import fingerprint
from fmsdata.epochs.line_order import NEXT_EPOCH, NO_TOKENS
from fmsdata.epochs.rows import length
from fmsdata.epochs.sampler_orders import checked_batch, checked_tokens, orders_of
from fmsdata.epochs.sampler_state import NewWeights, NextEpoch, Saved, moved, pack, unpack
from fmsdata.errors import ConfigError, FmsdataWarning
from fmsdata.run.gather import agreed
from fmsdata.run.ranks import Ranks


class EpochSampler:
    """The rows of a dataset with a length, in epochs, for one rank.

    Each epoch is a new order of the rows, by a hash of the seed and the epoch. Samples are cut into
    global batches first, and each rank takes its part: `batch[rank::world_size]`. So a global batch
    is the same at any world size, and every rank has the same number of rows.

    With `drop_last`, rows that do not fill a global batch are left out of the epoch: other rows each
    time, if it shuffles. Without, rows are repeated to fill it up, and marked in the batch
    (`is_padding`).

    >>> sampler = EpochSampler(["a", "b", "c", "d"], global_batch=2, rank=0, world_size=2, seed=42)
    >>> len(list(sampler)), len(sampler)
    (2, 2)

    Samples of `FineTuningRows` are packed lines, and `global_batch` counts lines. With `max_tokens`,
    a sample is a batch of at most that many tokens, and `global_batch`, by default the world size,
    counts batches.

    With a `StatefulDataLoader` its position is that of the last batch handed out. In a loader of
    another library it yields the ids of rows, like a `DistributedSampler`, and its position is that
    of the last id that the library took, perhaps ahead of the trainer.
    """

    def __init__(
        self,
        rows: Any,
        *,
        global_batch: int | None = None,
        max_tokens: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        mesh: DeviceMesh | None = None,
        process_group: ProcessGroup | None = None,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = True,
        fingerprint: str | bool = True,
    ) -> None:
        self.rows = rows
        self._size = length(rows)
        self.seed = whole("seed", seed, least=None)
        self.shuffle, self.drop_last = flag("shuffle", shuffle), flag("drop_last", drop_last)
        self.ranks = Ranks.given_by(rank, world_size, mesh, process_group) or Ranks.found()
        self.rank, self.world_size = self.ranks.rank, self.ranks.world_size
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(
                f"rank is {self.rank} of world size {self.world_size}; it must be from 0 to world size - 1"
            )
        self.max_tokens = None if max_tokens is None else checked_tokens(max_tokens, rows)
        if global_batch is None:
            if self.max_tokens is None:
                raise ConfigError("global_batch is missing: the rows of a step on all ranks together")
            global_batch = self.world_size
        self.global_batch = checked_batch(whole("global_batch", global_batch, least=1), self.world_size)
        self.layout = Layout(self.global_batch, self.drop_last, self.rank, self.world_size)
        if not isinstance(fingerprint, str | bool):
            raise ConfigError(f"fingerprint is {shown(fingerprint)}; it must be a text that names the rows, or False")
        self._named = fingerprint
        self._orders, self._mixture, self.packing = orders_of(rows, self.seed, self.shuffle, self.max_tokens)
        weights = None if self._mixture is None else self._mixture.weights
        self._next = NextEpoch(Exclusions.none(), None)
        self._new_weights = NewWeights()
        self.cursor = Cursor(0, 0, self._orders.first(0, self._next.excluded, weights))
        self._check_batches(self._next.excluded, weights, self.cursor)
        self._named_epoch = False  # by `set_epoch`, which does not begin another one
        self._changed_at_once = False  # this epoch, by mode="immediate"
        self._changed_epochs: dict[int, int] = {}  # earlier ones: keys of the rows excluded at their ends

    @property
    def epoch(self) -> int:
        """The epoch of the last sample that was handed out."""
        return self.cursor.epoch

    @property
    def position(self) -> int:
        """The samples of this epoch that were handed out, on all ranks together."""
        return self.cursor.position

    @property
    def step(self) -> int:
        """The global batches of all epochs that were handed out."""
        return self.cursor.steps(self.layout)

    @property
    def batches(self) -> int:
        """The global batches of an epoch: of the one in progress, or of the next if that has ended."""
        if not self.finished:
            cursor = self.cursor
            return cursor.cut // self.global_batch + (cursor.end(self.layout) - cursor.cut) // self.global_batch
        size = self._epoch_size(self._next.excluded, self._next_weights())
        return size // self.global_batch if self.drop_last else -(-size // self.global_batch)

    @property
    def excluded(self) -> list[int]:
        """The rows that are excluded from the next epoch on, sorted."""
        ids: list[int] = self._next.excluded.ids.tolist()
        return ids

    def describe(self) -> State:
        """The sampler and its position as plain data."""
        names = ("global_batch", "rank", "world_size", "seed", "shuffle", "drop_last", "epoch", "position")
        return {"rows": self._size, **{name: getattr(self, name) for name in names}}

    def outline(self) -> Outline:
        """The sampler for people: what `repr` prints. The rows are not read."""
        return Outline(type(self).__name__, facts_of(self.describe()))

    def __repr__(self) -> str:
        return outline_of(self).text()

    def _repr_html_(self) -> str:
        return outline_of(self).html()

    def __len__(self) -> int:
        """The rows of this rank in an epoch."""
        return self.batches * self.global_batch // self.world_size

    def __iter__(self) -> Iterator[int]:
        if self.packing is not None:
            raise ConfigError(
                "a sampler of FineTuningRows deals out packed lines, which have no id: give it to "
                "fmsdata.StatefulDataLoader(rows, sampler=sampler, ...)"
            )
        self.begin_epoch()
        planned: Iterator[PlannedBatch] = iter(())
        expected: Cursor | None = None
        while True:
            if expected is not self.cursor:  # it was moved meanwhile
                planned = self.plan(1)
            batch = next(planned, None)
            if batch is None:
                return
            self.cursor = expected = batch.after
            yield int(batch.request.rows[0])

    def plan(self, batch_size: int) -> Iterator[PlannedBatch]:
        """The batches of this rank from here to the end of the epoch. Nothing is handed out yet."""
        self.ranks.check("sampler")
        self._align(batch_size)
        return self.cursor.plan(self.layout, batch_size)

    def _align(self, batch_size: int) -> None:
        """Cut the rest of the epoch anew if it was left where no step of this size begins."""
        if (self.cursor.position - self.cursor.cut) % (batch_size * self.world_size):
            self.cursor = self.cursor.recut(self.layout)

    @property
    def finished(self) -> bool:
        """Whether all samples of the epoch were handed out."""
        return self.cursor.position >= self.cursor.end(self.layout)

    def begin_epoch(self, batch_size: int = 1) -> None:
        """Begin the next epoch, if the last one was handed out. A loop over a loader calls this."""
        if len(self.rows) != self._size:
            raise ConfigError(
                f"the dataset had {counted(self._size, 'row')} when its sampler was created, and has "
                f"{len(self.rows)} now; create "
                "a new sampler for the new rows"
            )
        named, self._named_epoch = self._named_epoch, False
        self._align(batch_size)
        if not self.finished:
            return
        if named:
            warnings.warn(
                f"set_epoch({self.epoch}): all of epoch {self.epoch} was handed out before, so this loop is empty; "
                f"to read it again call reshuffle(epoch={self.epoch})",
                FmsdataWarning,
                stacklevel=4,
            )
            return
        weights = self._next_weights()
        self._check_batches(self._next.excluded, weights)
        self._leave_epoch()
        self.cursor = self.cursor.next_epoch(self.layout, self._next.excluded, weights)
        self._next = NextEpoch(self._next.excluded, None)

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch. If it is in progress, nothing changes.

        Calling it before each loop, as for a `DistributedSampler`, is not necessary, and does no
        harm: a run that resumed in the middle of the epoch stays there.
        """
        if whole("epoch", epoch) != self.epoch:
            self._go_to(epoch)
        self._named_epoch = True

    def reshuffle(self, epoch: int | None = None) -> None:
        """Go to the beginning of an epoch, also if it is in progress; by default of the next one."""
        self._go_to(self.epoch + 1 if epoch is None else whole("epoch", epoch))

    def _go_to(self, epoch: int) -> None:
        weights = self._next_weights()
        if epoch == self.epoch + 1:  # as a loop goes on: the sources of a mixture continue
            cursor = self.cursor.next_epoch(self.layout, self._next.excluded, weights)
        else:
            order = self._orders.first(epoch, self._next.excluded, weights)
            cursor = Cursor(epoch, 0, order, step=self.step, changes=self.cursor.changes)
        self._check_batches(self._next.excluded, weights, cursor)
        self._leave_epoch()
        self._changed_epochs.pop(epoch, None)
        self.cursor = cursor
        self._next = NextEpoch(self._next.excluded, None)

    def _leave_epoch(self) -> None:
        if self._changed_at_once:
            self._changed_epochs[self.epoch] = key_of(self.cursor.order.excluded.text)
        self._changed_at_once = False

    def set_skip(self, batches: int) -> None:
        """Go to a global batch of the epoch in progress: skip this many from its beginning."""
        cursor = self.cursor._replace(position=whole("batches", batches) * self.global_batch, ended=False)
        if self.cursor.start or self.cursor.cut:
            raise ConfigError("set_skip is for an epoch whose order did not change on the way; load a state instead")
        if cursor.position > cursor.end(self.layout):
            raise ConfigError(
                f"set_skip({batches}) is after the end of the epoch, which has {counted(self.batches, 'batch')}"
            )
        self.cursor = cursor.with_due_changes(self.layout)

    def exclude(self, ids: Iterable[int], *, mode: Literal["next_epoch", "immediate"] = "next_epoch") -> None:
        """Take rows out, from the next epoch on. The order of the others does not change.

        Ids are those in `index` of a batch. Call it with the same ids on all ranks. With
        `mode="immediate"`, rows that were not handed out yet are left out of the epoch in progress
        too; only a sampler of world size 1 can do that.

        >>> sampler = EpochSampler(range(10), global_batch=2, rank=0, world_size=1)
        >>> sampler.exclude([3, 5])
        >>> sampler.include([3])
        >>> sampler.excluded
        [5]
        """
        self._change(self._next.excluded.with_ids(checked_ids(ids, self._size)), mode)

    def include(self, ids: Iterable[int], *, mode: Literal["next_epoch", "immediate"] = "next_epoch") -> None:
        """Take excluded rows back in, from the next epoch on, or at once.

        A row that is included at once comes in this epoch only if its place in the order is still
        to come.
        """
        self._change(self._next.excluded.without_ids(checked_ids(ids, self._size)), mode)

    def _change(self, excluded: Exclusions, mode: str) -> None:
        if mode not in ("next_epoch", "immediate"):
            raise ConfigError(f"mode is {mode!r}; it must be 'next_epoch' or 'immediate'")
        if mode == "immediate" and self.world_size > 1:
            raise ConfigError(
                f"mode='immediate' on {self.ranks}: ranks that are at different samples would read different rows; "
                "use mode='next_epoch' on all ranks"
            )
        if mode == "immediate" and self.packing is not None:
            raise ConfigError(f"mode='immediate': {NEXT_EPOCH}; use mode='next_epoch'")
        if mode == "immediate" and self._mixture is not None and not self._mixture.has_fixed_size:
            raise ConfigError(
                "mode='immediate' on a RowMixture without weights: its epoch has each row once, so other rows would "
                "come twice in place of those; use mode='next_epoch', or give the mixture weights or an epoch_size"
            )
        self._check_batches(excluded, self._next_weights())
        if mode == "immediate" and not self.finished:
            self.cursor = self.cursor.excluding(excluded)
            self._changed_at_once = True
        self._next = NextEpoch(excluded, self._next.weights)

    def set_weights(self, weights: Mapping[str, float], *, step: int | None = None) -> None:
        """Change the weights of a `RowMixture`, from the next epoch on or from a step on.

        Steps are global batches of all epochs, as in `step`. Call it with the same arguments on all
        ranks, and with a step early enough: before any of them reads it.
        """
        if self._mixture is None:
            raise ConfigError(f"weights are for a RowMixture, and the rows are a {type(self.rows).__name__}")
        if step is not None and self.packing is not None:
            raise ConfigError(f"step is {step}: {NEXT_EPOCH}; leave it out")
        shares = self._mixture.checked_weights(weights)
        self._check_batches(self._next.excluded, shares)
        if step is None:
            self._next = NextEpoch(self._next.excluded, (shares,))
            self._new_weights = self._new_weights._replace(epoch=self.epoch, next=self._next.weights)
            return
        self._orders.size(self.cursor.order.excluded, shares)
        at = self.cursor.cut + (whole("step", step) - self.cursor.step) * self.global_batch
        if at < self.cursor.position:
            raise ConfigError(f"step is {step}, but the run is at step {self.step} already; name a later one")
        change = Change(step, shares)
        others = (other for other in self.cursor.changes if other.step != step)
        changes = sorted([*others, change], key=lambda change: change.step)
        self.cursor = self.cursor._replace(changes=tuple(changes))
        self._new_weights = self._new_weights._replace(changes=(*self._new_weights.changes, change))

    def _next_weights(self) -> Mapping[str, float] | None:
        """The weights of the next epoch: those that were set for it, or the last ones of this epoch."""
        return self.cursor.order.weights if self._next.weights is None else self._next.weights[0]

    def _epoch_size(self, excluded: Exclusions, weights: Mapping[str, float] | None) -> int:
        """The samples of the next epoch with these exclusions and weights."""
        if self.packing is None:
            return self._orders.size(excluded, weights)
        return self.cursor.next_epoch(self.layout, excluded, weights).order.size

    def _check_batches(
        self, excluded: Exclusions, weights: Mapping[str, float] | None, first: Cursor | None = None
    ) -> None:
        """Raise if an epoch would have no batches: the next one, or that of a cursor."""
        size = self._orders.size(excluded, weights)
        if self.packing is not None and size < (self.global_batch if self.drop_last else 1):  # perhaps there are more
            size = self._epoch_size(excluded, weights) if first is None else first.order.size
            if not size:
                raise ConfigError(NO_TOKENS)
        if self.drop_last and size < self.global_batch:
            left = (
                f"{size} of {counted(self._size, 'row')} are not excluded"
                if len(excluded)
                else f"there are {counted(size, 'row')}"
            )
            if self.packing is not None:
                what = "" if self.max_tokens is None else f" of max_tokens={self.max_tokens}"
                left = f"the rows that are left fill {counted(size, 'line')}{what}"
            raise ConfigError(
                f"global_batch is {self.global_batch}, but {left}: with drop_last=True an epoch would have no batches; "
                "use a smaller global_batch, or drop_last=False, which fills up with marked rows"
            )

    def state_dict(self, *, gather: bool = False, at: State | None = None) -> State:
        """The position after the last sample handed out, as plain data, the same on every rank.

        With `gather`, ranks compare their states first, and all raise if they differ: a collective.
        With `at`, an earlier state of this sampler, it is the position of that state with the rows
        that are excluded now, and the weights that were set since: for a trainer that is some
        batches behind the loader.

        >>> sampler = EpochSampler(range(10), global_batch=2, rank=0, world_size=1)
        >>> sampler.state_dict()["position"]
        0
        """
        state = pack(self._saved())
        if at is not None:
            state = moved(state, at, self._new_weights, self._changed_epochs)
        return agreed(state, self.ranks) if gather else state

    def _saved(self) -> Saved:
        cursor = self.cursor._replace(ended=self.position > 0 and self.finished)
        return Saved(self.seed, self.shuffle, self.global_batch, self.rows_described, cursor, self._next)

    @cached_property
    def rows_described(self) -> State:
        """What is known of the rows, to compare a state with: see `fmsdata.epochs.fingerprint`."""
        described = fingerprint(self.rows, self._named)
        if self.packing is not None:
            described["settings"] |= {"max_tokens": self.max_tokens, "tokens": self.rows.table.described}
        return {"rows": described, "weights": None if self._mixture is None else self._mixture.weights}

    def load_state_dict(self, state: State | Sequence[State]) -> None:
        """Resume from a state: of any rank, or the list of those of all ranks, which must be equal.

        World size, batch size, global batch and `drop_last` may differ from those it was saved
        with. A loader of this sampler continues from there.
        """
        saved = unpack(state, self._saved(), self._orders, self._size)
        cursor = saved.cursor
        if saved.global_batch != self.global_batch:
            cursor = cursor.recut(self.layout._replace(global_batch=saved.global_batch))
        self.cursor, self._next, self._named_epoch = cursor, saved.next, False
        self._new_weights = NewWeights()
        self._changed_at_once, self._changed_epochs = False, {}
