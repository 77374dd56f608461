"""A finished run is read as it was computed: by position, by document, by rows, in batches, and by other programs."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import shutil
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from penstock import extract
from penstock.domain import ledger
from penstock.domain.admission import BadInput
from penstock.domain.ledger import Unit
from penstock.extract.export import export_dataset
from penstock.extract.iterators import batches, jax_batches, joint_batches, torch_batches
from penstock.extract.layout import Piece, read_index, write_table
from penstock.extract.plan import RunPlan, publish
from penstock.extract.reader import Run
from penstock.extract.reading import Loop
from penstock.extract.source import Refused
from penstock.extract.verify import verify
from penstock.objects.directory import DirectoryObjects
from tests.missing import need_module
from tests.process.extraction import SITES, WIDTH, cheap_plan, document_of, tokens_of, values_of
from tests.tidy.tracked import ROOT
from tests.unit.extract.cheap import calls_to, finish, kept
from tests.unit.extract.cheap import run as run_now

ROWS = 30
TOKENS = sum(len(tokens_of(row)) for row in range(ROWS))


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    return kept(tmp_path_factory.mktemp("run"), ROWS)


@pytest.fixture
def run(address: str) -> Iterator[Run]:
    with extract.open(address) as found:
        yield found


def test_every_position_of_every_document(run: Run) -> None:
    assert len(run) == TOKENS
    for row in range(ROWS):
        if not len(tokens_of(row)):
            with pytest.raises(KeyError, match="nothing is stored"):
                run.tokens(document_of(row))
            continue
        assert np.array_equal(run.tokens(document_of(row)), tokens_of(row))
        assert np.array_equal(run.positions(document_of(row)), np.arange(len(tokens_of(row))))
        for site in SITES:
            expected = values_of(row, site)
            assert run.values(document_of(row), site).tobytes() == expected.tobytes()
            for position in range(len(expected)):
                assert run.vector(document_of(row), position, site).tobytes() == expected[position].tobytes()


def test_what_is_not_there_is_refused_by_name(run: Run, address: str) -> None:
    with pytest.raises(KeyError, match="no document"):
        run.values("nobody", SITES[0])
    with pytest.raises(KeyError, match="position 99"):
        run.vector(document_of(1), 99, SITES[0])
    with pytest.raises(BadInput, match=r"resid_post\.9.*is not in this run"):
        run.values(document_of(1), "resid_post.9")
    with pytest.raises(BadInput, match="not sealed"):
        extract.open(address[:-4] + "0000")


def test_the_root_of_one_run_is_enough(address: str) -> None:
    with extract.open(address.rpartition("/runs/")[0]) as found:
        assert found.plan.run == address.rpartition("/")[2]


def test_a_run_that_is_not_sealed_cannot_be_read(tmp_path: Path) -> None:
    plan = cheap_plan()
    run_now(lambda: publish(calls_to(DirectoryObjects(tmp_path)), plan))
    with pytest.raises(BadInput, match="not sealed"):
        extract.open(f"{tmp_path}/runs/{plan.run}")


def test_documents_are_those_that_have_vectors(run: Run) -> None:
    assert list(run.documents) == sorted(document_of(row) for row in range(ROWS) if len(tokens_of(row)))
    for document in run.documents:
        run.values(document, SITES[0])


# --- ids that several rows have, and rows that gave nothing ---


def _with_twins(plan: RunPlan, unit: Unit) -> Iterator[Piece]:
    """Rows 1, 8 and 12 are called "twin", and so is row 2, of which nothing is stored."""
    for row in range(unit.start, unit.stop):
        name = "twin" if row in (1, 2, 8, 12) else document_of(row)
        tokens = tokens_of(row) if row != 2 else np.zeros(0, np.int32)
        note = "" if len(tokens) else "has no token that the filter keeps"
        vectors = {site: values_of(row, site) for site in SITES} if len(tokens) else {}
        yield Piece(row, name, tokens, vectors, file="in.jsonl", offset=10 + row, note=note, excerpt=note[:3])


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("twins")
    plan = cheap_plan(20, 6)
    run_now(lambda: finish(calls_to(DirectoryObjects(root)), plan, compute=_with_twins))
    return f"{root}/runs/{plan.run}"


def test_a_name_that_several_rows_have_is_read_by_its_row(twins: str) -> None:
    with extract.open(twins) as run:
        for read in (
            lambda: run.values("twin", SITES[0]),
            lambda: run.tokens("twin"),
            lambda: run.positions("twin"),
            lambda: run.vector("twin", 0, SITES[0]),
        ):
            with pytest.raises(BadInput, match="'twin' names 3 input rows: 1, 8, 12; give row=1") as caught:
                read()
            assert "\n" not in str(caught.value)
        assert run.rows("twin") == [1, 8, 12]
        for row in (1, 8, 12):
            assert np.array_equal(run.tokens("twin", row=row), tokens_of(row))
            assert len(run.positions("twin", row=row)) == len(tokens_of(row))
            assert run.values("twin", SITES[0], row=row).tobytes() == values_of(row, SITES[0]).tobytes()
            assert run.vector("twin", 0, SITES[1], row=row).tobytes() == values_of(row, SITES[1])[0].tobytes()
        with pytest.raises(KeyError, match="is not input row 2"):
            run.values("twin", SITES[0], row=2)
        assert run.rows(document_of(3)) == [3]


def test_names_that_several_rows_have_are_counted(twins: str) -> None:
    calls = calls_to(DirectoryObjects(Path(twins.rpartition("/runs/")[0])))
    with extract.open(twins) as run:
        assert run.manifest.shared_ids == 1
        checked = run_now(lambda: verify(calls, run.plan))
    assert (checked.shared_ids, checked.problems) == (1, ())


def test_rows_that_gave_nothing_are_listed_with_their_place(twins: str) -> None:
    with extract.open(twins) as run:
        found = run.refused()
        side = run.manifest.refused
    assert [(each.row, each.line, each.file, each.id) for each in found] == [
        (2, 13, "in.jsonl", "twin"),
        (10, 21, "in.jsonl", document_of(10)),
    ]
    assert {(each.reason, each.excerpt) for each in found} == {("has no token that the filter keeps", "has")}
    assert side is not None
    lines = (Path(twins.rpartition("/runs/")[0]) / side.path).read_text().splitlines()
    assert [msgspec.json.decode(line, type=Refused) for line in lines] == found


def test_a_damaged_side_file_is_found(tmp_path: Path) -> None:
    plan = cheap_plan(20, 6)
    calls = calls_to(DirectoryObjects(tmp_path))
    run_now(lambda: finish(calls, plan, compute=_with_twins))
    (path,) = tmp_path.glob("runs/*/index/*.refused.jsonl")
    path.write_bytes(b"{}\n")
    assert any("the list of refused rows" in problem for problem in run_now(lambda: verify(calls, plan)).problems)


def test_a_run_without_the_newer_columns_is_read(twins: str, tmp_path: Path) -> None:
    """As it was written before a piece's tokens were counted, and names that several rows have."""
    root = Path(twins.rpartition("/runs/")[0])
    shutil.copytree(root, tmp_path / "old")
    (manifest,) = (tmp_path / "old").glob("runs/*/manifest/*")
    known = json.loads(manifest.read_bytes())
    del known["refused"], known["shared_ids"]
    for unit in known["units"]:
        (index,) = [each for each in unit["objects"] if "index.arrow" in each["path"]]
        path = tmp_path / "old" / index["path"]
        table = read_index(path.read_bytes()).drop_columns(["total", "first", "cut", "dropped", "excerpt"])
        path.write_bytes(write_table(table))
        index["checksum"] = ledger.checksum(path.read_bytes())
    data = json.dumps(known).encode()
    manifest.with_name(ledger.checksum(data)).write_bytes(data)
    manifest.unlink()
    with extract.open(str(tmp_path / "old")) as run:
        assert run.tokens("twin", row=8).tolist() == tokens_of(8).tolist()
        assert [(each.row, each.excerpt) for each in run.refused()] == [(2, ""), (10, "")]


