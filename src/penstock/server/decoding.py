"""Bodies into structs, and what is wrong with those that cannot be: field, value and rule in one line.

`server.app` makes one `Reading` per route. msgspec says where a body does not fit; the value itself is looked up again
in the body, because a person who reads the refusal wants to see it. Values that may be secrets are never repeated.
"""

from __future__ import annotations

import re
from typing import Any, Final, Generic, TypeVar

import msgspec

from penstock.server.routing import Refusal

T_co = TypeVar("T_co", covariant=True)

#: Parts of a path under which a value is not shown: it could be a secret.
_HIDDEN: Final = frozenset({"value", "token", "env", "code", "setup", "variables"})
_PLACE: Final = re.compile(r" - at `(?:key )?\$\.?(?P<path>[^`]*)`$")
_FIELD: Final = re.compile(r"field `(?P<name>[^`]*)`")
_SHOWN_MAX: Final = 60
_INT_WANTED: Final = "Expected `int"
_WHOLE_FLOATS_MAX: Final = 32  #: fields of one body that are mended so


class Reading(Generic[T_co]):
    """One struct type's decoder."""

    def __init__(self, shape: type[T_co]) -> None:
        self._shape = shape
        self._decoder = msgspec.json.Decoder(shape)

    def decode(self, body: bytes) -> T_co:
        try:
            return self._decoder.decode(body)
        except msgspec.ValidationError as error:
            return self._mended(error, body)
        except msgspec.DecodeError as error:
            detail = "body: is empty" if not body else f"body: is not JSON: {error}"
            raise Refusal("bad_input", detail, field="body", advice="send one JSON object") from error
        except UnicodeDecodeError as error:
            raise Refusal("bad_input", f"body: is not UTF-8 (byte {error.start})", field="body") from error
        except RecursionError:
            raise Refusal("bad_input", "body: is nested too deeply", field="body") from None
        except ValueError as error:
            raise Refusal("bad_input", f"body: {_one_line(str(error))}", field="body") from error

    def _mended(self, error: msgspec.ValidationError, body: bytes) -> T_co:
        """Once more with whole numbers that were written as 7.0: JSON knows only numbers, msgspec tells them apart."""
        raw: Any = None
        for _ in range(_WHOLE_FLOATS_MAX):
            path = _PLACE.search(str(error))
            if path is None or not str(error).startswith(_INT_WANTED) or "got `float`" not in str(error):
                break
            raw = _plain(body) if raw is None else raw
            if not _make_whole(raw, _steps(path.group("path"))):
                break
            try:
                return msgspec.convert(raw, self._shape)
            except msgspec.ValidationError as following:
                error = following
        raise misfit(str(error), body) from error


def _plain(body: bytes) -> Any:
    """The body as plain values; None when it cannot even be read to its end."""
    try:
        return msgspec.json.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def _steps(path: str) -> list[str]:
    return re.findall(r"[^.\[\]]+", path)


def _make_whole(raw: Any, steps: list[str]) -> bool:
    """Turn the number at a path into an int if it is whole, in all members of a list at once; whether any was."""
    if isinstance(raw, list) and len(steps) > 1:
        mended = [_make_whole(member, steps[1:]) for member in raw]
        return any(mended)
    if not isinstance(raw, dict) or not steps or steps[0] not in raw:
        return False
    if len(steps) > 1:
        return _make_whole(raw[steps[0]], steps[1:])
    value = raw[steps[0]]
    if not isinstance(value, float) or not value.is_integer():
        return False
    raw[steps[0]] = int(value)
    return True


def _inside(value: Any, step: str) -> Any:
    if isinstance(value, list) and step.isdigit() and int(step) < len(value):
        return value[int(step)]
    return value.get(step) if isinstance(value, dict) else None


def misfit(message: str, body: bytes) -> Refusal:
    """msgspec's message as a refusal that names the field and shows its value."""
    place = _PLACE.search(message)
    path = place.group("path") if place is not None else ""
    rule = message[: place.start()] if place is not None else message
    named = _FIELD.search(rule)
    if named is not None:
        field = f"{path}.{named.group('name')}" if path else named.group("name")
        detail = f"{field[:200]}: {'is missing' if 'missing' in rule else 'is not a field here'}"
        return Refusal("bad_input", _one_line(detail), field=field[:200])
    field = path or "body"
    return Refusal("bad_input", f"{field[:200]}: {_shown(path, body)}{_one_line(rule.replace('`', ''))}", field=field)


def _shown(path: str, body: bytes) -> str:
    steps = _steps(path)
    if not steps or _HIDDEN & set(steps) or "..." in path:
        return ""
    value = _plain(body)
    for step in steps:
        value = _inside(value, step)
    if value is None or isinstance(value, (dict, list)):
        return ""
    text = repr(value)
    return (text if len(text) <= _SHOWN_MAX else text[: _SHOWN_MAX - 1] + "…") + ": "


def _one_line(text: str) -> str:
    return " ".join(text.split())
