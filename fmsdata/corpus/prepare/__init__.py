"""Preparing a corpus: text files become token shards, with counts, on one machine or a cluster."""

from fmsdata.corpus.prepare.run import Prepared, PreparedSource, prepare_corpus

__all__ = ["Prepared", "PreparedSource", "prepare_corpus"]
