"""Rows that are looked at lie all over the data, as far as they can be reached; units cut by them are alike."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.extract import formats, sampling
from penstock.extract.feed import Order
from penstock.extract.sampling import Look, Stretch
from penstock.extract.source import Source, SourceSpec
from penstock.extract.tokens import Cut, Keep, Rules
from tests.unit.extract.small_tokenizer import write_tokenizer


def look(found: Source, tmp_path: Path, **rules: object) -> Look:
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    order = Order(source=found, rules=msgspec.convert({"width": 64, **rules}, Rules), tokenizer=str(tokenizer))
    return sampling.look(order, found.rows)


def lines(path: Path, sizes: list[int]) -> Path:
    data = "".join(json.dumps({"text": "fox " * size}) + "\n" for size in sizes).encode()
    path.write_bytes(gzip.compress(data) if path.name.endswith(".gz") else data)
    return path


@pytest.fixture(autouse=True)
def small_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "MARK_BYTES", 1 << 12)
    monkeypatch.setattr(formats, "_CHUNK_BYTES", 1 << 10)


def test_every_file_is_looked_at(tmp_path: Path) -> None:
    for number in range(4):
        lines(tmp_path / f"{number}.jsonl", [1 + 10 * number] * 200)
    found = look(Source.open(SourceSpec(data=(str(tmp_path),))), tmp_path)
    assert found.rows == 200
    assert 12 < found.tokens / 800 < 24, "the first file alone would say 2 or 3"


def test_the_beginning_of_a_compressed_file_is_enough_if_its_end_is_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is inflated in vain is bounded; how long later rows are is known all the same."""
    path = lines(tmp_path / "a.jsonl.gz", [2] * 1500 + [40] * 500)
    source = Source.open(SourceSpec(data=(str(path),)))
    reached: list[int] = []
    places = sampling._places

    def noted(stretches: tuple[Stretch, ...], rows: int) -> list[tuple[int, int]]:
        reached.extend(start for start, _ in places(stretches, rows))
        return places(stretches, rows)

    monkeypatch.setattr(sampling, "_places", noted)
    monkeypatch.setattr(sampling, "REACH_BYTES", 10_000)
    found = look(source, tmp_path)
    assert max(reached) < 1000
    assert found.per_row[-1] > 5 * found.per_row[0]
    assert found.stops(2)[0] > 1400


def test_row_groups_tell_how_long_their_rows_are(tmp_path: Path) -> None:
    sizes = [2] * 600 + [60] * 200
    table = pa.table({"text": [f"{number} " + "fox " * size for number, size in enumerate(sizes)], "other": sizes})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=100, use_dictionary=False)
    found = look(Source.open(SourceSpec(data=(str(tmp_path / "a.parquet"),))), tmp_path)
    assert len(found.stretches) == 8
    assert found.per_row[-1] > 4 * found.per_row[0]
    stops = found.stops(8)
    assert stops[-1] == 800
    assert stops[0] > 3 * (stops[-1] - stops[-2])


@pytest.mark.parametrize(
    ("rules", "most"), [({}, 64), ({"keep": Keep("every", 4)}, 16), ({"keep": Keep("last")}, 1), ({"cut": "tail"}, 64)]
)
def test_a_row_is_not_taken_for_longer_than_it_can_be(tmp_path: Path, rules: dict[str, object], most: int) -> None:
    path = lines(tmp_path / "a.jsonl", [5] * 400 + [500] * 20)
    found = look(Source.open(SourceSpec(data=(str(path),))), tmp_path, **rules)
    assert max(found.per_row) == pytest.approx(most)
    windows = look(Source.open(SourceSpec(data=(str(path),))), tmp_path, cut=Cut.WINDOWS)
    assert max(windows.per_row) > 200


@given(
    counts=st.lists(st.tuples(st.integers(1, 50), st.floats(0, 100)), min_size=1, max_size=12),
    units=st.integers(1, 40),
)
def test_units_cover_all_rows_and_none_is_empty(counts: list[tuple[int, float]], units: int) -> None:
    stretches, start = [], 0
    for rows, _ in counts:
        stretches.append(Stretch(start, start + rows, 1, 0, 0))
        start += rows
    per_row = tuple(each for _, each in counts)
    found = Look(rows=1, kept=1, refused=(), stretches=tuple(stretches), per_row=per_row)
    units = min(units, start)
    stops = found.stops(units)
    assert len(stops) == units
    assert stops[-1] == start
    assert all(one < other for one, other in zip([0, *stops], stops, strict=False))
