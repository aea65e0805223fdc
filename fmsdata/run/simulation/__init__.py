"""Simulation: what a run of any size asks of its store, from the planning code and sampled ranks."""
