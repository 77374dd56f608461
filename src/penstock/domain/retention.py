"""How long what jobs leave is kept: an installation's policy, in seconds after a job's end.

`wiring.settings` reads it from `[retention]`, `server.cleaning` applies it when `tpu clean` asks, `server.retention` by
itself. Pure. It must not know what lies where.
"""

from __future__ import annotations

import math

import msgspec

from penstock.domain import limits


class Retention(msgspec.Struct, frozen=True, kw_only=True):
    """Ages after which each kind goes; infinite means never."""

    logs_s: float = limits.RETENTION_S
    results_s: float = limits.RETENTION_S  #: and artifacts
    checkpoints_s: float = limits.RETENTION_S  #: and compiled code; the newest stays as long as its job
    jobs_s: float = limits.RETENTION_S  #: the job itself, once nothing else of it is kept
    unused_s: float = (
        limits.UNUSED_S
    )  #: snapshots and blobs after no job names them, hosts' caches after their last use
    every_s: float = limits.RETENTION_EVERY_S  #: how often the server looks by itself

    @property
    def forget_s(self) -> float:
        """A row goes last: what lies under it could not be found without it."""
        return max(self.jobs_s, self.logs_s, self.results_s, self.checkpoints_s)

    @property
    def first_s(self) -> float:
        """The age at which a job begins to lose something."""
        return min(self.forget_s, self.logs_s, self.results_s, self.checkpoints_s)

    @property
    def by_itself(self) -> bool:
        return math.isfinite(self.every_s)
