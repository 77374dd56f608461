"""The registry is whole, a report counts premises, and no history, however odd, makes a rule raise."""

from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.domain.invariants import rules
from penstock.domain.invariants.history import History, Record
from penstock.domain.invariants.indexed import Indexed
from penstock.domain.invariants.story import LINES_MAX, story
from penstock.domain.lifecycle import TABLES
from penstock.domain.nouns import Event
from tests.unit.domain.invariants.scribe import Scribe

REFERENCE = Path(__file__).parents[4] / "docs" / "reference"
LANDED = 3


def lawful_run() -> Scribe:
    """A little of everything that a healthy installation does."""
    scribe = Scribe()
    scribe.commit("leader.elected", "leader", epoch=1, holder="c1")
    scribe.queue_created()
    scribe.commit("team.created", "red", limit_chips=64)
    scribe.slice("s1")
    scribe.slice("s2", hosts=2)
    scribe.job("j1", key="k1", outputs=("model",))
    scribe.call("submit", "unknown", key="k1", body_hash="h", team="red", answer={})
    scribe.placed("j1", "a1", "s1")
    scribe.started("a1")
    scribe.read("j1")
    scribe.read("j1")
    scribe.world("projection", "c1", equal=True)
    scribe.heal()
    scribe.world("vm.preempted", "s1", provider_id="vm-s1")
    scribe.wait(16.0)
    scribe.requeued("a1", "preempted")
    scribe.commit("slice.preempted", "s1", why="preempted")
    scribe.slice_deleted("s1")
    scribe.placed("j1", "a2", "s2")
    scribe.started("a2")
    scribe.ticks(10)
    scribe.world("why", "j1", code="running", as_of=scribe.t)
    scribe.succeeded("a2")
    scribe.job("j2")
    scribe.cancelled("j2")
    scribe.commit("job.cancelled", "j2")
    scribe.ticks(110)
    return scribe


def test_a_lawful_run_keeps_every_rule() -> None:
    report = lawful_run().check()
    assert report.violations == []
    assert report.holds
    exercised = {name for name, count in report.premises.items() if count}
    assert exercised >= {"S0", "S1", "S2", "S3", "S4", "S5", "S6", "S8", "S9", "S10", "S11", "S12", "S13", "S14"}
    assert exercised >= {"S15", "S20", "L1", "L2", "L3", "L4", "L8", "L12"}


def test_every_rule_of_the_list_is_registered() -> None:
    names = [f"S{number}" for number in range(23)] + [f"L{number}" for number in range(1, 13)]
    assert list(rules.RULES) == names
    to_come = {rule.name for rule in rules.RULES.values() if rule.function is None}
    assert to_come == {"L5"}
    assert all(rules.RULES[name].issue > LANDED for name in to_come)


def test_a_function_answers_for_its_own_rule() -> None:
    for rule in rules.RULES.values():
        if rule.function is not None:
            finding = rule.function(Indexed(History()))
            assert (finding.rule, finding.premises, finding.violations) == (rule.name, 0, [])


def test_the_reference_has_a_row_for_every_rule() -> None:
    rows = [line for line in (REFERENCE / "rules.md").read_text().splitlines() if line.startswith("| ")]
    cells = {row.split("|")[1].strip(): [cell.strip() for cell in row.split("|")[2:-1]] for row in rows}
    for rule in rules.RULES.values():
        assert rule.name in cells, f"docs/reference/rules.md has no row for {rule.name}"
        assert cells[rule.name][-1] == str(rule.issue), f"{rule.name}: docs/reference/rules.md names another issue"


def test_violations_name_the_rule_and_the_entity() -> None:
    scribe = lawful_run()
    scribe.commit("job.failed", "j1")
    report = scribe.check()
    assert not report.holds
    assert {violation.rule for violation in report.violations} == {"S3", "S4"}
    assert str(report.violations[0]).startswith("S3 job j1 at seq ")


def test_check_takes_the_rules_it_is_told() -> None:
    assert set(rules.check(History(), rules=["S1", "L1", "L5"]).premises) == {"S1", "L1"}
    with pytest.raises(KeyError):
        rules.check(History(), rules=["S99"])


