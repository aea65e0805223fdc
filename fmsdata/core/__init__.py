"""The foundation: stages, lanes, chunks, keyed randomness.

No I/O; torch only for `IterableDataset`.
"""
