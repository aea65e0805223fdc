"""Names and limits of options that both a stage and the configuration check.

They are here, and not beside the stage, so that `fmsdata schema` can describe a configuration
without importing torch.
"""

from typing import Literal

Mode = Literal["split", "pad", "bestfit"]  # how lines are packed
# Extra fields of a batch.
OUTPUT_NAMES = (
    "document_ids",
    "position_ids",
    "cu_seqlens",
    "max_seqlen",
    "source_ids",
    "label_document_ids",
    "label_source_ids",
    "provenance",
    "epochs",
    "pieces",
)
IGNORED = -100  # the label of a token that is not predicted
LARGEST_WEIGHT = 1e30  # of a source
PREFETCH = 16  # batches that a thread makes ahead; with fewer it often waits for room, if the trainer is fast
