"""Names and limits of options that both a stage and the configuration check.

They are here, and not beside the stage, so that `fmsdata schema` can describe a configuration
without importing torch.
"""

from typing import Literal

Mode = Literal["split", "pad"]  # how lines are packed
OUTPUT_NAMES = ("document_ids", "position_ids", "cu_seqlens", "provenance", "epochs")  # extra fields of a batch
LARGEST_WEIGHT = 1e30  # of a source
