"""What an agent and the server say beside the sync of `domain.custody`: joining, what to launch, logs, results.

Only the agent's own credential opens these routes, and only for its own slice and the attempts bound to it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from penstock.domain.custody import SyncReply, SyncRequest
from penstock.wire.api import CommandRequest, ErrorView, ProgressView, SnippetRequest
from penstock.wire.solving import SolveOrder


class Join(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A host's first call. `token` belongs to one slice intent and serves once per host index."""

    slice: str
    host: Annotated[int, Meta(ge=0)]
    provider_id: str
    incarnation: str
    token: str


class Joined(msgspec.Struct, frozen=True, kw_only=True):
    """The host's own credential (send as a bearer token), and where the bucket is if hosts can reach it."""

    credential: str
    root: str | None = None  #: file:///… on the embedded default; None: go through the server


class AgentSync(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A sync that may wait on the server for news: up to `wait_s`, unless there are orders at once."""

    request: SyncRequest
    wait_s: Annotated[float, Meta(ge=0, le=30)] = 0.0
    progress: dict[str, ProgressView] = {}  #: attempt -> what its payload last said
    #: Attempt -> seconds since its newest checkpoint was finished, where hosts save in the root itself.
    saved: dict[str, Annotated[float, Meta(ge=0, le=1e9)]] = {}
    address: Annotated[str, Meta(max_length=64, pattern=r"^[0-9A-Fa-f.:]*$")] = ""  #: where other hosts reach this one


class LaunchSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one host needs to start one attempt."""

    attempt: str
    job: str
    name: str
    team: str
    replica: int
    fence: int
    stage: int
    rank: int
    world_size: int
    payload: SnippetRequest | CommandRequest
    timeout_s: float
    accelerator: str
    jax_devices: int  #: of this host
    coordinator: str | None  #: host:port for jax.distributed, which real TPUs do not need; None for single hosts
    slices: int = 1  #: of the gang
    slice_index: int = 0  #: which of them this host belongs to
    environment: str = ""  #: hash of the set-up
    env: dict[str, str] = {}
    secrets: dict[str, str] = {}
    outputs: tuple[str, ...] = ()
    memory_bytes: int | None = None
    #: (job, fence) of earlier attempts whose checkpoints may be resumed, newest first: jobs/<job>/checkpoints/<fence>/.
    #: Empty when the attempt starts from nothing; the parent's job id appears here for a resumed job.
    restore: tuple[tuple[str, int], ...] = ()
    wandb_run_id: str = ""
    stop_grace_s: float = 30.0


class Orders(SyncReply, frozen=True, gc=True, kw_only=True):
    """The answer to a sync. An order to launch brings along what it takes to carry it out.

    Where `spec` is missing the host asks for it, and is told why there is none.
    """

    spec: LaunchSpec | None = None
    solve: SolveOrder | None = None  #: look whether this host is well; see `wire.solving`


class LogAck(msgspec.Struct, frozen=True):
    """Bytes below `durable` are safe and may leave the spool; the next chunk must start at `received`.

    `received` below the end of the chunk just sent means that the server lost its memory: go on from there. A chunk
    above it is not taken unless it says `gap=true` (the bytes between are gone for good); the server marks the gap. An
    empty chunk asks where the stream stands.
    """

    durable: int
    received: int = 0


class ResultReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a payload left: rank 0's `result` as JSON, how it failed, and artifacts that were put beside it."""

    result: object = None
    note: str = ""  #: why `result` is a repr
    error: ErrorView | None = None
    artifacts: tuple[str, ...] = ()


# --- checkpoints, where hosts reach the bucket through the server ---
class SavedFile(msgspec.Struct, frozen=True, array_like=True):
    """One file of a checkpoint directory: its pieces, by SHA-256, follow each other."""

    path: str
    size: int
    mode: int
    mtime_ns: int
    pieces: tuple[str, ...]


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint directory as one host copied it, whole. Of several the one with the highest `number` counts."""

    number: Annotated[int, Meta(ge=0, lt=1 << 53)]  #: 0: nothing was copied yet
    files: tuple[SavedFile, ...] = ()
    folders: tuple[str, ...] = ()  #: empty ones as well
    writing: bool = (
        False  #: this host has begun to save; False in the list with which a host of a gang says it is there
    )


class PiecesQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which of these pieces are not in the bucket yet?"""

    pieces: tuple[Annotated[str, Meta(pattern="^[0-9a-f]{64}$")], ...]


class PiecesReply(msgspec.Struct, frozen=True):
    missing: tuple[str, ...]


class Restorable(msgspec.Struct, frozen=True, kw_only=True):
    """What one host of an earlier attempt had copied."""

    job: str
    fence: int  #: of compiled code, which is kept by job: the replica
    rank: int
    saved: Saved


class RestoreReply(msgspec.Struct, frozen=True):
    """All hosts of the newest earlier attempt that has a whole copy; empty if there is none."""

    found: tuple[Restorable, ...] = ()
    notes: tuple[str, ...] = ()  #: newer ones that are not whole, and why


class FenceWay(msgspec.Struct, frozen=True):
    """Where this attempt's fence object alone can be read without the server, for a while; None: nowhere."""

    url: str | None = None
