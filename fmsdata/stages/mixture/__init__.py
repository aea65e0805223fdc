"""Mixture: documents of several sources, each source at its share of the tokens at every moment.

There is one virtual time, in tokens of all sources together. The next document of a source that has
given `given` tokens is due at `(given + offset * length) / weight`. Each lane has its own offset
for each source, a number between 0 and 1: so, whatever the lengths of the documents, a source is
exactly at its share at every moment, on average over the lanes. As arrays, that is a merge of the
sources' documents by the time at which each is due.

The tokens that a source has given count against its share as its `lead`. When a phase ends, every
lead becomes the surplus over the share so far: from then on the new weights hold, and no source
catches up for the past.

`mixture.py` has the stage, `weights.py` the arithmetic of weights and phases, `iterator.py` the
merge, and `source_state.py` what is saved.
"""

from fmsdata.stages.mixture.mixture import Mixture, stages_down_to_mixture
from fmsdata.stages.mixture.weights import Phase, check_weights

__all__ = ["Mixture", "Phase", "check_weights", "stages_down_to_mixture"]
