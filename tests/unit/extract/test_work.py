"""A plan knows its model by all bytes, refuses at once what a worker would refuse, and older plans still run."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import obstore
import pytest
import tokenizers
from obstore.store import MemoryStore
from safetensors.numpy import load_file, save_file

from examples.extract_tiny.make import make
from penstock.domain import ledger
from penstock.domain.admission import BadInput
from penstock.extract import formats
from penstock.extract.compute import ModelCompute, Settings
from penstock.extract.content import Reading
from penstock.extract.plan import make_plan
from penstock.extract.source import Source, SourceSpec
from penstock.extract.tokens import Cut, Rules, Tokenizer
from penstock.extract.weights import load_weights
from penstock.extract.work import Planned, Wish, check, fingerprints, plan_run, work_of
from penstock.objects.inputs import Changed
from penstock.wiring import extraction
from penstock.wiring.extraction import DataOptions, PlanWish

Rows = list[dict[str, Any]]
WORDS = ["water", "gate", "valve", "turbine"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make(folder)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A model of one's own, to be spoilt."""
    shutil.copytree(made, tmp_path / "tiny")
    return tmp_path / "tiny"


def planned(folder: Path, rows: Rows | None = None, tokenizer: Path | None = None, **options: Any) -> Planned:
    data = folder / "docs.jsonl"
    if rows is not None:
        data = folder / "own.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reading = Reading(**{name: options.pop(name) for name in list(options) if name in Reading.__struct_fields__})
    source = Source.open(SourceSpec(data=(str(data),), reading=reading))
    model = str(folder / "model")
    rules = options.pop("rules", Rules(width=64))
    wish = Wish(model=model, tokenizer=str(tokenizer or model), source=source, sites="resid_post:1", rules=rules)
    return plan_run(msgspec.structs.replace(wish, **options))


# The model.


