"""Where to ask for a slice: what past tries say of each zone, and the order in which zones are tried.

The controller's verbs call `learn` when a provider granted or refused a slice, or took one back, and store the
result; `planner.growth` calls `rank` and `open_at` when it needs a slice, and others ask how long one may take. Pure:
jitter comes from the zone's own name and streak, exploration from the number of tries. It must not create anything and
knows no provider.
See docs/adr/0006-zone-odds.md for why it is not simpler, and not cleverer.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from penstock.domain import limits
from penstock.domain.nouns import Pool, Slice, Zone, untried
from penstock.planner.actions import Reason
from penstock.planner.snapshot import Mute, Snapshot

Outcome = Literal["granted", "refused", "lost", "broken"]

#: What is left of older evidence after one more try: three tries outweigh all that came before.
DECAY: Final = 0.75
#: What is left of the refusals when a grant ends a run of them.
RUN_OVER: Final = 0.25
#: Weight of a newly measured time to ready, or life, in the smoothed one.
SMOOTH: Final = 0.3
#: A zone not tried is believed half as firmly after this long: spot capacity changes within hours.
EVIDENCE_HALF_LIFE_S: Final = 3600.0
#: Pretended tries, half of them granted, that one real try has to outweigh.
PRIOR: Final = 0.5
#: One try in this many goes to the zone that was not tried for longest; in fewer when the best known is poor.
EXPLORE_EVERY: Final = 8
EXPLORE_EVERY_MIN: Final = 3
#: Exploring is worth a try only where a zone at its best would beat the best known one by this factor.
EXPLORE_GAIN: Final = 1.15

#: Of what a provider says when it refuses: the sentence people need, not its whole dump.
WHY_CHARACTERS: Final = 300


def learn(
    zone: Zone,
    outcome: Outcome,
    now: float,
    ready_s: float | None = None,
    life_s: float | None = None,
    refuse_s: float | None = None,
    why: str = "",
) -> Zone:
    """What is known of a zone after one more outcome.

    `refuse_s` is the first back-off of a refusal that waiting does not mend soon (quota, permission); `why` is what the
    provider said.
    """
    if outcome == "lost":
        return msgspec.structs.replace(zone, losses=zone.losses + 1.0, life_s=_smoothed(zone.life_s, life_s))
    if outcome == "granted":
        return msgspec.structs.replace(
            zone,
            grants=zone.grants * DECAY + 1.0,
            # The first grant after a run of refusals says that the run is over, more than one grant among many does.
            refusals=zone.refusals * DECAY * (RUN_OVER if zone.streak > 1 else 1.0),
            losses=zone.losses * DECAY,
            tries=zone.tries + 1,
            ready_s=_smoothed(zone.ready_s, ready_s),
            backoff_until=0.0,
            streak=0,
            broken=0,
            tried_at=now,
            why="",
        )
    if outcome == "broken":
        return _after_broken(zone, now, why)
    if now < zone.backoff_until:
        # It was asked before the refusal that began this back-off: one dry moment, seen twice, is no second proof.
        return msgspec.structs.replace(zone, tries=zone.tries + 1)
    streak = zone.streak + 1
    return msgspec.structs.replace(
        zone,
        grants=zone.grants * DECAY,
        refusals=zone.refusals * DECAY + 1.0,
        tries=zone.tries + 1,
        backoff_until=now + backoff_s(zone.id, streak, refuse_s),
        streak=streak,
        tried_at=now,
        why=why[:WHY_CHARACTERS],
    )


def _after_broken(zone: Zone, now: float, why: str) -> Zone:
    """It gave a slice that could not be set up. That is hardly the zone's fault, so it says nothing of its odds; but
    what fails again and again needs a person, and each try costs money."""
    if zone.broken and now < zone.backoff_until:
        return msgspec.structs.replace(zone, tries=zone.tries + 1, why=why)  # made before that was known
    broken = zone.broken + 1
    rest_s = limits.SETUP_REST_S if broken >= limits.SETUP_FAILURES_MAX else backoff_s(zone.id, broken)
    return msgspec.structs.replace(
        zone, tries=zone.tries + 1, broken=broken, backoff_until=now + rest_s, tried_at=now, why=why
    )


def forgiven(zone: Zone) -> Zone:
    """Something was changed that may have been the reason: try at once."""
    return msgspec.structs.replace(zone, backoff_until=0.0, streak=0, broken=0, why="")


def _smoothed(old: float | None, new: float | None) -> float | None:
    if new is None or old is None:
        return old if new is None else new
    return old + SMOOTH * (new - old)


def backoff_s(zone: str, streak: int, first_s: float | None = None) -> float:
    """How long a zone is left alone after `streak` refusals in a row: doubling, less up to half by jitter."""
    first = limits.ZONE_BACKOFF_FIRST_S if first_s is None else first_s
    full = min(max(limits.ZONE_BACKOFF_MAX_S, first), first * 2.0 ** min(streak - 1, 30))
    return full * (0.5 + (zlib.crc32(f"{zone}:{streak}".encode()) & 0xFFFF) / 0x1FFFE)


def odds(zone: Zone, now: float) -> float:
    """How likely the next try is granted. Old evidence fades towards an even chance."""
    faded = math.exp2(-max(0.0, now - zone.tried_at) / EVIDENCE_HALF_LIFE_S)
    return (zone.grants * faded + PRIOR / 2) / ((zone.grants + zone.refusals) * faded + PRIOR)


def useful_share(zone: Zone) -> float:
    """The share of a granted slice's time that is work and not waiting for it to be ready.

    Only slices that were taken back have a known life, so it counts by how many of the granted ones were: one
    early preemption among many grants says little.
    """
    if zone.life_s is None or zone.ready_s is None:
        return 1.0
    taken_back = min(1.0, zone.losses / (zone.grants + PRIOR))
    span = zone.life_s + zone.ready_s
    return 1.0 - taken_back * (zone.ready_s / span if span > 0 else 0.0)


def worth(zone: Zone, usd_per_chip_hour: float | None, now: float) -> float:
    """Useful work to expect of one try, per unit of money."""
    return odds(zone, now) * useful_share(zone) / (usd_per_chip_hour or 1.0)


def slow_after_s(zone: Zone) -> float:
    """How long a creation may take in a zone before it is called slow, by what others took there."""
    if zone.ready_s is None:
        return limits.SLOW_UNKNOWN_S
    return max(limits.SLOW_LEAST_S, limits.SLOW_TIMES * zone.ready_s)


def patience_s(zone: Zone, slice: Slice) -> float:
    """How long a creation is waited for before it is given up. A place in a line is not: others are behind it."""
    wish = slice.cloud
    if wish is not None and wish.in_line:
        return max(limits.CREATE_TIMEOUT_S, (wish.wait_s or 0.0) + limits.ZONE_BACKOFF_FIRST_S)
    # What others took counts from the request: of one not made yet, or of unknown date, it says nothing.
    if zone.ready_s is None or slice.asked_at is None:
        return limits.CREATE_TIMEOUT_S
    usual = max(limits.CREATE_TIMEOUT_LEAST_S, limits.CREATE_TIMEOUT_TIMES * zone.ready_s)
    return min(limits.CREATE_TIMEOUT_S, usual)


def zone_of(snapshot: Snapshot, pool: Pool, zone: str) -> Zone:
    """What is known of a pool's zone; nothing yet, if it was never tried."""
    fresh = untried(pool, zone)
    return snapshot.zones.get(fresh.id, fresh)


