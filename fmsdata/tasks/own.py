"""OwnTask: a function of the user's own as a task, named by its module."""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch

from fmsdata.core.checks import check_parameters, suggestion, whole
from fmsdata.core.wording import shown
from fmsdata.errors import ConfigError, FmsdataError, StageError
from fmsdata.tasks.batch import Batch


@dataclass(frozen=True)
class OwnTask:
    """The function at `module:function` as a task.

    It is called with a `Batch` and returns the fields of the batch.

    The module is looked up in the current directory, then on Python's search path. `parameters` are
    passed by name. The function may have the attributes of a task: `extra_tokens` (default 1),
    `needs_lines` (default True) and `causal` (default True).

    >>> task = OwnTask("my_tasks:reversed_lm", {"share": 0.5})     # doctest: +SKIP
    """

    function: str
    parameters: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "parameters", dict(self.parameters))
        whole(f"extra_tokens of task {self.function!r}", self.extra_tokens)
        try:
            signature = inspect.signature(self._function)
            accepted = list(signature.parameters.values())
            if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted):
                check_parameters(
                    f"task {self.function!r}", self.parameters, [parameter.name for parameter in accepted[1:]]
                )
            signature.bind(None, **self.parameters)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"task {self.function!r} can't be called with a batch and {self.parameters}: {error}"
            ) from None

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
        module, _, name = str(self.function).partition(":")
        if not module or not name:
            raise ConfigError(f"task {self.function!r}: name a function of your own as package.module:function")
        with _current_directory_first():
            found = _import(module, self.function)
        try:
            function = attrgetter(name)(found)
        except AttributeError:
            callables = [attribute for attribute, value in vars(found).items() if callable(value)]
            raise ConfigError(
                f"task {self.function!r}: {getattr(found, '__file__', module)} has no {name!r}; "
                + suggestion(name, callables)
            ) from None
        if not callable(function):
            raise ConfigError(f"task {self.function!r}: {name} is {shown(function)}, which is not callable")
        return function  # type: ignore[no-any-return]

    def __reduce__(self) -> tuple[type["OwnTask"], tuple[str, dict[str, Any]]]:
        """Another process looks the function up again, in the same places."""
        return OwnTask, (self.function, dict(self.parameters))


def _import(module: str, written: str) -> Any:
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"task {written!r}: there is no module {error.name!r} in {os.getcwd()} or on Python's search path"
            ) from None
        raise ConfigError(f"task {written!r}: importing {module} failed: {type(error).__name__}: {error}") from error


@contextmanager
def _current_directory_first() -> Iterator[None]:
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)
