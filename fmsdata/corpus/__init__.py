"""A corpus on disk or in the cloud: its counts, its index, and writing shards."""
