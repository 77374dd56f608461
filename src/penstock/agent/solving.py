"""The checks of `tpu solve` on one host: what each looks for, what it finds, and how that is mended.

`loop` runs them when the server orders it; `CHECKS` is the whole registry, and docs/howto/solve.md explains it. A fix
counts only when a second look finds nothing. One that could harm a running job waits until none runs. A check never
raises: what it cannot see is a finding too. It must not decide what becomes of a slice that cannot be mended.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from penstock.agent import solving_devices, solving_disk, solving_jax, solving_system
from penstock.agent.surroundings import CannotFix, Surroundings, Trouble
from penstock.wire.solving import Finding

TEXT_MAX: Final = 1_000  #: characters of evidence: a line for people


class Check(NamedTuple):
    """One row of the registry."""

    name: str
    looks_for: str
    evidence: str  #: what is shown when it finds something
    fix: str
    safe: bool  #: whether the fix may be made while a job runs
    look: Callable[[Surroundings], Trouble | None]


CHECKS: Final = (
    Check(
        "device",
        "a process that holds an accelerator (/dev/accel*, /dev/vfio/*) and belongs to no job of this host",
        "the device, the process and its command line",
        "end the process: SIGTERM, then SIGKILL; on a machine that is not ours alone, only leftovers of our own jobs",
        safe=False,  # a child of the job that hid its parents well enough would be taken for a stranger
        look=solving_devices.look_at_devices,
    ),
    Check(
        "lock_file",
        "a libtpu lock file (/tmp/libtpu_lockfile) that no process has open",
        "its path, owner and age",
        "remove it",
        safe=True,
        look=solving_devices.look_at_lock_file,
    ),
    Check(
        "disk",
        "a file system of this host with hardly any room left",
        "where, how full, and what takes the room",
        "remove our own caches, what is easiest to get again first; nothing that is not ours",
        safe=True,  # caches that something uses now are left alone
        look=solving_disk.look_at_disk,
    ),
    Check(
        "mount",
        "a mount of the pool that is missing or dead",
        "the path, and what it says",
        "unmount what is dead, and mount it as the startup script does",
        safe=True,
        look=solving_system.look_at_mounts,
    ),
    Check(
        "clock",
        "a clock that differs from the server's by more than five seconds",
        "by how much",
        "step it with chrony if there is one, else set it to the server's time",
        safe=False,  # a job may measure its steps by this clock
        look=solving_system.look_at_clock,
    ),
    Check(
        "jax",
        "jax, jaxlib and libtpu that do not fit each other, in the agent's Python and in every environment of a job",
        "the environment, what is installed, and what jax asks for",
        "remove the environment, so that the next job's set-up makes it anew; unpack the agent's own Python anew",
        safe=True,  # an environment that a process runs in is left alone
        look=solving_jax.look_at_jax,
    ),
    Check(
        "dns",
        "names that this host needs and cannot look up: the server's and the metadata server's",
        "the name, the error, and the name servers of /etc/resolv.conf",
        "restart the resolver; without one, put the platform's name server into /etc/resolv.conf",
        safe=True,
        look=solving_system.look_at_dns,
    ),
)


def solve(around: Surroundings, *, dry_run: bool, busy: bool, checks: Iterable[Check] = CHECKS) -> tuple[Finding, ...]:
    """Run the checks, one after another, on the thread that calls."""
    return tuple(_one(check, around, dry_run=dry_run, busy=busy) for check in checks)


def _one(check: Check, around: Surroundings, *, dry_run: bool, busy: bool) -> Finding:
    try:
        trouble = check.look(around)
    except Exception as error:  # noqa: BLE001 - one check that fails must not hide what the others find
        return _finding(check, "unknown", f"it could not look: {type(error).__name__}: {error}")
    if trouble is None:
        return _finding(check, "well")
    if dry_run:
        return _finding(check, "found", trouble.evidence, trouble.fix)
    if busy and not check.safe:
        return _finding(check, "waits", trouble.evidence, f"{trouble.fix}; not while a job runs here")
    if trouble.mend is None:
        return _finding(check, "unfixed", trouble.evidence, trouble.fix)
    try:
        trouble.mend()
        left = check.look(around)
    except CannotFix as error:
        return _finding(check, "unfixed", f"{trouble.evidence}; {error}", trouble.fix)
    except Exception as error:  # noqa: BLE001 - as above
        return _finding(check, "unfixed", f"{trouble.evidence}; {type(error).__name__}: {error}", trouble.fix)
    if left is not None:
        return _finding(check, "unfixed", f"{trouble.evidence}; after that: {left.evidence}", trouble.fix)
    return _finding(check, "fixed", trouble.evidence, trouble.fix)


def _finding(check: Check, verdict: str, evidence: str = "", fix: str = "") -> Finding:
    return Finding(check=check.name, verdict=verdict, evidence=_line(evidence), fix=_line(fix), safe=check.safe)  # type: ignore[arg-type]


def _line(text: str) -> str:
    """One printable line, not too long: a process may call itself anything."""
    with contextlib.suppress(UnicodeError):
        text = text.encode("utf-8", "replace").decode("utf-8", "replace")
    shown = "".join(letter if letter.isprintable() else " " for letter in text)
    return shown if len(shown) <= TEXT_MAX else shown[: TEXT_MAX - 1] + "…"
