"""Loaders and trainers of other libraries that use a dataset in a way that can't be exact.

A `Rescalable` that reads the lanes of one rank of several must not be split again: a dispatcher reads
on rank 0 for all ranks, a slicing wrapper keeps a part of what each rank reads, and the other lanes
are lost without a word. Such wrappers call `iter()` or, before it, `set_epoch()` on the dataset, and
they know the number of processes. So the object that calls is asked for it.
"""

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from fmsdata.errors import ConfigError
from fmsdata.run.ranks import Ranks

ONE_RANK_SAVERS = {"accelerate", "lightning", "pytorch_lightning"}  # they save what rank 0 returns


def refuse_wrappers(ranks: Ranks, lanes: int, seed: int) -> None:
    """Raise if the caller of the method that calls this is a wrapper that loses samples, or never ends."""
    frames = list(_callers(2))
    owner: Any = None
    if frames and frames[0].f_code.co_name in ("__iter__", "set_epoch"):  # looking at the variables of others
        owner = frames[0].f_locals.get("self")  # would keep them alive
    processes = _processes(owner)
    name = type(owner).__name__
    if processes > 1 and ranks.world_size > 1:
        raise ConfigError(
            f"{name} splits what it reads among {processes} processes, but this Rescalable reads only the lanes of "
            f"{ranks}: samples would be lost. Use the loader of fmsdata, which accelerator.prepare() leaves as it is:\n"
            "    loader = fmsdata.StatefulDataLoader(data, batch_size=...)\n"
            "or let each process read the whole stream, of which the wrapper keeps a part:\n"
            f"    data = fmsdata.Rescalable(lines, lanes={lanes}, seed={seed}, rank=0, world_size=1)"
        )
    if processes > 1 and getattr(owner, "use_stateful_dataloader", False) and hasattr(owner, "slice_fn"):
        raise ConfigError(
            f"{name} with use_stateful_dataloader=True on {processes} processes saves the state after the batches that "
            "it read ahead: batches would be lost on resume. Use the loader of fmsdata, whose state is exact:\n"
            "    loader = fmsdata.StatefulDataLoader(data, batch_size=...)\n"
            "    state = loader.state_dict(gather=True)"
        )
    for frame in frames:
        if frame.f_code.co_name == "evaluation_loop" and _module(frame) == "transformers":
            raise ConfigError(
                "Trainer.evaluate reads its dataset to the end, and this stream has no end. "
                "Give it a loader with an end, in a subclass of Trainer:\n"
                "    def get_eval_dataloader(self, eval_dataset=None):\n"
                "        return fmsdata.StatefulDataLoader(data, batch_size=..., steps=...)"
            )


def refuse_to_save_one_rank(ranks: Ranks) -> None:
    """Raise if the state of one rank of several is requested by a library that saves no other.

    Looks at the caller of the method that calls this.
    """
    caller = next(_callers(2), None)
    if ranks.world_size > 1 and caller is not None and (library := _module(caller)) in ONE_RANK_SAVERS:
        raise ConfigError(
            f"{library} saves the state of one rank only, and state_dict() on {ranks} holds the lanes of this rank: "
            "the run could not be resumed. Hand it an object whose state_dict() returns "
            "loader.state_dict(gather=True), the state of all ranks"
        )


def _processes(owner: Any) -> int:
    """The processes that a wrapper splits samples among: 1 if it is no such wrapper."""
    for holder in (owner, getattr(owner, "state", None)):
        processes = getattr(holder, "num_processes", None)
        if isinstance(processes, int):
            return processes
    return 1


def _callers(depth: int) -> Iterator[FrameType]:
    """The stack, from the caller of the method that is `depth` calls above."""
    frame: FrameType | None = sys._getframe(depth + 1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
