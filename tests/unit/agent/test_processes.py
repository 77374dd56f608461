"""Processes: who descends from whom, and that a kill reaches all of them and nobody else."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from penstock.agent.processes import descendants, kill_all, started_at, stat_of

TREE = "import os, time\nfor _ in range(3):\n    os.fork()\nprint('up', flush=True)\ntime.sleep(600)\n"


def wait_for(count: int, root: int) -> set[int]:
    until = time.monotonic() + 20
    while len(found := descendants(root)) < count:
        assert time.monotonic() < until
        time.sleep(0.01)
    return found


def test_a_tree_is_seen_and_ends_as_a_whole() -> None:
    with subprocess.Popen([sys.executable, "-c", TREE], stdout=subprocess.DEVNULL) as process:
        found = wait_for(7, process.pid)
        assert started_at(process.pid) is not None
        bystander = subprocess.Popen(["sleep", "600"])
        try:
            assert kill_all(process.pid, [], 60.0)
            assert all(started_at(pid) is None for pid in found)
            assert started_at(bystander.pid) is not None
            assert started_at(process.pid) is not None, "the root itself is its owner's to end"
        finally:
            bystander.kill()
            bystander.wait()
            process.kill()


def test_nobody_owns_what_is_under_init() -> None:
    """A number that was lost must never mean everybody."""
    for root in (-1, 0, 1):
        assert descendants(root) == set()
        assert kill_all(root, [], 0.1)
    assert started_at(os.getpid()) is not None


def test_a_name_with_brackets_is_read_right() -> None:
    script = "import sys, time; open('/proc/self/comm', 'w').write('a) R (b'); print('up', flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        stat = stat_of(process.pid)
        process.kill()
    assert stat is not None
    assert (stat[0], stat[2]) == ("a) R (b", os.getpid())


def test_a_zombie_and_a_missing_process_do_not_live() -> None:
    process = subprocess.Popen(["true"])
    until = time.monotonic() + 20
    while started_at(process.pid) is not None:
        assert time.monotonic() < until
        time.sleep(0.005)
    assert stat_of(process.pid) is not None, "it waits to be collected"
    process.wait()
    assert started_at(1 << 30) is None
