"""A unit from a real (tiny) model holds what the model says of each document alone, however it was packed and cut."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np
import pytest

from examples.extract_tiny.make import make
from penstock.domain.admission import BadInput
from penstock.extract import packing
from penstock.extract.attention import plain
from penstock.extract.compute import ModelCompute, Settings
from penstock.extract.config import load_config
from penstock.extract.content import Reading
from penstock.extract.engine import room
from penstock.extract.fit import Fit
from penstock.extract.layout import INDEX, Piece, read_index
from penstock.extract.model import make_step
from penstock.extract.shapes import parse_sites
from penstock.extract.source import Source, SourceSpec
from penstock.extract.tokens import Cut, Keep, Rules, Tokenizer
from penstock.extract.weights import load_weights
from penstock.extract.work import Planned, Wish, choose_unit_rows, plan_run, work_of
from tests.unit.extract.cheap import encode_unit

SITES = "resid_post:1,3;mlp_out:2"
WIDTH = 64
LONGEST = 150

Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make(folder)
    return folder


def texts(folder: Path) -> Rows:
    lines = [json.loads(line) for line in (folder / "docs.jsonl").read_text().splitlines()[:14]]
    return [{**each, "text": each["text"][: 40 + 70 * number]} for number, each in enumerate(lines)]


def wish(folder: Path, rows: Rows, *, bad: Sequence[str] = (), **rules: Any) -> Wish:
    data = folder / "some.jsonl"
    data.write_text("".join([*(json.dumps(each) + "\n" for each in rows), *(line + "\n" for line in bad)]))
    source = Source.open(SourceSpec(data=(str(data),), reading=Reading(id="id")))
    model = str(folder / "model")
    return Wish(
        model=model,
        tokenizer=model,
        source=source,
        sites=SITES,
        rules=Rules(width=WIDTH, **rules),
        dtype="float32",
        unit_rows=6,
    )


def pieces_of(planned: Planned, rows: int = 3) -> list[Piece]:
    compute = ModelCompute(planned.plan, Settings(rows=rows), lambda line: None)
    found = []
    for unit in planned.plan.units:
        made = list(compute(planned.plan, unit))
        encode_unit(planned.plan, unit, made)  # which checks that it is whole
        found += made
    return found


class Alone:
    """The model on one document at a time, in a row of its own."""

    def __init__(self, folder: Path) -> None:
        model = str(folder / "model")
        config = load_config(model)
        sites = parse_sites(SITES)
        self._step = jax.jit(make_step(config, sites, attention=plain(), dtype="float32"))
        self._params = load_weights(model, config, sites, "float32")
        self._tokenizer = Tokenizer.open(model)

    def tokens(self, text: str) -> list[int]:
        (encoding,) = self._tokenizer.encode([text], special=True, offsets=False)
        return list(encoding.ids)

    def __call__(self, ids: Sequence[int]) -> dict[str, np.ndarray[Any, Any]]:
        row = np.zeros((1, LONGEST), np.int32)
        row[0, : len(ids)] = ids
        positions = np.arange(LONGEST, dtype=np.int32)[None]
        segments = (positions < len(ids)).astype(np.int32)
        found = self._step(self._params, row, positions, segments)
        return {name: np.asarray(value)[0, : len(ids)] for name, value in found.items()}


@pytest.fixture(scope="module")
def alone(folder: Path) -> Alone:
    return Alone(folder)


def check(piece: Piece, expected: dict[str, np.ndarray[Any, Any]], first: int = 0) -> None:
    assert piece.positions is not None
    for site, values in piece.sites.items():
        np.testing.assert_allclose(values, expected[site][piece.positions - first], atol=2e-5)


def test_packed_documents_are_as_if_alone(folder: Path, alone: Alone) -> None:
    rows = texts(folder)
    planned = plan_run(wish(folder, rows, bad=["{broken", '{"id": "x", "text": 5}', '{"id": "y", "text": ""}']))
    found = pieces_of(planned)
    assert sorted(piece.row for piece in found) == list(range(17))
    by_row = {piece.row: piece for piece in found}
    for number, each in enumerate(rows):
        ids = alone.tokens(each["text"])
        piece = by_row[number]
        assert (piece.document, piece.total, piece.first) == (each["id"], len(ids), 0)
        assert (piece.cut, piece.dropped) == (("head", len(ids) - WIDTH) if len(ids) > WIDTH else ("", 0))
        assert piece.tokens.tolist() == ids[:WIDTH]
        check(piece, alone(ids[:WIDTH]))
    assert [len(by_row[row].tokens) for row in (14, 15, 16)] == [0, 0, 0]
    assert [by_row[row].document for row in (14, 15, 16)] == ["row 14", "x", "y"], "an id that can be read is kept"
    assert [by_row[row].excerpt for row in (14, 15, 16)] == ["{broken", '{"id":"x","text":5}', ""]
    assert "not text" in by_row[15].note
    assert "no tokens" in by_row[16].note


def test_it_tells_when_all_is_read_and_when_the_device_has_the_last_batch(folder: Path) -> None:
    planned = plan_run(wish(folder, texts(folder)))
    compute = ModelCompute(planned.plan, Settings(rows=1, in_flight=2), lambda line: None)
    course = compute(planned.plan, planned.plan.units[0])
    given: list[Piece] = []
    assert course.is_read, "it is less than a first window"
    told: list[int] = []
    course.on_fed = lambda: told.append(len(given))
    for piece in course:
        given.append(piece)  # noqa: PERF402 (one by one: they are counted on the way)
    assert len(given) == 6
    assert len(told) == 1
    assert told[0] < len(given), "the device had nothing to do when it told so"


def test_the_device_has_its_first_batch_before_all_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "FIRST_WINDOW", 2)
    monkeypatch.setattr(packing, "KEPT_OPEN", 0)
    planned = plan_run(msgspec.structs.replace(wish(folder, texts(folder)), unit_rows=14))
    compute = ModelCompute(planned.plan, Settings(rows=1, in_flight=1), lambda line: None)
    course = compute(planned.plan, planned.plan.units[0])
    given: list[Piece] = []
    read_at: list[int] = []
    assert not course.is_read
    course.on_read = lambda: read_at.append(len(given))
    for piece in course:
        given.append(piece)  # noqa: PERF402 (one by one: they are counted on the way)
    assert len(given) == 14
    assert 0 < read_at[0] < 14


def test_a_course_that_is_closed_leaves_its_places_on_the_device(folder: Path) -> None:
    planned = plan_run(wish(folder, texts(folder)))
    compute = ModelCompute(planned.plan, Settings(rows=1, in_flight=2), lambda line: None)
    course = compute(planned.plan, planned.plan.units[0])
    pieces = iter(course)
    next(pieces)
    assert compute._engine._queue._steps
    course.close()
    assert not compute._engine._queue._steps
    assert len(list(compute(planned.plan, planned.plan.units[0]))) == 6


def test_windows_and_chosen_positions_keep_their_places(folder: Path, alone: Alone) -> None:
    rows = texts(folder)[8:12]
    planned = plan_run(wish(folder, rows, cut=Cut.WINDOWS, overlap=16, keep=Keep("every", 3)))
    found = pieces_of(planned)
    for number, each in enumerate(rows):
        ids = alone.tokens(each["text"])
        own = sorted((piece for piece in found if piece.row == number), key=lambda piece: int(piece.positions[0]))  # type: ignore[index]
        positions = np.concatenate([piece.positions for piece in own if piece.positions is not None])
        assert positions.tolist() == list(range(0, len(ids), 3))
        for at, piece in enumerate(own):
            first = at * (WIDTH - 16)
            check(piece, alone(ids[first : first + WIDTH]), first)
    # Each window tells of its document, and nothing of it was dropped.
    objects, facts = encode_unit(planned.plan, planned.plan.units[0], found)
    assert facts.truncated == 0
    windows = read_index(objects[INDEX]).to_pylist()
    assert len(windows) > len(rows)
    for each in windows:
        total = len(alone.tokens(rows[each["row"]]["text"]))
        cut = "windows" if total > WIDTH else ""
        assert (each["total"], each["cut"], each["dropped"], each["truncated"]) == (total, cut, 0, False)
        assert each["first"] <= each["position"] < each["first"] + WIDTH
    assert {each["first"] for each in windows} >= {0, WIDTH - 16}


def test_a_model_that_was_changed_after_the_plan_is_refused(folder: Path, tmp_path: Path) -> None:
    make(tmp_path)
    planned = plan_run(wish(tmp_path, texts(folder)[:2]))
    weights = tmp_path / "model" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(bytes(data))
    with pytest.raises(BadInput, match=r"is not the plan's: model\.safetensors differs"):
        ModelCompute(planned.plan, Settings(), lambda line: None)


def test_rows_are_as_many_as_the_device_has_memory_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = plan_run(wish(folder, texts(folder)[:2]))
    said: list[str] = []

    def begun(memory: int | None, rows: int | None = None) -> int:
        monkeypatch.setattr("penstock.extract.engine._limit", lambda _: memory)
        return ModelCompute(planned.plan, Settings(rows=rows), said.append)._engine.shape[0]

    assert begun(None) == 4096 // WIDTH
    assert len(said) == 1
    whole = room_of(planned, 4096 // WIDTH).memory
    assert begun(whole.total // 2) in (8, 16, 32)
    assert "rows a step instead of 64, for which memory is too little: 0.0" in said[1]
    assert begun(whole.total // 2, rows=64) == 64, "who names the rows is believed"

    def load(*_: object, **__: object) -> None:
        raise AssertionError("weights that cannot fit are not loaded")

    monkeypatch.setattr("penstock.extract.compute.load_weights", load)
    with pytest.raises(BadInput, match=r"is too little for one row of 64 tokens a step, about .*weights .*--mesh"):
        begun(whole.weights // 2)


def room_of(planned: Planned, rows: int) -> Fit:
    return room(planned.config, planned.sites, jax.devices()[:1], dtype="float32", rows=rows, width=WIDTH)


def test_what_cannot_be_planned_is_refused(folder: Path) -> None:
    good = wish(folder, texts(folder)[:2])
    for change, said in (
        ({"sites": "resid_post:9"}, "layers are 0 to 3"),
        ({"rules": Rules(width=9999)}, "more than the 512 positions"),
        ({"max_samples": 0}, "is not above 0"),
        ({"model": str(folder)}, "config.json"),
    ):
        with pytest.raises(BadInput, match=said):
            plan_run(msgspec.structs.replace(good, **change))


def test_max_samples_is_the_total(folder: Path) -> None:
    planned = plan_run(msgspec.structs.replace(wish(folder, texts(folder)), max_samples=9))
    assert (planned.plan.rows, [unit.stop for unit in planned.plan.units]) == (9, [6, 9])
    assert work_of(planned.plan).rules.vocabulary == 512


def test_units_are_large_objects_but_work_for_several() -> None:
    one = 400 * 896 * 2
    assert choose_unit_rows(10_000_000, one, 3 * one) == (1 << 30) // one
    assert choose_unit_rows(10_000_000, one, 8 * one) == (1 << 29) // one
    assert choose_unit_rows(10_000_000, one, 72 * one) == (1 << 28) // one
    assert choose_unit_rows(10_000_000, one, 3 * one, most=1 << 28) == (1 << 28) // one
    assert choose_unit_rows(160, 1.0, 1.0) == 10
    assert choose_unit_rows(3, 0.0, 0.0) == 1
