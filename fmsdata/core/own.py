"""Code of the user's own, named `module:name` in a configuration or on the command line.

The module is looked up beside the configuration, then in the current directory, then on Python's
search path. The two folders are on the search path only while the module is imported.
"""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, NamedTuple

from fmsdata.core.checks import check_parameters, suggestion
from fmsdata.core.wording import shown
from fmsdata.errors import ConfigError


class OwnName(NamedTuple):
    """A function or class of the user's own, as it was written, and where its module is looked up.

    >>> OwnName.found_from("task", "my_tasks:noisy_lm", folder=None).load()     # doctest: +SKIP
    <function noisy_lm>
    """

    kind: str  # what it is used as, for messages: "task"
    written: str  # module:name
    folders: tuple[str, ...]  # that are searched before Python's search path

    @classmethod
    def found_from(cls, kind: str, written: str, folder: str | None) -> "OwnName":
        """The name, with the folders that are searched from here: `folder`, and the current directory."""
        here = [] if folder is None else [os.path.abspath(folder)]
        return cls(kind, str(written), tuple(dict.fromkeys([*here, os.getcwd()])))

    def load(self) -> Callable[..., Any]:
        """The function or class."""
        module, _, name = self.written.partition(":")
        if not module or not name:
            raise ConfigError(f"{self}: name a function of your own as package.module:function")
        with _searched_first(self.folders):
            found = self._import(module)
        try:
            function = attrgetter(name)(found)
        except AttributeError:
            callables = [attribute for attribute, value in vars(found).items() if callable(value)]
            where = getattr(found, "__file__", module)
            raise ConfigError(f"{self}: {where} has no {name!r}; {suggestion(name, callables)}") from None
        if not callable(function):
            raise ConfigError(f"{self}: {name} is {shown(function)}, which is not callable")
        return function  # type: ignore[no-any-return]

    def check_arguments(self, arguments: Mapping[str, Any], first: str | None = None) -> None:
        """Raise unless it can be called with these arguments by name, after `first`, which is put into words."""
        function = self.load()
        before = [] if first is None else [None]
        try:
            signature = inspect.signature(function)
            accepted = list(signature.parameters.values())
            if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted):
                check_parameters(str(self), arguments, [parameter.name for parameter in accepted[len(before) :]])
            signature.bind(*before, **arguments)
        except (TypeError, ValueError) as error:
            given = dict(arguments) if first is None else f"{first} and {dict(arguments)}"
            raise ConfigError(f"{self} can't be called with {given}: {error}") from None

    def _import(self, module: str) -> Any:
        try:
            return importlib.import_module(module)
        except (Exception, SystemExit) as error:
            if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
                raise ConfigError(
                    f"{self}: there is no module {error.name!r} in {', '.join(self.folders)} or on Python's search path"
                ) from None
            raise ConfigError(f"{self}: importing {module} failed: {type(error).__name__}: {error}") from error

    def __str__(self) -> str:
        return f"{self.kind} {self.written!r}"


@contextmanager
def _searched_first(folders: tuple[str, ...]) -> Iterator[None]:
    sys.path[:0] = folders
    try:
        yield
    finally:
        for folder in folders:
            sys.path.remove(folder)
