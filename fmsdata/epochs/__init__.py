"""Map-style rows: epochs of a dataset with a length, rows that are taken out, mixtures of rows."""
