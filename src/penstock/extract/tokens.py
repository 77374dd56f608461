"""Documents become tokens: the tokenizer, what happens to documents longer than a row, and which positions are kept.

`feed` calls it, in processes ahead of the device. What was done to a document is recorded with it: how many tokens it
had, where a passage begins in it, whether it was cut and how. A position of a document is kept at most once: windows
may overlap, and what a later window repeats is context for it, not a result. It must not pack or pad.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Final, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.domain.admission import BadInput
from penstock.extract.content import Reading
from penstock.extract.source import Document, Refused
from penstock.extract.templates import ChatTemplate, Span, chat_template_of
from penstock.objects.inputs import read_input

TOKENIZER_BYTES_MAX: Final = 256 << 20  #: Gemma's has 34 MB, the largest today
WIDTH_MAX: Final = 1 << 20
_CONFIG_BYTES_MAX: Final = 16 << 20
_BEYOND: Final = "has token"
_FILTER: Final = re.compile(r"(?P<word>[a-z]+)(?::(?P<value>.+))?")


class Cut(StrEnum):
    """What becomes of a document that is longer than a row."""

    HEAD = "head"  #: its beginning is kept
    TAIL = "tail"  #: its end is kept
    WINDOWS = "windows"  #: all of it, in windows that overlap
    REFUSE = "refuse"  #: it is set aside with the malformed rows


class Keep(msgspec.Struct, frozen=True):
    """Which positions of a document are results; `every` keeps 0, n, 2n, … Ranges and flags of a document also hold."""

    which: Literal["all", "last", "every"] = "all"
    n: int = 1


class Rules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How documents become passages. Part of the plan: another rule is another run.

    `special`: whether the tokenizer adds its own tokens (such as the one that begins a text); None: for text yes, for
    chats no, because their template writes them. `vocabulary` is the number of rows of the model's embedding: a
    document with a token beyond is set aside. Some tokenizers have such tokens (Gemma 3's for images), few texts do.
    """

    width: int
    cut: Cut = Cut.HEAD
    overlap: int = 0
    keep: Keep = Keep()
    special: bool | None = None
    vocabulary: int | None = None


class Passage(msgspec.Struct, frozen=True, gc=False, eq=False, kw_only=True):
    """What the model reads in one piece: a document, or a part of one.

    `tokens[i]` is position `first + i` of the document's `total`; `keep[i]` says whether its activations are wanted.
    `cut` is None for a document that fits. Parts of one document have its id and count from 0.
    """

    id: str
    row: int
    file: str
    offset: int
    part: int
    first: int
    total: int
    cut: Cut | None
    tokens: NDArray[np.int32]
    keep: NDArray[np.bool_]


def check(rules: Rules) -> None:
    if not 1 <= rules.width <= WIDTH_MAX:
        raise BadInput("width", rules.width, f"is not between 1 and {WIDTH_MAX}", "use the length of a row")
    if rules.cut is not Cut.WINDOWS and rules.overlap:
        raise BadInput("overlap", rules.overlap, f"is for windows, not for {rules.cut}", "use cut windows")
    if not 0 <= rules.overlap < rules.width:
        raise BadInput("overlap", rules.overlap, f"is not less than the width {rules.width}", "use a smaller one")
    if rules.keep.n < 1:
        raise BadInput("filter", f"every:{rules.keep.n}", "keeps nothing", "use every:1 or more")


def parse_filter(text: str, reading: Reading) -> tuple[Reading, Keep]:
    """What a filter as users write it (all, last, every:N, mask:COLUMN, assistant) asks of rows and of rules."""
    match = _FILTER.fullmatch(text.strip())
    word, value = (match["word"], match["value"]) if match else ("", None)
    if word in ("all", "last") and value is None:
        return reading, Keep("all" if word == "all" else "last")
    if word == "every" and value is not None and value.isascii() and value.isdecimal() and int(value):
        return reading, Keep("every", int(value))
    if word == "mask" and value:
        return msgspec.structs.replace(reading, mask=value), Keep()
    if word == "assistant" and value is None:
        return msgspec.structs.replace(reading, answers=True), Keep()
    raise BadInput("filter", text, "is no token filter", "use all, last, every:N, mask:COLUMN or assistant")


class Tokenizer:
    """A `tokenizer.json`. Its own truncation and padding are switched off: cutting is `Rules`' business."""

    def __init__(self, data: bytes, where: str = "tokenizer.json") -> None:
        import tokenizers

        try:
            self._inner = tokenizers.Tokenizer.from_buffer(data)
        except Exception as error:  # the library has no error of its own
            raise BadInput("tokenizer", where, f"cannot be read: {error}", "give a tokenizer.json") from error
        self._inner.no_truncation()
        self._inner.no_padding()
        self.fingerprint = f"sha256:{hashlib.sha256(data).hexdigest()}"

    @staticmethod
    def open(address: str, environment: Mapping[str, str] = os.environ) -> Tokenizer:
        """From a file, or from a model's directory."""
        file = tokenizer_file(address)
        data = read_input(file, environment, at_most=TOKENIZER_BYTES_MAX)
        if data is None:
            fix = "give a tokenizer.json or a directory with one; older formats have to be converted first"
            raise BadInput("tokenizer", address, "has no tokenizer.json", fix)
        return Tokenizer(data, file)

    @property
    def vocabulary(self) -> int:
        return int(self._inner.get_vocab_size(with_added_tokens=True))

    def encode(self, texts: Sequence[str], *, special: bool, offsets: bool) -> list[Any]:
        """One encoding a text; without `offsets` (where tokens lie in the text) it is faster."""
        encode = self._inner.encode_batch if offsets else self._inner.encode_batch_fast
        return list(encode(list(texts), add_special_tokens=special))


