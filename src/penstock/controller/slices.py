"""Verbs on slices: intend, observe, release, drain, bury, sweep, and what each teaches about its zone.

`controller.execute` performs plans through them, `controller.observe` reports what providers show. A name is never
reused: a slice that is gone stays a tombstone. They must not call a provider.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.controller.verbs import Outdated, save_slice, verb
from penstock.domain import limits
from penstock.domain.lifecycle import BROKEN_SLICE_STATES, LIVE_ATTEMPT_STATES, SliceState
from penstock.domain.nouns import Pool, Slice, StopOrder, Zone, untried
from penstock.planner import zones
from penstock.ports.capacity import CREATING, DELETING, FAILED, PREEMPTED, READY, Seen
from penstock.ports.store import Transaction

_COMING = (SliceState.INTENDED, SliceState.CREATING)
_LOG_IN_SENTENCE = 600  #: characters
_HELD = (*_COMING, SliceState.READY, SliceState.DRAINING)
_NOTICE = "the platform gave notice"


@verb
def intend(
    tx: Transaction,
    pool_name: str,
    team: str,
    wanted: Sequence[tuple[str, str]],
    race: str | None,
    number: int | None = None,
    beside: str | None = None,
) -> None:
    """Commit the wish for one slice, in one zone or racing in several: `wanted` is (name, zone) of each.

    `beside` names a slice whose creation is slow: what is wanted races it, in its race if it is in one.
    """
    pool = tx.pool(pool_name)
    if pool is None or pool.deleted or tx.control().maintenance:
        raise Outdated(f"pool {pool_name} makes no slices now")
    if team != pool.team and team not in pool.teams:
        raise Outdated(f"team {team} may not use pool {pool_name}")
    if beside is not None:
        race = _raced(tx, beside, race)
    for id, zone in wanted:
        _intend_one(tx, pool, team, id, zone, race, number)


def _raced(tx: Transaction, id: str, race: str | None) -> str | None:
    """The race of a slice that is still coming; if it was alone, from now on this one."""
    slice = _slice(tx, id)
    if slice.state not in _COMING:
        raise Outdated(f"slice {id} is {slice.state.value}: there is nothing to race")
    if slice.race is None:
        slice = save_slice(tx, slice, msgspec.structs.replace(slice, race=race), "slice.raced", race=race)
    return slice.race


def _intend_one(
    tx: Transaction, pool: Pool, team: str, id: str, zone: str, race: str | None, number: int | None
) -> None:
    slice = Slice(
        id=id,
        team=team,
        pool=pool.name,
        provider=pool.provider,
        zone=zone,
        accelerator=pool.accelerator,
        chips=pool.chips,
        hosts=pool.hosts,
        spot=pool.spot,
        cloud=pool.cloud,
        usd_per_chip_hour=0.0 if pool.provider == "local" else pool.usd_per_chip_hour,
        race=race,
        number=number,
        intended_at=tx.at,
    )
    save_slice(
        tx,
        None,
        slice,
        "slice.intended",
        pool=pool.name,
        team=team,
        provider=pool.provider,
        zone=zone,
        accelerator=pool.accelerator,
        chips=pool.chips,
        hosts=pool.hosts,
        race=race,
        number=number,
        spot=pool.spot,
    )


@verb
def observe(tx: Transaction, sightings: Sequence[Seen]) -> None:
    """Take in what a provider shows of slices we know; what is unknown is the sweep's business."""
    for seen in sightings:
        slice = tx.slice(seen.name)
        if slice is not None:
            _observe_one(tx, slice, seen)


