"""Arrow IPC shards: mapped files, and files read as byte ranges."""
