"""What a row of a dataset says: its text or token ids, its id, and which part of it is to be kept.

`source` calls `reading` once and the function it gives for every row. A row that does not have what was asked for is
`Unfit`, with a reason that names the column; it never stops the rows after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from penstock.domain.admission import BadInput
from penstock.extract.templates import ChatTemplate, Span, Unrendered, columns_of, render_chat, render_row

ID_CHARACTERS_MAX: Final = 512
TOKEN_ID_MAX: Final = 2**31 - 1  #: tokens are stored as int32

Row = Mapping[str, object]


class Reading(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the text is. One of `template`, `chat`, `tokens`; without them it is the column `column`.

    `id` is a column that names documents; without it a document is called after its row's number. `mask` is a column of
    what to keep: character ranges `[[start, stop], …]` for text, a 0 or 1 for each token for `tokens`. `answers` keeps
    what the assistant wrote in a chat; `open_answer` ends a chat with the words after which it would write.
    """

    column: str = "text"
    template: str | None = None
    chat: str | None = None  #: a column with messages: [{"role": …, "content": …}, …]
    chat_template: ChatTemplate | None = None
    tokens: str | None = None  #: a column with token ids
    id: str | None = None
    mask: str | None = None
    answers: bool = False
    open_answer: bool = False


class Content(msgspec.Struct, frozen=True, gc=False):
    """Text or token ids; and where only a part is to be kept, which: ranges of characters, or a flag for each token."""

    id: str | None
    text: str | None = None
    tokens: tuple[int, ...] | None = None
    spans: tuple[Span, ...] | None = None
    flags: tuple[bool, ...] | None = None


class Unfit(Exception):
    """This row gives no document; the text says why."""

    id: str | None = None  #: the row's own, where that can be read


def columns(reading: Reading) -> frozenset[str]:
    """Which columns are needed; the rest of a row need not even be read."""
    if reading.template is not None:
        named = columns_of(reading.template)
    else:
        named = frozenset({reading.tokens or reading.chat or reading.column})
    return named | {name for name in (reading.id, reading.mask) if name is not None}


def check(reading: Reading) -> None:
    """Refuse what contradicts itself, before any file is opened."""
    ways = [
        word
        for word, value in (("template", reading.template), ("chat", reading.chat), ("tokens", reading.tokens))
        if value is not None
    ]
    if len(ways) > 1:
        raise BadInput(ways[0], getattr(reading, ways[0]), f"is given together with {ways[1]}", "give one of them")
    if reading.chat is not None and reading.chat_template is None:
        raise BadInput("chat", reading.chat, "needs a chat template", "give a tokenizer directory that has one")
    if reading.answers and reading.chat is None:
        raise BadInput("filter", "assistant", "is for chats", "name the column of messages with chat")
    if reading.open_answer and reading.chat is None:
        raise BadInput("open_answer", True, "is for chats", "name the column of messages with chat")
    if reading.mask is not None and reading.chat is not None:
        raise BadInput("mask", reading.mask, "is for text and tokens, not for chats", "use the filter assistant")
    columns(reading)  # a template that cannot be parsed


def reading(how: Reading) -> Callable[[Row], Content]:
    """The function that reads one row; it raises `Unfit`."""
    check(how)

    def read(row: Row) -> Content:
        id = None if how.id is None else _id(row, how.id)
        try:
            return rest(row, id)
        except Unfit as error:
            error.id = id
            raise

    def rest(row: Row, id: str | None) -> Content:
        if how.tokens is not None:
            tokens = _tokens(row, how.tokens)
            return Content(id, tokens=tokens, flags=None if how.mask is None else _flags(row, how.mask, len(tokens)))
        try:
            if how.template is not None:
                text, spans = render_row(how.template, row), None
            elif how.chat is not None and how.chat_template is not None:
                messages = _value(row, how.chat)
                if not isinstance(messages, list):
                    raise Unfit(f"column {how.chat!r} is {_kind(messages)}, not a list of messages")
                text, answers = render_chat(
                    how.chat_template, messages, mark_answers=how.answers, open_answer=how.open_answer
                )
                spans = answers if how.answers else None
            else:
                text, spans = _text(row, how.column), None
        except Unrendered as error:
            raise Unfit(str(error)) from error
        if how.mask is not None:
            spans = _spans(row, how.mask, len(text))
        return Content(id, text=text, spans=spans)

    return read


def _value(row: Row, column: str) -> object:
    if column not in row:
        raise Unfit(f"has no column {column!r}; it has {', '.join(sorted(row)[:8]) or 'none'}")
    return row[column]


def _text(row: Row, column: str) -> str:
    value = _value(row, column)
    if not isinstance(value, str):
        raise Unfit(f"column {column!r} is {_kind(value)}, not text")
    return value


def _id(row: Row, column: str) -> str:
    value = _value(row, column)
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise Unfit(f"column {column!r} is {_kind(value)}, not an id of letters or a whole number")
    if len(str(value)) > ID_CHARACTERS_MAX:
        raise Unfit(f"column {column!r} has an id of more than {ID_CHARACTERS_MAX} characters")
    return str(value)


def _list(row: Row, column: str, what: str) -> Sequence[object]:
    value = _value(row, column)
    if not isinstance(value, list):
        raise Unfit(f"column {column!r} is {_kind(value)}, not {what}")
    return value


def _tokens(row: Row, column: str) -> tuple[int, ...]:
    found = _list(row, column, "a list of token ids")
    for value in found:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= TOKEN_ID_MAX:
            raise Unfit(f"column {column!r} has {value!r} among its token ids")
    return tuple(value for value in found if isinstance(value, int))


def _flags(row: Row, column: str, count: int) -> tuple[bool, ...]:
    found = _list(row, column, "a list of 0 and 1")
    if len(found) != count:
        raise Unfit(f"column {column!r} has {len(found)} flags for {count} tokens")
    if any(value not in (0, 1) for value in found):
        raise Unfit(f"column {column!r} has something else than 0 and 1")
    return tuple(bool(value) for value in found)


def _spans(row: Row, column: str, length: int) -> tuple[Span, ...]:
    spans: list[Span] = []
    for each in _list(row, column, "a list of ranges [start, stop]"):
        match each:
            case [int(start), int(stop)] if 0 <= start <= stop <= length:
                spans.append((start, stop))
            case _:
                raise Unfit(f"column {column!r} has {each!r}, not a range of the text's {length} characters")
    return tuple(spans)


def _kind(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "true or false"
        case int() | float():
            return "a number"
        case str():
            return "text" if value else "empty"
        case list():
            return "a list"
        case dict():
            return "an object"
        case _:
            return f"a {type(value).__name__}"
