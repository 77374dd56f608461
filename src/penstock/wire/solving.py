"""What is said when a slice is mended: by people to the server, by the server to hosts, and back.

`tpu solve` asks, `server.solving` passes an order on with the next sync of each host, and agents answer with one
finding per check. Evidence is for people; verdicts and names of checks never change meaning.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from penstock.domain.cloud import Mount

#: well: nothing is wrong. found: something is, and nothing was touched (a dry run). fixed: it was, and a second look
#: shows that it is not any more. waits: its fix would harm the job that runs here. unfixed: the fix did not help, or
#: there is none. unknown: the check could not look.
Verdict = Literal["well", "found", "fixed", "waits", "unfixed", "unknown"]
GOOD: Final = frozenset({"well", "fixed"})
FINDINGS_MAX: Final = 64
Text = Annotated[str, Meta(max_length=2_000)]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What one check found on one host."""

    check: Annotated[str, Meta(max_length=40)]
    verdict: Verdict
    evidence: Text = ""
    fix: Text = ""  #: what was done, or what would help
    safe: bool = True  #: whether that may be done while a job runs


class SolveOrder(msgspec.Struct, frozen=True, kw_only=True):
    """To one host: look at everything, and mend it unless this is a dry run. Repeating the order is harmless."""

    run: str
    dry_run: bool
    now: float  #: the server's clock when this was sent
    mounts: tuple[Mount, ...] = ()  #: what the pool says should be there
    ours_alone: bool = False  #: the machine was made for this slice: whatever is on it is ours


class SolveReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """From one host, when it is done."""

    run: Annotated[str, Meta(max_length=40)]
    findings: Annotated[tuple[Finding, ...], Meta(max_length=FINDINGS_MAX)]


class SolveRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Look at every host of a slice, and mend what is wrong; with `dry_run` only look."""

    dry_run: bool = False


class HostFindings(msgspec.Struct, frozen=True, kw_only=True):
    host: int
    findings: tuple[Finding, ...] = ()  #: empty while it has not answered


class SolveView(msgspec.Struct, frozen=True, kw_only=True):
    """How far a run is. `well` says whether nothing is left to do; it means something once the run is `done`."""

    run: str
    slice: str
    dry_run: bool
    done: bool
    well: bool
    hosts: tuple[HostFindings, ...]
    failures: int = 0  #: runs in a row that could not mend this slice
    quarantined: str = ""  #: why the slice is given up and replaced
