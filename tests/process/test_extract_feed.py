"""Tokenising in processes ahead of the device: the same passages in the same order, and none outlives its parent."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from penstock.domain.admission import BadInput
from penstock.extract.feed import AHEAD, CHUNK_ROWS, Feeder, Order, passages
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


def test_it_is_told_when_the_processes_have_got_the_last_rows(order: Order) -> None:
    """Then those of the next unit may come behind them, while the last of these are still being made and taken."""
    taken: list[int] = []
    told: list[int] = []
    with Feeder(order, 1) as feeder:
        for each in feeder.passages(0, ROWS, lambda _: None, lambda: told.append(len(taken))):
            taken.append(each.row)  # noqa: PERF401 (one by one: they are counted on the way)
    assert len(told) == 1
    assert len(taken) - 2 * AHEAD * CHUNK_ROWS < told[0] < len(taken) - CHUNK_ROWS


def test_what_asks_a_worker_to_stop_does_not_take_its_processes_away(order: Order) -> None:
    """Ctrl-C and a launcher's SIGTERM reach all of a group, and the worker may still need them for its last unit."""
    with Feeder(order, 1) as feeder:
        found = feeder.passages(0, ROWS, lambda _: None)
        next(found)
        (child,) = multiprocessing.active_children()
        assert child.pid is not None
        os.kill(child.pid, signal.SIGINT)
        os.kill(child.pid, signal.SIGTERM)
        assert len(list(found)) > ROWS // 2


def test_what_a_process_finds_wrong_is_told_in_its_own_words(order: Order, tmp_path: Path) -> None:
    """Not as a pool that broke: the tokenizer went after this process had read it."""
    assert order.tokenizer is not None
    folder = Path(shutil.copytree(order.tokenizer, tmp_path / "tokenizer"))
    with Feeder(msgspec.structs.replace(order, tokenizer=str(folder)), 2) as feeder:
        (folder / "tokenizer.json").unlink()
        feeder.start()
        with pytest.raises(BadInput, match=r"^tokenizer: .* has no tokenizer\.json") as told:
            next(feeder.passages(0, ROWS, lambda _: None))
        assert told.value.field == "tokenizer"


def test_processes_that_come_up_early_hear_nothing_that_is_meant_for_the_worker(order: Order) -> None:
    """Not even before they can ignore it: Ctrl-C in a worker's first second."""
    with Feeder(order, 2) as feeder:
        feeder.start()
        children = [child.pid for child in multiprocessing.active_children() if child.pid is not None]
        assert len(children) == 2
        for child in children:
            os.kill(child, signal.SIGINT)
            os.kill(child, signal.SIGTERM)
        assert len(list(feeder.passages(0, ROWS, lambda _: None))) > ROWS // 2
    assert not {signal.SIGINT, signal.SIGTERM} & signal.pthread_sigmask(signal.SIG_BLOCK, ()), "we hear them"


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
