"""Text files with one document a line."""

import pyarrow as pa

from fmsdata.core.keys import Ints
from fmsdata.core.tokens import Tokens
from fmsdata.formats.base import Documents
from fmsdata.formats.lines import NOT_UTF8, Lines, collect


def parse_text(name: str, lines: Lines, skip_bad: bool) -> Documents:
    """Lines as they are, if they are UTF-8."""
    if is_utf8(lines.tokens, lines.ends):
        return Documents(lines.tokens, lines.ends, lines.first, [])
    data, ends = lines.tokens.tobytes(), lines.ends.tolist()
    texts = [data[ends[i] : ends[i + 1]] for i in range(len(lines))]
    return collect(name, [text if _decodes(text) else NOT_UTF8 for text in texts], lines.first, skip_bad=skip_bad)


def is_utf8(tokens: Tokens, ends: Ints) -> bool:
    """Whether each of some documents is UTF-8 text.

    >>> import numpy as np
    >>> is_utf8(np.frombuffer("é".encode(), np.uint8), np.array([0, 2]))
    True
    >>> is_utf8(np.frombuffer("é".encode(), np.uint8), np.array([0, 1, 2]))
    False
    """
    array = pa.LargeStringArray.from_buffers(len(ends) - 1, pa.py_buffer(ends.data), pa.py_buffer(tokens.data))
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _decodes(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True
