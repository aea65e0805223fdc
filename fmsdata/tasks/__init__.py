"""Tasks: what a line becomes for the model. The data below is the same for all of them."""

from fmsdata.tasks.base import IGNORED, Task
from fmsdata.tasks.causal_lm import CausalLM
from fmsdata.tasks.collate import Collate
from fmsdata.tasks.fill_in_the_middle import FillInTheMiddle
from fmsdata.tasks.masked_lm import MaskedLM
from fmsdata.tasks.own import OwnTask
from fmsdata.tasks.registry import TASKS, task_from

__all__ = [
    "IGNORED",
    "TASKS",
    "CausalLM",
    "Collate",
    "FillInTheMiddle",
    "MaskedLM",
    "OwnTask",
    "Task",
    "task_from",
]
