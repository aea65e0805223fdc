"""What people see: words and tables in a terminal, and batches in a notebook."""
