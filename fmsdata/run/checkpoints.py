"""Checkpoints of the loader: each rank writes its own lanes, and no rank talks to another.

`<path>/step-<n>/` holds one file per rank, `rank-<r>-of-<W>.<course>.<size>.json`. The course is a digest of the
run's history and pipeline, so that files which were not written together are told apart; the size tells a file
that is not whole. So a listing is enough to know whether a checkpoint is complete, every rank comes to the same
conclusion, and reads only the files that hold its lanes.

The rank that finds a checkpoint complete after writing its own file marks it so, and removes the oldest ones. The
mark names the course: a run that went back and came to the same step again takes the place of the earlier one.
"""

import hashlib
import json
import re
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

from fmsdata.core.checks import whole
from fmsdata.core.state import State
from fmsdata.errors import CheckpointError, ConfigError, FmsdataWarning
from fmsdata.storage.location import Folder
from fmsdata.storage.settings import Storage

STEP = re.compile(r"step-(0|[1-9][0-9]*)")
FILE = re.compile(r"rank-([0-9]+)-of-([0-9]+)\.([0-9a-f]{8})\.([0-9]+)\.json")
MARK = "complete"  # a file that tells that the checkpoint was complete once, and of which ranks and course
Course: TypeAlias = tuple[int, str]  # ranks, and the digest
PATIENCE = 3  # saves that may stay incomplete before it is said


