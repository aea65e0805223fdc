"""The loader: batches for one rank, its prefetch thread, and its worker processes."""
