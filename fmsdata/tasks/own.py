"""A task of the user's own: a function, named by where it is."""

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
from fmsdata.errors import ConfigError, FmsdataError, StageError
from fmsdata.tasks.batch import Batch


@dataclass(frozen=True)
class OwnTask:
    """The task that the function at `module:function` is: called with a `Batch`, it gives the batch's fields.

    The module is looked for in the current directory, then where Python looks. `parameters` are passed by name.
    Attributes of the function say what a task must tell: `extra_tokens` (1 if missing), `needs_lines` (True).

    >>> task = OwnTask("my_tasks:reversed_lm", {"share": 0.5})     # doctest: +SKIP
    """

    function: str
    parameters: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "parameters", dict(self.parameters))
        whole(f"extra_tokens of task {self.function!r}", self.extra_tokens)
        try:
            signature = inspect.signature(self._function)
            takes = list(signature.parameters.values())
            if not any(one.kind is one.VAR_KEYWORD for one in takes):
                check_parameters(f"task {self.function!r}", self.parameters, [one.name for one in takes[1:]])
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

    def __call__(self, batch: Batch) -> dict[str, torch.Tensor]:
        try:
            fields = self._function(batch, **self.parameters)
        except FmsdataError:
            raise
        except Exception as error:
            raise StageError(f"task {self.function!r} failed: {type(error).__name__}: {error}") from error
        if not isinstance(fields, dict) or not all(isinstance(name, str) for name in fields):
            given = f"names {list(fields)}" if isinstance(fields, dict) else f"a {type(fields).__name__}"
            raise StageError(f"task {self.function!r} gave {given}, not a dict of tensors by name")
        return fields

    @cached_property
    def _function(self) -> Callable[..., Any]:
        module, _, name = str(self.function).partition(":")
        if not module or not name:
            raise ConfigError(f"task {self.function!r}: write a function of your own as package.module:function")
        with _current_directory_first():
            found = _import(module, self.function)
        try:
            function = attrgetter(name)(found)
        except AttributeError:
            callables = [one for one, value in vars(found).items() if callable(value)]
            raise ConfigError(
                f"task {self.function!r}: {getattr(found, '__file__', module)} has no {name!r}; "
                + suggestion(name, callables)
            ) from None
        if not callable(function):
            raise ConfigError(f"task {self.function!r}: {name} is {function!r}, which can't be called")
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
                f"task {written!r}: there is no module {error.name!r} in {os.getcwd()} nor where Python looks"
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
