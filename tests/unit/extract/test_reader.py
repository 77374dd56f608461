"""A finished run is read as it was computed: by position, by document, by rows, in batches, and by other programs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from penstock import extract
from penstock.domain.admission import BadInput
from penstock.extract.export import export_dataset
from penstock.extract.iterators import batches, jax_batches, joint_batches, torch_batches
from penstock.extract.plan import publish
from penstock.extract.reader import Run
from penstock.objects.directory import DirectoryObjects
from tests.missing import need_module
from tests.process.extraction import SITES, WIDTH, cheap_plan, document_of, tokens_of, values_of
from tests.unit.extract.cheap import calls_to, finished
from tests.unit.extract.cheap import run as run_now

ROWS = 30
TOKENS = sum(len(tokens_of(row)) for row in range(ROWS))


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("run")
    _, plan = finished(DirectoryObjects(root), ROWS)
    return f"{root}/runs/{plan.run}"


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
    done = export_dataset(run, SITES[0], tmp_path / "out", context=10, column="blocks.1.hook_resid_post")
    assert (done.contexts, done.left_over) == (TOKENS // 10, TOKENS % 10)
    state = json.loads((tmp_path / "out/state.json").read_text())
    (file,) = state["_data_files"]
    with pa.ipc.open_stream(tmp_path / "out" / file["filename"]) as reader:
        table = reader.read_all()
    values = np.asarray(table["blocks.1.hook_resid_post"].to_pylist(), np.float32)
    assert np.array_equal(values.reshape(-1, WIDTH), run.slice(0, TOKENS // 10 * 10, SITES[0]).astype(np.float32))
    with pytest.raises(BadInput, match="is not empty"):
        export_dataset(run, SITES[0], tmp_path / "out", context=10, column="x")