# --- a run that is closed, and what the page says ---


def test_a_closed_run_says_so(address: str) -> None:
    with extract.open(address) as run:
        assert run.tokens(document_of(1)).tolist() == tokens_of(1).tolist()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for read in (lambda: run.tokens(document_of(1)), lambda: run.values(document_of(0), SITES[0]), run.refused):
            with pytest.raises(ValueError, match="the run is closed"):
                read()
        gc.collect()  # a call that nobody awaits would be told of here
    run.close()


def test_who_waits_for_a_bucket_hears_that_the_run_is_closed() -> None:
    """And does not wait for ever: a process would not end."""
    loop, asked = Loop(), threading.Event()

    async def never() -> None:
        asked.set()
        await asyncio.Event().wait()

    said: list[str] = []

    def wait() -> None:
        try:
            loop.run(never())
        except ValueError as error:
            said.append(str(error))

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    assert asked.wait(60)
    loop.close()
    waiting.join(60)
    assert len(said) == 1
    assert "the run is closed" in said[0]


class _Trainer:
    """As SAELens' trainer takes its data."""

    seen: ClassVar[list[Any]] = []

    def __init__(self, cfg: Any, sae: Any, data_provider: Iterator[Any]) -> None:
        self._provider = data_provider

    def fit(self) -> None:
        self.seen.extend(next(self._provider) for _ in range(3))


