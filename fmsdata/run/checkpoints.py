"""Checkpoints of the loader: each rank writes its own lanes, without communication between ranks.

`<path>/step-<n>/` holds one file per rank, `rank-<r>-of-<W>.<digest>.<size>.json`. The digest is that
of the run's history and pipeline, which tells apart files that were not written together. The size
reveals a file that is not whole. So a listing is enough to know whether a checkpoint is complete: every rank
comes to the same conclusion, and reads only the files that hold its lanes.

The rank that finds a checkpoint complete after writing its own file writes the mark `complete`, and
removes the oldest checkpoints. The mark names the digest: a run that went back and reached the same
step again replaces the files of the earlier one.
"""

import hashlib
import json
import re
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from fmsdata.core.checks import whole
from fmsdata.core.state import State
from fmsdata.errors import CheckpointError, ConfigError, FmsdataWarning
from fmsdata.storage.location import Location
from fmsdata.storage.settings import Storage

STEP = re.compile(r"step-(0|[1-9][0-9]*)")
FILE = re.compile(r"rank-([0-9]+)-of-([0-9]+)\.([0-9a-f]{8})\.([0-9]+)\.json")
MARK = "complete"  # the file that says that the checkpoint was complete, and with which key
PATIENCE = 3  # incomplete saves before a warning


class SaveKey(NamedTuple):
    """What the files of one checkpoint share: the number of ranks, and the digest of the run."""

    world_size: int
    digest: str

    @classmethod
    def of(cls, state: State, world_size: int) -> "SaveKey":
        text = json.dumps([state["history"], state["pipeline"]]).encode()
        return cls(world_size, hashlib.blake2b(text, digest_size=4).hexdigest())

    def mark(self) -> bytes:
        """The content of the mark. Its text is a file format."""
        return f"{self.world_size} ranks, course {self.digest}\n".encode()


