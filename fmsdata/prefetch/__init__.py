"""What is fetched when: a queue of byte ranges, a look-ahead per lane, a buffer within a budget."""
