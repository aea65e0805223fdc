"""Keyed randomness, for your own tasks and stages: pure functions of a key."""

from fmsdata.core.keys import key_of, keyed_order, mix, mix_array, uniform

__all__ = ["key_of", "keyed_order", "mix", "mix_array", "uniform"]
