"""Verbs on what operators set: teams, queues, pools, provider limits and maintenance mode.

Called by `controller.commands`. Each keeps the counter behind a limit in step with the noun that states it, so that a
lowered limit blocks new reservations at once and evicts nothing by itself.
"""

from __future__ import annotations

import msgspec

from penstock.controller.jobs import NotFound
from penstock.controller.verbs import verb
from penstock.domain import places
from penstock.domain.admission import BadInput
from penstock.domain.nouns import Pool, Queue, Quota, Team, untried
from penstock.planner import zones
from penstock.ports.store import Transaction


@verb
def put_team(tx: Transaction, team: Team) -> Team:
    """Create a team or change its limit."""
    old = tx.team(team.name)
    body = {"limit_chips": team.chip_limit}
    limit(tx, "team", team.name, team.chip_limit)
    if old is None:
        return tx.add(team, "team.created", body=body)
    return tx.save(msgspec.structs.replace(team, version=old.version), "team.edited", body=body)


@verb
def put_queue(tx: Transaction, queue: Queue) -> Queue:
    """Create a queue or change its share; what it has used is kept."""
    if tx.team(queue.team) is None:
        raise NotFound("team", queue.team)
    old = tx.queue(queue.name)
    body = _queue_facts(queue)
    if old is None:
        saved = tx.add(msgspec.structs.replace(queue, used_at=tx.at), "queue.created", body=body)
    elif old.team != queue.team:
        raise BadInput("team", queue.team, f"cannot change: queue {queue.name} belongs to {old.team}")
    else:
        saved = tx.save(
            msgspec.structs.replace(
                queue, version=old.version, used_chip_s=old.used_chip_s, used_at=old.used_at, spent=old.spent
            ),
            "queue.edited",
            body=body,
        )
    _limit_queue(tx, saved)
    return saved


@verb
def delete_queue(tx: Transaction, name: str) -> Queue:
    """Take a queue away that no unfinished job is in. Its quota goes back; what it has used is kept."""
    old = tx.queue(name)
    if old is None or old.deleted:
        raise NotFound("queue", name)
    job = tx.queue_in_use(name)
    if job is not None:
        raise BadInput("queue", name, f"is in use by {job}, which has not ended", "wait for its jobs, or cancel them")
    gone = msgspec.structs.replace(old, deleted=True, quota_chips=0, borrow_chips=0, paused=False)
    saved = tx.save(gone, "queue.deleted", body=_queue_facts(gone))
    _limit_queue(tx, saved)
    return saved


def _queue_facts(queue: Queue) -> dict[str, object]:
    return {
        "team": queue.team,
        "weight": queue.weight,
        "quota_chips": queue.quota_chips,
        "borrow_chips": queue.borrow_chips,
        "band": queue.band,
        "paused": queue.paused,
        "budget": None if queue.budget is None else queue.budget.text,
    }


def _limit_queue(tx: Transaction, queue: Queue) -> None:
    """A queue may hold its quota and what it may borrow; a team's queues together no more than their quotas."""
    ceiling = None
    if queue.quota_chips is not None and queue.borrow_chips is not None:
        ceiling = queue.quota_chips + queue.borrow_chips
    limit(tx, "queue", queue.name, ceiling)
    quotas = [each.quota_chips for each in tx.queues() if each.team == queue.team]
    known = [chips for chips in quotas if chips is not None]
    limit(tx, "cohort", queue.team, sum(known) if len(known) == len(quotas) else None)


@verb
def put_pool(tx: Transaction, pool: Pool) -> Pool:
    """Create or resize a pool. Its accelerator and provider never change: slices of it exist."""
    for name in (pool.team, *pool.teams):
        if tx.team(name) is None:
            raise NotFound("team", name)
    old = tx.pool(pool.name)
    body = {"limit_chips": pool.max * pool.chips, "max": pool.max, "team": pool.team}
    limit(tx, "pool", pool.name, pool.max * pool.chips)
    if pool.per_zone is not None:
        pool = msgspec.structs.replace(pool, places=places.assign(pool, old, tx.pools(), tx.live_slices()))
    if old is None:
        return tx.add(pool, "pool.created", body=body)
    for field in ("team", "provider", "accelerator", "spot"):
        if getattr(old, field) != getattr(pool, field):
            rule = f"cannot change: pool {pool.name} has {getattr(old, field)!r}"
            raise BadInput(field, getattr(pool, field), rule, "make a new pool")
    if old.cloud != pool.cloud:
        _forgive_zones(tx, pool)
    kept = msgspec.structs.replace(pool, version=old.version, reserved=old.reserved)
    return tx.save(kept, "pool.edited", body=body)


def _forgive_zones(tx: Transaction, pool: Pool) -> tuple[str, ...]:
    """What went wrong before says nothing any more, because something was changed or mended. Answers where."""
    forgiven = []
    for name in pool.zones:
        zone = tx.zone(untried(pool, name).id)
        if zone is not None and zone.backoff_until:
            tx.save(zones.forgiven(zone), "zone.learned", body={"outcome": "forgiven"})
            if zone.backoff_until > tx.at:
                forgiven.append(name)
    return tuple(forgiven)


@verb
def retry_zones(tx: Transaction, name: str) -> tuple[str, ...]:
    """Somebody says that it is worth trying: zones of a pool that rest are asked at once. Answers which."""
    pool = tx.pool(name)
    if pool is None or pool.deleted:
        raise NotFound("pool", name)
    return _forgive_zones(tx, pool)


@verb
def reopen_zone(tx: Transaction, provider: str, name: str) -> None:
    """A zone that would not let us look does again: it is asked at once, but where slices could not be set up."""
    for zone in tx.zones():
        if (zone.provider, zone.zone) == (provider, name) and zone.backoff_until > tx.at and not zone.broken:
            tx.save(zones.forgiven(zone), "zone.learned", body={"outcome": "forgiven"})


@verb
def delete_pool(tx: Transaction, name: str) -> Pool:
    """Make no more slices; those that exist drain and go."""
    old = tx.pool(name)
    if old is None:
        raise NotFound("pool", name)
    if old.deleted:
        return old
    limit(tx, "pool", name, 0)
    gone = msgspec.structs.replace(old, deleted=True, min=0, max=0, per_zone=None, places=())
    return tx.save(gone, "pool.deleted", body={"limit_chips": 0, "max": 0, "team": old.team})


@verb
def limit_provider(tx: Transaction, provider: str, chips: int | None) -> None:
    """What the project may hold at a provider, in chips."""
    limit(tx, "provider", provider, chips)


@verb
def set_maintenance(tx: Transaction, on: bool) -> None:
    """Stop placing and creating; go on cleaning."""
    control = tx.control()
    if control.maintenance != on:
        changed = msgspec.structs.replace(control, maintenance=on)
        tx.save(changed, "control.edited", body={"maintenance": on})


def limit(tx: Transaction, scope: str, name: str, chips: int | None) -> None:
    """Set the limit of a counter, leaving what is used. Not a verb: part of others."""
    old = tx.quota(scope, name)
    body = {"scope": scope, "name": name, "limit_chips": chips}
    if old is None:
        tx.add(Quota(scope=scope, name=name, limit_chips=chips), "quota.limit_set", body=body)
    elif old.limit_chips != chips:
        tx.save(msgspec.structs.replace(old, limit_chips=chips), "quota.limit_set", body=body)
