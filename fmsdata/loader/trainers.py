"""Trainers of others that would use a loader in a way that is silently wrong, and the lines to write instead.

Trainers know torch's `DataLoader`: they look up its dataset and its sampler, skip batches on resume, and
save what they know about. A loader of fmsdata has a position of its own, which `fmsdata.integrations`
connects to their checkpoints. Whoever calls is recognised from the stack.
"""

import gc
import inspect
import sys
import warnings
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

from fmsdata.errors import ConfigError, FmsdataWarning, NoSuchAttributeError

# The lines that connect a loader to a trainer, by the package that the trainer is in. What uses another comes first.
LINES = {
    "lightning": (
        'data = fmsdata.integrations.lightning.DataModule("run.yaml")     # or a function that builds the loader\n'
        "trainer.fit(model, datamodule=data, ckpt_path=...)"
    ),
    "transformers": (
        "from fmsdata.integrations.hf import Trainer\n"
        "trainer = Trainer(model, args, train_dataset=loader)\n"
        "trainer.train(resume_from_checkpoint=...)"
    ),
    "accelerate": "fmsdata.integrations.accelerate.register(accelerator, loader)",
    "deepspeed": "fmsdata.integrations.deepspeed.save_checkpoint(engine, folder, loader)",
    "ray": (
        "checkpoint = fmsdata.integrations.ray.restore(loader)            # and no prepare_data_loader\n"
        "fmsdata.integrations.ray.report(metrics, loader, folder)"
    ),
}
LINES["pytorch_lightning"] = LINES["lightning"]
READ_AHEAD = ("lightning", "pytorch_lightning", "ray")  # what they iterate over, they read ahead, and save after that
TRAINS = {"_run_epoch", "_inner_training_loop"}  # methods of transformers that iterate, in versions 5 and 4
SAVE_ALL = ("torch.distributed.checkpoint", "fmsdata.train")  # they save the states of all ranks
RESUME = "state = loader.state_dict(gather=True)\nloader.load_state_dict(state)"
OWN = 'or save loader.state_dict(gather=True) yourself, and say so:\n    loader.keeper = "own"'
SHIFT = "task: {name: causal_lm, shift: false}     # or StatefulDataLoader(..., task=fmsdata.CausalLM(shift=False))"


class NotHere:
    """An attribute that trainers look up and a loader does not have: reading it is an error, `hasattr` is False."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, loader: object, owner: type) -> NoReturn:
        library = _library_in_use()
        raise NoSuchAttributeError(
            f"a loader has no {self._name!r}: it reads a stream, at a position of its own"
            + (f", which {library} does not know" if library else "")
            + f". Instead of building another loader from it, or skipping batches, write\n{_indented(library)}"
        )


def check_caller(frame: FrameType | None) -> None:
    """Raise if the caller of this frame, in which an iteration begins, reads ahead of what is trained on."""
    library = "" if frame is None or frame.f_back is None else _library(frame.f_back)
    if library in READ_AHEAD:
        raise ConfigError(
            f"{library} reads a batch ahead of what it trains on, and does not save the positions of all ranks: "
            f"batches would be lost on resume. Instead of giving it the loader, write\n{_indented(library)}"
        )


def check_trainer(step: int, task: Any) -> None:
    """Raise if the Trainer of transformers begins an epoch that would be wrong. Called when an iteration begins."""
    for frame in _stack("transformers"):
        trainer = frame.f_locals.get("self") if frame.f_code.co_name in TRAINS else None
        if trainer is None:
            continue
        resumed = frame.f_locals.get("resume_from_checkpoint")
        done = getattr(getattr(trainer, "state", None), "global_step", 0)
        if resumed is not None and done and not step:
            raise ConfigError(
                f"the Trainer resumes from {resumed} at step {done}, but the loader is at the start of the stream: "
                f"the first samples would be trained on again. Write\n{_indented('transformers')}"
            )
        check_labels(trainer, task)


def check_labels(trainer: Any, task: Any) -> None:
    """Raise if a Trainer's model would shift labels that are shifted already."""
    transformers = sys.modules["transformers"]
    model = trainer.model
    while not isinstance(model, transformers.PreTrainedModel) and hasattr(model, "module"):  # sharded or replicated
        model = model.module
    model = model.get_base_model() if hasattr(model, "get_base_model") else model  # adapters of peft
    own_loss = (
        getattr(trainer, "compute_loss_func", None) is not None
        or type(trainer).compute_loss is not transformers.Trainer.compute_loss
        or not isinstance(model, transformers.PreTrainedModel)
    )
    if getattr(task, "shift", False) and not own_loss:
        raise ConfigError(
            f"the labels of this loader are shifted by one token, and {type(model).__name__} shifts them once "
            f"more: it would learn to skip every other token. Write\n    {SHIFT}"
        )


