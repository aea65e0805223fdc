"""Checkpoints of the loader: each rank writes its own lanes, without communication between ranks.

`<path>/step-<n>/` holds one file per rank, `rank-<r>-of-<W>.<digest>.<size>.json`. The digest is
that of the run's history and pipeline, which distinguishes files that were not written together.
The size reveals a file that is not whole. So a listing is enough to know whether a checkpoint is
complete: every rank decides alike, and reads only the files that hold its lanes.

The rank that finds a checkpoint complete after writing its own file writes the mark `complete`, and
removes the oldest checkpoints. The mark names the digest: a run that went back and reached the same
step again replaces the files of the earlier one.

A run that goes back to a step writes `abandoned` into the folders of the later ones when it first
saves, and `back-to-<n>` beside them: they are not resumed from any more, unless a step is reached
again. `fmsdata.run.lease` keeps two runs from saving to one folder.
"""

import logging
import warnings
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from fmsdata.core.checks import flag, whole
from fmsdata.core.state import State
from fmsdata.core.wording import counted
from fmsdata.errors import CheckpointError, FmsdataWarning
from fmsdata.run import lease
from fmsdata.run.checkpoint_files import (
    ABANDONED,
    MARK,
    STEP,
    SaveKey,
    Survey,
    list_step,
    read_state,
    survey_step,
    to_bytes,
)
from fmsdata.storage.location import Location
from fmsdata.storage.settings import Storage

log = logging.getLogger("fmsdata")

BACK = "back-to-"  # the file that says to which step the run went back
PATIENCE = 3  # incomplete saves before a warning
TRIES = 8  # of a load, if checkpoints are removed meanwhile


class _ChangedError(CheckpointError):
    """The folder changed while it was read."""


