"""The train state: all that a run needs to resume, apart from the model and the optimizer."""

from fmsdata.train.state import Restored, Scheduler, build, load, restore, save

__all__ = ["Restored", "Scheduler", "build", "load", "restore", "save"]
