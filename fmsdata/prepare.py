"""Preparing corpora: writing token shards."""

from fmsdata.corpus.shard_writer import Layout, write_shard

__all__ = ["Layout", "write_shard"]
