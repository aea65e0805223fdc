"""Fuzzers of everything that is read from files: shards, counts, YAML, states, checkpoints."""
