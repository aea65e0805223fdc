"""The pieces of work that processes and nodes share: a unit to tokenize, or a shard to write.

A task depends on the job and on nothing else, so it does not matter who runs it, when, or how often.
"""

import pickle
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

from fmsdata.corpus.prepare.settings import Settings, Unit
from fmsdata.corpus.prepare.shards import ShardPlan, write_planned
from fmsdata.corpus.prepare.units import UnitRecord, tokenize_unit
from fmsdata.corpus.prepare.work_folder import WorkFolder
from fmsdata.corpus.tokenizer import Tokenizer
from fmsdata.storage.location import Location

Task: TypeAlias = Unit | ShardPlan
Result: TypeAlias = UnitRecord | dict[str, Any]


class Job(NamedTuple):
    """What all tasks of a run share."""

    source: Location
    output: Location
    settings: Settings
    tokenizer: bytes  # pickled, on its way to another process


def run_task(job: Job, task: Task) -> Result:
    """Do a piece of work."""
    work = WorkFolder(job.output)
    if isinstance(task, Unit):
        return tokenize_unit(job.source, work, job.settings, _tokenizer(job.tokenizer), task)
    return write_planned(job.output, work, job.settings, task)


@lru_cache(maxsize=1)
def _tokenizer(pickled: bytes) -> Tokenizer:
    """The tokenizer, opened once in each process."""
    tokenizer: Tokenizer = pickle.loads(pickled)
    return tokenizer


def doing(task: Task) -> str:
    """What a task does, for errors."""
    return f"tokenizing {task}" if isinstance(task, Unit) else f"writing {task}"
