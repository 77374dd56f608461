"""What there is to place on in one round: idle slices, slices on their way, and room for more.

`planner.admission` makes one `Ground` per round, asks it where a gang fits, and takes, keeps or gives back slices
through it, so that nothing is handed out twice. It knows teams, pools and zones, never quotas or whose turn it is.
All choices are by stable keys: the order in which the snapshot was filled does not matter.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice
from typing import NamedTuple

from penstock.domain import limits
from penstock.domain.nouns import Pool, Resources, Slice
from penstock.planner import slices
from penstock.planner.backfill import Endings
from penstock.planner.snapshot import Snapshot
from penstock.planner.zones import open_at


def idle_from(slice: Slice) -> float:
    """Since when a slice has had nothing to do."""
    return slice.idle_since if slice.idle_since is not None else slice.ready_at or 0.0


def _within(entries: Iterable[tuple[str, ...]], zones: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Those of the coming slices that can appear nowhere but in these zones."""
    return (where for where in entries if all(zone in zones for zone in where))


class Option(NamedTuple):
    """A pool a job may use: `rank` is its accelerator's place in the job's list, `zones` those the job accepts."""

    rank: int
    pool: Pool
    zones: tuple[str, ...]
    only: str | None = None  #: the one slice the job wants


class Fit(NamedTuple):
    """Slices a gang can start on now."""

    slices: tuple[Slice, ...]
    on_kept: bool  #: some of them are kept for another job, which the candidate will not delay


class Gap(NamedTuple):
    """How a job that found no place could get one: slices it keeps, slices coming, slices to ask for, slices short."""

    options: tuple[Option, ...]
    zone: str | None  #: where a gang gathers; None while it has nothing yet
    idle: tuple[Slice, ...]
    spare: int  #: of the idle ones: not needed at the shadow start, when enough others will have become free
    coming: int
    wanted: int
    short: int  #: neither idle, nor coming, nor may they be asked for: a limit is reached
    shadow: float  #: before this the job cannot start


class Bucket:
    """The idle slices of one team in one pool and zone, best first."""

    def __init__(self, idle: Iterable[Slice]) -> None:
        order = sorted(idle, key=lambda one: (one.chips, idle_from(one), one.id), reverse=True)
        self.free = len(order)
        self.kept: dict[str, tuple[float, Slice]] = {}  #: slice -> until when a passer-by may use it
        self._order = order  #: best last, so that taking the best is cheap
        self._warm: dict[str, list[Slice]] = {}
        self._gone: set[str] = set()
        for one in order:
            if one.warm:
                self._warm.setdefault(one.warm, []).append(one)

    def lent(self, end: float) -> list[Slice]:
        """Kept slices that something over by `end` may use meanwhile, best first."""
        return [one for until, one in self.kept.values() if end <= until]

    def best(self, count: int, environment: str, end: float | None = None) -> list[Slice]:
        """Up to `count` slices: warm ones first, then the longest idle; kept ones last, and only with an `end`."""
        chosen: dict[str, Slice] = {}
        for line in ((self._warm.get(environment) or []) if environment else [], self._order):
            while line and line[-1].id in self._gone:
                line.pop()
            for one in reversed(line):
                if len(chosen) == count:
                    break
                if one.id not in self._gone:
                    chosen[one.id] = one
        if end is not None and len(chosen) < count:
            for one in self.lent(end)[: count - len(chosen)]:
                chosen[one.id] = one
        return list(chosen.values())

    def take(self, one: Slice) -> None:
        if self.kept.pop(one.id, None) is None:
            self.free -= 1
            self._gone.add(one.id)

    def keep(self, one: Slice, until: float) -> None:
        self.take(one)
        self.kept[one.id] = (until, one)


def _scopes(one: Slice) -> tuple[tuple[str, str], ...]:
    """The limits a slice counts against."""
    return ("pool", one.pool), ("team", one.team), ("provider", one.provider)


