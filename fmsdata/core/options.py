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
)
LARGEST_WEIGHT = 1e30  # of a source

# Windows over text that is tokenized while it is read hold its tokens in memory. Automatic ones are at most so
# large that those of all lanes together hold this many; as many again are made for the next windows.
TOKENIZED_IN_WINDOWS = 1 << 25
