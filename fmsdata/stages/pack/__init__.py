"""Pack: documents into lines of fixed length.

`pack.py` has the stage and the table of modes. Modes that keep the order of the documents see them
as one long run of tokens (`token_run.py`) and cut it into lines (`cut.py`); they differ only in
where a line ends (`split.py`, `pad.py`). `bestfit.py` packs windows of documents, and `fit.py` says
which document goes into which line.
"""

from fmsdata.core.options import Mode
from fmsdata.stages.pack.pack import MODES, Pack, check_options

__all__ = ["MODES", "Mode", "Pack", "check_options"]
