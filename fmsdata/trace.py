"""What was in a step of a run, and in which steps a document was seen."""

from fmsdata.run.trace import Found, Seen, Trace

__all__ = ["Found", "Seen", "Trace"]
