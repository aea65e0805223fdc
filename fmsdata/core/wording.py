"""Words for messages: numbers of things, and lists in a sentence."""

from collections.abc import Sequence


def counted(number: int, noun: str) -> str:
    """A number of things.

    >>> counted(1, "token"), counted(4_096, "token")
    ('1 token', '4,096 tokens')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


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