class Checkpoints:
    """A folder of checkpoints on any fsspec filesystem.

    The loader saves itself after `every` steps of the trainer (None: only on request), and with
    `on_sigterm` also when the scheduler ends the job. The newest `keep` complete checkpoints are
    kept (None: all).

    With `step` the run goes back to that step, once: when it has saved since, it resumes from its
    own newest checkpoint. With `read_only` the loader resumes in the same way, and nothing is
    written or removed.

    >>> checkpoints = Checkpoints("s3://bucket/run/loader", every=1000, keep=3)     # doctest: +SKIP
    >>> loader = StatefulDataLoader(data, batch_size=8, checkpoint=checkpoints)     # doctest: +SKIP
    """

    def __init__(
        self,
        path: str,
        *,
        every: int | None = None,
        keep: int | None = 3,
        step: int | None = None,
        on_sigterm: bool = False,
        read_only: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        storage: Storage | None = None,
    ) -> None:
        self.every = None if every is None else whole("every", every, least=1)
        self.keep = None if keep is None else whole("keep", keep, least=1)
        self.step = None if step is None else whole("step", step)
        self.read_only = flag("read_only", read_only)
        self.on_sigterm = flag("on_sigterm", on_sigterm) and not read_only
        self._folder = Location(path, storage_options, storage, error=CheckpointError).absolute()
        self._lease = lease.Lease(self._folder)
        self._in_use = False  # there was a lease when the folder was last listed for a load
        self._named: int | None = None  # the step that was named for the last load
        self._back_to: int | None = None  # the same, once the loader is there, until later steps are set aside
        self._earlier: set[int] = set()  # steps that had files of an earlier run when the folder was loaded
        self._waiting: list[int] = []  # steps that were incomplete after this process had written its file

    def __str__(self) -> str:
        return str(self._folder)

    def __repr__(self) -> str:
        read_only = ", read_only=True" if self.read_only else ""
        return f"{type(self).__name__}({str(self)!r}, every={self.every}, keep={self.keep}{read_only})"

    @property
    def folder(self) -> Location:
        """The folder."""
        return self._folder

    def is_due(self, step: int) -> bool:
        """Whether the loader saves itself after this step."""
        return self.saves_itself and self.every is not None and step > 0 and step % self.every == 0

    @property
    def saves_itself(self) -> bool:
        """Whether the loader saves without being asked to."""
        return self.every is not None and not self.read_only

    @property
    def goes_back(self) -> bool:
        """Whether the next save sets later steps aside."""
        return self._back_to is not None

    def save(self, state: State, rank: int, world_size: int, *, shared: bool = False) -> str:
        """Write the state of one rank, and return its path.

        `shared`: other processes may be the same rank, and save the same. The first one writes.

        A failure changes none of the existing files. Raises if another live run saves here, or if a
        rank of this run has saved a different pipeline.
        """
        if self.read_only:
            raise CheckpointError(
                f"{self._folder} is open for reading only (read_only=True), so nothing is saved there; "
                "build the loader without read_only to save"
            )
        holds = self._lease.check(rank)
        if rank == 0 and self._back_to is not None:
            self._abandon(self._back_to)
        text, step, own = to_bytes(state), state["step"], SaveKey.of(state, world_size)
        path = f"step-{step}/rank-{rank}-of-{world_size}.{own.digest}.{len(text)}.json"
        if shared and self._saved_by_partner(path, own, step):
            return f"{self._folder}/{path}"
        (self._folder / path).write_bytes(text)
        listing = list_step(self._folder, step)
        if own in listing.complete:
            self._waiting.clear()
            (self._folder / f"step-{step}/{MARK}").write_bytes(own.mark())
            for name, key in listing.keys.items():
                if key != own:
                    (self._folder / f"step-{step}/{name}").remove()
            if listing.abandoned:
                (self._folder / f"step-{step}/{ABANDONED}").remove()
            self._prune(step)
        elif listing.disagree and step not in self._earlier:
            raise CheckpointError(
                f"{self._folder}/step-{step}: {listing.problem} No run resumes from this step: "
                "start all ranks again, from the same checkpoint"
            )
        else:
            self._wait_for_others(step)
        if holds:
            self._lease.hold()
        return f"{self._folder}/{path}"

    def _saved_by_partner(self, path: str, own: SaveKey, step: int) -> bool:
        """Whether a process that shares the data of this one has saved it already."""
        listing = list_step(self._folder, step)
        return not listing.abandoned and path.partition("/")[2] in listing.complete.get(own, {}).values()

    def release(self) -> None:
        """Let other runs save to this folder. The next save takes it again."""
        self._lease.release()

    def load(self, lanes: Sequence[int], step: int | None = None) -> list[State] | None:
        """The states that hold these lanes, from the newest complete checkpoint or a given step.

        None if there is nothing to resume from. Raises if there was something, and it is damaged.
        If another process removes the checkpoint meanwhile, the next complete one is taken.
        """
        problem: CheckpointError | None = None
        for _ in range(TRIES):
            level = self._folder.level()
            steps = _steps(level.folders)
            notes = {entry.name for entry in level.files}
            self._in_use = lease.NAME in notes
            named = step if step is not None else self._target(steps, notes)
            try:
                found, problems = self._find(steps) if named is None else (self._find_named(named, steps), [])
                states = None if found is None else self._read(found, lanes)
            except CheckpointError as error:
                if not isinstance(error, _ChangedError) and self._are_there(steps):
                    raise
                problem = error
                continue
            if problems:
                where = (
                    "starting from the beginning"
                    if found is None
                    else f"resuming from {self._folder}/step-{found.step}"
                )
                never = "" if found else f"{self._folder} has no complete checkpoint and never had one: "
                warnings.warn(f"{where}: {never}{'; '.join(problems)}", FmsdataWarning, stacklevel=4)
            self._named, self._earlier = named, set(steps)
            return states
        raise CheckpointError(
            f"{self._folder} changed under each of {TRIES} attempts to read it: {problem}; another run saves and "
            "removes checkpoints there: end it, or let it keep more of them"
        )

    def steps(self) -> list[int]:
        """The steps that have a folder, newest first, complete or not."""
        return _steps(self._folder.folders())

    def is_complete(self, step: int) -> bool:
        """Whether the checkpoint of this step holds every lane, and was not abandoned."""
        return survey_step(self._folder, step).usable

    def read(self, step: int, lanes: Sequence[int]) -> list[State]:
        """The states that hold these lanes, from any complete checkpoint."""
        return self._read(self._find_named(step, ()), lanes)

    def begin(self, step: int | None, rank: int) -> None:
        """The loader of a rank has taken the position that was loaded, if there was one.

        Rank 0 logs from which step it resumes, and where it will save.
        """
        self._back_to = self._named
        if rank != 0:
            return
        if self.read_only:
            saves = "nothing is written there (read_only)"
        elif self.every is None:
            saves = "the loader saves there when loader.save() is called"
        else:
            kept = "all checkpoints" if self.keep is None else f"the newest {self.keep}"
            saves = f"the loader saves there every {counted(self.every, 'step')} and keeps {kept}"
        if self._in_use and not self.read_only and (other := self._lease.other_run()):
            saves += f"; but it is in use by another run ({other}), and saving will be refused while that is alive"
        if step is None:
            log.info("starting at step 0: %s has no checkpoint; %s", self._folder, saves)
        elif self._back_to is None:
            log.warning("resuming from %s/step-%d; %s", self._folder, step, saves)
        else:
            log.warning(
                "going back to %s/step-%d; later steps are set aside when this run first saves; %s",
                self._folder,
                step,
                saves,
            )

    def _target(self, steps: Sequence[int], notes: set[str]) -> int | None:
        """The step to go back to, unless the run did that already and has saved since."""
        if self.step is None or f"{BACK}{self.step}" not in notes:
            return self.step
        newest = next((step for step in steps if survey_step(self._folder, step).usable), self.step)
        return None if newest > self.step else self.step

    def _are_there(self, steps: Sequence[int]) -> bool:
        """Whether none of these steps was removed. Other ranks may have added some."""
        return not steps or set(steps) <= set(self.steps())

    def _find(self, steps: Sequence[int]) -> tuple[Survey | None, list[str]]:
        """The newest checkpoint to resume from, and why newer ones can't be used."""
        problems: list[str] = []
        was_complete = False
        for step in steps:
            survey = survey_step(self._folder, step)
            if survey.usable:
                return survey, problems
            was_complete |= survey.was_complete
            if not survey.abandoned:
                problems.append(survey.why_not())
        if not self._are_there(steps):
            raise _ChangedError("checkpoints were removed while they were listed")
        if was_complete:
            problems = [survey_step(self._folder, step).why_not() for step in steps]
            raise CheckpointError(
                f"{self._folder}: no checkpoint is complete: {'; '.join(problems)}; "
                "restore the files, or give a different folder to start from the beginning"
            )
        return None, problems

    def _find_named(self, step: int, steps: Sequence[int]) -> Survey:
        """The checkpoint of this step, also if the run went back to an earlier one since."""
        survey = survey_step(self._folder, step)
        if not survey.files:
            complete = [f"step-{other}" for other in steps if survey_step(self._folder, other).files]
            raise CheckpointError(
                f"{self._folder}: {survey.why_not()}" + (f"; complete are {', '.join(complete)}" if complete else "")
            )
        return survey

    def _wait_for_others(self, step: int) -> None:
        """Warn once if several checkpoints stay incomplete: perhaps not all ranks save."""
        if step in self._waiting:  # several ranks in one process
            return
        self._waiting.append(step)
        if len(self._waiting) <= PATIENCE:
            return
        oldest = survey_step(self._folder, self._waiting[0])
        if oldest.files or oldest.gone:  # another rank completed it, and may have removed it since
            self._waiting.clear()
        elif len(self._waiting) == PATIENCE + 1:
            warnings.warn(
                f"{self._folder}: step-{self._waiting[0]} is still incomplete, {oldest.problem}, "
                f"and this rank has saved {counted(PATIENCE, 'time')} since; every rank must save",
                FmsdataWarning,
                stacklevel=5,
            )

    def _read(self, survey: Survey, lanes: Sequence[int]) -> list[State]:
        step, files = survey.step, survey.files
        needed = sorted({lane % len(files) for lane in lanes})
        try:
            states = [read_state(self._folder, f"step-{step}/{files[rank]}") for rank in needed]
        except CheckpointError:
            if set(files.values()) <= list_step(self._folder, step).keys.keys():
                raise
            raise _ChangedError(f"{self._folder}/step-{step} was removed while it was read") from None
        if wrong := [state for state in states if state.get("step") != step]:
            raise CheckpointError(
                f"{self._folder}/step-{step} holds the state of step {wrong[0].get('step')}: "
                "it was copied or renamed; restore its name, or remove it"
            )
        return states

    def _abandon(self, target: int) -> None:
        """Set aside all steps after the one that the run went back to. Nothing is removed.

        Only rank 0 does this, before it writes its own file. So no checkpoint of the run that went
        back is complete before that.
        """
        level = self._folder.level()
        text = f"the run went back to step {target}\n".encode()
        for step in _steps(level.folders):
            if step > target:
                (self._folder / f"step-{step}/{ABANDONED}").write_bytes(text)
        (self._folder / f"{BACK}{target}").write_bytes(text)
        for entry in level.files:
            if entry.name.startswith(BACK) and entry.name != f"{BACK}{target}":
                (self._folder / entry.name).remove()
        (self._folder / f"step-{target}/{ABANDONED}").remove()
        self._back_to = None

    def _prune(self, newest: int) -> None:
        """Remove what is older than the checkpoints to keep. Lists only the folders of those.

        A run that is behind another one removes nothing.
        """
        steps = self.steps()
        complete = list(islice((step for step in steps if survey_step(self._folder, step).usable), self.keep or 1))
        if complete and complete[0] > newest:
            if self._back_to is None:  # else rank 0 has not set it aside yet
                warnings.warn(
                    f"{self._folder}/step-{complete[0]} is newer than step {newest}, and the next resume would take "
                    "it; move it away if that run is abandoned, or go back with loader.load(step=...)",
                    FmsdataWarning,
                    stacklevel=5,
                )
        elif len(complete) == self.keep:
            for step in steps:
                if step < complete[-1]:
                    (self._folder / f"step-{step}").remove_folder(first=MARK)


def _steps(folders: Sequence[str]) -> list[int]:
    """The steps that have a folder, newest first."""
    return sorted((int(match[1]) for name in folders if (match := STEP.fullmatch(name))), reverse=True)