def _observe_one(tx: Transaction, slice: Slice, seen: Seen) -> None:
    if slice.provider_id is not None and slice.provider_id != seen.provider_id:
        if slice.state in _HELD:
            fail_slice(tx, slice, "the provider shows another machine under this name")
        return
    if slice.state is SliceState.INTENDED and seen.state in (CREATING, READY):
        slice = save_slice(
            tx,
            slice,
            msgspec.structs.replace(
                slice,
                state=SliceState.CREATING,
                provider_id=seen.provider_id,
                # One that is ready when it is first seen was asked for long ago: nobody knows when.
                asked_at=tx.at if seen.state == CREATING else None,
            ),
            "slice.creating",
            provider_id=seen.provider_id,
        )
    if slice.provider_state != seen.state or slice.provider_id is None:
        slice = save_slice(
            tx,
            slice,
            msgspec.structs.replace(
                slice,
                provider_state=seen.state,
                provider_id=seen.provider_id,
                up_at=tx.at if seen.state == READY and slice.up_at is None else slice.up_at,
            ),
            "slice.observed",
            provider_state=seen.state,
        )
    if slice.state not in _HELD:
        if slice.state is SliceState.DELETING and slice.dirty and seen.state == PREEMPTED:
            note_loss(tx, slice, "preempted, as its provider told only after its hosts had fallen silent")
        return
    if seen.state == READY:
        settle_ready(tx, slice)
    elif seen.state == PREEMPTED:
        _lose(tx, slice)
    elif seen.state in (FAILED, DELETING):
        if seen.state == FAILED and slice.ready_at is None:
            # Taken in, then not granted: the zone must rest as after any refusal.
            _learn(tx, slice, "refused", why=seen.detail)
        fail_slice(tx, slice, seen.detail or f"the provider shows it as {seen.state}")


def settle_ready(tx: Transaction, slice: Slice) -> Slice:
    """A slice is ready when the provider says so and every host's agent has joined."""
    if (
        slice.state is not SliceState.CREATING
        or slice.provider_state != READY
        or not slice.joined
        or None in slice.joined
    ):
        return slice
    _learn(tx, slice, "granted", ready_s=max(0.0, tx.at - slice.begun_at))
    ready = msgspec.structs.replace(slice, state=SliceState.READY, ready_at=tx.at, idle_since=tx.at)
    return save_slice(tx, slice, ready, "slice.ready")


def _lose(tx: Transaction, slice: Slice) -> None:
    if slice.ready_at is not None:
        slice = note_loss(tx, slice, "the provider preempted it")
    else:
        _learn(tx, slice, "refused")
    lost = msgspec.structs.replace(slice, state=SliceState.PREEMPTED, idle_since=None, why="the provider took it away")
    save_slice(tx, slice, lost, "slice.preempted", why="the provider preempted it")


def note_loss(tx: Transaction, slice: Slice, why: str) -> Slice:
    """The platform takes away what worked: learned once, whichever way it is known first. Not a verb.

    Hosts tell of a notice, listings and gets of the end; either may come late or never.
    """
    if slice.ready_at is None or slice.lost_at is not None:
        return slice
    ended_at = tx.at if slice.deleting_at is None else slice.deleting_at
    life_s = max(0.0, ended_at - slice.ready_at)
    _learn(tx, slice, "lost", life_s=life_s)
    lost = msgspec.structs.replace(slice, lost_at=tx.at)
    return save_slice(tx, slice, lost, "slice.lost", why=why, life_s=life_s)


def fail_slice(tx: Transaction, slice: Slice, why: str) -> Slice:
    """A slice that can serve nobody any more. Not a verb: part of others."""
    failed = msgspec.structs.replace(slice, state=SliceState.FAILED, idle_since=None, why=why)
    return save_slice(tx, slice, failed, "slice.failed", why=why)


@verb
def fail_setup(tx: Transaction, id: str, host: int, machine: str, log: str) -> None:
    """A host came up and could not be made ours: the slice is replaced, and a zone where that goes on rests."""
    slice = _slice(tx, id)
    if slice.state not in _COMING or slice.provider_id not in (None, machine):
        raise Outdated(f"slice {id} is {slice.state.value}")
    last = next((line for line in reversed(log.splitlines()) if line.strip()), "it did not say why")
    _learn(tx, slice, "broken", why=f"host {host} of slice {id} could not be set up: {_one_line(log) or last}")
    failed = msgspec.structs.replace(
        slice, state=SliceState.FAILED, idle_since=None, why=f"host {host} could not be set up: {last}"
    )
    save_slice(tx, slice, failed, "slice.failed", why=failed.why, host=host, log=log)


def _one_line(log: str) -> str:
    """The end of a log for a sentence."""
    text = " | ".join(line.strip() for line in log.splitlines() if line.strip())
    return text if len(text) <= _LOG_IN_SENTENCE else "…" + text[-_LOG_IN_SENTENCE:]