class Checkpoints:
    """A folder of checkpoints on any fsspec filesystem.

    `every` so many steps of the trainer the loader saves itself (None: only on request); `keep` complete ones are
    kept (None: all). With `on_sigterm`, it also does when the scheduler ends the job.

    >>> checkpoints = Checkpoints("s3://bucket/run/loader", every=1000, keep=3)               # doctest: +SKIP
    >>> loader = StatefulDataLoader(data, batch_size=8, checkpoint=checkpoints)               # doctest: +SKIP
    """

    def __init__(
        self,
        path: str,
        *,
        every: int | None = None,
        keep: int | None = 3,
        on_sigterm: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        storage: Storage | None = None,
    ) -> None:
        self.every = None if every is None else whole("every", every, least=1)
        self.keep = None if keep is None else whole("keep", keep, least=1)
        self.on_sigterm = on_sigterm
        if not isinstance(on_sigterm, bool):
            raise ConfigError(f"on_sigterm is {on_sigterm!r}; it must be True or False")
        self._folder = Folder(path, storage_options or {}, CheckpointError, storage)
        self._waiting: list[int] = []  # steps that were not complete when this process had written its part

    def __str__(self) -> str:
        return str(self._folder)

    def is_due(self, step: int) -> bool:
        """Whether the loader saves itself after this step."""
        return self.every is not None and step > 0 and step % self.every == 0

    def save(self, state: State, rank: int, world_size: int) -> str:
        """Write one rank's state, and tell where. A failure leaves all that was there as it was."""
        body = json.dumps(state).encode()
        text = json.dumps({"format": "fmsdata loader", "sha256": _digest(body)}).encode() + b"\n" + body
        step, own = state["step"], (world_size, _course(state))
        path = f"step-{step}/rank-{rank}-of-{world_size}.{own[1]}.{len(text)}.json"
        self._folder.write(path, text)
        sets = self._sets(step)
        if own in sets.complete:
            self._waiting.clear()
            self._folder.write(f"step-{step}/{MARK}", _mark(own))
            for name, course in sets.courses.items():
                if course != own:
                    self._folder.remove_file(f"step-{step}/{name}")
            self._prune(step)
        else:
            self._wait_for_others(step)
        return f"{self._folder}/{path}"

    def load(self, lanes: Sequence[int], step: int | None = None) -> list[State] | None:
        """The states that hold these lanes, of the newest complete checkpoint or of a given step.

        None if there is nothing to go on from. Raises if there was something, and it is damaged.
        """
        steps = self.steps()
        if step is not None:
            self._require_newest(step, steps)
        problems: list[str] = []
        was_complete = False
        for one in [step] if step is not None else steps:
            survey = self._survey(one)
            if survey.files:
                if problems:
                    warnings.warn(
                        f"going on from {self._folder}/step-{one}: " + "; ".join(problems), FmsdataWarning, stacklevel=4
                    )
                return self._read(one, survey.files, lanes)
            problems.append(f"step-{one} can't be used, {survey.problem}")
            was_complete |= survey.was_complete
        if was_complete or step is not None:
            raise CheckpointError(
                f"{self._folder}: no checkpoint is complete: {'; '.join(problems)}; "
                "bring the files back, or give another folder to start from the beginning"
            )
        if problems:
            warnings.warn(
                f"starting from the beginning: {self._folder} has no complete checkpoint and never had one: "
                + "; ".join(problems),
                FmsdataWarning,
                stacklevel=4,
            )
        return None

    def steps(self) -> list[int]:
        """The steps that have a folder, newest first. Not all of them need be complete."""
        return sorted((int(m[1]) for name in self._folder.folders() if (m := STEP.fullmatch(name))), reverse=True)

    def is_complete(self, step: int) -> bool:
        """Whether every lane of this step is there."""
        return bool(self._survey(step).files)

    def read(self, step: int, lanes: Sequence[int]) -> list[State]:
        """The states that hold these lanes, of a complete checkpoint: to look into, also where there is a newer one."""
        survey = self._survey(step)
        if not survey.files:
            raise CheckpointError(f"{self._folder}: step-{step} can't be used, {survey.problem}")
        return self._read(step, survey.files, lanes)

    def _sets(self, step: int) -> "_Sets":
        """What a listing tells of a checkpoint."""
        listed = self._folder.files(f"step-{step}")
        parts = [(name, match) for name in sorted(listed) if (match := FILE.fullmatch(name))]
        found: dict[Course, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
        torn = []
        for name, match in parts:
            if int(match[4]) != listed[name]:
                torn.append(f"{name} has {listed[name]} bytes")
            else:
                found[int(match[2]), match[3]][int(match[1])].append(name)
        complete = {
            key: {rank: names[0] for rank, names in files.items()}
            for key, files in found.items()
            if files.keys() == set(range(key[0])) and all(len(names) == 1 for names in files.values())
        }
        if torn:
            problem = f"it is torn: {torn[0]}"
        elif found:
            (world_size, _), files = max(found.items(), key=lambda one: len(one[1]))
            missing = [rank for rank in range(world_size) if rank not in files]
            problem = f"rank {missing[0]} of {world_size} is missing" if missing else "a rank is there twice"
        else:
            problem = "it holds no file of a loader"
        return _Sets({name: (int(match[2]), match[3]) for name, match in parts}, complete, problem, MARK in listed)

    def _survey(self, step: int) -> "_Survey":
        """The set of files to go on from, if there is one. Of several, the one that was completed last."""
        courses, complete, problem, was_complete = self._sets(step)
        files: Mapping[int, str] = {}
        if len(complete) == 1:
            (files,) = complete.values()
        elif complete:
            mark = self._folder.read(f"step-{step}/{MARK}") if was_complete else b""
            files = next((complete[key] for key in complete if _mark(key) == mark), {})
            problem = "it is there more than once, and nothing tells which was last: remove the files of one course"
        return _Survey(files, problem, was_complete, gone=not courses)

    def _wait_for_others(self, step: int) -> None:
        """Say so once if checkpoint after checkpoint stays incomplete: perhaps not all ranks save."""
        if step in self._waiting:  # several ranks in one process
            return
        self._waiting.append(step)
        if len(self._waiting) <= PATIENCE:
            return
        oldest = self._survey(self._waiting[0])
        if oldest.files or oldest.gone:  # another rank completed it, and may have removed it since
            self._waiting.clear()
        elif len(self._waiting) == PATIENCE + 1:
            warnings.warn(
                f"{self._folder}: step-{self._waiting[0]} is still not complete, {oldest.problem}, "
                f"and this rank has saved {PATIENCE} times since; every rank must save, not only one",
                FmsdataWarning,
                stacklevel=5,
            )

    def _read(self, step: int, files: Mapping[int, str], lanes: Sequence[int]) -> list[State]:
        needed = sorted({lane % len(files) for lane in lanes})
        states = [self._read_file(f"step-{step}/{files[rank]}") for rank in needed]
        if wrong := [state for state in states if state.get("step") != step]:
            raise CheckpointError(
                f"{self._folder}/step-{step} holds the state of step {wrong[0].get('step')}: "
                "it was copied or renamed; give it back its name, or remove it"
            )
        return states

    def _read_file(self, path: str) -> State:
        header, _, body = self._folder.read(path).partition(b"\n")
        try:
            if json.loads(header)["sha256"] != _digest(body):
                raise ValueError("its checksum is wrong")
            return dict(json.loads(body))
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{self._folder}/{path} is damaged: {error}; "
                f"remove {path.partition('/')[0]} to go on from the checkpoint before it"
            ) from None

    def _require_newest(self, step: int, steps: Sequence[int]) -> None:
        newer = [one for one in steps if one > step and self._survey(one).files]
        if newer:
            raise CheckpointError(
                f"{self._folder}: step-{newer[0]} is newer than step-{step}, and the next resume would take it; "
                f"move {', '.join(f'step-{one}' for one in newer)} away to go back to step {step}"
            )

    def _prune(self, newest: int) -> None:
        """Remove what is older than the checkpoints to keep. Only those are looked into, however many there are."""
        steps = self.steps()
        complete = list(islice((step for step in steps if self._survey(step).files), self.keep or 1))
        if complete[0] > newest:
            warnings.warn(
                f"{self._folder}/step-{complete[0]} is newer than step {newest}, and the next resume would take it; "
                "move it away if that run is given up",
                FmsdataWarning,
                stacklevel=5,
            )
        if len(complete) == self.keep:
            for step in steps:
                if step < complete[-1]:
                    self._folder.remove(f"step-{step}", first=MARK)


class _Sets(NamedTuple):
    """The files of a checkpoint, as far as their names and sizes tell."""

    courses: dict[str, Course]  # of each file
    complete: dict[Course, dict[int, str]]  # by rank, of the courses that have every rank's file
    problem: str  # why there is none
    was_complete: bool


@dataclass(frozen=True)
class _Survey:
    files: Mapping[int, str]  # by rank, if the checkpoint is complete
    problem: str
    was_complete: bool
    gone: bool  # there is no file of a loader


def _mark(own: Course) -> bytes:
    return f"{own[0]} ranks, course {own[1]}\n".encode()


def _course(state: State) -> str:
    """What the states that belong together have in common."""
    told = json.dumps([state["history"], state["pipeline"]]).encode()
    return hashlib.blake2b(told, digest_size=4).hexdigest()


def _digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()
