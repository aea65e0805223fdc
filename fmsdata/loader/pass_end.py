"""The end of a finite pass, as a loader knows it: the last step, and what fills up the last batches.

It follows from the plan of all lanes and from the world and batch sizes of the run so far, which every
rank knows. So all ranks end at the same step without asking each other: see `fmsdata.run.finite`.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from fmsdata.core.checks import check_parameters, flag, whole
from fmsdata.core.wording import counted
from fmsdata.errors import ConfigError, StateError
from fmsdata.planning.schedule import Schedule, Segment
from fmsdata.run.checkpoints import Checkpoints
from fmsdata.run.finite import PassPlan, check_finite, filler_line
from fmsdata.run.positions import Positions
from fmsdata.run.rescalable import Rescalable
from fmsdata.storage.location import Location
from fmsdata.storage.own_folder import make_own_folder, user_cache
from fmsdata.tasks.base import IGNORED
from fmsdata.tasks.batch import Batch


class PassEnd:
    """Where a loader's pass ends. Planning begins when this is created, and is waited for when it is needed."""

    def __init__(self, data: Rescalable, samples: int | None, checkpoint: Checkpoints | None) -> None:
        self._lanes = data.lanes
        self._start_plan = partial(data.plan, samples, plan_folder(checkpoint))
        self._start_plan()
        self.filler = filler_line(check_finite(data.lines))
        self._step: int | None = None

    @property
    def plan(self) -> PassPlan:
        """The lines of all lanes. Waits for the plan; after a failure, plans again."""
        return self._start_plan().result()

    def move(self) -> None:
        """The loader was moved: from there on, the pass may end at another step."""
        self._step = None

    def step(self, positions: Positions, history: Sequence[Segment]) -> int:
        """The step at which a run with this history ends, if its world and batch sizes stay the same."""
        if self._step is None:
            lines = self.plan.lines
            schedule = Schedule(history, self._lanes, lines)
            expected = schedule.lines(positions.step)
            for lane, taken in positions.lines.items():
                if taken != expected[lane]:
                    raise StateError(
                        f"{counted(taken, 'line')} of lane {lane} were taken, but {expected[lane]} according to "
                        "the steps of the "
                        "pass: the state is damaged or was edited, or is not from this pass"
                    )
            self._step = schedule.end(Segment(positions.step, *history[-1][1:]))
        return self._step


def plan_folder(checkpoint: Checkpoints | None) -> Location | None:
    """Where plans are kept: beside the checkpoints, else in the user's cache. None: nowhere."""
    if checkpoint is not None and not checkpoint.read_only:
        return checkpoint.folder
    folder = user_cache()
    try:
        make_own_folder(folder)
    except (ConfigError, OSError):  # the next start plans again
        return None
    return Location(folder)


def mark_padding(fields: dict[str, Any], batch: Batch) -> dict[str, Any]:
    """The fields of a batch of a finite pass: `is_padding` says which rows only fill it up."""
    is_padding = torch.tensor([padding >= batch.tokens.shape[1] for padding in batch.padding], device="cpu")
    labels = fields.get("labels")
    if isinstance(labels, torch.Tensor) and labels.shape[:1] == is_padding.shape and is_padding.any():
        fields = {**fields, "labels": labels.masked_fill(is_padding.view(-1, *[1] * (labels.ndim - 1)), IGNORED)}
    return {**fields, "is_padding": is_padding}


def checked_evaluation(evaluation: Any, data: Rescalable, checkpoint: Checkpoints | None) -> tuple[bool, int | None]:
    """Whether a loader evaluates, and how many samples of the set it reads; None: all."""
    samples = None
    if isinstance(evaluation, Mapping):
        check_parameters("evaluation", evaluation, ["samples"])
        samples = evaluation.get("samples")
        samples = None if samples is None else whole("evaluation samples", samples, least=1)
    elif not flag("evaluation", evaluation):
        return False, None
    if data.epochs is None:
        raise ConfigError("evaluation reads a set to its end: give the Rescalable epochs=1")
    if checkpoint is not None:
        raise ConfigError(
            "an evaluation loader has no state, so it has no checkpoints: remove `checkpoint`, or evaluation"
        )
    return True, samples