def large_model(folder: Path) -> Path:
    """More than could be known by samples."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(os.urandom(4 << 20))
    return folder


def test_a_byte_anywhere_in_the_weights_makes_another_model(tmp_path: Path) -> None:
    model = large_model(tmp_path / "model")
    before = fingerprints(str(model))
    assert ledger.matches((model / "model.safetensors").read_bytes(), before["model.safetensors"])
    with (model / "model.safetensors").open("r+b") as file:
        file.seek((4 << 20) // 16 * 5 - 100_000)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    after = fingerprints(str(model))
    assert after["config.json"] == before["config.json"]
    assert after["model.safetensors"] != before["model.safetensors"]


def test_in_a_bucket_the_version_is_the_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    monkeypatch.setattr("penstock.objects.inputs.store_of", lambda *_: store)
    obstore.put(store, "m/config.json", b"{}")
    obstore.put(store, "m/model.safetensors", b"one")
    before = fingerprints("gs://b/m")
    assert before == fingerprints("gs://b/m")
    obstore.put(store, "m/model.safetensors", b"two")
    after = fingerprints("gs://b/m")
    assert after["model.safetensors"].startswith("etag:")
    assert (after["config.json"], after["model.safetensors"] != before["model.safetensors"]) == (
        before["config.json"],
        True,
    )


def test_weights_that_are_replaced_while_they_are_loaded_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = planned(folder)

    def replaced(*given: Any, **named: Any) -> Any:
        weights = folder / "model" / "model.safetensors"
        data = bytearray(weights.read_bytes())
        data[-1] ^= 1
        weights.write_bytes(bytes(data))
        return load_weights(*given, **named)

    monkeypatch.setattr("penstock.extract.compute.load_weights", replaced)
    with pytest.raises(BadInput, match=r"is not the plan's: model\.safetensors differs"):
        ModelCompute(found.plan, Settings(), lambda line: None)


def test_a_tokenizer_that_was_changed_after_the_plan_is_refused(folder: Path) -> None:
    found = planned(folder)
    path = folder / "model" / "tokenizer.json"
    path.write_text(path.read_text() + " ")
    with pytest.raises(BadInput, match=r"^tokenizer: .* is not the plan's"):
        ModelCompute(found.plan, Settings(), lambda line: None)


def test_data_that_was_changed_after_the_plan_is_no_unit(folder: Path) -> None:
    found = planned(folder)
    worker = ModelCompute(found.plan, Settings(), lambda line: None)
    data = folder / "docs.jsonl"
    text = data.read_text()
    data.write_text(text.replace("water", "fires", 1))
    assert data.stat().st_size == len(text.encode())
    with pytest.raises(Changed, match=r"docs\.jsonl: is not the file that the plan was made from"):
        list(worker(found.plan, found.plan.units[0]))


def test_a_plan_of_an_older_version_is_checked_as_it_was_made_and_runs(folder: Path) -> None:
    found = planned(folder, max_samples=20)
    work: dict[str, Any] = json.loads(json.dumps(found.plan.work))
    sampled = {name: _as_it_was((folder / "model" / name).read_bytes()) for name in work["files"]}
    del work["config"]
    work["files"] = sampled
    work["source"]["files"][0]["marks"] = [mark[:2] for mark in work["source"]["files"][0]["marks"]]
    old = make_plan(rows=20, unit_rows=10, sites=found.plan.sites, dtype=found.plan.dtype, work=work)
    assert work_of(old).config is None
    worker = ModelCompute(old, Settings(), lambda line: None)
    assert {piece.row for piece in worker(old, old.units[1])} == set(range(10, 20))
    (folder / "model" / "config.json").write_text((folder / "model" / "config.json").read_text() + "\n")
    with pytest.raises(BadInput, match=r"config\.json differs"):
        check(work_of(old))


def _as_it_was(data: bytes) -> str:
    digest = hashlib.sha256(str(len(data)).encode())
    for number in range(17):
        start = max(0, len(data) - 65536) * number // 16
        digest.update(data[start : start + 65536])
    return digest.hexdigest()


def test_the_models_config_is_in_the_plan(folder: Path) -> None:
    found = planned(folder)
    assert found.plan.work["config"] == json.loads((folder / "model" / "config.json").read_text())


Change = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda found: found.pop("model.norm.weight"), "weights: 'model.norm.weight' is missing in the files"),
        (
            lambda found: found.update({"model.layers.4.mlp.up_proj.weight": np.zeros((128, 64), np.float32)}),
            "weights: 'model.layers.4.mlp.up_proj.weight' is no tensor of the model that config.json describes",
        ),
        (
            lambda found: found.update({"model.layers.3.mlp.up_proj.weight": np.zeros((128, 63), np.float32)}),
            "has the shape [128, 63], and by config.json it is [128, 64]",
        ),
        (
            lambda found: found.update({"model.layers.2.mlp.up_proj.weight": np.zeros((128, 64), np.int8)}),
            "has the dtype I8, and only F32, F16, BF16 can be read",
        ),
    ],
)
def test_weights_that_cannot_be_loaded_are_refused_when_the_run_is_planned(
    folder: Path, change: Change, said: str
) -> None:
    path = folder / "model" / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    data = DataOptions(data=("no data is looked at before",))
    wish = PlanWish(
        model=str(path.parent),
        data=data,
        sites="embed",
        dtype="float32",
        width=None,
        cut="head",
        overlap=0,
        max_samples=None,
        unit_rows=None,
    )
    with pytest.raises(BadInput) as caught:
        extraction.plan_run(wish)
    assert said in str(caught.value)


# The rows.


def test_a_column_that_no_row_has_is_refused(folder: Path) -> None:
    with pytest.raises(
        BadInput, match=r"^column: 'nope' gives nothing in any of the 200 rows looked at: line 1 of "
    ) as caught:
        planned(folder, column="nope")
    assert "has no column 'nope'; it has id, text; name another column" in str(caught.value)
    with pytest.raises(BadInput, match=r"^id: 'nope' gives nothing in any"):
        planned(folder, id="nope")
    with pytest.raises(BadInput, match=r"^filter: 'mask:nope' gives nothing in any"):
        planned(folder, mask="nope")
    with pytest.raises(BadInput, match=r"^template: .*nope.* gives nothing in any .*its columns are id, text"):
        planned(folder, template="{{ nope.a }}")
    with pytest.raises(
        BadInput, match=r"^column: 'id' gives nothing .* is a number, not text; its columns are id, text"
    ):
        planned(folder, [{"id": 1, "text": "a"}, {"id": 2, "text": "b"}], column="id")


def test_rows_that_give_nothing_among_others_are_counted_with_the_first_reason(folder: Path) -> None:
    found = planned(folder, [{"text": "water"}, {"other": 1}, {"text": 5}, {"text": "gate"}])
    assert (found.looked_at, found.refused, found.reason) == (4, 2, "has no column 'text'; it has other")
    assert planned(folder).refused == 0


def with_tokens(folder: Path, *words: str) -> Path:
    """The model's tokenizer, with further tokens behind the embedding's last row, as Gemma 3's has one for images."""
    made = tokenizers.Tokenizer.from_file(str(folder / "model" / "tokenizer.json"))
    made.add_tokens([f"<unused{number}>" for number in range(512 - made.get_vocab_size())])
    made.add_tokens(list(words))
    made.save(str(folder / "tokenizer.json"))
    assert Tokenizer.open(str(folder)).vocabulary == 512 + len(words)
    return folder


