"""Verbs on the shared inventory: reserve a slice or a pool for one user, and give it back.

Called by `controller.commands`. A reservation is a row's field and ends by its own time; the planner and `attempts`
respect it. Whoever runs there goes on to the end. They must not check who may do it: that is `server.inventory`.
"""

from __future__ import annotations

import msgspec

from penstock.controller.jobs import NotFound
from penstock.controller.verbs import save_slice, verb
from penstock.domain.lifecycle import COUNTED_SLICE_STATES
from penstock.domain.nouns import Pool, Reservation, Slice
from penstock.domain.reservations import in_force
from penstock.ports.store import Transaction


class Taken(Exception):
    """Somebody else holds it."""

    def __init__(self, what: str, holder: Reservation) -> None:
        super().__init__(f"{what} is reserved by {holder.user}")
        self.holder = holder


@verb
def reserve_slice(tx: Transaction, id: str, wanted: Reservation | None, user: str | None) -> Slice:
    """Reserve a slice, or with None give it back. `user` may replace only an own claim; None replaces anybody's."""
    slice = tx.slice(id)
    if slice is None or slice.state not in COUNTED_SLICE_STATES:
        raise NotFound("slice", id)
    _check(tx, f"slice {id}", slice.reserved, user)
    if wanted is None and slice.reserved is None:
        return slice
    changed = msgspec.structs.replace(slice, reserved=_kept_since(slice.reserved, wanted, tx.at))
    if wanted is None:
        return save_slice(tx, slice, changed, "slice.unreserved")
    return save_slice(tx, slice, changed, "slice.reserved", user=wanted.user, until=wanted.until, note=wanted.note)


@verb
def reserve_pool(tx: Transaction, name: str, wanted: Reservation | None, user: str | None) -> Pool:
    """The same for all slices of a pool, present and to come."""
    pool = tx.pool(name)
    if pool is None or pool.deleted:
        raise NotFound("pool", name)
    _check(tx, f"pool {name}", pool.reserved, user)
    if wanted is None and pool.reserved is None:
        return pool
    changed = msgspec.structs.replace(pool, reserved=_kept_since(pool.reserved, wanted, tx.at))
    if wanted is None:
        return tx.save(changed, "pool.unreserved", body={})
    return tx.save(changed, "pool.reserved", body={"user": wanted.user, "until": wanted.until, "note": wanted.note})


def _check(tx: Transaction, what: str, old: Reservation | None, user: str | None) -> None:
    holder = in_force(old, tx.at)
    if holder is not None and user is not None and holder.user != user:
        raise Taken(what, holder)


def _kept_since(old: Reservation | None, wanted: Reservation | None, now: float) -> Reservation | None:
    """Who prolongs a reservation has had it since it began."""
    holder = in_force(old, now)
    if wanted is None or holder is None or holder.user != wanted.user:
        return wanted
    return msgspec.structs.replace(wanted, since=holder.since)
