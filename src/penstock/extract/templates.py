"""Jinja templates: a row of a dataset becomes text, a conversation becomes the text its model was trained on.

`content` calls it for each row. Chat templates come with models, that is from strangers: they run in Jinja's immutable
sandbox, and so do the user's own. They see the row and what is written in the plan, never a clock, a file or a variable
of the environment, so that a row gives the same text on every host and day. Options and filters are those of Hugging
Face's renderer, so that templates written for it mean the same here.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NoReturn, cast

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils
import msgspec
from typing_extensions import override

from penstock.domain.admission import BadInput

TEXT_CHARACTERS_MAX: Final = 64 << 20  #: of one document, as for lines of a file
# Code points that Unicode keeps for the inside of programs: around what `{% generation %}` wrote, until it is measured,
# and around what is in a message, with its number in digits of their own.
_OPEN, _CLOSE, _MARK = "\ufdd0", "\ufdd1", "\ufdd2"
_DIGITS: Final = {ord(digit): chr(0xFDE0 + int(digit)) for digit in "0123456789"}
_DIGITS_BACK: Final = {ord(mark): chr(digit) for digit, mark in _DIGITS.items()}
_MARKS: Final = re.compile(f"{_MARK}([\ufde0-\ufde9]+)")
_RESERVED: Final = re.compile("[\ufdd0-\ufdef]")
#: `<think>` and the like: templates cut answers there, and marks must be on both sides of the cut.
_TAG: Final = re.compile(r"(</?[^<>\s]{1,32}>)")
_UNMARKED: Final = ("role", "type", "id", "tool_call_id")  #: not what anybody wrote; templates compare them
_MOVED: Final = (
    "the template does not write each message as it is and where it stands, so that it does not show which part the "
    "assistant wrote"
)

Span = tuple[int, int]
Message = Mapping[str, object]


class ChatTemplate(msgspec.Struct, frozen=True):
    """How a model's conversations are written: the template, and the variables it sees (`bos_token` and the like)."""

    text: str
    variables: dict[str, Any] = msgspec.field(default_factory=dict)


