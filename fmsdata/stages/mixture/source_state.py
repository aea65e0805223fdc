"""What a lane saves of each source of a mixture."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from fmsdata.core.state import EDITED, State, number, parse, part, signed_number
from fmsdata.core.wording import shown
from fmsdata.errors import StateError
from fmsdata.stages.mixture.leftovers import Leftover


@dataclass(frozen=True, kw_only=True)
class SourceState:
    """The position of a source of a mixture in a lane."""

    taken: int = 0  # tokens
    shift: int = 0  # lead minus tokens taken; not 0 after the weights changed
    leftover: Leftover | None = None
    below: State | None = None


def pack_sources(sources: Mapping[str, SourceState]) -> State:
    """The state of a mixture.

    Only after an edit, a few lanes have a shift or a leftover. Those are one JSON text, so that the
    other lanes save nothing but an empty text.
    """
    edited = {
        name: {"shift": source.shift, "rest": None if source.leftover is None else source.leftover.plain()}
        for name, source in sources.items()
        if source.shift or source.leftover
    }
    return {
        "sources": {name: {"taken": source.taken, "below": source.below} for name, source in sources.items()},
        "edited": json.dumps(edited, separators=(",", ":")) if edited else "",
    }


def unpack_sources(state: State) -> dict[str, SourceState]:
    """The reverse of `pack_sources`."""
    text = state.get("edited")
    edited = {} if text == "" else parse(text, f"'edited' ({shown(text)})")
    sources = {}
    for name in part(state, "sources") or {}:
        saved = part(part(state, "sources"), name)
        after_edit = part(edited, name) if name in edited else None
        taken, leftover = number(saved, "taken"), Leftover.parse((after_edit or {}).get("rest"))
        if leftover and leftover.length > taken + leftover.tokens:  # it begins at or behind the start of the source
            raise StateError(f"source {name!r} has a leftover of {leftover.length} tokens, and gave {taken}: {EDITED}")
        shift = signed_number(after_edit, "shift")
        sources[name] = SourceState(taken=taken, shift=shift, leftover=leftover, below=part(saved, "below"))
    return sources
