"""Loaders and trainers of other libraries that use a dataset in a way that can't be exact.

A `Rescalable` that reads the lanes of one rank of several must not be split again: a dispatcher
reads on rank 0 for all ranks, a slicing wrapper keeps a part of what each rank reads, and the other
lanes are silently lost. Such wrappers call `iter()` or, before it, `set_epoch()` on the
dataset, and they know the number of processes. So that number is read from the object that calls.
"""

import importlib.metadata
import inspect
import re
from collections.abc import Iterator
from types import FrameType
from typing import Any

from fmsdata.errors import ConfigError
from fmsdata.run.ranks import Ranks

EXACT = (
    "Use the loader of fmsdata, whose state is exact:\n"
    "    loader = fmsdata.StatefulDataLoader(data, batch_size=...)\n"
    "    state = loader.state_dict(gather=True)"
)
# They save what rank 0 returns, unless they are connected to a loader in this way.
INTEGRATIONS = {
    "accelerate": "fmsdata.integrations.accelerate.register(accelerator, loader)",
    "lightning": "fmsdata.integrations.lightning",
    "lightning_fabric": "fmsdata.integrations.lightning",
    "pytorch_lightning": "fmsdata.integrations.lightning",
}
EXACT_SLICES = (1, 13)  # the first version of Accelerate that resumes a loader with slices where it was


def refuse_wrappers(ranks: Ranks, lanes: int, seed: int) -> str | None:
    """Raise if a method was called by a wrapper that loses samples, or never ends.

    To be called by that method.

    Returns the name of a wrapper that is exact, but reads ahead.
    """
    caller = next(_callers(2), None)
    owner: Any = None
    if caller is not None and caller.f_code.co_name in ("__iter__", "set_epoch"):  # looking at the variables of
        owner = caller.f_locals.get("self")  # other functions would keep these alive
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
            f"it read ahead: batches would be lost on resume. {EXACT}"
        )
    refuse_endless_evaluation()
    _refuse_collator(caller)
    if caller is None or _library(caller) != "accelerate":
        return None
    if processes > 1 and (found := _inexact_slices()):
        raise ConfigError(
            f"Accelerate {found} with use_stateful_dataloader=True on {processes} processes resumes at another "
            f"position than the saved one: batches would be repeated. Upgrade it (pip install 'accelerate>="
            f"{'.'.join(map(str, EXACT_SLICES))}'). {EXACT.replace('Use', 'Or use', 1)}"
        )
    return name


def _refuse_collator(caller: FrameType | None) -> None:
    """Raise if a loader of torch joins samples with a function of transformers, which knows dicts only."""
    collate: Any = None
    if caller is not None and _library(caller) == "torch" and caller.f_code.co_name == "__init__":
        collate = caller.f_locals.get("collate_fn")
    collate = getattr(collate, "data_collator", collate)  # inside a wrapper of the Trainer
    if str(getattr(collate, "__module__", "")).partition(".")[0] == "transformers":
        raise ConfigError(
            "the collator of transformers can't join the samples of this dataset. Give the Trainer a loader:\n"
            "    from fmsdata.integrations.hf import Trainer\n"
            "    trainer = Trainer(model, args, train_dataset=loader)\n"
            "or Trainer(..., data_collator=fmsdata.Collate())"
        )


def refuse_endless_evaluation() -> None:
    """Raise if transformers evaluates, which it does to the end of the data."""
    if any(frame.f_code.co_name == "evaluation_loop" and _library(frame) == "transformers" for frame in _callers(1)):
        raise ConfigError(
            "Trainer.evaluate reads its data to the end, and this stream has no end. "
            "Give it a loader with an end, in a subclass of Trainer:\n"
            "    def get_eval_dataloader(self, eval_dataset=None):\n"
            "        return fmsdata.StatefulDataLoader(data, batch_size=..., steps=...)"
        )


def refuse_to_save(ranks: Ranks, gather: bool, reader: str | None = None) -> None:
    """Raise if the state that a method returns to its caller could not be resumed from.

    `reader` is what reads the data ahead of the trainer, if anything does. Loaders that read ahead
    and take the state at the right moment, as torchdata does, are the caller themselves.
    """
    caller = next(_callers(2), None)
    library = "" if caller is None else _library(caller)
    if ranks.world_size > 1 and not gather and library in INTEGRATIONS:
        raise ConfigError(
            f"{library} saves the state of one rank only, and state_dict() on {ranks} holds the lanes of this rank: "
            "the run could not be resumed. Save loader.state_dict(gather=True), the state of all ranks, as "
            f"{INTEGRATIONS[library]} does"
        )
    if reader is not None and library != "torchdata":
        raise ConfigError(
            f"this dataset is read by {reader}, ahead of the trainer, so its position is not that of the "
            f"trainer: samples would be lost or repeated on resume. {EXACT}"
        )


def _inexact_slices() -> str | None:
    """The version of Accelerate, if it saves the state of a loader with slices, and is one that does so wrongly.

    Its loader calls `set_epoch()` of the dataset that slices, which called ours.
    """
    frames = (frame for frame in _callers(1) if frame.f_code.co_name == "set_epoch" and _library(frame) == "accelerate")
    if not any(getattr(frame.f_locals.get("self"), "use_stateful_dataloader", False) for frame in frames):
        return None
    found = importlib.metadata.version("accelerate")
    return found if tuple(map(int, re.findall(r"\d+", found)[:2])) < EXACT_SLICES else None


def _processes(owner: Any) -> int:
    """The processes that a wrapper splits samples among: 1 if it is no such wrapper."""
    for holder in (owner, getattr(owner, "state", None)):
        processes = getattr(holder, "num_processes", None)
        if isinstance(processes, int) and isinstance(getattr(holder, "process_index", None), int):
            return processes
    return 1


def _callers(depth: int) -> Iterator[FrameType]:
    """The stack, from the caller of the method that is `depth` calls above."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        if depth < 0:
            yield frame
        frame, depth = frame.f_back, depth - 1


def _library(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