class Unrendered(Exception):
    """This row cannot be written with this template; the text says why."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}`: what the model itself would write."""

    tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

    @override
    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_mark")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        return f"{_OPEN}{caller()}{_CLOSE}"


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, with products of text bounded as loops already are."""

    intercepted_binops = frozenset(("*", "**"))

    @override
    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            long = max((len(side) for side in (left, right) if isinstance(side, str | list | tuple)), default=0)
            times = max((side for side in (left, right) if isinstance(side, int)), default=0)
            if long * times > TEXT_CHARACTERS_MAX:
                raise jinja2.exceptions.SecurityError(f"a product of {long * times} characters is too long")
        elif not (isinstance(left, int | float) and isinstance(right, int | float) and abs(right) <= 64):
            raise jinja2.exceptions.SecurityError("a power this large is not computed")
        return super().call_binop(context, operator, left, right)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.exceptions.TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As Hugging Face's: Jinja's own escapes for HTML, which models have not seen."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Namespace(jinja2.utils.Namespace):
    """Without names such as `__class__`, by which templates have left the sandbox before."""

    def __init__(*given: Any, **attributes: Any) -> None:  # `self` is a name that a template may use
        self, rest = given[0], given[1:]
        names = dict(*rest, **attributes)
        for name in names:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, names)

    @override
    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace may not hold {name!r}")


class _Dict:
    """`dict(…)` for templates, without the type that stands behind the name."""

    def __call__(self, *given: Any, **attributes: Any) -> dict[Any, Any]:
        return dict(*given, **attributes)


@functools.cache
def _environment(*, strict: bool) -> _Sandbox:
    made = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined if strict else jinja2.Undefined,
        extensions=[_Generation, "jinja2.ext.loopcontrols"],
    )
    made.filters["tojson"] = _to_json
    made.globals |= {"raise_exception": _raise_exception, "namespace": _Namespace, "dict": _Dict()}
    return made


@functools.lru_cache(64)
def _compiled(text: str, *, strict: bool) -> jinja2.Template:
    try:
        return _environment(strict=strict).from_string(text)
    except jinja2.TemplateSyntaxError as error:
        rule = f"is no Jinja template: line {error.lineno}: {error.message}"
        raise BadInput("template", text, rule, "mend it") from error


def columns_of(template: str) -> frozenset[str]:
    """Which columns a row template uses; a template that cannot be parsed is refused."""
    _compiled(template, strict=True)
    environment = _environment(strict=True)
    return frozenset(jinja2.meta.find_undeclared_variables(environment.parse(template)) - set(environment.globals))


def render_row(template: str, row: Mapping[str, object]) -> str:
    """The text of one row; a column it lacks is an error, not an empty place."""
    return _rendered(_compiled(template, strict=True), row)


def render_chat(
    template: ChatTemplate, messages: Sequence[Message], *, mark_answers: bool = False, open_answer: bool = False
) -> tuple[str, tuple[Span, ...]]:
    """The text of a conversation and, where asked for, the stretches of it that the assistant wrote.

    `open_answer` adds the words after which the model would begin to answer.

    A template that marks them itself (`{% generation %}`) is believed. Otherwise an answer is what its message adds to
    the conversation before it and the words that open an answer. A template that writes the beginning differently once
    more follows (Qwen3's drops what earlier answers thought), or cannot write it alone, is given the messages with
    marks in them; if that changes anything but the marks, the conversation is refused.
    """
    _check(messages)
    marked = _chat(template, messages, add_generation_prompt=open_answer)
    text = marked.replace(_OPEN, "").replace(_CLOSE, "")
    if not mark_answers:
        return text, ()
    if _OPEN in marked:
        return text, _marked_spans(marked)
    spans = _added_spans(template, messages, text)
    return text, spans if spans is not None else _found_spans(template, messages, text, open_answer=open_answer)


def _check(messages: Sequence[Message]) -> None:
    if not messages:
        raise Unrendered("has no messages")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise Unrendered(f"message {number} is no object with a role")
        if any(_RESERVED.search(text) for text in _strings(message)):
            raise Unrendered(f"message {number} has a character that Unicode reserves (U+FDD0 to U+FDEF)")


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _added_spans(template: ChatTemplate, messages: Sequence[Message], text: str) -> tuple[Span, ...] | None:
    """What each answer adds to what is before it; None where the template does not write a beginning as in `text`."""
    spans: list[Span] = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        try:
            before = _chat(template, messages[:index], add_generation_prompt=True)
            until = _chat(template, messages[: index + 1])
        except Unrendered:
            return None
        if not (until.startswith(before) and text.startswith(until)):
            return None
        spans.append((len(before), len(until)))
    return tuple(spans)


def _found_spans(
    template: ChatTemplate, messages: Sequence[Message], text: str, *, open_answer: bool
) -> tuple[Span, ...]:
    """Answers by marks in their messages: from the words that open an answer to those that end the last one.

    Where a template has no such words, or others in the middle of a conversation, an answer is its content alone.
    """
    marks = _Marks()
    marked = [
        marks.put_in(message, index) if message["role"] == "assistant" else message
        for index, message in enumerate(messages)
    ]
    closed, opened = (_chat(template, marked, add_generation_prompt=opening) for opening in (False, True))
    plain, places = marks.find(opened if open_answer else closed)
    if plain != text:
        raise Unrendered(_MOVED)
    same = len(os.path.commonprefix([opened, closed]))  # noqa: RUF071 (characters are meant)
    opening = opened[same:].partition("<think>")[0]
    spans: list[Span] = []
    last = 0
    for index, (start, stop) in places.items():
        begin = text.rfind(opening, last, start) if opening else -1
        ending = ""
        with contextlib.suppress(Unrendered):  # a beginning that the template refuses has no ending to compare
            alone, there = marks.find(_chat(template, marked[: index + 1]))
            ending = alone[there[index][1] :] if index in there else ""
        last = stop + len(ending) if text.startswith(ending, stop) else stop
        spans.append((start if begin < 0 else begin + len(opening), last))
    return tuple(spans)


class _Marks:
    """Marks around each stretch of text in some messages; each stretch has a number of its own."""

    def __init__(self) -> None:
        self._owners: list[int] = []  #: of the stretches, the message that each is in

    def put_in(self, value: Any, message: int) -> Any:
        """The same with marks, inside of the blanks that templates strip."""
        if isinstance(value, Mapping):
            return {key: item if key in _UNMARKED else self.put_in(item, message) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.put_in(item, message) for item in value]
        if not isinstance(value, str):
            return value
        parts = _TAG.split(value)  # stretches and, between them, tags
        for place in range(0, len(parts), 2):
            core = parts[place].strip()
            if core:
                mark = _MARK + str(len(self._owners)).translate(_DIGITS)
                self._owners.append(message)
                parts[place] = parts[place].replace(core, f"{mark}{core}{mark}", 1)
        return "".join(parts)

    def find(self, marked: str) -> tuple[str, dict[int, Span]]:
        """The text without marks, and from where to where the stretches of each message are that it has some of."""
        parts = _MARKS.split(marked)
        numbers = [int(digits.translate(_DIGITS_BACK)) for digits in parts[1::2]]
        firsts, seconds = numbers[::2], numbers[1::2]
        owners = [self._owners[number] for number in firsts]
        if firsts != seconds or len(set(firsts)) != len(firsts) or owners != sorted(owners):
            raise Unrendered(_MOVED)
        places: dict[int, Span] = {}
        at = 0
        for part, number in zip(parts[::2], numbers, strict=False):  # behind the last mark there is one part more
            at += len(part)
            owner = self._owners[number]
            places[owner] = (places.get(owner, (at, at))[0], at)
        return "".join(parts[::2]), places


def _chat(template: ChatTemplate, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
    nothing = {"tools": None, "documents": None}  # defined, as Hugging Face has them: templates ask `is not none`
    values = {**nothing, **template.variables, "messages": messages, "add_generation_prompt": add_generation_prompt}
    return _rendered(_compiled(template.text, strict=False), values)


def _rendered(template: jinja2.Template, values: Mapping[str, object]) -> str:
    try:
        text = template.render(_plain(values))
    except jinja2.exceptions.TemplateError as error:
        raise Unrendered(f"the template refuses it: {error}") from error
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError, RecursionError) as error:
        # What templates do with rows of another shape than they expect: "a" + 1, x[0] of nothing.
        raise Unrendered(f"the template fails on it: {type(error).__name__}: {error}") from error
    if len(text) > TEXT_CHARACTERS_MAX:
        raise Unrendered(f"gives {len(text)} characters, more than {TEXT_CHARACTERS_MAX}")
    return text


def _plain(value: Any) -> Any:
    """JSON's types only: dates, decimals and the like have methods that nobody has looked at for templates' sake."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value)


def _marked_spans(marked: str) -> tuple[Span, ...]:
    spans: list[Span] = []
    at = 0
    for before, rest in (part.rpartition(_OPEN)[::2] for part in marked.split(_CLOSE)[:-1]):
        begin = at + len(before)
        at = begin + len(rest)
        spans.append((begin, at))
    return tuple(spans)


def chat_template_of(configuration: bytes | None, alone: bytes | None, where: str) -> ChatTemplate:
    """The template of a model's directory: `chat_template.jinja`, or what `tokenizer_config.json` holds."""
    try:
        facts = msgspec.json.decode(configuration or b"{}", type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadInput("tokenizer", where, f"has a tokenizer_config.json that cannot be read: {error}") from error
    found = alone.decode() if alone is not None else facts.get("chat_template")
    if isinstance(found, list):  # several, by name
        found = {each["name"]: each["template"] for each in cast("list[dict[str, str]]", found)}.get("default")
    if not isinstance(found, str):
        raise BadInput("tokenizer", where, "has no chat template", "give one, or a template for rows")
    _compiled(found, strict=False)
    tokens = {name: _token(value) for name, value in facts.items() if name.endswith("_token") and value}
    return ChatTemplate(found, {name: token for name, token in tokens.items() if token})


def _token(value: object) -> str:
    return str(value.get("content", "")) if isinstance(value, dict) else value if isinstance(value, str) else ""
