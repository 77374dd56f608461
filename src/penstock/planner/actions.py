"""What a plan may ask for: small typed actions, and the reasons it gives for what it leaves undone.

`planner.plan` makes them, `controller.execute` performs each with the intent-first protocol. An action carries all
that its performer needs and nothing that could go stale unnoticed: every verb behind it compares versions again.
"""

from __future__ import annotations

import msgspec

from penstock.domain.lifecycle import Cause


class Place(msgspec.Struct, frozen=True, gc=False, tag="place", kw_only=True):
    """Start an attempt of one replica on these ready slices (a gang: all of them or none)."""

    job: str
    replica: int
    slices: tuple[str, ...]
    chips: int
    band: int
    borrowed: bool = False
    backfilled: bool = False


class Intend(msgspec.Struct, frozen=True, gc=False, tag="intend", kw_only=True):
    """Ask for one more slice of a pool for a team: in one zone, or in several at once, the first to be ready kept."""

    pool: str
    team: str
    zones: tuple[str, ...]
    number: int | None = None  #: the place it shall have in its fleet
    beside: str | None = None  #: a slice whose creation is slow: the new one races it


class Create(msgspec.Struct, frozen=True, gc=False, tag="create"):
    """Call the provider for a slice whose intent is committed."""

    slice: str


class Ask(msgspec.Struct, frozen=True, gc=False, tag="ask"):
    """Ask the provider about one slice by name: silence or absence from listings made us doubt."""

    slice: str
    why: str


class Release(msgspec.Struct, frozen=True, gc=False, tag="release"):
    """Let a slice go: commit that it is leaving, then delete it. Never one with a live attempt."""

    slice: str
    why: str
    useless: bool = False  #: asking for it brought nothing that could be used: its zone is left alone for a while
    vanished: bool = False  #: its provider knows nothing of it: nobody here has let it go


class Drain(msgspec.Struct, frozen=True, gc=False, tag="drain"):
    """Place nothing more on a slice; it is released when its attempt has ended."""

    slice: str
    why: str


class Delete(msgspec.Struct, frozen=True, gc=False, tag="delete"):
    """Call the provider's delete for a slice that is `deleting`, again until it is gone."""

    slice: str


class Bury(msgspec.Struct, frozen=True, gc=False, tag="bury"):
    """Absence is proven (two complete listings apart and a direct get): the slice is gone."""

    slice: str
    evidence: tuple[str, ...]


class Stop(msgspec.Struct, frozen=True, gc=False, tag="stop"):
    """Ask the agents of an attempt to stop it. `why` is one of `StopOrder.why`."""

    attempt: str
    why: str


class Fence(msgspec.Struct, frozen=True, gc=False, tag="fence"):
    """Write a higher fence object for a silent attempt, so that a zombie stops by itself."""

    attempt: str


class Close(msgspec.Struct, frozen=True, gc=False, tag="close", kw_only=True):
    """End an attempt without, or with incomplete, reports of its hosts.

    `clean` says that no process of it can be left on its slices; otherwise they are never reused.
    """

    attempt: str
    cause: Cause
    evidence: tuple[str, ...]
    clean: bool


class Finish(msgspec.Struct, frozen=True, gc=False, tag="finish", kw_only=True):
    """End a job that has no live attempt: cancelled, or failed as infeasible."""

    job: str
    cancelled: bool
    reason: str


Action = Place | Intend | Create | Ask | Release | Drain | Delete | Bury | Stop | Fence | Close | Finish


class Want(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Slices that admission would place a job on if they existed: what `scaling.grow` turns into intents."""

    job: str
    team: str
    pools: tuple[str, ...]  #: that may give them, in order of preference; all slices come from one pool
    slices: int  #: missing beside the ready ones it could have now; those on their way are not taken off yet
    zones: tuple[str, ...] = ()  #: only these; empty: any zone of the pool
    same_zone: bool = False  #: all of them in one zone


class Reason(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Why a job is not running, in a stable code, the numbers behind it, one sentence, and what would help."""

    code: str
    sentence: str
    numbers: dict[str, float] = {}
    advice: str = ""


class Plan(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Actions in the order they should be tried, and a reason for every job of the snapshot that is not running."""

    actions: tuple[Action, ...]
    reasons: dict[str, Reason]
