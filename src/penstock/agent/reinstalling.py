"""Puts the agent's own Python back as it was packed: the bundle is fetched by its hash and takes the old one's place.

The check of `tpu solve` about jax uses it, on the thread that checks run on, when somebody has installed things into
the Python that came with the agent. It serves hosts that a startup script set up, where the folder's name is the hash
of the archive (`capacity.startup`); elsewhere that Python is the server's own. What runs from the old folder goes on:
programs stay loaded, and later imports find the same modules under the same path.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.agent.link import Refused, Silent
from penstock.agent.surroundings import CannotFix

if TYPE_CHECKING:
    from penstock.agent.host import Host

FETCH_S: Final = 240.0  #: the server waits not much longer for what came of it
_BUNDLE: Final = re.compile(r"bundle-([0-9a-f]{64})")
_PIECE_BYTES: Final = 1 << 20


def reinstaller(host: Host, program: Path) -> Callable[[], None] | None:
    """What puts the Python that `program` belongs to back, called from another thread; None where nothing can."""
    found = next((folder for folder in program.parents if _BUNDLE.fullmatch(folder.name)), None)
    if found is None:
        return None
    loop = asyncio.get_running_loop()
    return lambda: _reinstall(host, loop, found)


def _reinstall(host: Host, loop: asyncio.AbstractEventLoop, bundle: Path) -> None:
    part = bundle.with_name(f"partial-{bundle.name}")  # what one leaves that was killed, the next clears away
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    try:
        packed = part / "bundle.tar.gz"
        _fetch(host, loop, bundle, packed)
        (part / "new").mkdir()
        words = ["tar", "-xzf", str(packed), "-C", str(part / "new"), "--no-same-owner"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise CannotFix(f"the agent bundle cannot be unpacked: {done.stderr.strip()[-200:]}")
        bundle.rename(part / "old")
        try:
            (part / "new").rename(bundle)
        except BaseException:
            (part / "old").rename(bundle)
            raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _fetch(host: Host, loop: asyncio.AbstractEventLoop, bundle: Path, into: Path) -> None:
    sha256 = bundle.name.removeprefix("bundle-")
    path = f"/v1/agent/bundle/{sha256}?slice={host.place.slice}"
    fetching = asyncio.run_coroutine_threadsafe(host.link.call("GET", path, timeout_s=FETCH_S, into=into), loop)
    try:
        fetching.result()
    except (Silent, Refused) as error:
        raise CannotFix(f"the agent bundle cannot be fetched: {error}") from error
    digest = hashlib.sha256()
    with into.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
    if digest.hexdigest() != sha256:
        raise CannotFix("the agent bundle did not arrive whole")
