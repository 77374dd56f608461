"""Which walls stand around payloads on this host, for `tpu doctor`: asks the agent's own sandbox, so the two agree."""

from __future__ import annotations

from penstock.agent.sandbox import Walls, try_walls

__all__ = ["Walls", "try_walls"]
