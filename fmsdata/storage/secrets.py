"""Keeping secrets out of messages: passwords and signatures in URLs, and credentials in options.

Everything that the package shows about a filesystem goes through here: paths in errors, the text
of other libraries' errors, and the `repr` of a location.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

MASK = "***"
PASSWORD = re.compile(r"^([^/]*://[^/:]*):[^/]*@")
URL = re.compile(r"([a-z0-9+]+://)(?:[^\s/@'\"]*@)?([^\s?'\"]*)(?:\?[^\s'\")]*)?")
SECRET_NAME = re.compile("key|secret|token|password|credential|sas|sig", re.IGNORECASE)
SHORTEST_SECRET = 4  # letters; masking shorter values would make messages unreadable


def mask_password(url: str) -> str:
    """A URL that can be shown and still says who the user is.

    >>> mask_password("https://me:hunter2@host/corpus")
    'https://me:***@host/corpus'
    """
    return PASSWORD.sub(rf"\1:{MASK}@", url)


def mask_text(text: str, secrets: Iterable[str] = ()) -> str:
    """Any text, its URLs without user and query, and without the given secrets.

    >>> mask_text("403 for https://me:hunter2@host/a.arrow?sig=abc, key AKIA", ["AKIA"])
    '403 for https://host/a.arrow key ***'
    """
    text = URL.sub(r"\1\2", text)
    for secret in secrets:
        text = text.replace(secret, MASK)
    return text


def secrets_in(options: Mapping[str, Any]) -> set[str]:
    """The values of storage options that must not be shown.

    >>> secrets_in({"anon": False, "client_kwargs": {"aws_secret_access_key": "hunter2"}})
    {'hunter2'}
    """
    found: set[str] = set()
    for name, value in options.items():
        if isinstance(value, Mapping):
            found |= secrets_in(value)
        elif isinstance(value, str) and len(value) >= SHORTEST_SECRET and SECRET_NAME.search(str(name)):
            found.add(value)
    return found