@verb
def refuse(tx: Transaction, id: str, why: str, wait_s: float | None, quota: bool = False) -> None:
    """The provider would not create it: learn, and let the name go. Nothing exists that would need a delete.

    A quota that is full because something of ours is still on its way out there is free again once that is gone: a
    fleet as large as its quota must not rest for minutes after each preemption.
    """
    slice = _slice(tx, id)
    # In a back-off nothing is changed by `wait_s`: of many refusals at a time only the first looks through all slices.
    if quota and tx.at >= _zone(tx, slice).backoff_until and _quota_is_freed(tx, slice):
        wait_s = limits.QUOTA_FREED_S
    _learn(tx, slice, "refused", refuse_s=wait_s, why=why)
    if slice.state in _COMING:
        release_slice(tx, slice, why)


def _quota_is_freed(tx: Transaction, slice: Slice) -> bool:
    """Whether something in its zone exists, or did a moment ago, and is to be deleted: until then it holds quota."""
    leaving = (SliceState.DRAINING, SliceState.DELETING, *BROKEN_SLICE_STATES)
    return any(
        (each.provider, each.zone) == (slice.provider, slice.zone)
        and each.provider_id is not None
        and each.state in leaving
        for each in tx.live_slices()
    )


@verb
def disown(tx: Transaction, id: str, why: str) -> None:
    """Something that is not ours bears the name: let the intent go, and never call a delete for it."""
    slice = _slice(tx, id)
    if slice.state is SliceState.INTENDED:
        release_slice(tx, slice, why)


@verb
def drain(tx: Transaction, id: str, why: str) -> None:
    """Place nothing more here."""
    slice = _slice(tx, id)
    if slice.state is not SliceState.READY:
        raise Outdated(f"slice {id} is {slice.state.value}")
    draining = msgspec.structs.replace(slice, state=SliceState.DRAINING, idle_since=None, why=why)
    save_slice(tx, slice, draining, "slice.draining", why=why)


@verb
def adopt(tx: Transaction, pool: Pool, id: str, machine: str) -> Slice:
    """Something that exists becomes a slice of ours. It is never asked for: it has a machine from the beginning."""
    _intend_one(tx, pool, pool.team, id, pool.zones[0], None, None)
    slice = _slice(tx, id)
    return save_slice(
        tx,
        slice,
        msgspec.structs.replace(slice, state=SliceState.CREATING, provider_id=machine),
        "slice.creating",
        provider_id=machine,
    )


def heed(tx: Transaction, slice: Slice) -> Slice:
    """A host told that the platform takes it away: what is here saves and stops, and the loss counts. Not a verb."""
    slice = note_loss(tx, slice, _NOTICE)
    order = StopOrder("notice", tx.at, f"slice {slice.id} was preempted with notice")
    return _vacate(tx, slice, "notice", _NOTICE, order)


def _vacate(tx: Transaction, slice: Slice, why: str, told: str, order: StopOrder) -> Slice:
    """Place nothing more here, and stop what is: the whole gang, so that all of it can save."""
    if slice.state is SliceState.READY:
        slice = save_slice(
            tx,
            slice,
            msgspec.structs.replace(slice, state=SliceState.DRAINING, idle_since=None, why=why),
            "slice.draining",
            why=told,
        )
    attempt = tx.attempt(slice.attempt) if slice.attempt else None
    if attempt is not None and attempt.state in LIVE_ATTEMPT_STATES and attempt.stop is None:
        tx.save(msgspec.structs.replace(attempt, stop=order), "attempt.stopping", body={"why": order.why})
    return slice


@verb
def replace(tx: Transaction, id: str, why: str, now: bool) -> Slice:
    """Somebody wants another slice in its place. A job on it ends first; with `now` it goes on elsewhere."""
    slice = _slice(tx, id)
    attempt = tx.attempt(slice.attempt) if slice.attempt else None
    if slice.state not in _HELD:
        return slice
    if attempt is None or attempt.state not in LIVE_ATTEMPT_STATES:
        return release_slice(tx, slice, why)
    if now:
        return _vacate(tx, slice, why, why, StopOrder("drained", tx.at, f"slice {id} was given up: {why}"))
    if slice.state is SliceState.READY:
        drain(tx, id, why)
    return _slice(tx, id)


