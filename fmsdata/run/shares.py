"""TODO."""

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

from fmsdata.core.lane import full_name
from fmsdata.core.stage import Stage
from fmsdata.stages.mixture import Mixture, expected_tokens

if TYPE_CHECKING:
    from fmsdata.run.rescalable import Rescalable


def source_sizes(stage: Stage) -> dict[str, int]:
    """All sources of a pipeline by their full names, in order, and the tokens of one epoch of each."""
    return {name: leaf.size().tokens for name, leaf, _ in sorted(leaves(stage), key=lambda leaf: leaf[0])}


def wanted_shares(data: "Rescalable", begin: float, end: float) -> dict[str, float]:
    """The share that each source should have of the tokens between two moments of the run, counted in tokens."""
    return {name: share for name, _, share in leaves(data.lines, begin, end)}


def leaves(
    stage: Stage, begin: float = 0, end: float = 0, source: str = "", share: float = 1.0
) -> Iterator[tuple[str, Stage, float]]:
    """The stages that everything comes from, with their full names and their shares of the mix."""
    children = stage.children()
    if not children:
        yield source or str(getattr(stage, "name", type(stage).__name__)), stage, share
    shares = _shares_between(stage, begin * share, end * share) if isinstance(stage, Mixture) else None
    for name, child in children.items():
        if shares is not None:
            yield from leaves(child, begin, end, full_name(source, name), share * shares[name])
        else:
            yield from leaves(child, begin, end, source, share if len(children) == 1 else math.nan)


def _shares_between(mixture: Mixture, begin: float, end: float) -> dict[str, float]:
    """The weights, on average over the phases between two moments, and without sources that have ended."""
    if any(stage.ends() for stage in mixture.sources.values()) and begin < end:
        before, after = (expected_tokens(mixture, tokens) for tokens in (begin, end))
        return {name: (after[name] - before[name]) / (end - begin) for name in mixture.sources}
    ends = [phase.until_tokens for phase in mixture.phases if phase.until_tokens and begin < phase.until_tokens < end]
    if not ends:
        return dict(mixture.phase_at(int(begin)).weights)
    parts = [(mixture.phase_at(int(a)).weights, (b - a) / (end - begin)) for a, b in pairwise([begin, *ends, end])]
    return {name: math.fsum(weights[name] * part for weights, part in parts) for name in mixture.sources}
