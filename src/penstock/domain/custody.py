"""What agent and server say to each other, and when an agent must give up its children.

The agent (and its model in the simulator) sends a `SyncRequest` and obeys the `SyncReply`; `controller.agents` answers.
`custody` is the agent's half of the two clocks: it decides alone, from its own steady clock, so that no clock of two
machines is ever compared.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from penstock.domain import limits
from penstock.domain.nouns import Exit


class Phase(StrEnum):
    """Where the process of an attempt is on one host."""

    LAUNCHED = "launched"
    RUNNING = "running"
    EXITED = "exited"


class Held(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One attempt an agent holds, repeated in every sync until the server says `forget`."""

    attempt: str
    fence: int
    phase: Phase
    exit: Exit | None = None
    outputs: tuple[str, ...] = ()  #: declared outputs found complete in this attempt's staging prefix
    open_units: int | None = None
    holding: bool | None = None  #: whether it has a unit in hand, as the payload last said; None: it does not say


class SyncRequest(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """What an agent observes. `incarnation` is made new whenever the host is; a reboot keeps it."""

    slice: str
    provider_id: str
    host: int
    incarnation: str
    held: tuple[Held, ...] = ()
    notice: bool = False  #: the platform said that this host will be taken away


class Launch(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Start this attempt's process here; repeating the order is harmless."""

    attempt: str
    job: str
    replica: int
    fence: int
    stage: int
    rank: int
    world_size: int
    timeout_s: float


class SyncReply(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """What should be. A host that is not `welcome` stops everything it holds and does not come back."""

    welcome: bool
    launch: Launch | None = None
    stop: tuple[str, ...] = ()  #: attempts to stop with grace
    broken: tuple[str, ...] = ()  #: of `stop`, those whose gang has lost a member: a short grace is enough
    kill: tuple[str, ...] = ()  #: attempts to stop at once: their fence has been passed
    forget: tuple[str, ...] = ()  #: attempts whose end is committed
    why: str = ""


class Keep(StrEnum):
    """The agent's choice for one attempt while the server is silent."""

    GO_ON = "go_on"
    STOP = "stop"


def custody(own_fence: int, fence_seen: int | None, server_silent_s: float, bucket_silent_s: float) -> Keep:
    """Whether an attempt may go on.

    `fence_seen` is the fence object as last read from the bucket (None: there was none yet). A higher one means that a
    successor may start. When neither server nor bucket answered for `CUSTODY_S`, nobody can tell, so the agent stops:
    the server waits that long before it starts a successor it could not fence.
    """
    if fence_seen is not None and fence_seen > own_fence:
        return Keep.STOP
    if min(server_silent_s, bucket_silent_s) >= limits.CUSTODY_S:
        return Keep.STOP
    return Keep.GO_ON


def fence_path(job: str, replica: int) -> str:
    """Where the current fence of a replica is written before a successor starts."""
    return f"jobs/{job}/fence/{replica}"


def staging_path(job: str, fence: int, output: str) -> str:
    """Where an attempt writes an output before it is committed: the fence is in the name (S6)."""
    return f"jobs/{job}/staging/{fence}/{output}"
