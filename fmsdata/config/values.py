"""The types of values in a configuration, each with its check and its place in the JSON schema."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Discriminator, Field, Tag, WithJsonSchema
from pydantic_core import PydanticCustomError

from fmsdata.core.checks import SIZE, byte_count
from fmsdata.core.options import LARGEST_WEIGHT, OUTPUT_NAMES
from fmsdata.errors import ConfigError

Natural: TypeAlias = Literal["natural"]
KeyPath: TypeAlias = tuple[str | int, ...]


class NestedErrors(ValueError):
    """Errors below one key, each with its path from there."""

    def __init__(self, errors: list[tuple[KeyPath, str]]) -> None:
        super().__init__("; ".join(text for _, text in errors))
        self.errors = errors


@contextmanager
def collected() -> Iterator[None]:
    """Let pydantic collect the project's own errors, to report them with file and line."""
    try:
        yield
    except ConfigError as error:
        raise ValueError(str(error)) from None


def _must_be(words: str, check: Callable[[Any], bool]) -> BeforeValidator:
    def checked(value: Any) -> Any:
        if not check(value):
            raise PydanticCustomError("must_be", words)
        return value

    return BeforeValidator(checked)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _whole_float(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _bytes(value: Any) -> Any:
    size = byte_count(value) if isinstance(value, str) else _whole_float(value)
    if not isinstance(size, int) or isinstance(size, bool):
        raise PydanticCustomError("must_be", "a number of bytes, or a size such as 256MB or 1.5GiB")
    return size


def _kind_of_weights(value: Any) -> str:
    return "by source" if isinstance(value, dict) else "otherwise"


Whole: TypeAlias = Annotated[int, Field(ge=0)]
Positive: TypeAlias = Annotated[int, Field(ge=1)]
TokenCount: TypeAlias = Annotated[int, BeforeValidator(_whole_float), Field(ge=1)]  # 1.0e12 is allowed
ByteCount: TypeAlias = Annotated[
    int,
    Field(ge=0),
    BeforeValidator(_bytes),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": f"^{SIZE.pattern}$"}]}),
]
Seconds: TypeAlias = Annotated[float, Field(gt=0)]
Number: TypeAlias = Annotated[float, Field(ge=0, le=LARGEST_WEIGHT)]
Weight: TypeAlias = Annotated[
    Number | Natural,
    _must_be(
        f"a number from 0 to {LARGEST_WEIGHT:.0e}, or the word natural",
        lambda value: value == "natural" or (_is_number(value) and 0 <= value <= LARGEST_WEIGHT),
    ),
]
Weights: TypeAlias = Annotated[
    Annotated[dict[str, Number], Tag("by source")]
    | Annotated[
        Natural | None,
        _must_be("a mapping from sources to numbers, or the word natural", lambda value: value in ("natural", None)),
        Tag("otherwise"),
    ],
    Discriminator(_kind_of_weights),
]
Window: TypeAlias = Annotated[
    Positive | Literal["auto"],
    _must_be(
        "a number of lines (1 or more), or the word auto",
        lambda value: value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= 1),
    ),
]
Temperature: TypeAlias = Annotated[float, Field(gt=0)]
Text: TypeAlias = Annotated[str, Field(min_length=1)]
TASK = _must_be(
    "the name of a task, or a mapping with its name and options", lambda value: isinstance(value, str | dict)
)
AS_LIST = Field(strict=False)  # accepts a list for a tuple
OwnStages: TypeAlias = Annotated[
    tuple[
        Annotated[
            str | dict[str, Any],
            _must_be(
                "module:Class, or a mapping with that as its name, and arguments",
                lambda value: isinstance(value, str | dict),
            ),
        ],
        ...,
    ],
    AS_LIST,
    WithJsonSchema(
        {
            "type": "array",
            "items": {
                "anyOf": [
                    {"type": "string", "pattern": ".+:.+"},
                    {
                        "type": "object",
                        "properties": {"name": {"type": "string", "pattern": ".+:.+"}},
                        "required": ["name"],
                        "additionalProperties": True,
                    },
                ]
            },
        }
    ),
]
ONE_OF_OUTPUTS: dict[str, Any] = {"items": {"enum": list(OUTPUT_NAMES)}}
