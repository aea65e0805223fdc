"""The command line: one file for each command, and beside it what the command reports."""
