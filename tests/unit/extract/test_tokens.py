"""Tokens: what the tokenizer says, each position kept once at most, cuts recorded, filters that keep what they say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.domain.admission import BadInput
from penstock.extract.content import Reading
from penstock.extract.source import Document, Refused
from penstock.extract.templates import ChatTemplate, render_chat
from penstock.extract.tokens import (
    Cut,
    Keep,
    Passage,
    Rules,
    Tokenizer,
    check,
    load_chat_template,
    parse_filter,
    passages,
)
from tests.unit.extract.small_tokenizer import write_tokenizer

WHERE = {"file": "a.jsonl", "offset": 3, "row": 13}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.open(str(folder))


def numbers(count: int, flags: tuple[bool, ...] | None = None) -> Document:
    return Document(id="d", file="a.jsonl", offset=3, row=13, tokens=tuple(range(100, 100 + count)), flags=flags)


def parts(document: Document, rules: Rules) -> list[Passage]:
    found = passages([document], None, rules, chat=False)
    return [each for each in found if isinstance(each, Passage)]


def kept(found: list[Passage]) -> list[int]:
    return [passage.first + int(at) for passage in found for at in np.flatnonzero(passage.keep)]


def test_text_becomes_all_its_tokens_whatever_the_tokenizers_own_limits(tokenizer: Tokenizer) -> None:
    text = "the quick brown fox jumps over the lazy dog while naïve ones look on"
    (found,) = passages([Document(id="d", text=text, **WHERE)], tokenizer, Rules(width=64), chat=False)  # type: ignore[arg-type]
    assert isinstance(found, Passage)
    (again,) = tokenizer.encode([text], special=True, offsets=True)
    assert found.tokens.tolist() == again.ids
    assert len(again.ids) > 9
    assert found.tokens[0] == 0
    assert found.tokens.dtype == np.int32
    assert found.keep.all()
    assert (found.id, found.row, found.file, found.offset) == ("d", 13, "a.jsonl", 3)
    assert (found.part, found.first, found.total, found.cut) == (0, 0, len(again.ids), None)


@pytest.mark.parametrize(("chat", "special", "begins"), [(False, None, True), (True, None, False), (True, True, True)])
def test_special_tokens_are_added_once(tokenizer: Tokenizer, chat: bool, special: bool | None, begins: bool) -> None:
    (found,) = passages(
        [Document(id="d", text="the fox", **WHERE)],  # type: ignore[arg-type]
        tokenizer,
        Rules(width=64, special=special),
        chat=chat,
    )
    assert isinstance(found, Passage)
    assert (found.tokens[0] == 0) is np.bool_(begins)


def test_a_long_document_is_cut_as_the_rules_say_and_says_so() -> None:
    (head,) = parts(numbers(10), Rules(width=4))
    assert (head.tokens.tolist(), head.first, head.total, head.cut) == ([100, 101, 102, 103], 0, 10, Cut.HEAD)
    (tail,) = parts(numbers(10), Rules(width=4, cut=Cut.TAIL))
    assert (tail.tokens.tolist(), tail.first, tail.total, tail.cut) == ([106, 107, 108, 109], 6, 10, Cut.TAIL)
    (refused,) = passages([numbers(10)], None, Rules(width=4, cut=Cut.REFUSE), chat=False)
    assert isinstance(refused, Refused)
    assert (refused.line, refused.row, refused.reason) == (4, 13, "has 10 tokens, more than the width 4")
    assert refused.id == "d"
    (whole,) = parts(numbers(4), Rules(width=4, cut=Cut.REFUSE))
    assert whole.cut is None


def test_windows_repeat_context_and_keep_each_position_once() -> None:
    found = parts(numbers(10), Rules(width=4, cut=Cut.WINDOWS, overlap=2))
    assert [passage.tokens.tolist() for passage in found] == [
        [100, 101, 102, 103],
        [102, 103, 104, 105],
        [104, 105, 106, 107],
        [106, 107, 108, 109],
    ]
    assert [passage.keep.tolist() for passage in found[:2]] == [[True] * 4, [False, False, True, True]]
    assert [(passage.part, passage.first) for passage in found] == [(0, 0), (1, 2), (2, 4), (3, 6)]
    assert {passage.cut for passage in found} == {Cut.WINDOWS}


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 200),
    width=st.integers(1, 40),
    overlap=st.integers(0, 39),
    keep=st.one_of(
        st.builds(Keep, st.sampled_from(["all", "last"])), st.builds(Keep, st.just("every"), st.integers(1, 50))
    ),
    flags=st.none() | st.randoms(use_true_random=False),
)
def test_windows_cover_a_document_and_the_filter_decides(
    count: int, width: int, overlap: int, keep: Keep, flags: object
) -> None:
    import random

    chosen = tuple(flags.random() < 0.5 for _ in range(count)) if isinstance(flags, random.Random) else None
    rules = Rules(width=width, cut=Cut.WINDOWS, overlap=min(overlap, width - 1), keep=keep)
    found = parts(numbers(count, chosen), rules)
    for passage in found:
        assert 1 <= len(passage.tokens) == len(passage.keep) <= width
        assert passage.tokens.tolist() == list(range(100 + passage.first, 100 + passage.first + len(passage.tokens)))
        assert passage.keep.any()
    wanted = {"all": range(count), "last": [count - 1], "every": range(0, count, keep.n)}[keep.which]
    assert kept(found) == [position for position in wanted if chosen is None or chosen[position]]
    if keep.which == "all" and chosen is None and count > width:
        assert found[-1].first + len(found[-1].tokens) == count


def test_the_last_token_is_that_of_what_was_kept() -> None:
    assert kept(parts(numbers(10), Rules(width=4, keep=Keep("last")))) == [3]
    assert kept(parts(numbers(10), Rules(width=4, cut=Cut.TAIL, keep=Keep("last")))) == [9]
    assert kept(parts(numbers(10), Rules(width=4, cut=Cut.WINDOWS, keep=Keep("last")))) == [9]


def test_ranges_of_characters_keep_the_tokens_that_touch_them(tokenizer: Tokenizer) -> None:
    text = "naïve ones look on"
    spans = ((text.index("ones"), text.index("ones") + 4),)
    (found,) = passages([Document(id="d", text=text, spans=spans, **WHERE)], tokenizer, Rules(width=64), chat=False)  # type: ignore[arg-type]
    assert isinstance(found, Passage)
    (encoding,) = tokenizer.encode([text], special=True, offsets=True)
    cut = [text[slice(*encoding.offsets[at])] for at in np.flatnonzero(found.keep)]
    assert "".join(cut).strip() == "ones"
    assert not found.keep[0], "the token that begins a text has no characters"


def test_the_assistants_part_of_a_chat_is_kept(tokenizer: Tokenizer) -> None:
    template = ChatTemplate(
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}.{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    chat = [{"role": "user", "content": "the quick fox"}, {"role": "assistant", "content": "the lazy dog"}]
    text, spans = render_chat(template, chat, mark_answers=True)
    (found,) = passages([Document(id="d", text=text, spans=spans, **WHERE)], tokenizer, Rules(width=64), chat=True)  # type: ignore[arg-type]
    assert isinstance(found, Passage)
    (encoding,) = tokenizer.encode([text], special=False, offsets=True)
    shown = "".join(text[slice(*encoding.offsets[at])] for at in np.flatnonzero(found.keep))
    assert shown.strip() == "the lazy dog."


def test_a_row_without_anything_to_keep_is_set_aside(tokenizer: Tokenizer) -> None:
    documents = [
        Document(id="a", text="", **WHERE),  # type: ignore[arg-type]
        Document(id="b", text="fox", spans=(), **WHERE),  # type: ignore[arg-type]
        Document(id="c", text="fox", **WHERE),  # type: ignore[arg-type]
    ]
    empty, unkept, found = passages(documents, tokenizer, Rules(width=64), chat=True)
    assert isinstance(empty, Refused)
    assert empty.reason == "has no tokens"
    assert isinstance(unkept, Refused)
    assert unkept.reason == "has no token that the filter keeps"
    assert isinstance(found, Passage)


def test_ids_beyond_the_vocabulary_are_set_aside() -> None:
    (refused,) = passages([numbers(3)], None, Rules(width=4, vocabulary=102), chat=False)
    assert isinstance(refused, Refused)
    assert refused.reason == "has token 102; the vocabulary ends at 101"
    assert parts(numbers(3), Rules(width=4, vocabulary=103))


def test_filters_as_users_write_them() -> None:
    plain, chat = Reading(), Reading(chat="messages")
    assert parse_filter("all", plain) == (plain, Keep("all"))
    assert parse_filter("last", plain) == (plain, Keep("last"))
    assert parse_filter("every:8", plain) == (plain, Keep("every", 8))
    assert parse_filter("mask:wanted", plain) == (Reading(mask="wanted"), Keep("all"))
    assert parse_filter("assistant", chat) == (Reading(chat="messages", answers=True), Keep("all"))


@pytest.mark.parametrize("text", ["", "first", "every", "every:0", "every:-1", "every:²", "mask:", "all:1", "last:2"])
def test_what_is_no_filter_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="is no token filter; use all, last, every:N, mask:COLUMN or assistant"):
        parse_filter(text, Reading())


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (Rules(width=0), "width: 0 is not between"),
        (Rules(width=8, overlap=2), "overlap: 2 is for windows, not for head"),
        (Rules(width=8, cut=Cut.WINDOWS, overlap=8), "overlap: 8 is not less than the width 8"),
        (Rules(width=8, cut=Cut.WINDOWS, overlap=-1), "overlap: -1 is not less than"),
        (Rules(width=8, keep=Keep("every", 0)), "keeps nothing"),
    ],
)
def test_rules_that_cannot_hold_are_refused(rules: Rules, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        check(rules)


def test_a_tokenizer_is_found_named_and_refused_in_one_line(folder: Path, tmp_path: Path) -> None:
    one, other = Tokenizer.open(str(folder)), Tokenizer.open(str(folder / "tokenizer.json"))
    assert one.fingerprint == other.fingerprint
    assert one.fingerprint.startswith("sha256:")
    assert 258 <= one.vocabulary <= 400
    with pytest.raises(BadInput, match=r"has no tokenizer\.json"):
        Tokenizer.open(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(BadInput, match="cannot be read") as caught:
        Tokenizer.open(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_text_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(BadInput, match="is missing, and the dataset is text"):
        passages([Document(id="d", text="x", **WHERE)], None, Rules(width=4), chat=False)  # type: ignore[arg-type]


def test_a_models_directory_brings_its_chat_template(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    with pytest.raises(BadInput, match="has no chat template"):
        load_chat_template(str(tmp_path))
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}")
    assert load_chat_template(str(tmp_path)) == ChatTemplate("{{ bos_token }}", {"bos_token": "<s>"})
