"""Objects that are hashed and written by blocks while pieces come: the same bytes and hashes as if made at once."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from blake3 import blake3
from typing_extensions import Buffer

from penstock.domain.ledger import BLOCK_BYTES, Unit
from penstock.extract import tensors
from penstock.extract.layout import Piece
from penstock.extract.plan import RunPlan, make_plan
from penstock.extract.unit_writer import SAMPLED_ROWS, Hands, UnitWriter
from penstock.ports.objects import ObjectsError
from tests.unit.extract.cheap import encode_unit

WIDTH = 1024


def plan_of(rows: int) -> tuple[RunPlan, Unit]:
    plan = make_plan(rows=rows, unit_rows=rows, sites=("embed",), dtype="bfloat16", work={})
    return plan, plan.units[0]


def pieces_of(lengths: Sequence[int], values: np.ndarray[tuple[int, ...], np.dtype[np.uint16]]) -> list[Piece]:
    """Consecutive rows of one array, as the engine hands them over."""
    whole = values.view(tensors.dtype_of("bfloat16"))
    ends = np.cumsum(lengths)
    return [
        Piece(row, f"d{row}", np.zeros(length, np.int32), {"embed": whole[end - length : end]})
        for row, (length, end) in enumerate(zip(lengths, ends, strict=True))
    ]


@pytest.mark.parametrize("lengths", [(5000, 1, 2094, 2, 5191), (4094,), (4095,), (4094, 4096), (3,)])
def test_blocks_make_the_object_and_its_hash(lengths: tuple[int, ...]) -> None:
    """4,094 rows fill the first block, 4,096 each further one."""
    values = np.random.default_rng(1).integers(0, 0x4000, (sum(lengths), WIDTH), np.uint16)
    plan, unit = plan_of(len(lengths))
    apart = [piece._replace(sites={"embed": piece.sites["embed"].copy()}) for piece in pieces_of(lengths, values)]
    for given in (pieces_of(lengths, values), apart):
        objects, facts = encode_unit(plan, unit, given)  # which compares the checksum with the bytes
        data = objects["embed.safetensors"]
        assert data[tensors.ROOM_BYTES :] == values.tobytes()
        assert tensors.view(data, "acts", "x").shape == values.shape
        assert facts.sites["embed"].bytes == values.nbytes
        assert SAMPLED_ROWS <= facts.sites["embed"].sampled <= 2 * SAMPLED_ROWS or len(values) < SAMPLED_ROWS


def test_the_checksum_is_the_hash_of_the_blocks_hashes() -> None:
    """Written down as anybody would who reads the objects without us."""
    values = np.random.default_rng(1).integers(0, 0x4000, (9000, WIDTH), np.uint16)
    plan, unit = plan_of(1)
    hands = Hands(2)
    drafts = Noting(lambda: None)
    writer = UnitWriter(plan, unit, hands, lambda: drafts)
    for piece in pieces_of((9000,), values):
        writer.add(piece)
    made = writer.finish(seconds=0.0, worker="w", code="c").objects["embed.safetensors"]
    hands.close()
    data = b"".join(drafts.written[at] for at in sorted(drafts.written))
    digests = [blake3(data[at : at + BLOCK_BYTES]).digest() for at in range(0, len(data), BLOCK_BYTES)]
    assert len(digests) == 3
    assert made.checksum == "sha256-of-8MiB-blake3:" + hashlib.sha256(b"".join(digests)).hexdigest()


class Noting:
    """A draft that does something before each block, and remembers what was written."""

    def __init__(self, before: Callable[[], object]) -> None:
        self.written: dict[int, bytes] = {}
        self._before = before

    def write(self, at: int, parts: Sequence[Buffer]) -> None:
        self._before()
        self.written[at] = b"".join(bytes(part) for part in parts)

    async def name(self, path: str) -> int:
        raise NotImplementedError


def test_a_slow_disk_holds_up_whoever_computes() -> None:
    values = np.zeros((4096 * 8, WIDTH), np.uint16)
    lengths = (4096,) * 8
    plan, unit = plan_of(len(lengths))
    go_on, added = threading.Event(), threading.Semaphore(0)
    hands = Hands(1, held=2)
    writer = UnitWriter(plan, unit, hands, lambda: Noting(lambda: go_on.wait(60)))
    count = 0

    def compute() -> None:
        nonlocal count
        for piece in pieces_of(lengths, values):
            writer.add(piece)
            count += 1
            added.release()

    thread = threading.Thread(target=compute)
    thread.start()
    for _ in range(2):  # the block that is written, and the one that waits
        assert added.acquire(timeout=60)
    assert not added.acquire(timeout=0.05)
    assert count == 2
    go_on.set()
    thread.join(60)
    assert count == 8
    assert writer.finish(seconds=0.0, worker="w", code="c").facts.tokens == 4096 * 8
    hands.close()


def test_a_disk_that_refuses_is_told() -> None:
    def refuse() -> None:
        raise ObjectsError("no space left")

    plan, unit = plan_of(1)
    hands = Hands(1)
    writer = UnitWriter(plan, unit, hands, lambda: Noting(refuse))
    with pytest.raises(ObjectsError, match="no space left"):  # noqa: PT012 (either may be the first to know)
        for piece in pieces_of((9000,), np.zeros((9000, WIDTH), np.uint16)):
            writer.add(piece)
        writer.finish(seconds=0.0, worker="w", code="c")
    hands.close()


def test_a_disk_that_refuses_is_told_while_the_unit_is_computed() -> None:
    """Not first at its end: by then the device has worked for minutes for nothing."""
    refused = threading.Event()

    def refuse() -> None:
        refused.set()
        raise ObjectsError("no space left")

    lengths = (4096,) * 8  # each a block
    plan, unit = plan_of(len(lengths))
    hands = Hands(1, held=1)
    writer = UnitWriter(plan, unit, hands, lambda: Noting(refuse))
    added = 0
    with pytest.raises(ObjectsError, match="no space left"):  # noqa: PT012 (it is one of the pieces)
        for piece in pieces_of(lengths, np.zeros((4096 * 8, WIDTH), np.uint16)):
            writer.add(piece)
            added += 1
    hands.close()
    assert refused.is_set()
    assert added <= 3, "one block is written while the next comes; it is known with the one after that"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_one_odd_value_among_many_is_found(dtype: str, value: float) -> None:
    plan = make_plan(rows=1, unit_rows=1, sites=("embed",), dtype=dtype, work={})  # type: ignore[arg-type]
    limit = 60_000.0 if dtype == "float16" else 3e38
    values = np.linspace(-limit, limit, 3000, dtype=np.float32).reshape(30, 100)
    values[17, 3] = value
    piece = Piece(0, "d", np.zeros(30, np.int32), {"embed": values.astype(tensors.dtype_of(dtype))})
    assert encode_unit(plan, plan.units[0], [piece])[1].sites["embed"].not_finite == 1
