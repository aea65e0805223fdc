"""When a loader saves itself, and what is in its folder of checkpoints already.

A batch is finished when the trainer asks for the next one. So that is when a loader saves, and what
it saves is the position of that moment.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

from fmsdata.core.state import State
from fmsdata.core.wording import shown
from fmsdata.errors import CheckpointError, ConfigError
from fmsdata.loader.ends import Unsaved
from fmsdata.loader.sigterm import EXIT_CODE, Sigterm
from fmsdata.run.checkpoints import Checkpoints
from fmsdata.run.positions import Positions
from fmsdata.run.ranks import Ranks

StateOf: TypeAlias = Callable[[Positions], State]


class Saving:
    """The saves of one loader, which may have no folder to save to.

    Methods take the function that makes a state of a position: keeping it would keep the loader alive.
    """

    def __init__(self, checkpoint: Checkpoints | None, ranks: Ranks) -> None:
        if not isinstance(checkpoint, Checkpoints | None):
            raise ConfigError(
                f"checkpoint is {shown(checkpoint)}; it must be a Checkpoints, as in Checkpoints('folder')"
            )
        self.checkpoint = checkpoint
        self._ranks = ranks
        self._sigterm = Sigterm()
        self._busy = False
        self._done: Positions | None = None  # when the trainer last asked for a batch
        self._saved_step: int | None = None  # the step that is in the folder already
        self._unsaved: Unsaved | None = None

    @property
    def folder(self) -> Checkpoints:
        """The folder. Raises if there is none."""
        if self.checkpoint is None:
            raise ConfigError("this loader has no checkpoint folder: create it with checkpoint=Checkpoints(path)")
        return self.checkpoint

    @property
    def handles_sigterm(self) -> bool:
        return self.checkpoint is not None and self.checkpoint.on_sigterm

    def load(self, lanes: Any, step: int | None) -> list[State]:
        """The states of a step of the folder, or of its newest complete checkpoint. Raises if there is none."""
        states = self.folder.load(lanes, step)
        if states is None:
            raise CheckpointError(f"{self.folder} has no checkpoint to load")
        return states

    def move_to(self, positions: Positions) -> None:
        """The loader takes a position that need not come from the folder."""
        self._done, self._saved_step = positions, None
        if self.checkpoint is not None and self.checkpoint.saves_itself and self._ranks.rank == 0:
            self._unsaved = Unsaved(str(self.checkpoint), positions.step)

    def begin(self, loaded: Positions | None) -> None:
        """The loader begins at a position that it loaded from the folder; None: at the start of the stream."""
        if loaded is not None:
            self._saved_step = loaded.step
        if self.checkpoint is not None:
            self.checkpoint.begin(self._saved_step, self._ranks.rank)

    def advance(self, step: int) -> None:
        """A batch was handed out."""
        if self._unsaved is not None:
            self._unsaved.step = step

    def on_sigterm(self, state_of: StateOf) -> AbstractContextManager[None]:
        """Within this context SIGTERM saves, if the folder says so."""
        return self._sigterm.handled(lambda: self._save_done(state_of)) if self.handles_sigterm else nullcontext()

    def save_if_due(self, positions: Positions, state_of: StateOf, *, ended: bool) -> None:
        """The trainer asks for a batch: it has finished all that it got. `ended`: it gets no more."""
        checkpoint = self.folder
        self._done = positions
        if checkpoint.is_due(positions.step) or self._sigterm.received or (ended and checkpoint.saves_itself):
            self._save(checkpoint, positions, state_of)
        if self._sigterm.received:
            raise SystemExit(EXIT_CODE)

    def save(self, positions: Positions, state_of: StateOf) -> str:
        """Save now, and return the step's folder."""
        checkpoint = self.folder
        if checkpoint.read_only or checkpoint.goes_back:  # the first is an error, the second has more to write
            self._saved_step = None
        self._save(checkpoint, positions, state_of)
        return f"{checkpoint}/step-{positions.step}"

    def close(self) -> None:
        """Report what is in no checkpoint, and let other runs save to the folder."""
        if self._unsaved is not None:
            self._unsaved.report()
        if self.checkpoint is not None and self._ranks.rank == 0:
            self.checkpoint.release()

    def _save(self, checkpoint: Checkpoints, positions: Positions, state_of: StateOf) -> None:
        if positions.step == self._saved_step:
            return
        self._ranks.check("loader")
        self._busy = True
        try:
            if self._ranks.saves:
                rank, world_size = self._ranks.rank, self._ranks.world_size
                checkpoint.save(state_of(positions), rank, world_size, shared=self._ranks.may_be_shared)
        finally:
            self._busy = False
        self._saved_step = positions.step
        if self._unsaved is not None:
            self._unsaved.saved = positions.step

    def _save_done(self, state_of: StateOf) -> None:
        """Save where the trainer last asked for a batch, unless a save is in progress."""
        if self.checkpoint is not None and self._done is not None and not self._busy:
            self._save(self.checkpoint, self._done, state_of)
