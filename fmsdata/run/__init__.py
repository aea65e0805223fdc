"""A run: lanes and ranks, state, live edits, checkpoints, statistics and tracing."""
