"""The planned share of each source in any part of a run, from weights, phases and `max_epochs`.

Nothing is read: sizes come from the counts.
"""

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from fmsdata.core.lane import full_name
from fmsdata.core.stage import Stage
from fmsdata.planning import generations
from fmsdata.stages.mixture import Mixture
from fmsdata.stages.shard_reader import ShardReader

if TYPE_CHECKING:
    from fmsdata.run.rescalable import Rescalable


class Leaf(NamedTuple):
    """A stage with no stage below: its full name as a source, and its share of the mix.

    `top` is the stage that the mixture reads, or the pipeline without one. Its size counts in tokens.
    """

    name: str
    stage: Stage
    share: float
    top: Stage


def source_sizes(stage: Stage) -> dict[str, int]:
    """All sources of a pipeline by full name, sorted, and the tokens of one epoch of each."""
    return {leaf.name: leaf.top.size().tokens for leaf in sorted(leaves(stage), key=lambda leaf: leaf.name)}


def earlier_epochs(stage: Stage) -> dict[str, tuple[tuple[int, int], ...]]:
    """Of sources that have grown in the run, by full name: how many epochs had how many tokens before."""
    readers = ((leaf.name, leaf.top) for leaf in leaves(stage))
    return {
        name: generations.earlier_epochs(reader.shard_files.counts, reader.timeline)
        for name, reader in readers
        if isinstance(reader, ShardReader)
    }


def planned_shares(data: "Rescalable", begin: float, end: float) -> dict[str, float]:
    """The share that each source should have of the tokens `begin` to `end` of the run."""
    return {leaf.name: leaf.share for leaf in leaves(data.lines, begin, end, epochs=data.epochs)}


def leaves(
    stage: Stage,
    begin: float = 0,
    end: float = 0,
    source: str = "",
    share: float = 1.0,
    top: Stage | None = None,
    epochs: int | None = None,
) -> Iterator[Leaf]:
    """The lowest stages of a pipeline, with their shares of the tokens `begin` to `end`.

    `epochs` are those of a finite pass.
    """
    children = stage.children()
    if not children:
        yield Leaf(source or stage.source_name(), stage, share, top or stage)
    shares = _shares_between(stage, begin * share, end * share, epochs) if isinstance(stage, Mixture) else None
    for name, child in children.items():
        if shares is not None:
            yield from leaves(child, begin, end, full_name(source, name), share * shares[name], epochs=epochs)
        else:
            alone = len(children) == 1
            yield from leaves(
                child, begin, end, source, share if alone else math.nan, (top or stage) if alone else None, epochs
            )


def _shares_between(mixture: Mixture, begin: float, end: float, epochs: int | None) -> dict[str, float]:
    """The average weights over the phases from `begin` to `end`, without sources that have ended."""
    if (epochs is not None or any(stage.ends() for stage in mixture.sources.values())) and begin < end:
        before, after = (expected_tokens(mixture, tokens, epochs) for tokens in (begin, end))
        return {name: (after[name] - before[name]) / (end - begin) for name in mixture.sources}
    ends = [phase.until_tokens for phase in mixture.phases if phase.until_tokens and begin < phase.until_tokens < end]
    if not ends:
        return dict(mixture.phase_at(int(begin)).weights)
    parts = [(mixture.phase_at(int(a)).weights, (b - a) / (end - begin)) for a, b in pairwise([begin, *ends, end])]
    return {name: math.fsum(weights[name] * part for weights, part in parts) for name in mixture.sources}


def expected_tokens(mixture: Mixture, tokens: float, epochs: int | None = None) -> dict[str, float]:
    """The tokens that each source will have given when the mixture has given this many.

    Phase by phase. A source that reaches its `max_epochs`, or the `epochs` of a finite pass, gives its
    share to the others.
    """
    taken = dict.fromkeys(mixture.sources, 0.0)
    most = {name: stage.total_tokens() for name, stage in mixture.sources.items()}
    if epochs is not None:
        most = {name: min(most[name], epochs * mixture.sources[name].size().tokens) for name in most}
    done = 0.0
    while done < tokens:
        phase = mixture.phase_at(math.floor(done))
        active = {name: share for name, share in phase.weights.items() if share and taken[name] < most[name]}
        total = math.fsum(active.values())
        until = min(tokens, phase.until_tokens or tokens)
        used_up = {name: done + (most[name] - taken[name]) * total / share for name, share in active.items()}
        now = min([until, *used_up.values()])
        for name, share in active.items():
            taken[name] = most[name] if used_up[name] <= now else taken[name] + (now - done) * share / total
        done = now
    return taken
