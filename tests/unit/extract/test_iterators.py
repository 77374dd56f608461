"""Batches go on where a trainer stopped, stay what they were while they are held, and end with the run."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest

from penstock import extract
from penstock.domain.admission import BadInput
from penstock.extract.iterators import KEPT, _Memory, batches, jax_batches, joint_batches, torch_batches
from penstock.extract.reader import Run
from tests.missing import need_module
from tests.process.extraction import SITES, WIDTH, tokens_of
from tests.unit.extract.cheap import kept

ROWS = 60
TOKENS = sum(len(tokens_of(row)) for row in range(ROWS))
BATCH = 8
SIZES: dict[str, Any] = {"mixed_rows": 50, "block_rows": 5}
PER_EPOCH = TOKENS // BATCH


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    return kept(tmp_path_factory.mktemp("run"), ROWS)


@pytest.fixture
def run(address: str) -> Iterator[Run]:
    with extract.open(address) as found:
        yield found


def raw(found: Iterator[Any]) -> list[bytes]:
    return [np.asarray(each).tobytes() for each in found]


@pytest.mark.parametrize("keep_rest", [False, True])
def test_a_trainer_goes_on_at_any_batch(run: Run, keep_rest: bool) -> None:
    options: dict[str, Any] = {"seed": 4, "epochs": 3, "keep_rest": keep_rest, **SIZES}
    whole = raw(batches(run, SITES[0], BATCH, **options))
    assert len(whole) == 3 * (PER_EPOCH + keep_rest)
    assert len(set(whole)) == len(whole)
    for skip in (
        0,
        1,
        5,
        6,
        7,
        20,
        PER_EPOCH - 1,
        PER_EPOCH,
        PER_EPOCH + 1,
        PER_EPOCH + 2,
        len(whole) - 1,
        len(whole),
        999,
    ):
        assert raw(batches(run, SITES[0], BATCH, skip=skip, **options)) == whole[skip:], skip


def test_what_is_left_out_is_not_read(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    read = list[int]()
    block = Run.block

    def counted(self: Run, *words: Any) -> Any:
        read.append(words[0].stop - words[0].start)
        return block(self, *words)

    monkeypatch.setattr(Run, "block", counted)
    last = list(batches(run, SITES[0], BATCH, skip=PER_EPOCH - 1, **SIZES))
    assert len(last) == 1
    assert sum(read) < TOKENS / 3


def test_parts_are_about_equal_and_mix_all_over_the_run(run: Run) -> None:
    """The last part must not be a few neighbouring rows."""
    whole = run.slice(0, TOKENS, SITES[0])
    places = {row.tobytes(): number for number, row in enumerate(whole)}
    found = list(batches(run, SITES[0], BATCH, mixed_rows=TOKENS - BATCH, block_rows=4))
    for batch in (found[0], found[-1]):
        where = sorted(places[row.tobytes()] for row in batch)
        assert where[-1] - where[0] > TOKENS / 3


def test_batches_that_are_held_stay_as_they_were(run: Run) -> None:
    """Their memory is used again only when nobody holds it."""
    torch = need_module("torch")
    options: dict[str, Any] = {"seed": 2, "epochs": 4, **SIZES}
    expected = raw(batches(run, SITES[0], BATCH, **options))
    assert len(expected) > 64
    wide = [np.frombuffer(each, run.slice(0, 1, SITES[0]).dtype).astype(np.float32).tobytes() for each in expected]
    assert raw(iter(list(batches(run, SITES[0], BATCH, **options)))) == expected
    assert raw(iter(list(jax_batches(run, SITES[0], BATCH, **options)))) == expected
    held = list(torch_batches(run, SITES[0], BATCH, **options))
    assert raw(each.numpy() for each in held) == wide
    held = [each[:1] for each in torch_batches(run, SITES[0], BATCH, dtype="bfloat16", **options)]
    assert raw(each.view(torch.int16).numpy() for each in held) == [each[: WIDTH * 2] for each in expected]
    rows = [each[:1] for each in batches(run, SITES[0], BATCH, **options)]  # views of views
    assert raw(iter(rows)) == [each[: WIDTH * 2] for each in expected]


def test_memory_that_nobody_holds_is_used_again() -> None:
    memory = _Memory()
    for _ in range(10):
        memory.get(1000)[:] = 1
    assert len(memory._owners) == 1
    held = [memory.get(1000)[5:].reshape(5, -1) for _ in range(3)]
    assert len({each.ctypes.data for each in held}) == len(memory._owners) == 3
    assert len([memory.get(1000) for _ in range(2 * KEPT)]) > len(memory._owners) == KEPT


@pytest.mark.parametrize("way", [batches, torch_batches, jax_batches])
def test_a_closed_run_ends_its_batches_in_one_line(address: str, way: Any) -> None:
    if way is torch_batches:
        need_module("torch")
    with extract.open(address) as run:
        found = way(run, SITES[0], BATCH, **SIZES)
        next(found)
    with pytest.raises(ValueError, match=r"the run is closed; .* inside of its `with`"):
        list(islice(found, 10_000))


def test_an_iterator_that_is_dropped_leaves_no_thread(run: Run) -> None:
    def own() -> int:
        names = [thread.name for thread in threading.enumerate()]
        return sum(name.startswith(("penstock-extract-batches", "penstock-extract-gathers")) for name in names)

    found = joint_batches(run, SITES, BATCH, epochs=None, **SIZES)
    next(found)
    assert own() > 0
    found.close()  # type: ignore[attr-defined]
    assert own() == 0


def test_impossible_wishes_are_refused(run: Run) -> None:
    with pytest.raises(BadInput, match="skip: -1 is less than 0"):
        batches(run, SITES[0], BATCH, skip=-1)
    with pytest.raises(BadInput, match=f"is more than the run's {TOKENS} rows"):
        batches(run, SITES[0], TOKENS + 1)
    assert [len(each) for each in batches(run, SITES[0], TOKENS + 1, keep_rest=True)] == [TOKENS]