def test_missing_premises() -> None:
    totals = rules.total_premises([lawful_run().check(), lawful_run().check()])
    assert totals["S8"] == 2
    assert totals["S17"] == 0
    missing = rules.missing_premises(totals, LANDED)
    assert "S7" in missing
    assert "S8" not in missing
    assert "S17" not in missing
    assert "L11" not in missing
    assert "S17" not in rules.missing_premises(totals, 2, where="process")
    process = rules.missing_premises(totals, LANDED, where="process")
    assert process == ["S17", "S18", "S19", "S21", "S22", "L10"]
    assert rules.missing_premises(totals, LANDED, where="bench") == ["L11"]
    assert rules.missing_premises({}, 1) == []


# --- stories ---
def test_a_story_tells_all_three_histories_in_order() -> None:
    told = story(lawful_run().history, "job", "j1").splitlines()
    assert told[0].startswith("story of job j1 (")
    kinds = [line.split()[3] for line in told[1:] if "left out" not in line]
    assert kinds[0] == "job.created"
    for kind in ("submit.ok", "attempt.created", "proc.started", "read.ok", "heal", "object.put", "job.succeeded"):
        assert kind in kinds
    assert not any("j2" in line for line in told)
    seqs = [int(line.split()[0]) for line in told[1:] if "left out" not in line]
    assert seqs == sorted(seqs)


def test_stories_of_attempts_and_slices() -> None:
    history = lawful_run().history
    attempt = story(history, "attempt", "a2")
    assert "slice.bound s2" in attempt
    assert "job.succeeded j1" in attempt
    slice = story(history, "slice", "s1")
    assert "vm.preempted s1" in slice
    assert "attempt.closed a1" in slice


def test_a_long_story_is_cut_in_the_middle() -> None:
    scribe = Scribe()
    scribe.job("j1")
    for _ in range(200):
        scribe.commit("job.edited", "j1", tags=["x" * 500])
    scribe.commit("job.failed", "j1")
    told = story(scribe.history, "job", "j1").splitlines()
    assert len(told) == LINES_MAX
    assert "left out" in "".join(told)
    assert "job.created" in told[1]
    assert "job.failed" in told[-1]
    assert max(len(line) for line in told) <= 150


def test_a_story_tells_a_reason_once() -> None:
    scribe = Scribe()
    scribe.job("j1")
    for code in ("quota", "quota", "stockout", "stockout", "quota"):
        scribe.world("why", "j1", code=code, as_of=scribe.t)
        scribe.wait(5.0)
    assert story(scribe.history, "job", "j1").count(" why ") == 3


def test_a_story_of_nothing() -> None:
    assert story(History(), "job", "j1") == "story of job j1: nothing names it"