def test_a_tokenizer_may_have_a_token_more_than_the_embedding_and_only_its_rows_are_set_aside(folder: Path) -> None:
    tokenizer = with_tokens(folder, "<image>")
    rows: Rows = [{"text": "water gate"}, {"text": "a <image> of water"}, {"text": "valve"}]
    found = planned(folder, rows, tokenizer=tokenizer)
    assert (found.refused, found.reason) == (1, "has token 512; the vocabulary ends at 511")
    (note,) = found.notes
    assert note.startswith("the tokenizer has 513 tokens and the model's embedding 512 rows: rows with a token beyond")
    assert "(1 of the 3 looked at)" in note
    assert planned(folder, rows).notes == ()


def test_a_tokenizer_of_another_model_is_refused(folder: Path) -> None:
    words = ["zarf", "quoz", "fjord"]
    tokenizer = with_tokens(folder, *words)
    rows = [{"text": " ".join(words[: 1 + number % 3])} for number in range(30)]
    rule = r"^tokenizer: .* gives tokens beyond the 512 rows of the model's embedding, in 30 of 30 rows"
    with pytest.raises(BadInput, match=rule):
        planned(folder, rows, tokenizer=tokenizer)


# Units.


@pytest.mark.parametrize("cut", [Cut.HEAD, Cut.WINDOWS])
def test_units_are_alike_where_the_first_rows_are_shorter_than_the_rest(
    folder: Path, monkeypatch: pytest.MonkeyPatch, cut: Cut
) -> None:
    monkeypatch.setattr(formats, "MARK_BYTES", 1 << 12)
    monkeypatch.setattr(formats, "_CHUNK_BYTES", 1 << 10)
    sizes = [2] * 1500 + [40] * 500  # words, each of which is a token and a half or so
    found = planned(
        folder,
        [{"text": " ".join(WORDS[number % 4] for number in range(size))} for size in sizes],
        rules=Rules(width=512, cut=cut),
        object_bytes_max=64 * 2 * 1000,  # a thousand tokens
    )
    tokenizer = Tokenizer.open(str(folder / "model"))

    def tokens(rows: range) -> int:
        texts = [" ".join(WORDS[number % 4] for number in range(sizes[row])) for row in rows]
        return sum(len(each.ids) for each in tokenizer.encode(texts, special=True, offsets=False))

    units = [tokens(range(unit.start, unit.stop)) for unit in found.plan.units]
    assert found.plan.units[-1].stop == 2000
    assert sum(units) == pytest.approx(found.plan.rows * found.tokens_per_row, rel=0.2)
    assert max(units) < 1500
    assert len(units) == pytest.approx(sum(units) / 1000, rel=0.3)
    assert found.plan.units[0].stop > 5 * (2000 - found.plan.units[-2].stop)
