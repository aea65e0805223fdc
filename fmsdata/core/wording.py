"""Words for messages: numbers of things, and lists in a sentence."""

from collections.abc import Sequence

from fmsdata.errors import without_addresses

SHOWN = 200  # characters of a wrong value in a message


def counted(number: int, noun: str) -> str:
    """A number of things.

    >>> counted(1, "token"), counted(4_096, "token"), counted(2, "batch")
    ('1 token', '4,096 tokens', '2 batches')
    """
    return f"{number:,} {noun if number == 1 else plural(noun)}"


def plural(noun: str) -> str:
    """More than one of something.

    >>> plural("lane"), plural("batch"), plural("worker process")
    ('lanes', 'batches', 'worker processes')
    """
    return f"{noun}es" if noun.endswith(("ch", "s", "x")) else f"{noun}s"


def listed(items: Sequence[object], last: str = ", ") -> str:
    """Items in a sentence.

    >>> listed([1, 2, 8]), listed([1, 2, 8], " and ")
    ('1, 2, 8', '1, 2 and 8')
    """
    return last.join(filter(None, [", ".join(map(str, items[:-1])), str(items[-1])]))


def few(items: Sequence[object], most: int, separator: str = ", ") -> str:
    """The first of many items, and how many more there are.

    >>> few([1, 2, 3, 5, 8], 3), few([1, 2, 3], 3)
    ('1, 2, 3 and 2 more', '1, 2, 3')
    """
    more = f" and {len(items) - most:,} more" if len(items) > most else ""
    return separator.join(map(str, items[:most])) + more


def shown(value: object) -> str:
    """A wrong value, for a message: in one line, not too long, and without addresses.

    >>> shown(3.5), shown(object())
    ('3.5', 'an object of class object')
    """
    try:
        drawn = hasattr(value, "outline") and not isinstance(value, type)
        text = f"{type(value).__name__}(...)" if drawn else repr(value)
    except Exception:  # a repr that fails must not hide what is wrong with the value
        text = f"an object of class {type(value).__name__}"
    first, *more = text.split("\n", 1)
    first = without_addresses(first)
    return f"{first[:SHOWN].rstrip()} ..." if more or len(first) > SHOWN else first