# --- nothing raises ---
IDS = st.sampled_from(["a", "b", "red", "r1/0", "runs/r1/0", ""])
KINDS = st.sampled_from(
    [
        *sorted({kind for table in TABLES.values() for _, kind in table}),
        *[
            "team.created",
            "pool.created",
            "pool.edited",
            "queue.created",
            "queue.edited",
            "queue.charged",
            "quota.limit_set",
        ],
        *["control.edited", "leader.elected", "zone.learned", "odd"],
    ]
)
WORLD_KINDS = st.sampled_from(
    [
        "vm.created",
        "vm.ready",
        "vm.preempted",
        "vm.deleted",
        "provider.call",
        "object.put",
        "object.deleted",
        "proc.started",
        "proc.exited",
        "agent.heard",
        "agent.silent",
        "fault",
        "heal",
        "store.down",
        "store.up",
        "controller.started",
        "controller.crashed",
        "tick",
        "why",
        "projection",
        "bench",
        "shard.planned",
        "shard.claimed",
        "shard.committed",
        "dataset.complete",
        *["owned", "granted", "acted", "log.written", "log.taken", "secret.planted", "sink.scanned", "audit.line"],
        *["replayed", "tree.sent", "tree.found", "server.told", "server.gone"],
    ]
)
VERBS = ("submit", "cancel", "read", "answer", "change", "log.read")
CLIENT_KINDS = st.sampled_from([f"{v}.{o}" for v in VERBS for o in ("invoke", "ok", "fail")])
NAMES = st.sampled_from(
    [
        "job",
        "attempt",
        "replica",
        "slices",
        "slice",
        "provider_id",
        "team",
        "queue",
        "key",
        "outputs",
        "chips",
        "hosts",
        "cause",
        "clean",
        "accelerators",
        "accelerator",
        "after",
        "race",
        "pool",
        "host",
        "world_size",
        "fence",
        "verb",
        "outcome",
        "label",
        "units",
        "manifest",
        "generation",
        "actions",
        "epoch",
        "code",
        "as_of",
        "call",
        "found",
        "limit_chips",
        "scope",
        "name",
        "weight",
        "quota_chips",
        "timeout_s",
        "backfilled",
        "maintenance",
        "rows",
        *[
            "teams",
            "marks",
            "route",
            "digest",
            "parts",
            "bytes",
            "sha256",
            "secret",
            "tree",
            "server",
            "what",
            "entity",
        ],
        *["id", "principal", "rejected", "events", "marker_bytes", "host_missing", "home"],
    ]
)
VALUES = st.one_of(
    IDS,
    st.none(),
    st.booleans(),
    st.integers(-2, 5),
    st.floats(-5, 5),
    st.sampled_from(["create", "delete", "ok", "preempted", "user_error", "v5e-8", "infeasible", "cancelled"]),
    st.lists(
        st.one_of(IDS, st.integers(0, 3), st.tuples(IDS, IDS), st.lists(st.integers(0, 5), max_size=3)), max_size=3
    ),
)
BODIES = st.dictionaries(NAMES, VALUES, max_size=10)
EVENTS = st.builds(
    lambda seq, at, kind, id, version, epoch, fence, body: Event(
        seq=seq, at=at, kind=kind, entity=kind.partition(".")[0], id=id, version=version, actor="",
        epoch=epoch, fence=fence, body=body,
    ),
    st.integers(0, 60), st.floats(0, 9000), KINDS, IDS, st.integers(0, 4), st.integers(0, 3), st.integers(0, 4), BODIES,
)  # fmt: skip


def records(kinds: st.SearchStrategy[str]) -> st.SearchStrategy[Record]:
    return st.builds(
        lambda order, seq, t, kind, subject, body: Record(
            order=order, seq=seq, t=t, kind=kind, subject=subject, body=body
        ),
        st.integers(0, 90), st.integers(0, 60), st.floats(0, 9000), kinds, IDS, BODIES,
    )  # fmt: skip


@given(
    st.lists(EVENTS, max_size=40),
    st.lists(records(CLIENT_KINDS), max_size=15),
    st.lists(records(WORLD_KINDS), max_size=30),
)
def test_no_history_makes_a_rule_raise(events: list[Event], clients: list[Record], world: list[Record]) -> None:
    history = History(events=events, clients=clients, world=world)
    report = rules.check(history)
    assert all(count >= 0 for count in report.premises.values())
    assert len(story(history, "job", "a").splitlines()) <= LINES_MAX


@given(st.randoms(use_true_random=False), st.integers(0, 30))
def test_no_order_of_a_lawful_run_makes_a_rule_raise(random: Random, dropped: int) -> None:
    history = lawful_run().history
    order = list(range(1, len(history.events) + 1))
    random.shuffle(order)
    shuffled = [
        Event(
            seq=seq, at=event.at, kind=event.kind, entity=event.entity, id=event.id, version=event.version,
            actor=event.actor, epoch=event.epoch, fence=event.fence, body=event.body,
        )
        for seq, event in zip(order, history.events, strict=True)
    ]  # fmt: skip
    report = rules.check(History(events=shuffled[dropped:], clients=history.clients, world=history.world[dropped:]))
    assert report.violations or order == sorted(order)