def watch_accelerate(loader: Any) -> None:
    """Warn if Accelerate is in use, whose checkpoints do not hold the position of a loader; `save_state` will raise."""
    accelerate = sys.modules.get("accelerate")
    state = sys.modules.get("accelerate.state")
    if accelerate is None or state is None or not state.is_initialized():
        return
    methods = {frame.f_code.co_name for frame in _stack("transformers")}
    if "evaluation_loop" in methods:  # what is evaluated needs no position
        return
    library = "transformers" if methods & TRAINS else "accelerate"
    if library == "accelerate":
        for found in gc.get_objects():  # an accelerator is known to the script alone, which may keep it anywhere
            if issubclass(type(found), accelerate.Accelerator):
                _refuse_to_save(found, weakref.ref(loader))
    warnings.warn(
        f"{library} is in use, and its checkpoints do not hold the position of this loader: a run that resumes from "
        f"them would begin at the start of the stream. Before the first batch, write\n{_indented(library)}\n{OWN}",
        FmsdataWarning,
        stacklevel=4,
    )


def _refuse_to_save(accelerator: Any, reference: Callable[[], Any]) -> None:
    """Let `save_state` raise while nothing saves the position of a loader."""

    def refuse(*_: Any) -> None:
        loader = reference()
        registered = getattr(accelerator, "_custom_objects", ())  # exact on 1 process; on several, the state refuses
        if loader is None or loader.keeper or loader.checkpoint or any(known is loader for known in registered):
            return
        raise ConfigError(
            "accelerator.save_state leaves out the position of a loader that was read: a run that resumes from this "
            f"checkpoint would begin at the start of the stream. Write\n{_indented('accelerate')}\n{OWN}"
        )

    accelerator.register_save_state_pre_hook(refuse)


def refuse_client_state() -> None:
    """Raise if DeepSpeed is in use, which keeps the client state of one rank, and the state is that of this rank."""
    comm = sys.modules.get("deepspeed.comm")
    if comm is None or not comm.is_initialized() or any(_stack(package) for package in SAVE_ALL):
        return
    raise ConfigError(
        "deepspeed is in use, and keeps the client_state of one rank, but state_dict() holds the lanes of this rank: a "
        f"run could not be resumed from it. Write\n{_indented('deepspeed')}\n"
        "or state_dict(gather=False), if you save the states of all ranks yourself"
    )


def advice() -> str:
    """The lines to write, at the end of an error, if a trainer is on the stack."""
    library = _library_in_use()
    return f". With {library}, write\n{_indented(library)}" if library else ""


def _indented(library: str) -> str:
    return "\n".join(f"    {line}" for line in LINES.get(library, RESUME).splitlines())


def _library_in_use() -> str:
    """The trainer that is on the stack, and uses the others there; "" if there is none."""
    return next((library for library in LINES if _stack(library)), "")


def _stack(package: str) -> list[FrameType]:
    """The frames of a package that are on the stack."""
    frames = []
    frame = inspect.currentframe()
    while frame is not None:
        if f"{frame.f_globals.get('__name__', '')}.".startswith(f"{package}."):
            frames.append(frame)
        frame = frame.f_back
    return frames


def _library(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
