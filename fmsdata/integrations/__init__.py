"""fmsdata inside the trainers of others: one module per trainer, imported only when it is used.

A module connects a loader to what the trainer saves and restores. It has no logic of its own beyond
that: the state is the gathered one, which loads on any number of processes.
"""
