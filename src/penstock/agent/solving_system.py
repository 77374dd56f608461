"""Checks of `tpu solve` about the machine under the jobs: its mounts, its clock, and whether it can look names up.

`solving` has them in its registry. Fixes run the commands an operator would, each with a time limit. What belongs to
the system is changed only on machines that are ours alone; elsewhere it is told.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from penstock.agent.surroundings import COMMAND_S, CannotFix, Surroundings, Trouble
from penstock.domain.cloud import Mount
from penstock.domain.mounts import mount_words

CLOCK_OFF_S: Final = 5.0
_STAT_S: Final = 10.0  #: a mount that does not answer by then is dead
_SAID_MAX: Final = 200
_KEPT: Final = ".before-penstock"


# --- mounts ---
def look_at_mounts(around: Surroundings) -> Trouble | None:
    wrong = [(mount, said) for mount in around.mounts if (said := _missing(mount))]
    if not wrong:
        return None
    evidence = "; ".join(f"{mount.path}: {said}" for mount, said in wrong)
    fix = "; ".join(" ".join(mount_words(mount)) for mount, _ in wrong)
    return Trouble(evidence, fix, lambda: _mount_all([mount for mount, _ in wrong]))


def _missing(mount: Mount) -> str:
    """What is wrong with a mount; empty when something is mounted there and answers."""
    if not _is_mounted(mount.path):
        return "nothing is mounted"
    try:
        # In a process of its own: who looks at a dead network mount may never come back.
        _command(("stat", "-f", "--", mount.path), _STAT_S)
    except CannotFix as error:
        return f"it is mounted and does not answer: {error}"
    return ""


def _is_mounted(path: str) -> bool:
    wanted = os.path.normpath(path)
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        # Spaces and the like are written as octal numbers there.
        shown = line.split(" ")[4].encode().decode("unicode_escape").encode("latin-1").decode("utf-8", "replace")
        if shown == wanted:
            return True
    return False


def _mount_all(mounts: list[Mount]) -> None:
    for mount in mounts:
        if _is_mounted(mount.path):
            _command(("umount", "-l", mount.path))
        Path(mount.path).mkdir(parents=True, exist_ok=True)
        _command(mount_words(mount))


# --- clock ---
def look_at_clock(around: Surroundings) -> Trouble | None:
    if around.server_now is None:
        return None
    right = around.server_now + (around.steady() - around.came_at)
    off_s = around.now() - right
    if abs(off_s) <= CLOCK_OFF_S:
        return None
    evidence = f"this host's clock is {abs(off_s):.1f} s {'ahead of' if off_s > 0 else 'behind'} the server's"
    if not around.ours_alone:
        return Trouble(evidence, "set the clock of this machine; its owner has to")
    return Trouble(evidence, "step the clock to the server's time", lambda: _step(around))


def _step(around: Surroundings) -> None:
    if shutil.which("chronyc"):
        try:
            _command(("chronyc", "-a", "makestep"))
            if look_at_clock(around) is None:
                return
        except CannotFix:
            pass  # no daemon answers: then by hand
    assert around.server_now is not None
    try:
        around.set_clock(around.server_now + (around.steady() - around.came_at))
    except OSError as error:
        raise CannotFix(f"the clock cannot be set: {error.strerror}") from error


# --- names ---
def look_at_dns(around: Surroundings) -> Trouble | None:
    wrong = [(name, said) for name in around.names if (said := _unknown(name))]
    if not wrong:
        return None
    shown = "; ".join(f"{name} cannot be looked up: {said}" for name, said in wrong)
    evidence = f"{shown} ({around.resolver}: {_name_servers(around.resolver)})"
    if not (around.ours_alone and around.root):
        return Trouble(evidence, f"mend {around.resolver}; the owner of this machine has to")
    if around.systemd.is_dir():
        return Trouble(
            evidence, "restart systemd-resolved", lambda: _command(("systemctl", "restart", "systemd-resolved"))
        )
    return Trouble(evidence, f"name server {around.name_server} in {around.resolver}", lambda: _rewrite(around))


def _unknown(name: str) -> str:
    try:
        socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _name_servers(path: Path) -> str:
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError as error:
        return error.strerror or str(error)
    return ", ".join(line.split(None, 1)[1] for line in lines if line.startswith("nameserver ")) or "no name server"


def _rewrite(around: Surroundings) -> None:
    """Put the platform's name server in, and what was there back if that does not help."""
    path = around.resolver
    old = path.read_bytes() if path.exists() else b""
    path.with_name(path.name + _KEPT).write_bytes(old)
    path.write_text(
        f"# by `tpu solve`; what was here before is in {path.name}{_KEPT}\nnameserver {around.name_server}\n"
    )
    left = [name for name in around.names if _unknown(name)]
    if left:
        path.write_bytes(old)
        raise CannotFix(f"name server {around.name_server} does not know {', '.join(left)} either; {path} is as before")


def _command(words: tuple[str, ...], patience_s: float = COMMAND_S) -> None:
    # Not through a pipe: a daemon that it leaves behind would keep that open.
    with tempfile.TemporaryFile() as output:
        try:
            running = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        except FileNotFoundError as error:
            raise CannotFix(f"{words[0]} is not installed here") from error
        try:
            status = running.wait(patience_s)
        except subprocess.TimeoutExpired as error:
            running.kill()  # and not waited for: it may hang in the kernel, on the very mount it looks at
            raise CannotFix(f"`{' '.join(words)}` did not end within {patience_s:.0f} s") from error
        if status != 0:
            output.seek(0)
            said = output.read().decode("utf-8", "replace").strip()[-_SAID_MAX:]
            raise CannotFix(f"`{' '.join(words)}` ended with {status}: {said}")
