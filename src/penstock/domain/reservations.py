"""Whose a reserved slice or pool is, and for how long.

The planner asks before it uses a slice, `controller.attempts` again before it places, `server` to show and change it. A
reservation that is over counts for nothing, whether anybody has taken it away or not. Pure.
"""

from __future__ import annotations

from penstock.domain.nouns import Reservation


def in_force(reserved: Reservation | None, now: float) -> Reservation | None:
    return reserved if reserved is not None and now < reserved.until else None


def others_claim(reserved: Reservation | None, user: str, now: float) -> bool:
    """Whether somebody else holds it: then jobs of `user` do not start there."""
    return reserved is not None and now < reserved.until and reserved.user != user
