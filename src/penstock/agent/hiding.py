"""Takes the values of secrets out of text and of JSON values, in every form in which they usually travel.

`launch` gives the keeper the forms to look for in output, `snippet` cleans result and error before they are written
down, `uploads` does it once more for all that leaves the host: results, errors and names. Files a payload puts into its
output directory are its own data and are not looked into. Standard library only: it also runs in a snippet's process.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from urllib.parse import quote, quote_plus

LEAST = 4  #: a shorter "secret" occurs in every text: hiding it would only ruin the text
MASK = "***"


def forms(values: Iterable[str]) -> tuple[str, ...]:
    """Each value as it is, as Python and JSON quote it, and as a part of a URL; the longest first."""
    found: set[str] = set()
    for value in values:
        if len(value) >= LEAST:
            found |= {value, repr(value)[1:-1], json.dumps(value)[1:-1], quote(value, safe=""), quote_plus(value)}
            found |= {line for line in value.splitlines() if len(line) >= 4 * LEAST}  # a key file is printed by lines
    return tuple(sorted(found, key=lambda form: (-len(form), form)))


def hide(text: str, hidden: Sequence[str]) -> str:
    """`text` without the values in `hidden`."""
    for form in forms(hidden):
        text = text.replace(form, MASK)
    return text


def hide_all(value: object, hidden: Sequence[str]) -> object:
    """The same for all text in a JSON value, keys too."""
    return _hide_in(value, forms(hidden)) if hidden else value


def _hide_in(value: object, found: tuple[str, ...]) -> object:
    if isinstance(value, str):
        for form in found:
            value = value.replace(form, MASK)
        return value
    if isinstance(value, list):
        return [_hide_in(each, found) for each in value]
    if isinstance(value, dict):
        return {_hide_in(key, found): _hide_in(each, found) for key, each in value.items()}
    if isinstance(value, int | float) and not isinstance(value, bool) and json.dumps(value) in found:
        return MASK  # a secret of digits
    return value
