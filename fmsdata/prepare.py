"""Preparing corpora: token shards from text (`prepare_corpus`) or from your own tokens (`write_shard`)."""

from fmsdata.corpus.prepare import Prepared, PreparedSource, prepare_corpus
from fmsdata.corpus.shard_writer import Layout, write_shard

__all__ = ["Layout", "Prepared", "PreparedSource", "prepare_corpus", "write_shard"]
