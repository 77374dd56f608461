"""Tokenising in processes ahead of the device: the same passages in the same order, and none outlives its parent."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from penstock.extract.feed import Feeder, Order, passages
from penstock.extract.source import Refused, Source, SourceSpec
from penstock.extract.tokens import Rules
from tests.unit.extract.small_tokenizer import TEXT, write_tokenizer

ROWS = 1500
PATIENCE_S = 60.0

HOLDER = """
import os, sys
import multiprocessing
import msgspec
from pathlib import Path
from penstock.extract.feed import Order, passages

if __name__ == "__main__":
    order = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Order)
    found = passages(order, refuse=lambda _: None, processes=2)
    next(found)
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def order(tmp_path_factory: pytest.TempPathFactory) -> Order:
    folder = write_tokenizer(tmp_path_factory.mktemp("feed"))
    rows = [{"text": f"{number} {TEXT[: number % 90]}"} if number % 97 else {"none": 1} for number in range(ROWS)]
    (folder / "a.jsonl").write_bytes(b"\n".join(map(msgspec.json.encode, rows)))
    source = Source.open(SourceSpec(data=(str(folder / "a.jsonl"),)))
    return Order(source=source, rules=Rules(width=64), tokenizer=str(folder))


def test_processes_give_what_one_would_in_the_same_order(order: Order) -> None:
    alone: list[Refused] = []
    ahead: list[Refused] = []
    expected = [(each.row, each.tokens.tolist()) for each in passages(order, refuse=alone.append)]
    with Feeder(order, 2) as feeder:
        abandoned = feeder.passages(0, ROWS, lambda _: None)
        assert next(abandoned).row == expected[0][0]
        abandoned.close()
        found = [
            (each.row, each.tokens.tolist())
            for start, stop in ((0, 700), (700, ROWS))
            for each in feeder.passages(start, stop, ahead.append)
        ]
    assert found == expected
    assert ahead == alone
    assert len(found) + len(ahead) == ROWS


def test_processes_end_when_their_parent_is_killed(order: Order, tmp_path: Path) -> None:
    (tmp_path / "order.json").write_bytes(msgspec.json.encode(order))
    (tmp_path / "holder.py").write_text(HOLDER)
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "holder.py"), str(tmp_path / "order.json")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        children = [int(word) for word in holder.stdout.readline().split()]
        assert len(children) == 2
        holder.send_signal(signal.SIGKILL)
        holder.wait(PATIENCE_S)
    deadline = time.monotonic() + PATIENCE_S
    while any(_lives(pid) for pid in children):
        assert time.monotonic() < deadline, f"still there: {[pid for pid in children if _lives(pid)]}"
        time.sleep(0.05)


def _lives(pid: int) -> bool:
    """Whether the process still runs; one that nobody has collected yet does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"