@verb
def release(tx: Transaction, id: str, why: str, useless: bool = False, vanished: bool = False) -> None:
    """Commit that a slice is leaving; only after this may its delete be called."""
    slice = _slice(tx, id)
    if slice.attempt is not None:
        attempt = tx.attempt(slice.attempt)
        if attempt is not None and attempt.state in LIVE_ATTEMPT_STATES:
            raise Outdated(f"slice {id} is in use by {attempt.id}")
    if slice.state is SliceState.CREATING and tx.at - slice.begun_at >= zones.patience_s(_zone(tx, slice), slice):
        _learn(tx, slice, "refused")  # a zone that never delivers is a dry one
    elif useless:
        # Whether its zone does not answer, its hosts cannot reach us or never came up: each further try costs.
        _learn(tx, slice, "refused", why=f"slice {id}: {why}")
    elif vanished and slice.spot and slice.state in (SliceState.READY, SliceState.DRAINING):
        # Nobody but the provider takes a spot slice away without a word.
        slice = note_loss(tx, slice, "its provider knows nothing of it any more")
    release_slice(tx, slice, why)


def release_slice(tx: Transaction, slice: Slice, why: str) -> Slice:
    """`release` after its checks. Not a verb: part of others."""
    if slice.state not in _HELD and slice.state not in BROKEN_SLICE_STATES:
        raise Outdated(f"slice {slice.id} is {slice.state.value}")
    leaving = msgspec.structs.replace(
        slice, state=SliceState.DELETING, idle_since=None, deleting_at=tx.at, why=slice.why or why
    )
    return save_slice(tx, slice, leaving, "slice.deleting", why=why)


@verb
def bury(tx: Transaction, id: str, evidence: tuple[str, ...]) -> None:
    """Absence is proven: the slice is gone, its name stays."""
    slice = _slice(tx, id)
    if slice.state is not SliceState.DELETING:
        raise Outdated(f"slice {id} is {slice.state.value}")
    gone = msgspec.structs.replace(slice, state=SliceState.GONE, gone_at=tx.at, attempt=None)
    save_slice(tx, slice, gone, "slice.gone", evidence=list(evidence))


@verb
def sweep(tx: Transaction, provider: str, seen: Seen) -> bool:
    """Something with our label that no live slice owns: a late create, or a row lost. True: delete it now.

    A name we never intended (a store restored from an older copy) becomes a slice that is leaving, so that its
    deletion runs through the same path, with the same proofs, as any other.
    """
    slice = tx.slice(seen.name)
    if slice is None:
        unknown = Slice(
            id=seen.name,
            team="",
            pool="",
            provider=provider,
            zone=seen.zone,
            accelerator="",
            chips=0,
            hosts=0,
            intended_at=tx.at,
        )
        facts = {"pool": "", "team": "", "provider": provider, "zone": seen.zone, "chips": 0}
        slice = save_slice(tx, None, unknown, "slice.intended", **facts, race=None, number=None)
        slice = save_slice(
            tx,
            slice,
            msgspec.structs.replace(slice, state=SliceState.CREATING, provider_id=seen.provider_id),
            "slice.creating",
            provider_id=seen.provider_id,
        )
        release_slice(tx, slice, "nobody intended it")
        return False
    if slice.state is not SliceState.GONE:
        return False
    save_slice(tx, slice, slice, "slice.swept", provider_id=seen.provider_id)
    return True


def _learn(
    tx: Transaction,
    slice: Slice,
    outcome: zones.Outcome,
    *,
    ready_s: float | None = None,
    life_s: float | None = None,
    refuse_s: float | None = None,
    why: str = "",
) -> None:
    """Remember what this slice says of its kind of capacity in its zone."""
    before = _zone(tx, slice)
    after = zones.learn(before, outcome, tx.at, ready_s=ready_s, life_s=life_s, refuse_s=refuse_s, why=why)
    body: dict[str, object] = {"outcome": outcome, "ready_s": ready_s, "life_s": life_s}
    if before.version == 0:
        tx.add(after, "zone.learned", body=body)
    else:
        tx.save(after, "zone.learned", body=body)


def _zone(tx: Transaction, slice: Slice) -> Zone:
    """What is known of a slice's kind of capacity in its zone."""
    fresh = untried(slice, slice.zone)
    return tx.zone(fresh.id) or fresh


def _slice(tx: Transaction, id: str) -> Slice:
    slice = tx.slice(id)
    if slice is None:
        raise Outdated(f"slice {id} is unknown")
    return slice
