"""Looking a dataset over: what is counted is what a run would meet."""

from __future__ import annotations

import statistics
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.extract import dataset_look
from penstock.extract.dataset_look import Tally, look, look_at_tokens
from penstock.extract.source import Source, SourceSpec
from penstock.extract.tokens import Cut, Keep, Rules, Tokenizer
from tests.unit.extract.small_tokenizer import TEXT, write_tokenizer


@pytest.fixture
def source(tmp_path: Path) -> Source:
    rows = [msgspec.json.encode({"text": TEXT[:number]}) for number in range(1, 91)]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([*rows, b"{", b"[]", b'{"text": 1}', b'{"text": 2}']))
    return Source.open(SourceSpec(data=(str(tmp_path / "a.jsonl"),)))


def test_rows_documents_and_refusals_are_counted(source: Source) -> None:
    found, refused = look(source, samples=2)
    assert (found.rows, found.rows_read, found.documents, found.refused) == (94, 94, 90, 4)
    assert found.reasons == {
        "column 'text' is a number, not text": 2,
        "is not JSON": 1,
        "is a JSON list, not an object": 1,
    }
    assert [each.line for each in refused] == [91, 92, 93, 94]
    assert found.samples == (TEXT[:1], TEXT[:2])
    assert found.characters is not None
    assert (found.characters.total, found.characters.median, found.characters.longest) == (90 * 91 // 2, 45, 90)
    assert found.characters.p95 == 86


def test_a_part_of_the_rows_says_so(source: Source) -> None:
    found, refused = look(source, rows=10)
    assert (found.rows, found.rows_read, found.documents, refused) == (94, 10, 10, [])


def test_tokens_are_counted_as_a_run_would_read_them(source: Source, tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "model")
    encodings = Tokenizer.open(str(folder)).encode([TEXT[:n] for n in range(1, 91)], special=True, offsets=False)
    lengths = [len(each.ids) for each in encodings]
    found, _ = look_at_tokens(source, Rules(width=16, cut=Cut.WINDOWS, overlap=2), str(folder))
    assert found.tokens is not None
    assert found.tokens.documents.total == sum(lengths)
    assert found.tokens.documents.longest == max(lengths)
    assert found.tokens.cut == sum(length > 16 for length in lengths) > 0
    assert found.tokens.kept == sum(lengths), "windows repeat context, and keep each token once"
    assert found.tokens.passages > 90
    assert 0.8 < found.tokens.fill <= 1
    last, _ = look_at_tokens(source, Rules(width=64, keep=Keep("last")), str(folder))
    assert last.tokens is not None
    assert last.tokens.kept == 90


def test_the_fill_is_that_of_packing_a_window_at_a_time(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_look, "WINDOW", 2)
    filling = dataset_look._Filling(10)
    for length in (6, 4, 6, 6, 3):
        filling.add(length)
    assert filling.settle() == 25 / 40


def test_nothing_good_is_no_division_by_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"{")
    source = Source.open(SourceSpec(data=(str(tmp_path / "a.jsonl"),)))
    found, _ = look(source)
    assert (found.documents, found.characters) == (0, None)
    more, _ = look_at_tokens(source, Rules(width=8), str(write_tokenizer(tmp_path / "model")))
    assert (more.documents, more.tokens) == (0, None)


@given(st.lists(st.integers(0, 10_000_000), min_size=1, max_size=200))
def test_lengths_are_counted_exactly_and_quantiles_to_three_digits(lengths: list[int]) -> None:
    tally = Tally()
    for length in lengths:
        tally.add(length)
    found = tally.lengths()
    assert found is not None
    assert found.total == sum(lengths)
    assert found.longest == max(lengths)
    assert found.mean == pytest.approx(statistics.fmean(lengths))
    assert found.median == pytest.approx(statistics.median_low(lengths), rel=0.011)
    assert found.median <= found.p95 <= found.longest


def test_reasons_without_end_are_summed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.extract.source import Refused

    monkeypatch.setattr(dataset_look, "REFUSED_KEPT", 3)
    refusals = dataset_look._Refusals()
    for number in range(100):
        refusals(Refused(file="a", line=number, row=number, reason=f"reason {number}"))
    assert refusals.count == 100
    assert len(refusals.rows) == 3
    assert len(refusals.reasons) == 51
    assert refusals.reasons["other reasons"] == 50