def open_at(snapshot: Snapshot, pool: Pool, zone: str) -> float:
    """When the zone's back-off ends; in the past, or 0, when it may be tried now; never while it cannot be seen."""
    if (pool.provider, zone) in snapshot.witness.mute:
        return math.inf
    return zone_of(snapshot, pool, zone).backoff_until


def unseen(snapshot: Snapshot, pool: Pool, zones: Sequence[str]) -> Reason:
    """Why a pool gets nothing from zones none of which can be seen."""
    mute = {zone: snapshot.witness.mute[pool.provider, zone] for zone in zones}
    longest = max(mute, key=lambda zone: (mute[zone].seconds, zone))
    told = muteness(longest, mute[longest]) + (f", and so it is in {len(mute) - 1} more" if len(mute) > 1 else "")
    return Reason(
        code="zone_mute",
        sentence=f"pool {pool.name} makes nothing where nothing can be seen: {told}",
        numbers={"seconds": mute[longest].seconds, "zones": len(mute)},
        advice=f"{mute_advice(mute[longest])}; other zones for pool {pool.name} would do meanwhile",
    )


def muteness(zone: str, mute: Mute) -> str:
    """In one line what is known of a zone that cannot be listed."""
    if mute.denied:
        return f"the API of zone {zone} has refused for {mute.seconds:.0f} s: {mute.said[:WHY_CHARACTERS]}"
    said = f" (last: {mute.said[:WHY_CHARACTERS]})" if mute.said else ""
    return f"the API of zone {zone} has not answered for {mute.seconds:.0f} s{said}"


def mute_advice(mute: Mute) -> str:
    """What somebody can do about it."""
    if mute.denied:
        return "give the server's account the right to list, create and delete TPUs there"
    return "see whether the server reaches the API, and what the provider says of it"


def rank(snapshot: Snapshot, pool: Pool, now: float, ahead: int = 0) -> list[str]:
    """The pool's zones, best first; those in back-off are among them.

    Zones never tried come first, as the pool names them. `ahead` counts tries whose outcome is not learned yet, so
    that of several slices asked for at once not all go exploring.
    """
    known = [zone_of(snapshot, pool, zone) for zone in pool.zones]
    order = {zone.zone: number for number, zone in enumerate(known)}
    fresh = [zone for zone in known if not zone.tries]
    tried = [zone for zone in known if zone.tries]
    value = {zone.zone: worth(zone, pool.usd_per_chip_hour, now) for zone in tried}
    tried.sort(key=lambda zone: (-value[zone.zone], order[zone.zone]))
    explored = _explored(tried, value, 1.0 / (pool.usd_per_chip_hour or 1.0), now, ahead)
    if explored is not None:
        tried.remove(explored)
        tried.insert(0, explored)
    return [zone.zone for zone in (*fresh, *tried)]


def _explored(tried: list[Zone], value: dict[str, float], best_possible: float, now: float, ahead: int) -> Zone | None:
    """The zone whose turn it is to be tried although it does not look best; the more to gain, the more often."""
    if not tried or best_possible <= EXPLORE_GAIN * value[tried[0].zone]:
        return None
    every = max(EXPLORE_EVERY_MIN, round(EXPLORE_EVERY * value[tried[0].zone] / best_possible))
    turn = ahead + sum(zone.tries for zone in tried)
    if turn % every != every - 1:
        return None
    stale = [zone for zone in tried[1:] if zone.backoff_until <= now]
    return min(stale, key=lambda zone: zone.tried_at, default=None)