class Checkpoints:
    """A folder of checkpoints on any fsspec filesystem.

    The loader saves itself after `every` steps of the trainer (None: only on request), and with
    `on_sigterm` also when the scheduler ends the job. The newest `keep` complete checkpoints are kept
    (None: all).

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
        self._folder = Location(path, storage_options, storage, error=CheckpointError).absolute()
        self._waiting: list[int] = []  # steps that were incomplete after this process had written its file

    def __str__(self) -> str:
        return str(self._folder)

    def is_due(self, step: int) -> bool:
        """Whether the loader saves itself after this step."""
        return self.every is not None and step > 0 and step % self.every == 0

    def save(self, state: State, rank: int, world_size: int) -> str:
        """Write the state of one rank, and return its path.

        A failure changes none of the existing files.
        """
        body = json.dumps(state).encode()
        text = json.dumps({"format": "fmsdata loader", "sha256": _digest(body)}).encode() + b"\n" + body
        step, own = state["step"], SaveKey.of(state, world_size)
        path = f"step-{step}/rank-{rank}-of-{world_size}.{own.digest}.{len(text)}.json"
        (self._folder / path).write_bytes(text)
        listing = self._list(step)
        if own in listing.complete:
            self._waiting.clear()
            (self._folder / f"step-{step}/{MARK}").write_bytes(own.mark())
            for name, key in listing.keys.items():
                if key != own:
                    (self._folder / f"step-{step}/{name}").remove()
            self._prune(step)
        else:
            self._wait_for_others(step)
        return f"{self._folder}/{path}"

    def load(self, lanes: Sequence[int], step: int | None = None) -> list[State] | None:
        """The states that hold these lanes, from the newest complete checkpoint or a given step.

        None if there is nothing to resume from. Raises if there was something, and it is damaged.
        """
        steps = self.steps()
        if step is not None:
            self._require_newest(step, steps)
        problems: list[str] = []
        was_complete = False
        for candidate in [step] if step is not None else steps:
            survey = self._survey(candidate)
            if survey.files:
                if problems:
                    warnings.warn(
                        f"resuming from {self._folder}/step-{candidate}: " + "; ".join(problems),
                        FmsdataWarning,
                        stacklevel=4,
                    )
                return self._read(candidate, survey.files, lanes)
            problems.append(_unusable(candidate, survey))
            was_complete |= survey.was_complete
        if was_complete or step is not None:
            raise CheckpointError(
                f"{self._folder}: no checkpoint is complete: {'; '.join(problems)}; "
                "restore the files, or give a different folder to start from the beginning"
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
        """The steps that have a folder, newest first, complete or not."""
        return sorted((int(m[1]) for name in self._folder.folders() if (m := STEP.fullmatch(name))), reverse=True)

    def is_complete(self, step: int) -> bool:
        """Whether the checkpoint of this step holds every lane."""
        return bool(self._survey(step).files)

    def read(self, step: int, lanes: Sequence[int]) -> list[State]:
        """The states that hold these lanes, from a complete checkpoint that need not be the newest."""
        survey = self._survey(step)
        if not survey.files:
            raise CheckpointError(f"{self._folder}: {_unusable(step, survey)}")
        return self._read(step, survey.files, lanes)

    def _list(self, step: int) -> "_Listing":
        """The files of a checkpoint."""
        listed = (self._folder / f"step-{step}").sizes()
        matches = [(name, match) for name in sorted(listed) if (match := FILE.fullmatch(name))]
        keys = {name: SaveKey(int(match[2]), match[3]) for name, match in matches}
        found: dict[SaveKey, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
        damaged = []
        for name, match in matches:
            if int(match[4]) != listed[name]:
                damaged.append(f"{name} has {listed[name]} bytes")
            else:
                found[keys[name]][int(match[1])].append(name)
        complete = {
            key: {rank: names[0] for rank, names in files.items()}
            for key, files in found.items()
            if len(files) == key.world_size == max(files) + 1 and all(len(names) == 1 for names in files.values())
        }
        if damaged:
            problem = f"a file has the wrong size: {damaged[0]}"
        elif found:
            key = max(found, key=lambda key: len(found[key]))
            missing = next((rank for rank in range(key.world_size) if rank not in found[key]), None)
            problem = "it has a rank twice" if missing is None else f"rank {missing} of {key.world_size} is missing"
        else:
            problem = "it holds no file of a loader"
        return _Listing(keys, complete, problem, MARK in listed)

    def _survey(self, step: int) -> "_Survey":
        """The files to resume from, if the checkpoint is complete.

        Of several complete sets of files, the mark names the last.
        """
        keys, complete, problem, was_complete = self._list(step)
        files: Mapping[int, str] = {}
        if len(complete) == 1:
            (files,) = complete.values()
        elif complete:
            mark = (self._folder / f"step-{step}/{MARK}").read_bytes() if was_complete else b""
            files = next((complete[key] for key in complete if key.mark() == mark), {})
            problem = "it has several complete sets of files, and none is marked as the last: remove all but one set"
        return _Survey(files, problem, was_complete, gone=not keys)

    def _wait_for_others(self, step: int) -> None:
        """Warn once if several checkpoints stay incomplete: perhaps not all ranks save."""
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
                f"{self._folder}: step-{self._waiting[0]} is still incomplete, {oldest.problem}, "
                f"and this rank has saved {PATIENCE} times since; every rank must save",
                FmsdataWarning,
                stacklevel=5,
            )

    def _read(self, step: int, files: Mapping[int, str], lanes: Sequence[int]) -> list[State]:
        needed = sorted({lane % len(files) for lane in lanes})
        states = [self._read_file(f"step-{step}/{files[rank]}") for rank in needed]
        if wrong := [state for state in states if state.get("step") != step]:
            raise CheckpointError(
                f"{self._folder}/step-{step} holds the state of step {wrong[0].get('step')}: "
                "it was copied or renamed; restore its name, or remove it"
            )
        return states

    def _read_file(self, path: str) -> State:
        header, _, body = (self._folder / path).read_bytes().partition(b"\n")
        try:
            if json.loads(header)["sha256"] != _digest(body):
                raise ValueError("the checksum is wrong")
            return dict(json.loads(body))
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{self._folder}/{path} is damaged: {error}; "
                f"remove {path.partition('/')[0]} to resume from the checkpoint before it"
            ) from None

    def _require_newest(self, step: int, steps: Sequence[int]) -> None:
        newer = [later for later in steps if later > step and self._survey(later).files]
        if newer:
            raise CheckpointError(
                f"{self._folder}: step-{newer[0]} is newer than step-{step}, and the next resume would take it; "
                f"move {', '.join(f'step-{later}' for later in newer)} away to go back to step {step}"
            )

    def _prune(self, newest: int) -> None:
        """Remove what is older than the checkpoints to keep. Lists only the folders of those."""
        steps = self.steps()
        complete = list(islice((step for step in steps if self._survey(step).files), self.keep or 1))
        if complete[0] > newest:
            warnings.warn(
                f"{self._folder}/step-{complete[0]} is newer than step {newest}, and the next resume would take it; "
                "move it away if that run is abandoned",
                FmsdataWarning,
                stacklevel=5,
            )
        if len(complete) == self.keep:
            for step in steps:
                if step < complete[-1]:
                    (self._folder / f"step-{step}").remove_folder(first=MARK)


class _Listing(NamedTuple):
    """The files of a checkpoint, according to their names and sizes."""

    keys: dict[str, SaveKey]  # of each file
    complete: dict[SaveKey, dict[int, str]]  # the files by rank, for keys with a file of every rank
    problem: str  # why there is no such key
    was_complete: bool


@dataclass(frozen=True)
class _Survey:
    files: Mapping[int, str]  # by rank, if the checkpoint is complete
    problem: str
    was_complete: bool
    gone: bool  # there is no file of a loader


def _unusable(step: int, survey: _Survey) -> str:
    return f"step-{step} can't be used, {survey.problem}"


def _digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()
