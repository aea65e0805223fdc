"""Bytes on any filesystem: locations, connections with retries, clients, and a disk cache."""
