"""Asking a payload to stop: who hears it, and what happens when nobody is there yet who could."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.agent.layout import STREAMS
from penstock.agent.tree import Ended, Keeping, Limits, Tree
from tests.process.machine import until

WITHIN_S = 60.0


def end_of(folder: Path, argv: Sequence[str], sign: str) -> Ended:
    """Start it, wait for its sign (a name in its folder), ask it to stop, and see how it ends."""
    home = folder / "home"
    home.mkdir()
    keeping = Keeping(folder)

    async def story() -> Ended:
        streams = {name: home / name for name in STREAMS}
        env = {"PATH": os.environ["PATH"]}
        tree = await Tree.start(keeping, argv, env=env, cwd=home, folder=home, streams=streams, bounds=Limits())
        await asyncio.to_thread(until, (home / sign).exists)
        tree.terminate()
        async with asyncio.timeout(WITHIN_S):
            return await tree.wait()

    try:
        return asyncio.run(story())
    finally:
        keeping.quit()


def test_a_program_may_end_as_it_likes(tmp_path: Path) -> None:
    code = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
pathlib.Path("there").touch()
time.sleep(1000)
"""
    assert end_of(tmp_path, [sys.executable, "-c", code], "there").code == 7


def test_walls_without_anybody_behind_them_do_not_stand_for_the_whole_grace(tmp_path: Path) -> None:
    """It was stopped while bubblewrap made its rooms: nobody would have heard a SIGTERM."""
    sleep = shutil.which("sleep")
    assert sleep is not None
    wrapper = tmp_path / "bwrap"
    shutil.copy(sleep, wrapper)
    assert end_of(tmp_path, [str(wrapper), "1000"], "shim.json").signal == 9
