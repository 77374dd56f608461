"""How zones are learned and ranked, and a small simulation that shows what the learned order is worth."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable

import msgspec
import pytest

from penstock.domain import limits
from penstock.domain.nouns import Pool, Zone
from penstock.planner import zones
from penstock.planner.snapshot import Snapshot
from penstock.planner.zones import Outcome, backoff_s, learn, odds, rank, useful_share, worth
from tests.planner.live import NOW, pool_with, world

NEW = Zone(provider="fake", zone="a", accelerator="v4-8", spot=False)


def after(outcomes: str, zone: Zone = NEW) -> Zone:
    """What is known after grants (g), refusals (r) and losses (l), spaced so that no back-off overlaps."""
    words: dict[str, Outcome] = {"g": "granted", "r": "refused", "l": "lost"}
    now = zone.tried_at
    for letter in outcomes:
        now += limits.ZONE_BACKOFF_MAX_S
        zone = learn(zone, words[letter], now)
    return zone


def known(zone: str, **changes: object) -> Zone:
    fresh = Zone(provider="fake", zone=zone, accelerator="v4-8", spot=False, tries=1, tried_at=NOW)
    return msgspec.structs.replace(fresh, **changes)


# --- learning ---
def test_a_refusal_backs_off_shortly_and_a_grant_clears_it() -> None:
    refused = learn(NEW, "refused", NOW)
    first = limits.ZONE_BACKOFF_FIRST_S
    assert NOW + first / 2 <= refused.backoff_until <= NOW + first
    granted = learn(refused, "granted", NOW + 20)
    assert (granted.backoff_until, granted.streak, granted.tries) == (0.0, 0, 2)


@pytest.mark.parametrize("streak", [1, 2, 3, 5, 6, 7, 50, 5000])
def test_back_off_doubles_up_to_its_limit(streak: int) -> None:
    full = min(limits.ZONE_BACKOFF_MAX_S, limits.ZONE_BACKOFF_FIRST_S * 2.0 ** min(streak - 1, 60))
    assert full / 2 <= backoff_s("z", streak) <= full


def test_jitter_differs_between_zones_and_not_between_replays() -> None:
    waits = {backoff_s(f"z{number}", 3) for number in range(20)}
    assert len(waits) > 15
    assert backoff_s("z", 3) == backoff_s("z", 3)


def test_quota_and_permission_back_off_longer() -> None:
    refused = learn(NEW, "refused", NOW, refuse_s=300.0)
    assert 150.0 <= refused.backoff_until - NOW <= 300.0
    assert learn(NEW, "refused", NOW, refuse_s=3600.0).backoff_until - NOW >= 1800.0


def test_refusals_of_one_burst_count_once() -> None:
    zone = NEW
    for number in range(50):
        zone = learn(zone, "refused", NOW + number * 0.1)
    assert (zone.streak, zone.refusals, zone.tries) == (1, 1.0, 50)
    assert zone.backoff_until <= NOW + limits.ZONE_BACKOFF_FIRST_S


def test_a_flip_of_rates_is_followed_within_twenty_tries() -> None:
    good = after("g" * 200)
    assert odds(good, good.tried_at) > 0.9
    bad = after("r" * 20, good)
    assert odds(bad, bad.tried_at) < 0.1
    again = after("g" * 5, bad)
    assert odds(again, again.tried_at) > 0.8


def test_evidence_fades_towards_an_even_chance() -> None:
    bad = after("rrrr")
    later = [odds(bad, bad.tried_at + hours * 3600.0) for hours in (0, 1, 5, 1000)]
    assert later == sorted(later)
    assert later[-1] == pytest.approx(0.5)


def test_odds_do_not_move_when_the_clock_jumps_back() -> None:
    zone = after("grg")
    assert odds(zone, zone.tried_at - 1e6) == odds(zone, zone.tried_at)


def test_times_are_smoothed() -> None:
    zone = learn(learn(NEW, "granted", NOW, ready_s=100.0), "granted", NOW, ready_s=200.0)
    assert zone.ready_s == pytest.approx(130.0)
    zone = learn(learn(zone, "lost", NOW, life_s=1000.0), "lost", NOW, life_s=2000.0)
    assert zone.life_s == pytest.approx(1300.0)
    assert learn(zone, "lost", NOW).life_s == zone.life_s


def test_a_loss_is_no_try_and_no_back_off() -> None:
    zone = learn(after("gg"), "lost", NOW, life_s=30.0)
    assert (zone.tries, zone.backoff_until, zone.losses) == (2, 0.0, 1.0)


def test_one_early_preemption_among_many_grants_says_little() -> None:
    steady = msgspec.structs.replace(after("g" * 20), ready_s=300.0)
    unlucky = learn(steady, "lost", NOW, life_s=60.0)
    always = msgspec.structs.replace(unlucky, losses=10.0)
    assert useful_share(steady) == 1.0
    assert useful_share(unlucky) > 0.75
    assert useful_share(always) == pytest.approx(60.0 / 360.0)


# --- ranking ---
def ranked(*zones_known: Zone, ahead: int = 0, pool: Pool | None = None) -> list[str]:
    pool = pool or pool_with()
    snapshot = world(pool)
    for zone in zones_known:
        snapshot.put_zone(zone)
    return rank(snapshot, pool, NOW, ahead)


def test_zones_never_tried_come_first_as_named() -> None:
    assert ranked() == ["a", "b", "c"]
    assert ranked(known("a", grants=3.0)) == ["b", "c", "a"]


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        ({"grants": 3.0, "refusals": 1.0}, {"grants": 1.0, "refusals": 3.0}),
        (
            {"grants": 2.0, "losses": 2.0, "life_s": 9000.0, "ready_s": 300.0},
            {"grants": 2.0, "losses": 2.0, "life_s": 600.0, "ready_s": 300.0},
        ),
        (
            {"grants": 2.0, "losses": 2.0, "life_s": 600.0, "ready_s": 100.0},
            {"grants": 2.0, "losses": 2.0, "life_s": 600.0, "ready_s": 900.0},
        ),
    ],
)
def test_odds_life_and_time_to_ready_decide(better: dict[str, object], worse: dict[str, object]) -> None:
    assert ranked(known("a", **worse), known("b", **better), known("c", refusals=9.0)) == ["b", "a", "c"]


def test_equals_keep_the_pools_order() -> None:
    assert ranked(known("c", grants=1.0), known("b", grants=1.0), known("a", grants=1.0)) == ["a", "b", "c"]


def test_worth_is_per_money() -> None:
    zone = known("a", grants=3.0)
    assert worth(zone, 2.0, NOW) == pytest.approx(worth(zone, None, NOW) / 2)


@pytest.mark.parametrize(("refusals", "every"), [(1.0, 6), (9.0, 3)])
def test_now_and_then_the_zone_untried_for_longest_goes_first(refusals: float, every: int) -> None:
    """The best known zone is worth 0.72 or 0.28 of what a perfect one would be: 8 x 0.72 is about 6."""
    facts = (
        known("a", grants=3.0, refusals=refusals, tries=every),
        known("b", refusals=30.0, tried_at=NOW - 50.0),
        known("c", refusals=30.0, tried_at=NOW - 90.0),
    )
    first = [ranked(*facts, ahead=ahead)[0] for ahead in range(2 * every)]
    assert [zone == "c" for zone in first] == [(ahead + 2) % every == every - 1 for ahead in range(2 * every)]
    assert set(first) == {"a", "c"}


def test_a_zone_in_back_off_is_not_explored() -> None:
    facts = (
        known("a", grants=3.0, refusals=1.0, tries=3),
        known("b", refusals=3.0, tried_at=NOW - 50.0),
        known("c", refusals=3.0, tried_at=NOW - 90.0, backoff_until=NOW + 1.0),
    )
    assert ranked(*facts)[0] == "b"


def test_nothing_is_explored_while_the_best_can_hardly_be_beaten() -> None:
    facts = (known("a", grants=4.0, tries=5), known("b", refusals=3.0), known("c", refusals=3.0))
    assert {ranked(*facts, ahead=ahead)[0] for ahead in range(16)} == {"a"}


# --- what it is worth ---
REFUSED_S = 300.0  #: a queued request that ends without capacity
READY_S = 120.0
RATES = {"good": 0.9, "fair": 0.5, "bad": 0.1}
Order = Callable[[Snapshot, Pool, float], list[str]]


class Market:
    """Three zones of hidden rates; one slice is asked for at a time, in the first zone of an order not in back-off."""

    def __init__(self, seed: int, order: Order) -> None:
        self._chance = random.Random(seed)
        self._order = order
        self.rates = dict(RATES)
        self.pool = pool_with(zones=tuple(self._chance.sample(sorted(RATES), 3)), spot=True)
        self.snapshot = world(self.pool)
        self.now = 0.0
        self.tries = 0
        self.granted = 0

    def ask(self) -> None:
        order = self._order(self.snapshot, self.pool, self.now)
        waits = {zone: zones.open_at(self.snapshot, self.pool, zone) for zone in order}
        self.now = max(self.now, min(waits.values()))
        zone = next(zone for zone in order if waits[zone] <= self.now)
        granted = self._chance.random() < self.rates[zone]
        self.now += READY_S if granted else REFUSED_S
        self.tries += 1
        self.granted += granted
        before = zones.zone_of(self.snapshot, self.pool, zone)
        self.snapshot.put_zone(learn(before, "granted" if granted else "refused", self.now, ready_s=READY_S))

    def acquire(self, count: int) -> None:
        while self.granted < count:
            self.ask()

    def favourite(self) -> str:
        return max(
            self.pool.zones, key=lambda zone: worth(zones.zone_of(self.snapshot, self.pool, zone), None, self.now)
        )


def as_named(_snapshot: Snapshot, pool: Pool, _now: float) -> list[str]:
    return list(pool.zones)


def test_the_learned_order_beats_a_fixed_one_by_a_quarter() -> None:
    """Both use the same back-off: what is compared is the order alone, over fixed orders drawn at random."""
    times: dict[str, list[float]] = {"learned": [], "fixed": []}
    for seed in range(50):
        for name, order in (("learned", rank), ("fixed", as_named)):
            market = Market(seed, order)
            market.acquire(60)
            times[name].append(market.now)
    assert statistics.mean(times["learned"]) <= 0.75 * statistics.mean(times["fixed"])


def test_a_flip_is_recovered_from_within_twenty_attempts() -> None:
    attempts = []
    for seed in range(50):
        market = Market(seed, rank)
        market.acquire(60)
        market.rates = {"good": 0.1, "fair": 0.5, "bad": 0.9}
        before = market.tries
        while market.favourite() != "bad" and market.tries < before + 100:
            market.ask()
        attempts.append(market.tries - before)
    assert statistics.mean(attempts) <= 10
    assert max(attempts) <= 20


# --- slices that cannot be set up ---
def test_what_fails_to_be_set_up_again_and_again_rests_long_and_keeps_its_words() -> None:
    zone, now = NEW, NOW
    for number in range(1, limits.SETUP_FAILURES_MAX):
        zone = learn(zone, "broken", now, why=f"log {number}")
        assert zone.broken == number
        assert 0 < zone.backoff_until - now <= 2**number * limits.ZONE_BACKOFF_FIRST_S
        now = zone.backoff_until
    zone = learn(zone, "broken", now, why="log at last")
    assert zone.backoff_until == now + limits.SETUP_REST_S
    assert zone.why == "log at last"
    assert (zone.grants, zone.refusals, zone.streak) == (0.0, 0.0, 0), "it says nothing of the zone's odds"


def test_slices_that_fail_together_count_once() -> None:
    zone = learn(NEW, "broken", NOW, why="first")
    again = learn(zone, "broken", NOW + 1, why="second")
    assert (again.broken, again.backoff_until) == (1, zone.backoff_until)


def test_a_grant_or_a_change_of_the_pool_forgives() -> None:
    zone = learn(NEW, "broken", NOW, why="first")
    granted = learn(zone, "granted", NOW + 60)
    assert (granted.broken, granted.why, granted.backoff_until) == (0, "", 0.0)
    forgiven = zones.forgiven(zone)
    assert (forgiven.broken, forgiven.why, forgiven.backoff_until) == (0, "", 0.0)
