"""What is fetched when: a queue of byte ranges, look-ahead per lane, and a buffer within a budget."""
