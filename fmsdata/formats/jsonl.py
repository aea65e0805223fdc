"""JSON lines: each line is an object, and one of its fields is the text.

A null field and an empty line are empty documents. A line that is no JSON object, or whose field is
missing or no string, is an error that names the line.
"""

import json
from typing import Any

from fmsdata.formats.base import Documents
from fmsdata.formats.lines import NOT_UTF8, Lines, collect

FIELD = "text"
# Numbers are not used. Python refuses to convert integers of more than 4300 digits; floats have no such limit.
DECODE = json.JSONDecoder(parse_int=float).decode


def parse_jsonl(name: str, lines: Lines, skip_bad: bool, *, field: str) -> Documents:
    """The field of each line."""
    data, ends = lines.tokens.tobytes(), lines.ends.tolist()
    texts = [_text(data[ends[i] : ends[i + 1]], field) for i in range(len(lines))]
    return collect(name, texts, lines.first, skip_bad=skip_bad)


def _text(line: bytes, field: str) -> bytes | str:
    """The text of a line in UTF-8, or what is wrong with it."""
    try:
        record: Any = DECODE(line.decode())
        text = record[field]
        if text is None:
            return b""
        encoded: bytes = text.encode()
    except UnicodeDecodeError:
        return NOT_UTF8
    except UnicodeEncodeError as error:
        return f"the field {field!r} holds half of a surrogate pair at character {error.start}, which is not text"
    except json.JSONDecodeError as error:
        return f"it is not JSON ({error.msg} at character {error.pos})" if line.strip() else b""
    except RecursionError:
        return "its JSON is nested too deeply"
    except KeyError:
        fields = ", ".join(sorted(record)[:8]) or "none"
        return f"there is no field {field!r}; its fields are: {fields} (set documents.column)"
    except (TypeError, AttributeError):
        if not isinstance(record, dict):
            return f"it is a JSON {_kind(record)}, not an object with the field {field!r}"
        return f"the field {field!r} is a {_kind(record[field])}, not a string (set documents.column)"
    return encoded


def _kind(value: Any) -> str:
    kinds = {dict: "object", list: "array", str: "string", float: "number", bool: "boolean", type(None): "null"}
    return kinds.get(type(value), type(value).__name__)
