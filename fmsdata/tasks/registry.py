"""The tasks by the names that a configuration uses."""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from fmsdata.core.checks import check_parameters, suggestion
from fmsdata.core.wording import shown
from fmsdata.errors import ConfigError
from fmsdata.tasks.base import Task
from fmsdata.tasks.causal_lm import CausalLM
from fmsdata.tasks.fill_in_the_middle import FillInTheMiddle
from fmsdata.tasks.masked_lm import MaskedLM
from fmsdata.tasks.own import OwnTask

TASKS: dict[str, Any] = {"causal_lm": CausalLM, "fill_in_the_middle": FillInTheMiddle, "masked_lm": MaskedLM}


def task_from(described: str | Mapping[str, Any] | None, folder: str | None = None) -> Task:
    """The task that a configuration describes.

    That is a name in `TASKS`, `module:function`, or a dict of a name and parameters. A module is also
    looked up in `folder`, that of the configuration.

    >>> task_from("causal_lm")
    CausalLM(prompt_len=0, shift=True, cross_documents=True)
    >>> task_from({"name": "masked_lm", "mask": 103, "vocab_size": 30_522}).rate
    0.15
    """
    if described is None:
        described = {}
    if not isinstance(described, str | Mapping):
        raise ConfigError(f"task is {shown(described)}; it must be a name, or a dict of a name and parameters")
    parameters = {"name": described} if isinstance(described, str) else dict(described)
    name = parameters.pop("name", "causal_lm")
    if not isinstance(name, str) or not all(isinstance(parameter, str) for parameter in parameters):
        raise ConfigError(f"task is {shown(described)}; its name and the names of its parameters must be strings")
    if ":" in name:
        return OwnTask(name, parameters, folder)
    if name not in TASKS:
        raise ConfigError(f"unknown task {name!r}; {suggestion(name, [*TASKS, 'package.module:function'])}")
    known = fields(TASKS[name])
    check_parameters(f"task {name!r}", parameters, [field.name for field in known])
    missing = [field.name for field in known if field.default is MISSING and field.name not in parameters]
    if missing:
        raise ConfigError(f"task {name!r} needs {', '.join(missing)}, as in {{name: {name}, {missing[0]}: ...}}")
    task: Task = TASKS[name](**parameters)
    return task