class Ground:
    """Slices and room of one round."""

    def __init__(self, snapshot: Snapshot, now: float, endings: Endings, leaving: set[str]) -> None:
        self._snapshot = snapshot
        self._now = now
        self._endings = endings
        witness = snapshot.witness
        self._unfit = leaving | witness.denied | witness.missing
        self._unfit.update(id for id, silent_s in witness.silent.items() if silent_s >= limits.SILENCE_S)
        self._buckets: dict[tuple[str, str], dict[tuple[str, str], Bucket]] = {}
        self._options: dict[tuple[str, Resources], tuple[Option, ...]] = {}
        self._coming: dict[tuple[str, str], list[tuple[str, ...]]] | None = None
        self._spent: dict[tuple[str, str], int] = defaultdict(int)
        self._full: set[str] = set()
        self._given_back: Counter[str] = Counter()  #: pool -> slices let go in this round
        self._draining = slices.draining_of(snapshot)
        self._idle_left: dict[str, int] = defaultdict(int)
        for (team, _), idle in snapshot.idle.items():
            self._idle_left[team] += len(idle)
        for id in self._unfit:
            slice = snapshot.slices.get(id)
            if slice is not None and slice.usable:
                self._idle_left[slice.team] -= 1
        self._pools: dict[str, list[Pool]] = {}
        self._team_pools: dict[str, list[Pool]] = defaultdict(list)
        for name in sorted(snapshot.pools):
            pool = snapshot.pools[name]
            if not pool.deleted:
                self._pools.setdefault(pool.accelerator, []).append(pool)
                for team in dict.fromkeys((pool.team, *pool.teams)):
                    self._team_pools[team].append(pool)
        self.touched: set[str] = set()  #: slices placed on, kept or given back: nobody else's to release

    # --- what a job may use ---
    def options(self, team: str, resources: Resources) -> tuple[Option, ...]:
        """Pools that could ever hold one gang of the job, best first: accelerator as listed, fewest chips, name."""
        key = (team, resources)
        found = self._options.get(key)
        if found is None:
            found = tuple(self._find_options(team, resources))
            self._options[key] = found
        return found

    def _find_options(self, team: str, resources: Resources) -> Iterator[Option]:
        if resources.slice is not None:
            yield from self._that_slice(team, resources)
            return
        for rank, accelerator in enumerate(resources.accelerators):
            pools = sorted(self._pools.get(accelerator, []), key=lambda pool: (pool.chips, pool.name))
            for pool in pools:
                zones = tuple(z for z in pool.zones if not resources.zones or z in resources.zones)
                if not zones or (team != pool.team and team not in pool.teams):
                    continue
                if resources.pool not in {None, pool.name} or resources.spot not in {None, pool.spot}:
                    continue
                holds = pool.max if pool.per_zone is None else min(pool.max, pool.per_zone)
                if resources.slices > holds or not self._ever_fits(team, pool, resources.slices * pool.chips):
                    continue
                yield Option(rank, pool, zones)

    def _that_slice(self, team: str, resources: Resources) -> Iterator[Option]:
        """The pool of the slice a job asks for by name, while it stays, is the team's and the job is no gang."""
        one = self._snapshot.slices.get(resources.slice or "")
        if one is None or one.team != team or resources.slices != 1 or slices.leaving(self._snapshot, one) is not None:
            return
        pool = self._snapshot.pools.get(one.pool)
        if pool is not None and one.accelerator in resources.accelerators:
            yield Option(0, pool, (one.zone,), one.id)

    def _ever_fits(self, team: str, pool: Pool, chips: int) -> bool:
        """Whether so many chips of a pool can ever be had at once: else it would hold a part for ever."""
        for scope, name in (("team", team), ("provider", pool.provider)):
            most = self._snapshot.ever_free_chips(scope, name, pool)
            if most is not None and chips > most:
                return False
        return True

    def bucket(self, team: str, pool: Pool, zone: str) -> Bucket | None:
        return self._team_buckets(team, pool.accelerator).get((pool.name, zone))

    def _team_buckets(self, team: str, accelerator: str) -> dict[tuple[str, str], Bucket]:
        found = self._buckets.get((team, accelerator))
        if found is None:
            grouped: dict[tuple[str, str], list[Slice]] = {}
            for slice in self._snapshot.idle.get((team, accelerator), {}).values():
                held = slice.id in self._unfit or slice.id in self._snapshot.holders
                if not held and slices.leaving(self._snapshot, slice) is None:
                    grouped.setdefault((slice.pool, slice.zone), []).append(slice)
            found = {key: Bucket(grouped[key]) for key in sorted(grouped)}
            self._buckets[team, accelerator] = found
        return found

    def set_aside(self, slice: Slice) -> bool:
        """Take a reserved slice out of what all share, before anything is placed; False if it is not fit for use."""
        fit = slice.id not in self._unfit
        self.touched.add(slice.id)
        self._unfit.add(slice.id)
        self._idle_left[slice.team] -= fit
        return fit

    # --- placing ---
    def fit(self, team: str, options: Sequence[Option], count: int, environment: str, end: float | None) -> Fit | None:
        """The best `count` slices of one pool and zone. With `end`, kept slices serve where no others do.

        The accelerator the job lists first comes first, even on kept slices: the job ahead is not delayed by it.
        """
        if self._idle_left[team] < count:
            return None
        for _, same in groupby(options, key=lambda option: option.rank):
            alike = list(same)
            for until in (None, end) if end is not None else (None,):
                best: tuple[tuple[int, int, int, float, str], list[Slice]] | None = None
                for option in alike:
                    found = self._best_zone(team, option, count, environment, until)
                    if found is not None and (best is None or found[0] < best[0]):
                        best = found
                if best is not None:
                    return Fit(tuple(best[1]), until is not None)
        return None

    def _best_zone(
        self, team: str, option: Option, count: int, environment: str, until: float | None
    ) -> tuple[tuple[int, int, int, float, str], list[Slice]] | None:
        best: tuple[tuple[int, int, int, float, str], list[Slice]] | None = None
        for zone in option.zones:
            bucket = self.bucket(team, option.pool, zone)
            if bucket is None:
                continue
            there = bucket.free + (len(bucket.lent(until)) if until is not None else 0)
            if there < count:
                continue
            chosen = bucket.best(count if option.only is None else there, environment, until)
            if option.only is not None:
                chosen = [one for one in chosen if one.id == option.only]
                if not chosen:
                    continue
            warm = sum(1 for one in chosen if environment and one.warm == environment)
            oldest = min(idle_from(one) for one in chosen)
            # After warmth the smallest group that will do, so that larger ones stay whole for gangs.
            key = (option.pool.chips, -warm, there, oldest, chosen[0].id)
            if best is None or key < best[0]:
                best = (key, chosen)
        return best

    def take(self, taken: Iterable[Slice]) -> None:
        for slice in taken:
            self._idle_left[slice.team] -= 1
            self._team_buckets(slice.team, slice.accelerator)[slice.pool, slice.zone].take(slice)
            self.touched.add(slice.id)

    def keep(self, kept: Iterable[Slice], until: float) -> None:
        """Set slices aside for a job that waits; others may use them only if they are over by `until`."""
        for slice in kept:
            bucket = self._team_buckets(slice.team, slice.accelerator)[slice.pool, slice.zone]
            if slice.id not in bucket.kept:
                bucket.keep(slice, until)
            self.touched.add(slice.id)

    # --- growing ---
    def room(self, team: str, pool: Pool) -> int:
        """How many more slices of a pool the limits of pool, team and provider allow. Fleets grow by themselves."""
        if pool.per_zone is not None or pool.adopted:
            return 0
        least = math.inf
        for scope in (("pool", pool.name), ("team", team), ("provider", pool.provider)):
            free = self._free(scope)
            if free is not None:
                least = min(least, free // pool.chips)
        return max(0, int(least))

    def _free(self, scope: tuple[str, str]) -> int | None:
        free = self._snapshot.free_chips(*scope)
        return None if free is None else free - self._spent[scope]

    def binding(self, team: str, pool: Pool) -> tuple[str, int, int]:
        """Which limit stops a pool from growing for a team: code, chips used, chips allowed."""
        for code, scope in (
            ("team_limit", ("team", team)),
            ("provider_limit", ("provider", pool.provider)),
        ):
            free, limit = self._free(scope), self._snapshot.limits.get(scope)
            if free is not None and limit is not None and free < pool.chips:
                return code, limit - free, limit
        free, limit = self._free(("pool", pool.name)) or 0, pool.max * pool.chips
        return "pool_at_max", limit - free, limit

    def spend(self, team: str, pool: Pool, count: int) -> None:
        for scope in (("pool", pool.name), ("team", team), ("provider", pool.provider)):
            self._spent[scope] += count * pool.chips

    def any_idle(self, team: str) -> bool:
        return self._idle_left[team] > 0

    def could_lend(self, team: str, options: Sequence[Option], count: int) -> bool:
        """Whether some pool's zone has the slices, be they kept for another: a shorter job might still pass."""
        for option in options:
            for zone in option.zones:
                bucket = self.bucket(team, option.pool, zone)
                if bucket is not None and bucket.free + len(bucket.kept) >= count:
                    return True
        return False

    def fullest(self, team: str, options: Sequence[Option], count: int) -> list[Slice]:
        """Up to `count` idle slices of the pool's zone that has most of them: what a gang in back-off left behind."""
        best: Bucket | None = None
        for option in options:
            for zone in option.zones:
                bucket = self.bucket(team, option.pool, zone)
                if bucket is not None and (best is None or bucket.free > best.free):
                    best = bucket
        return best.best(min(count, best.free), "") if best is not None else []

    def exhausted(self, team: str) -> bool:
        """Nothing of the team's is idle and none of its pools may grow: no job of it can get anything more."""
        if self._idle_left[team] > 0:
            return False
        if team not in self._full and not any(self.room(team, pool) for pool in self._team_pools[team]):
            self._full.add(team)
        return team in self._full

    def coming(self, team: str, pool: Pool, zones: tuple[str, ...]) -> int:
        """Slices on their way for a team in these zones, those promised to earlier jobs left out."""
        entries = self._on_their_way().get((team, pool.name), [])
        return sum(1 for _ in _within(entries, zones))

    def promise(self, team: str, pool: Pool, zones: tuple[str, ...], count: int) -> None:
        entries = self._on_their_way().get((team, pool.name), [])
        if count and entries:
            promised = list(islice(_within(entries, zones), count))
            for where in promised:
                entries.remove(where)

    def _any_coming(self, team: str, pool: Pool, zones: tuple[str, ...]) -> bool:
        """`coming` for one slice: the first found will do, and with hundreds on their way that is what counts."""
        return any(_within(self._on_their_way().get((team, pool.name), []), zones))

    def _on_their_way(self) -> dict[tuple[str, str], list[tuple[str, ...]]]:
        """Per team and pool, where each coming slice may appear; a racing set is one slice in several places."""
        if self._coming is None:
            races: dict[tuple[str, str, str], list[str]] = {}
            for id in sorted(self._snapshot.unsettled):
                slice = self._snapshot.unsettled[id]
                coming = slice.state in slices.UNREADY_SLICE_STATES
                if coming and slices.leaving(self._snapshot, slice) is None:
                    races.setdefault((slice.team, slice.pool, slice.race or id), []).append(slice.zone)
            self._coming = {}
            for (team, pool, _), zones in races.items():
                self._coming.setdefault((team, pool), []).append(tuple(zones))
        return self._coming

    def gather(self, team: str, options: Sequence[Option], count: int) -> Gap:
        """How a gang of `count` that fits nowhere gets its slices; what is coming or asked for is promised to it."""
        gap = self._single(team, options) if count == 1 else self._gang(team, options, count)
        pool = gap.options[0].pool
        if gap.wanted:
            self.spend(team, pool, gap.wanted)
        return gap

    def hold_rest(self, team: str, gap: Gap) -> None:
        """Keep what a full team or provider has left for a job that it is too little for.

        Spent on jobs behind it, by slices made and given back in turn, it would never add up to what the job needs.
        """
        pool = gap.options[0].pool
        for scope in (("team", team), ("provider", pool.provider)):
            free = self._free(scope)
            if free is not None and free < gap.short * pool.chips:
                self._spent[scope] += max(0, free)

    def _single(self, team: str, options: Sequence[Option]) -> Gap:
        for option in options:
            if self._any_coming(team, option.pool, option.zones):
                self.promise(team, option.pool, option.zones, 1)
                return Gap((option,), None, (), 0, 1, 0, 0, self._now)
        growing = tuple(option for option in options if self.room(team, option.pool))
        if growing:
            return Gap(growing, None, (), 0, 0, 1, 0, self._now)
        return Gap(tuple(options), None, (), 0, 0, 0, 1, math.inf)

    def _gang(self, team: str, options: Sequence[Option], count: int) -> Gap:
        """The pool and zone where least is missing, among those where the whole gang can be had if there are any."""
        best: tuple[tuple[bool, float, bool, int, int, int], Option, str, int, int, int] | None = None
        # Without anything to keep nobody asks for the shadow start, and it is not cheap.
        keeps = self.could_lend(team, options, 1)
        for at, option in enumerate(options):
            room = self.room(team, option.pool)
            for where, zone in enumerate(option.zones):
                bucket = self.bucket(team, option.pool, zone)
                idle = bucket.free if bucket is not None else 0
                coming = min(self.coming(team, option.pool, (zone,)), count - idle)
                missing = count - idle - coming
                closed = missing > 0 and open_at(self._snapshot, option.pool, zone) > self._now
                start = 0.0
                if keeps and missing > room:
                    start = self._endings.slices_free_at(option.pool.name, (zone,), missing - room)
                key = (missing > room, start, closed, missing, at, where)
                if best is None or key < best[0]:
                    best = (key, option, zone, coming, missing, room)
        assert best is not None  # a job without options is infeasible and never gathers
        (_, start, closed, *_), option, zone, coming, missing, room = best
        bucket = self.bucket(team, option.pool, zone)
        kept = tuple(bucket.best(bucket.free, "")) if bucket is not None else ()
        self.promise(team, option.pool, (zone,), coming)
        wanted, spare, shadow = min(missing, room), 0, self._now
        if wanted and not kept and not coming:
            whole = tuple(one for one in options if self.room(team, one.pool) >= count)
            return Gap(whole or (option,), None, (), 0, 0, wanted, missing - wanted, self._now)
        if missing > room and kept:
            shadow = start
            if start < math.inf:
                freed = self._endings.freed_by(option.pool.name, zone, team, start)
                spare = min(len(kept), max(0, freed - (missing - wanted)))
            else:
                shadow = self._otherwise(team, option.pool, missing - wanted)
        elif closed and not coming:
            shadow = open_at(self._snapshot, option.pool, zone)
        return Gap((option,), zone, kept, spare, coming, wanted, missing - wanted, shadow)

    def _otherwise(self, team: str, pool: Pool, count: int) -> float:
        """When room for `count` more slices can be expected though their zone will not have them: by pool, or team."""
        start = self._endings.slices_free_at(pool.name, pool.zones, count)
        return start if start < math.inf else self._endings.team_chips_free_at(team, count * pool.chips)

    # --- making room ---
    def clear_way(self, team: str, options: Sequence[Option], gap: Gap) -> list[Slice]:
        """Idle slices to give back so that a pool can grow for the team by what is short; none when that cannot help.

        In the way are, at a full pool, idle slices of other teams or of zones the job refuses; at a full team, the
        team's idle slices the job cannot use; at a full provider, those and whatever stands idle for other teams. They
        go only as far as every limit in the way can be met by it.
        """
        count, best = gap.short, gap.options[0]
        usable = {(option.pool.name, zone) for option in options for zone in option.zones}
        if gap.zone is not None or gap.wanted:
            # Room is made only where the gang gathers: there it is kept for it, elsewhere the next job would take it.
            options = [best]
            if gap.zone and gap.idle and self._endings.slices_free_at(best.pool.name, (gap.zone,), count) == math.inf:
                # Its zone will never have enough by itself: what stands idle in other zones is in its way too.
                usable = {(best.pool.name, gap.zone)}
        for option in options:
            pool = option.pool
            closed = all(open_at(self._snapshot, pool, zone) > self._now for zone in option.zones)
            if closed or pool.per_zone is not None:
                continue
            chosen: dict[str, Slice] = {}
            for scope in (("pool", pool.name), ("team", team), ("provider", pool.provider)):
                free = self._free(scope)
                if free is None:
                    continue
                free += sum(one.chips for one in chosen.values() if scope in _scopes(one))
                for one in self._in_the_way(scope, pool, usable, team):
                    if free >= count * pool.chips:
                        break
                    if one.id not in chosen and self._spare(one, chosen):
                        chosen[one.id] = one
                        free += one.chips
                if free < pool.chips:
                    chosen = {}
                    break
            if chosen:
                self.take(chosen.values())
                self._given_back.update(one.pool for one in chosen.values())
                return list(chosen.values())
        return []

    def _spare(self, one: Slice, chosen: dict[str, Slice]) -> bool:
        """Whether a slice's pool may lose it: below its minimum, and in a fleet, it would only be made again."""
        pool = self._snapshot.pools[one.pool]
        if pool.per_zone is not None:
            return False
        going = self._given_back[pool.name] + sum(1 for other in chosen.values() if other.pool == pool.name)
        return slices.held(self._snapshot, pool.name) - self._draining[pool.name] - going > min(pool.min, pool.max)

    def _in_the_way(self, scope: tuple[str, str], pool: Pool, usable: set[tuple[str, str]], team: str) -> list[Slice]:
        if scope[0] == "pool":
            holders = [(other, pool.accelerator) for other in sorted({pool.team, *pool.teams})]
        else:
            holders = sorted(key for key in self._snapshot.idle if scope[0] == "provider" or key[0] == team)
        found: list[Slice] = []
        for owner, accelerator in holders:
            for (name, zone), bucket in self._team_buckets(owner, accelerator).items():
                if scope[0] == "pool" and name != pool.name:
                    continue
                if scope[0] == "provider" and self._snapshot.pools[name].provider != pool.provider:
                    continue
                if owner != team or (name, zone) not in usable:
                    found.extend(bucket.best(bucket.free, ""))
        return sorted(found, key=lambda one: (idle_from(one), one.id))
