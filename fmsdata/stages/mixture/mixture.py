"""The stage `Mixture`: which sources are mixed, with which weights in which phase of the run."""

import copy
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence

from fmsdata.core.iterator import StageIterator
from fmsdata.core.lane import Lane, full_name
from fmsdata.core.stage import Stage, tokens_only
from fmsdata.core.state import State
from fmsdata.core.wording import counted, shown
from fmsdata.errors import ConfigError
from fmsdata.stages.mixture.iterator import MixtureIterator
from fmsdata.stages.mixture.weights import Phase, as_shares, check_weights, checked_phases


class Mixture(Stage):
    """Several sources, mixed by token weights. Only their names matter, not their order.

    A source with weight 0 is not read, and keeps its position. `phases` follow one another; after
    the last one, unless it has no end, `weights` hold. Tokens are those of the documents, without
    BOS and EOS. Each lane enters the next phase when it has taken its part of the tokens. When a
    run resumes without a source that it was saved with, `find` is called with the name and the
    description of that source and returns the stage (see `fmsdata.run.edits`).

    >>> mix = Mixture({"web": web, "wiki": wiki}, weights={"web": 7, "wiki": 3})    # doctest: +SKIP
    """

    def __init__(
        self,
        sources: Mapping[str, Stage],
        weights: Mapping[str, float],
        *,
        phases: Sequence[Phase] = (),
        find: Callable[[str, State], Stage] | None = None,
    ) -> None:
        if not isinstance(sources, Mapping):
            raise ConfigError(f"sources is {shown(sources)}; sources must be a dict of stages by name")
        if not sources:
            raise ConfigError("a mixture needs at least one source")
        for name, stage in sources.items():
            if not isinstance(name, str) or not isinstance(stage, Stage):
                raise ConfigError(f"source {name!r} is {shown(stage)}; sources must be a dict of stages by name")
        check_weights(sources, weights)
        for name, stage in sources.items():
            tokens_only(stage, f"source {name!r} of a Mixture")
        self.sources = {name: sources[name] for name in sorted(sources)}
        self.find = find
        self.set_weights(as_shares(self.sources, weights), checked_phases(self.sources, phases))
        for phase in self.all_phases:
            if all(self.sources[name].ends() for name, weight in phase.weights.items() if weight):
                raise ConfigError(
                    "every source that is read has max_epochs: the stream would end at a different step on every rank; "
                    "remove max_epochs from one of them, and stop after the number of steps you need"
                )

    def set_weights(self, weights: Mapping[str, float], phases: Sequence[Phase]) -> None:
        """Set the weights, given as shares of 1 for every source.

        `all_phases` are the phases and, unless the last has no end, what follows it.
        """
        self.weights, self.phases = dict(weights), tuple(phases)
        endless = bool(phases) and phases[-1].until_tokens is None
        self.all_phases = self.phases if endless else (*self.phases, Phase(weights=self.weights))

    def phase_at(self, tokens: int, lanes: int = 1) -> Phase:
        """The phase of a lane that has taken this many tokens, in a run with this many lanes."""
        past = bisect_right(self.all_phases[:-1], tokens * lanes, key=lambda phase: phase.until_tokens or 0)
        return self.all_phases[past]

    def only_plans(self) -> bool:
        return all(stage.only_plans() for stage in self.sources.values())

    def open(self, lane: Lane, state: State | None = None) -> StageIterator:
        return MixtureIterator(self, lane, state)

    def children(self) -> Mapping[str, Stage]:
        return self.sources

    def settled(self, lanes: int, saved: State | None = None) -> Stage:
        sources = {name: stage.settled(lanes, self.saved_child(saved, name)) for name, stage in self.sources.items()}
        if all(sources[name] is stage for name, stage in self.sources.items()):
            return self
        mixture = copy.copy(self)
        mixture.sources = sources
        return mixture

    def describe(self, source: str = "") -> State:
        described = {name: stage.describe(full_name(source, name)) for name, stage in self.sources.items()}
        return {"stage": type(self).__name__, **self.parameters(), "children": described}

    def parameters(self) -> State:
        phases = [{"until_tokens": phase.until_tokens, "weights": dict(phase.weights)} for phase in self.phases]
        return {"weights": dict(self.weights), "phases": phases}

    def _facts(self) -> str:
        return f"of {len(self.sources)}" + (f", {counted(len(self.phases), 'phase')}" if self.phases else "")

    def ends(self) -> bool:
        return False


def stages_down_to_mixture(lines: Stage) -> list[Stage]:
    """The stages from the top down to the outermost mixture, or to the lowest stage without one."""
    stages = [lines]
    while not isinstance(stages[-1], Mixture) and "below" in stages[-1].children():
        stages.append(stages[-1].children()["below"])
    return stages
