"""OwnTask: a function of the user's own as a task, named by its module."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from fmsdata.core.checks import whole
from fmsdata.core.own import OwnName
from fmsdata.errors import FmsdataError, StageError
from fmsdata.tasks.batch import Batch


@dataclass(frozen=True)
class OwnTask:
    """The function at `module:function` as a task.

    It is called with a `Batch` and returns the fields of the batch.

    The module is looked up in `folder`, if that is given, in the current directory, then on Python's
    search path. `parameters` are passed by name. The function may have the attributes of a task:
    `extra_tokens` (default 1), `needs_lines` (default True) and `causal` (default True).

    >>> task = OwnTask("my_tasks:reversed_lm", {"share": 0.5})     # doctest: +SKIP
    """

    function: str
    parameters: Mapping[str, Any] = field(default_factory=dict, hash=False)
    folder: str | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "parameters", dict(self.parameters))
        whole(f"extra_tokens of task {self.function!r}", self.extra_tokens)
        self._name.check_arguments(self.parameters, "a batch")

    @property
    def extra_tokens(self) -> int:
        extra: int = getattr(self._function, "extra_tokens", 1)
        return extra

    @property
    def needs_lines(self) -> bool:
        return bool(getattr(self._function, "needs_lines", True))

    @property
    def causal(self) -> bool:
        return bool(getattr(self._function, "causal", True))

    def __call__(self, batch: Batch) -> dict[str, torch.Tensor]:
        try:
            fields = self._function(batch, **self.parameters)
        except FmsdataError:
            raise
        except Exception as error:
            raise StageError(f"task {self.function!r} failed: {type(error).__name__}: {error}") from error
        if not isinstance(fields, dict) or not all(isinstance(name, str) for name in fields):
            returned = (
                f"a dict with the keys {list(fields)}" if isinstance(fields, dict) else f"a {type(fields).__name__}"
            )
            raise StageError(f"task {self.function!r} returned {returned}; expected a dict of tensors by name")
        return fields

    @cached_property
    def _function(self) -> Callable[..., Any]:
        return self._name.load()

    @cached_property
    def _name(self) -> OwnName:
        return OwnName.found_from("task", self.function, self.folder)

    def __reduce__(self) -> tuple[type["OwnTask"], tuple[str, dict[str, Any], str | None]]:
        """Another process looks the function up again, in the same places."""
        return OwnTask, (self.function, dict(self.parameters), self.folder)
