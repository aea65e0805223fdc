"""The arithmetic of weights: valid values, shares of 1, phases, and the surplus of a source."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from fmsdata.core.checks import unnamed, whole
from fmsdata.core.options import LARGEST_WEIGHT
from fmsdata.core.wording import shown
from fmsdata.errors import ConfigError

SCALES = 5000  # factors that are tried; a dozen are enough for a few sources, 500 for 300


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A part of the run with weights of its own.

    It lasts until the run has taken `until_tokens` tokens, or to the end of the run (None). It
    names every source: one that is not read meanwhile has weight 0.

    >>> phase = Phase(until_tokens=10**12, weights={"web": 0.9, "wiki": 0.1})
    """

    weights: Mapping[str, float]
    until_tokens: int | None = None


def check_weights(sources: Mapping[str, object], weights: Mapping[str, Any]) -> None:
    """Raise unless exactly the sources have weights, and at least one of them is above zero."""
    if not isinstance(sources, Mapping) or not isinstance(weights, Mapping):
        raise ConfigError("sources and weights must be dicts, with the names of the sources as keys")
    for name, weight in weights.items():
        if name not in sources:
            raise ConfigError(f"weight for unknown source {name!r}; the sources are {', '.join(sorted(sources))}")
        if not 0 <= _as_float(weight) <= LARGEST_WEIGHT:
            raise ConfigError(
                f"source {name!r}: weight is {weight!r}; it must be a number from 0 to {LARGEST_WEIGHT:.0e} "
                "(a source with weight 0 is not read)"
            )
    if missing := sorted(set(sources) - set(weights)):
        raise ConfigError(f"no weight for source {', '.join(map(repr, missing))}")
    if sources and not any(weights.values()):
        raise ConfigError(f"every source has weight 0 ({', '.join(sorted(sources))}); at least one must be read")


def _as_float(weight: Any) -> float:
    if isinstance(weight, int | float | np.number) and not isinstance(weight, bool):
        try:
            return float(weight)
        except OverflowError:
            pass
    return math.nan


def checked_phases(sources: Mapping[str, object], phases: Sequence[Phase]) -> list[Phase]:
    """The phases with shares of 1 for all sources. Raise unless they follow one another."""
    checked: list[Phase] = []
    if not isinstance(phases, Sequence):
        raise ConfigError(f"phases is {shown(phases)}; it must be a list of Phase(until_tokens=, weights=)")
    for i, phase in enumerate(phases):
        if not isinstance(phase, Phase):
            raise ConfigError(f"phase {i} is {shown(phase)}; it must be a Phase(until_tokens=, weights=)")
        until = phase.until_tokens
        if until is None and i < len(phases) - 1:
            raise ConfigError(f"phase {i} has no until_tokens, so phase {i + 1} would never come")
        if until is not None:
            whole("until_tokens", until, least=1)
            if checked and until <= (checked[-1].until_tokens or 0):
                raise ConfigError(f"until_tokens must grow: phase {i} has {until}, not more than the one before")
        if not isinstance(phase.weights, Mapping):
            raise ConfigError(
                f"phase {i}: weights is {shown(phase.weights)}; it must be a dict of a weight for each source"
            )
        if phase.weights.keys() <= sources.keys() and (missing := unnamed(sources, phase.weights)):
            raise ConfigError(f"phase {i}: {missing}")
        check_weights(sources, phase.weights)
        checked.append(Phase(weights=as_shares(sources, phase.weights), until_tokens=until))
    return checked


def as_shares(sources: Mapping[str, object], weights: Mapping[str, float]) -> dict[str, float]:
    """The weights as shares of 1, for every source."""
    total = math.fsum(weights.values())
    return {name: float(weights.get(name, 0)) / total for name in sources}


def weights_for(shares: Mapping[str, float], tokens: Mapping[str, int]) -> dict[str, float]:
    """Weights that `as_shares` makes exactly these shares of: the tokens of the sources, if they were natural.

    Shares as they are may add up to a little less than 1, so that dividing by their sum changes a bit.

    >>> weights_for({"web": 0.75, "wiki": 0.25}, {"web": 300, "wiki": 100})
    {'web': 300.0, 'wiki': 100.0}
    """
    natural = {name: float(max(1, tokens[name])) for name in shares}
    scaled = ({name: share * scale for name, share in shares.items()} for scale in range(1, SCALES, 2))
    return next((found for found in chain([natural], scaled) if as_shares(shares, found) == shares), dict(shares))


def surplus(leads: Mapping[str, int], weights: Mapping[str, float]) -> dict[str, int]:
    """The tokens that each source has given above its share of all tokens given.

    A source that is not read keeps its lead.

    >>> surplus({"web": 90, "wiki": 10, "code": 7}, {"web": 0.8, "wiki": 0.2, "code": 0.0})
    {'web': 10, 'wiki': -10, 'code': 7}
    """
    time = sum(leads[name] for name, weight in weights.items() if weight)
    return {name: lead - round(time * weights[name]) for name, lead in leads.items()}
