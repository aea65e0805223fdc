"""Keyed randomness, for your own tasks and stages: a pure function of a key, so there is no generator to save."""

from fmsdata.core.keys import key_of, keyed_order, mix, mix_array, uniform

__all__ = ["key_of", "keyed_order", "mix", "mix_array", "uniform"]
