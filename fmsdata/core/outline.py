"""Outlines: a pipeline as a tree of words, for `repr`, for notebooks and for `fmsdata plan`.

Making one reads nothing and starts nothing: it only looks at what an object knows already.
"""

import html
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

LONGEST = 60  # characters of a value


class Branch(NamedTuple):
    """One line of a tree: what is drawn before it, and its words."""

    guide: str  # before the first line of the words
    indent: str  # before further lines of the words, if they are wrapped
    name: str
    title: str
    facts: str

    @property
    def label(self) -> str:
        return f"{self.name}: " if self.name else ""


class Outline(NamedTuple):
    """A stage, a loader or the like: what it is, what is worth knowing about it, and what it reads.

    >>> print(Outline("Shuffle", "window=64", below=(Outline("ShardReader", "shards=4", "web"),)).text())
    Shuffle window=64
    └── web: ShardReader shards=4
    """

    title: str
    facts: str = ""
    name: str = ""
    below: tuple["Outline", ...] = ()

    def branches(self, guide: str = "", indent: str = "") -> Iterator[Branch]:
        """The lines of the tree, from the top down."""
        yield Branch(guide, indent + ("│   " if self.below else "    "), self.name, self.title, self.facts)
        for number, outline in enumerate(self.below, 1):
            last = number == len(self.below)
            yield from outline.branches(indent + ("└── " if last else "├── "), indent + ("    " if last else "│   "))

    def text(self) -> str:
        """The tree as text."""
        lines = (f"{branch.guide}{branch.label}{branch.title} {branch.facts}" for branch in self.branches())
        return "\n".join(line.rstrip() for line in lines)

    def html(self) -> str:
        """The tree for a notebook."""
        lines = (
            f"{branch.guide}{html.escape(branch.label)}<b>{html.escape(branch.title)}</b> {html.escape(branch.facts)}"
            for branch in self.branches()
        )
        return f"<pre>{chr(10).join(line.rstrip() for line in lines)}</pre>"


class Outlined(Protocol):
    """What has an outline."""

    def outline(self) -> Outline: ...


def outline_of(thing: Outlined) -> Outline:
    """The outline of anything that has one. Never raises: also a half-made object has a name."""
    try:
        return thing.outline()
    except Exception:
        return Outline(type(thing).__name__, "(not complete)")


def facts_of(values: Mapping[str, Any]) -> str:
    """Values by name, in one line. Those that are None are left out, and long ones are cut.

    >>> facts_of({"window": 64, "first_window": None})
    'window=64'
    """
    return " ".join(f"{name}={_cut(str(value))}" for name, value in values.items() if value is not None)


def _cut(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 4]} ..."
