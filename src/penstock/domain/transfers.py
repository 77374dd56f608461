"""What is kept of a checkpoint that had to be brought from another region before an attempt could go on from it.

`server.transfers` makes them, an attempt holds its last one, and people see it in the event log, in `tpu show` and in
`tpu why`: how many bytes, and what they cost. It must not know prices.
"""

from __future__ import annotations

import msgspec


class Transfer(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A checkpoint that was copied to another region's root before an attempt went on from it."""

    source: str  #: regions; "": of a root whose region nobody named
    target: str
    size: int  #: bytes of the whole checkpoint
    usd: float | None = None  #: at list price; None: unknown
    begun_at: float = 0.0
    done_at: float | None = None

    @property
    def told(self) -> str:
        """In one line, for people."""
        cost = "price unknown" if self.usd is None else f"{_money(self.usd)} at list price"
        done = "was copied" if self.done_at is not None else "is being copied"
        ways = f"from {self.source or 'the main root'} to {self.target or 'the main root'}"
        return f"its checkpoint {done} {ways} first: {_spoken(self.size)}, {cost}"


def _money(usd: float) -> str:
    return "less than $0.0001" if 0 < usd < 1e-4 else f"${usd:.4f}"


def _spoken(size: int) -> str:
    value, unit = float(size), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{size} bytes" if unit == "B" else f"{size} bytes ({value:.1f} {unit})"