def tokenizer_file(address: str) -> str:
    return address if address.endswith(".json") else address.rstrip("/") + "/tokenizer.json"


def load_chat_template(address: str, environment: Mapping[str, str] = os.environ) -> ChatTemplate:
    """The chat template in a model's directory."""
    folder = tokenizer_file(address).rpartition("/")[0] or "."
    configuration = read_input(f"{folder}/tokenizer_config.json", environment, at_most=_CONFIG_BYTES_MAX)
    alone = read_input(f"{folder}/chat_template.jinja", environment, at_most=_CONFIG_BYTES_MAX)
    return chat_template_of(configuration, alone, address)


def passages(
    documents: Sequence[Document], tokenizer: Tokenizer | None, rules: Rules, *, chat: bool
) -> list[Passage | Refused]:
    """What the model reads of some documents, in their order. `chat`: their text has its special tokens already."""
    texts = [each.text for each in documents if each.text is not None]
    if texts and tokenizer is None:
        raise BadInput("tokenizer", None, "is missing, and the dataset is text", "give one, or a column of token ids")
    special = not chat if rules.special is None else rules.special
    spanned = any(each.spans is not None for each in documents)
    encodings = iter(tokenizer.encode(texts, special=special, offsets=spanned) if tokenizer and texts else [])
    found: list[Passage | Refused] = []
    for document in documents:
        if document.text is not None:
            encoding = next(encodings)
            tokens = np.array(encoding.ids, np.int32)
            wanted = None if document.spans is None else _inside(encoding.offsets, document.spans)
        else:
            tokens = np.array(document.tokens or (), np.int32)
            wanted = None if document.flags is None else np.array(document.flags, np.bool_)
        if rules.vocabulary is not None and len(tokens) and int(tokens.max()) >= rules.vocabulary:
            reason = f"{_BEYOND} {tokens.max()}; the vocabulary ends at {rules.vocabulary - 1}"
            found.append(_refused(document, reason))
            continue
        found.extend(_parts(document, tokens, wanted, rules))
    return found


def is_beyond(refused: Refused) -> bool:
    """Whether a row was set aside because the model's embedding ends before one of its tokens."""
    return refused.reason.startswith(_BEYOND)


def _inside(offsets: Sequence[Span], spans: Sequence[Span]) -> NDArray[np.bool_]:
    """Tokens that have a character in one of the spans. Tokens the tokenizer added have none."""
    starts, stops = np.array(offsets, np.int64).reshape(-1, 2).T
    inside = np.zeros(len(starts), np.bool_)
    for start, stop in spans:
        inside |= (starts < stop) & (stops > start) & (stops > starts)
    return inside


def _parts(
    document: Document, tokens: NDArray[np.int32], wanted: NDArray[np.bool_] | None, rules: Rules
) -> list[Passage | Refused]:
    total = len(tokens)
    if not total:
        return [_refused(document, "has no tokens")]
    if total > rules.width and rules.cut is Cut.REFUSE:
        return [_refused(document, f"has {total} tokens, more than the width {rules.width}")]
    parts: list[Passage | Refused] = []
    bounds = _bounds(total, rules)
    end = bounds[-1][1]
    reached = 0  # positions before it were kept, or not, by an earlier window
    for part, (first, stop) in enumerate(bounds):
        keep = _kept(first, stop, end, rules.keep)
        if wanted is not None:
            keep &= wanted[first:stop]
        keep[: max(0, reached - first)] = False
        reached = stop
        if keep.any():  # a window that only others would learn from need not be computed
            parts.append(
                Passage(
                    id=document.id,
                    row=document.row,
                    file=document.file,
                    offset=document.offset,
                    part=part,
                    first=first,
                    total=total,
                    cut=rules.cut if total > rules.width else None,
                    tokens=tokens[first:stop],
                    keep=keep,
                )
            )
    return parts or [_refused(document, "has no token that the filter keeps")]


def _bounds(total: int, rules: Rules) -> list[Span]:
    if total <= rules.width:
        return [(0, total)]
    match rules.cut:
        case Cut.TAIL:
            return [(total - rules.width, total)]
        case Cut.WINDOWS:
            step = rules.width - rules.overlap
            return [(at, min(at + rules.width, total)) for at in range(0, total - rules.overlap, step)]
        case Cut.HEAD | Cut.REFUSE:
            return [(0, rules.width)]


def _kept(first: int, stop: int, end: int, keep: Keep) -> NDArray[np.bool_]:
    """Of positions `first` to `stop`; the last window ends at `end`."""
    kept = np.zeros(stop - first, np.bool_)
    match keep.which:
        case "all":
            kept[:] = True
        case "last":
            kept[end - 1 - first :] = True
        case "every":
            kept[-first % keep.n :: keep.n] = True
    return kept


def _refused(document: Document, reason: str) -> Refused:
    excerpt = (document.text or "")[:200]
    return Refused(
        file=document.file,
        line=document.offset + 1,
        row=document.row,
        id=document.id,
        reason=reason,
        excerpt=excerpt,
    )
