"""Asking a payload to stop: who hears it, and what happens when nobody is there yet who could."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec

from penstock.agent import processes
from penstock.agent.layout import STREAMS
from penstock.agent.tree import Keeping, Limits, Tree
from tests.process.machine import until

WITHIN_S = 60.0


#: Ends with 7 when it is asked to.
KIND = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
pathlib.Path("there").touch()
time.sleep(1000)
"""


def play(folder: Path, argv: Sequence[str], story: Callable[[Tree, Path], Awaitable[None]]) -> None:
    """Start it, and tell a story of it and the folder it runs in."""
    home = folder / "home"
    home.mkdir(exist_ok=True)
    keeping = Keeping(folder)

    async def run() -> None:
        streams = {name: home / name for name in STREAMS}
        env = {"PATH": os.environ["PATH"]}
        tree = await Tree.start(keeping, argv, env=env, cwd=home, folder=home, streams=streams, bounds=Limits())
        try:
            async with asyncio.timeout(WITHIN_S):
                await story(tree, home)
        finally:
            await tree.kill()

    try:
        asyncio.run(run())
    finally:
        keeping.quit()


def test_a_program_may_end_as_it_likes(tmp_path: Path) -> None:
    async def story(tree: Tree, home: Path) -> None:
        await asyncio.to_thread(until, (home / "there").exists)
        assert tree.terminate()
        assert (await tree.wait()).code == 7
        assert not tree.terminate()

    play(tmp_path, [sys.executable, "-c", KIND], story)


def test_who_has_ended_does_not_hear_though_nobody_took_its_status(tmp_path: Path) -> None:
    async def story(tree: Tree, home: Path) -> None:
        os.kill(tree.handle.shim, signal.SIGSTOP)  # nobody takes its status, and no file says how it ended
        try:
            (home / "go").touch()
            await asyncio.to_thread(until, lambda: processes.started_at(tree.pid) is None)
            assert not tree.terminate()
        finally:
            os.kill(tree.handle.shim, signal.SIGCONT)
        assert (await tree.wait()).code == 3

    play(tmp_path, ["/bin/sh", "-c", "while ! test -e go; do sleep 0.02; done; exit 3"], story)


def test_who_is_leaving_does_not_hear(tmp_path: Path) -> None:
    """Half a gigabyte in small pages is given back for a tenth of a second, and a host's whole memory for many."""
    code = """
import mmap, os, time
big = mmap.mmap(-1, 512 << 20)
big.madvise(mmap.MADV_NOHUGEPAGE)
for at in range(0, len(big), 4096): big[at] = 1
open("there", "w").close()
while not os.path.exists("go"): time.sleep(0.002)
os._exit(3)
"""

    async def story(tree: Tree, home: Path) -> None:
        await asyncio.to_thread(until, (home / "there").exists)
        (home / "go").touch()
        while (stat := processes.stat_of(tree.pid)) is not None and stat[1] not in "ZX" and not stat[5] & 4:
            pass
        assert not tree.terminate()  # on its way out, or gone if this process was too late to see it
        assert (await tree.wait()).code == 3

    play(tmp_path, [sys.executable, "-c", code], story)


def test_nobody_hears_while_the_walls_go_up_and_what_starts_behind_them_then_does(tmp_path: Path) -> None:
    wrapper = tmp_path / "bwrap"  # by its name it counts as walls
    wrapper.write_text('#!/bin/sh\nread go < go\n"$@"\n')
    wrapper.chmod(0o755)
    (tmp_path / "home").mkdir()
    os.mkfifo(tmp_path / "home" / "go")

    async def story(tree: Tree, home: Path) -> None:
        for tree_of in (tree, Tree(msgspec.structs.replace(tree.handle, main=0, main_started=None))):
            assert not tree_of.terminate()
        await asyncio.to_thread((home / "go").write_text, "\n")
        await asyncio.to_thread(until, (home / "there").exists)
        assert tree.terminate()
        assert (await tree.wait()).code == 7

    play(tmp_path, [str(wrapper), sys.executable, "-c", KIND], story)
