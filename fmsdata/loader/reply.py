"""Replies: what a worker sends back for one round.

A reply is the lines that the worker has in the round. Tokens, and the pickled description of the
lines behind them, go through shared memory; only the two sizes go through the worker's pipe. So a
message never fills the pipe, and a worker never waits for the trainer to receive one.
"""

import pickle
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from fmsdata.core.chunk import Chunk, Row
from fmsdata.core.tokens import Tokens
from fmsdata.errors import FmsdataError
from fmsdata.loader.shared_memory import SharedMemory
from fmsdata.run.positions import Milestone
from fmsdata.storage.mapped import Version
from fmsdata.storage.stats import StorageStats


class ReplySize(NamedTuple):
    """The bytes of a reply in shared memory: the message that announces it."""

    tokens: int
    description: int


class Reply(NamedTuple):
    """The description of a worker's lines in a round, without their tokens."""

    length: int = 0  # tokens per line
    dtype: str = ""
    padding: Sequence[int] = ()  # of each line
    lines: Chunk | None = None  # without tokens, and only if the batch needs them
    passed: Sequence[Milestone] = ()
    stats: StorageStats | None = None  # of this worker so far
    versions: Mapping[str, Version] | None = None  # of the files that it opened first in this round
    failure: "WorkerFailure | None" = None  # why the remaining lines are missing


class _Quoted(str):
    """The text of a KeyError, which is quoted already: a KeyError shows the repr of what it gets."""

    def __repr__(self) -> str:
        return str(self)


class WorkerFailure(NamedTuple):
    """An error in a worker: the names of its class, and its texts."""

    module: str
    name: str
    message: str
    traceback: str

    @classmethod
    def of(cls, error: Exception) -> "WorkerFailure":
        kind = type(error)
        return cls(kind.__module__, kind.__qualname__, str(error), "".join(traceback.format_exception(error)))

    def rebuild(self, worker: str) -> Exception:
        """The error, to be raised in the trainer, with a note that names the worker.

        A class that the trainer does not have, or that takes other arguments, becomes a `RuntimeError`.
        """
        kind = getattr(sys.modules.get(self.module), self.name, None)
        error: Exception = RuntimeError(f"{self.name}: {self.message}")
        if isinstance(kind, type) and issubclass(kind, Exception):
            with suppress(Exception):
                error = kind(_Quoted(self.message) if issubclass(kind, KeyError) else self.message)
        error.add_note(f"in {worker}")
        if not isinstance(error, FmsdataError):
            error.add_note(self.traceback)
        return error


def write_reply(memory: SharedMemory, reply: Reply, tokens: int = 0) -> ReplySize:
    """Write a reply behind the tokens of its lines, and return the message that announces it.

    The tokens are in the memory already: this many bytes.
    """
    description = pickle.dumps(reply, pickle.HIGHEST_PROTOCOL)
    memory.reserve(tokens + len(description))[tokens:] = description
    return ReplySize(tokens, len(description))


def read_reply(memory: SharedMemory, size: ReplySize) -> tuple[Reply, Tokens]:
    """The reply, and a view of its tokens that is valid until the memory is written to again."""
    data = memory.read(size.tokens + size.description)
    reply: Reply = pickle.loads(data[size.tokens :])
    tokens = np.frombuffer(data[: size.tokens], np.dtype(reply.dtype or np.uint8))
    return reply, tokens.reshape(len(reply.padding), reply.length)


def join_lines(rows: Sequence[Row]) -> Chunk:
    """These lines as one chunk without tokens.

    Lines of the same chunk are taken from it at once.
    """
    rows_of: dict[int, list[int]] = {}  # by chunk
    for row, (chunk, _) in enumerate(rows):
        rows_of.setdefault(id(chunk), []).append(row)
    chunks = [rows[group[0]][0].take(np.array([rows[row][1] for row in group])).compact() for group in rows_of.values()]
    lines = Chunk.join(chunks).take(np.argsort(np.concatenate(list(rows_of.values()))))
    no_tokens = np.empty(0, np.uint8)
    return Chunk([replace(buffer, tokens=no_tokens) for buffer in lines.buffers], lines.spans, lines.first)
