"""Feeding: passages in the order of rows, malformed rows set aside, wrong settings told before any work is done."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from penstock.domain.admission import BadInput
from penstock.extract import feed
from penstock.extract.content import Reading
from penstock.extract.feed import Order, passages
from penstock.extract.source import Refused, Source, SourceSpec, raw_rows
from penstock.extract.tokens import Cut, Rules
from tests.unit.extract.small_tokenizer import TEXT, write_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tokenizer(tmp_path_factory.mktemp("feed"))
    rows = [{"text": f"{number} {TEXT[: number % 90]}"} if number % 50 else {"none": 1} for number in range(500)]
    (folder / "a.jsonl").write_bytes(b"\n".join(map(msgspec.json.encode, rows)))
    return folder


def order(folder: Path, rules: Rules, tokenizer: str | None = "") -> Order:
    source = Source.open(SourceSpec(data=(str(folder / "a.jsonl"),)))
    return Order(source=source, rules=rules, tokenizer=str(folder) if tokenizer == "" else tokenizer)


def test_every_row_gives_passages_or_is_set_aside(folder: Path) -> None:
    refused: list[Refused] = []
    found = list(passages(order(folder, Rules(width=16, cut=Cut.WINDOWS, overlap=4)), 10, 490, refused.append))
    assert [each.line for each in refused] == list(range(51, 490, 50))
    assert sorted({each.row for each in found} | {each.row for each in refused}) == list(range(10, 490))
    assert [(each.row, each.part) for each in found] == sorted((each.row, each.part) for each in found)
    assert any(each.part for each in found)


def test_ranges_join_to_the_whole_whatever_the_chunks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    what = order(folder, Rules(width=64))
    whole = [(each.row, each.tokens.tolist()) for each in passages(what, refuse=lambda _: None)]
    monkeypatch.setattr(feed, "CHUNK_ROWS", 7)
    monkeypatch.setattr(feed, "CHUNK_CHARACTERS", 100)
    parts = [
        (each.row, each.tokens.tolist())
        for start, stop in ((0, 123), (123, 124), (124, 500))
        for each in passages(what, start, stop, lambda _: None)
    ]
    assert parts == whole
    assert len(whole) == 490


def test_chunks_end_where_their_text_grows_long(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "CHUNK_CHARACTERS", 200)
    source = order(folder, Rules(width=64)).source
    sizes = [sum(len(str(row.columns)) for row in chunk) for chunk in feed._chunks(raw_rows(source))]
    assert len(sizes) > 50
    assert max(sizes) < 200 + 2_000


def test_token_ids_need_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "ids.jsonl").write_text('{"ids": [5, 6, 7]}\n{"ids": [8], "ok": 1}\n{"ids": [-1]}\n')
    source = Source.open(SourceSpec(data=(str(tmp_path / "ids.jsonl"),), reading=Reading(tokens="ids")))
    refused: list[Refused] = []
    found = list(passages(Order(source=source, rules=Rules(width=8), tokenizer=None), refuse=refused.append))
    assert [each.tokens.tolist() for each in found] == [[5, 6, 7], [8]]
    assert all(each.tokens.dtype == np.int32 for each in found)
    assert [each.reason for each in refused] == ["column 'ids' has -1 among its token ids"]


@pytest.mark.parametrize("processes", [0, 1])
def test_what_is_wrong_is_told_in_words_before_any_work(folder: Path, tmp_path: Path, processes: int) -> None:
    with pytest.raises(BadInput, match="is missing, and the dataset is text"):
        next(passages(order(folder, Rules(width=8), tokenizer=None), processes=processes))
    with pytest.raises(BadInput, match=r"has no tokenizer\.json"):
        next(passages(order(folder, Rules(width=8), tokenizer=str(tmp_path)), processes=processes))
    with pytest.raises(BadInput, match="width: 0"):
        next(passages(order(folder, Rules(width=0)), processes=processes))
