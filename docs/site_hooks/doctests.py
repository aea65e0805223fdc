"""Shows the examples in docstrings (lines that start with `>>>`) as code, without doctest's options."""

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"(?:^>>> .*\n?(?:^(?!>>> ).*\S.*\n?)*)+", re.MULTILINE)
OPTION = re.compile(r"\s*# doctest: .*$", re.MULTILINE)


class Doctests(griffe.Extension):
    """Rewrites docstrings before they are rendered."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Fence the examples of an object's docstring."""
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(
                lambda found: f"```pycon\n{OPTION.sub('', found[0].rstrip())}\n```\n", obj.docstring.value
            )
