"""The files of one checkpoint: their names, and what a listing of them says.

The names alone say whether a checkpoint is complete: see `fmsdata.run.checkpoints`. Nothing here
writes.
"""

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from fmsdata.core.state import State
from fmsdata.errors import CheckpointError
from fmsdata.storage.location import Location

STEP = re.compile(r"step-(0|[1-9][0-9]*)")
FILE = re.compile(r"rank-([0-9]+)-of-([0-9]+)\.([0-9a-f]{8})\.([0-9]+)\.json")
MARK = "complete"  # the file that says that the checkpoint was complete, and with which key
ABANDONED = "abandoned"  # the file that says that the run went back to an earlier step


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


class StepListing(NamedTuple):
    """The files of a checkpoint, according to their names and sizes."""

    keys: dict[str, SaveKey]  # of each file
    complete: dict[SaveKey, dict[int, str]]  # the files by rank, for keys with a file of every rank
    problem: str  # why there is no such key
    was_complete: bool
    abandoned: bool
    disagree: bool  # ranks planned different streams, according to their keys


@dataclass(frozen=True)
class Survey:
    """Whether a checkpoint can be resumed from."""

    step: int
    files: Mapping[int, str]  # by rank, if the checkpoint is complete
    problem: str
    was_complete: bool
    abandoned: bool  # the run went back to an earlier step; take the files only on request
    gone: bool  # there is no file of a loader

    @property
    def usable(self) -> bool:
        """Whether a run resumes from here by itself."""
        return bool(self.files) and not self.abandoned

    def why_not(self) -> str:
        """Why it cannot be used."""
        problem = "the run went back to an earlier step" if self.files else self.problem
        return f"step-{self.step} can't be used, {problem}"


def list_step(folder: Location, step: int) -> StepListing:
    """The files of a checkpoint."""
    listed = (folder / f"step-{step}").sizes()
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
    elsewhere = None  # a rank that has a file with another key
    if found:
        key = max(found, key=lambda key: len(found[key]))
        others = {rank for other in found if other.world_size == key.world_size for rank in found[other]}
        elsewhere = min(others - found[key].keys(), default=None)
    if damaged:
        problem = f"a file has the wrong size: {damaged[0]}"
    elif elsewhere is not None:
        problem = (
            f"rank {min(found[key])} and rank {elsewhere} planned from different data, configurations or checkpoints: "
            "was the corpus indexed while the run started?"
        )
    elif found:
        missing = next((rank for rank in range(key.world_size) if rank not in found[key]), None)
        problem = "it has a rank twice" if missing is None else f"rank {missing} of {key.world_size} is missing"
    else:
        problem = "it holds no file of a loader"
    disagree = elsewhere is not None and not complete
    return StepListing(keys, complete, problem, MARK in listed, ABANDONED in listed, disagree)


def survey_step(folder: Location, step: int) -> Survey:
    """The files to resume from, if the checkpoint is complete.

    Of several complete sets of files, the mark names the last.
    """
    keys, complete, problem, was_complete, abandoned, _ = list_step(folder, step)
    files: Mapping[int, str] = {}
    if len(complete) == 1:
        (files,) = complete.values()
    elif complete:
        mark = (folder / f"step-{step}/{MARK}").read_bytes() if was_complete else b""
        files = next((complete[key] for key in complete if key.mark() == mark), {})
        problem = "it has several complete sets of files, and none is marked as the last: remove all but one set"
    return Survey(step, files, problem, was_complete, abandoned, gone=not keys)


def to_bytes(state: State) -> bytes:
    """The content of a rank's file: a line with the checksum, and the state as JSON."""
    body = json.dumps(state).encode()
    return json.dumps({"format": "fmsdata loader", "sha256": _digest(body)}).encode() + b"\n" + body


def read_state(folder: Location, path: str) -> State:
    """The state in a rank's file."""
    header, _, body = (folder / path).read_bytes().partition(b"\n")
    try:
        if json.loads(header)["sha256"] != _digest(body):
            raise ValueError("the checksum is wrong")
        return dict(json.loads(body))
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{folder}/{path} is damaged: {error}; "
            f"remove {path.partition('/')[0]} to resume from the checkpoint before it"
        ) from None


def _digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()