def test_the_page_can_be_typed_as_it_is(twins: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block alone, with this run in the place of the page's, and smaller batches."""
    need_module("torch")
    page = (ROOT / "docs" / "howto" / "extract.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page.partition("## Read it")[2], re.DOTALL)
    assert len(blocks) == 2
    lens, config, training = (ModuleType(name) for name in ("sae_lens", "config", "training"))
    lens.StandardTrainingSAE = lens.StandardTrainingSAEConfig = lambda *_, **__: None  # type: ignore[attr-defined]
    config.SAETrainerConfig = lambda **_: None  # type: ignore[attr-defined]
    training.SAETrainer = _Trainer  # type: ignore[attr-defined]
    for name, module in (("", lens), (".config", config), (".training", ModuleType("t"))):
        monkeypatch.setitem(sys.modules, f"sae_lens{name}", module)
    monkeypatch.setitem(sys.modules, "sae_lens.training.sae_trainer", training)
    for block in blocks:
        typed = block.replace("gs://b/acts/runs/ID", twins).replace("doc-0007", document_of(4)).replace("4096", "8")
        typed = typed.replace("resid_post:18", SITES[0].replace(".", ":")).replace(", 12, ", ", 1, ")
        exec(compile(typed, "docs/howto/extract.md", "exec"), {})  # noqa: S102 (our own page)
    assert [tuple(batch.shape) for batch in _Trainer.seen] == [(8, WIDTH)] * 3


def test_slices_are_the_rows_one_after_another(run: Run) -> None:
    whole = run.slice(0, len(run), SITES[1])
    assert whole.shape == (TOKENS, WIDTH)
    for start, stop in ((0, 1), (3, 3), (5, 60), (TOKENS - 2, TOKENS)):
        assert run.slice(start, stop, SITES[1]).tobytes() == whole[start:stop].tobytes()
    with pytest.raises(IndexError):
        run.slice(0, TOKENS + 1, SITES[1])


def _sorted_rows(values: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> list[bytes]:
    return sorted(row.tobytes() for row in values)


def test_an_epoch_has_each_row_once_in_an_order_that_the_seed_decides(run: Run) -> None:
    def epoch(seed: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        return np.concatenate(list(batches(run, SITES[0], 16, seed=seed, mixed_rows=48, block_rows=5, keep_rest=True)))

    whole = run.slice(0, len(run), SITES[0])
    assert _sorted_rows(epoch(1)) == _sorted_rows(whole)
    assert epoch(1).tobytes() == epoch(1).tobytes()
    assert epoch(1).tobytes() != epoch(2).tobytes()
    neighbours = sum(a.tobytes() + b.tobytes() in whole.tobytes() for a, b in zip(epoch(1), epoch(1)[1:], strict=False))
    assert neighbours < TOKENS / 5


def test_epochs_differ_and_batches_are_full(run: Run) -> None:
    found = list(batches(run, SITES[0], 16, epochs=2, mixed_rows=48, block_rows=5))
    assert {len(batch) for batch in found} == {16}
    assert len(found) == 2 * (TOKENS // 16)
    assert found[0].tobytes() != found[len(found) // 2].tobytes()


def test_joint_batches_keep_sites_together(run: Run) -> None:
    first, second = (run.slice(0, TOKENS, site) for site in SITES)
    pairs = {(first[at].tobytes(), second[at].tobytes()) for at in range(TOKENS)}
    assert len(pairs) > TOKENS * 0.9
    for batch in joint_batches(run, SITES, 8, mixed_rows=32, block_rows=4):
        found = zip(batch[SITES[0]], batch[SITES[1]], strict=True)
        assert {(one.tobytes(), other.tobytes()) for one, other in found} <= pairs


def test_a_trainer_of_torch_gets_tensors_for_ever(run: Run) -> None:
    torch = need_module("torch")
    provider = torch_batches(run, SITES[0], 32, seed=3)
    assert isinstance(provider, Iterator)
    seen = [next(provider) for _ in range(TOKENS // 32 + 2)]
    assert {(batch.shape, batch.dtype) for batch in seen} == {((32, WIDTH), torch.float32)}
    expected = next(batches(run, SITES[0], 32, seed=3))
    assert np.array_equal(seen[0].numpy(), expected.astype(np.float32))


def test_jax_gets_arrays_of_the_runs_type(run: Run) -> None:
    found = next(jax_batches(run, SITES[0], 8))
    assert (found.shape, str(found.dtype)) == ((8, WIDTH), "bfloat16")


def test_reading_needs_neither_jax_nor_torch(address: str) -> None:
    code = f"""
import sys
from penstock import extract
from penstock.extract.iterators import batches
with extract.open({address!r}) as run:
    next(batches(run, {SITES[0]!r}, 4))
print(sorted({{"jax", "torch", "transformers"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"


def test_the_export_holds_the_same_rows_in_contexts(run: Run, tmp_path: Path) -> None:
    done = export_dataset(run, SITES[0], str(tmp_path / "out"), context=10, column="blocks.1.hook_resid_post")
    assert (done.contexts, done.left_over) == (TOKENS // 10, TOKENS % 10)
    state = json.loads((tmp_path / "out/state.json").read_text())
    (file,) = state["_data_files"]
    with pa.ipc.open_stream(tmp_path / "out" / file["filename"]) as reader:
        table = reader.read_all()
    values = np.asarray(table["blocks.1.hook_resid_post"].to_pylist(), np.float32)
    assert np.array_equal(values.reshape(-1, WIDTH), run.slice(0, TOKENS // 10 * 10, SITES[0]).astype(np.float32))
    with pytest.raises(BadInput, match="is not empty"):
        export_dataset(run, SITES[0], tmp_path / "out", context=10, column="x")
