"""What the checks of `tpu solve` look at: paths, clocks and names, all of them arguments.

`loop` makes one for the host it runs on; tests make their own and point it at things they have broken. It only holds
things together.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.domain.cloud import Mount

#: Where Google's machines find their name server and their metadata server.
PLATFORM_ADDRESS: Final = "169.254.169.254"
COMMAND_S: Final = 60.0  #: for one command of a fix


class CannotFix(Exception):
    """A fix that did not work; the text says why, in words that follow the evidence."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """Something a check found. `mend` does what `fix` says; without it there is nothing that could be done here."""

    evidence: str
    fix: str
    mend: Callable[[], None] | None = None


def _set_clock(moment: float) -> None:
    time.clock_settime(time.CLOCK_REALTIME, moment)


def _now() -> float:
    return time.time()  # noqa: TID251 (the clock that is looked at)


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """One host. `ours_alone`: a machine that a provider made for one slice, so that everything on it is ours."""

    state: Path
    cache: Path
    ours_alone: bool = False
    attempts: frozenset[str] = frozenset()  #: that run here now
    #: The server's time, and what our steady clock said when it came.
    server_now: float | None = None
    came_at: float = 0.0
    mounts: tuple[Mount, ...] = ()
    names: tuple[str, ...] = ()  #: to look up
    dev: Path = Path("/dev")
    lock_file: Path = Path("/tmp/libtpu_lockfile")
    disks: tuple[Path, ...] = ()  #: beside state and cache
    resolver: Path = Path("/etc/resolv.conf")
    name_server: str = PLATFORM_ADDRESS
    systemd: Path = Path("/run/systemd/system")
    packages: tuple[Path, ...] = ()  #: where the agent's Python has its packages
    #: Puts that Python back as it was packed; None where it is no bundle's.
    reinstall: Callable[[], None] | None = None
    now: Callable[[], float] = _now
    steady: Callable[[], float] = time.monotonic
    set_clock: Callable[[float], None] = _set_clock

    @property
    def root(self) -> bool:
        return os.geteuid() == 0
