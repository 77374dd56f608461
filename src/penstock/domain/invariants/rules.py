"""The registry of rules S0–S22 and L1–L12, and the one call that checks a history against them.

Journeys, the simulator, process tests and `tpu doctor` call `check`; the build calls `missing_premises` over the totals
of a whole run, because a rule that was never put to the test proves nothing. What each rule says is in its function
and, in words, in docs/reference/rules.md. It must not look at anything but the history.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import msgspec

from penstock.domain.invariants import (
    liveness,
    liveness_capacity,
    liveness_fairness,
    real_processes,
    safety_capacity,
    safety_clients,
    safety_jobs,
    safety_shards,
)
from penstock.domain.invariants.finding import Finding, Violation
from penstock.domain.invariants.history import History
from penstock.domain.invariants.indexed import Indexed


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """One rule: its name, and the issue from which its premise must occur. Without a function it is yet to come."""

    name: str
    title: str
    issue: int
    function: Callable[[Indexed], Finding] | None = None
    where: str = "sim"  #: the run that must show its premise: "sim", "bench" or "process"


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a check found: premises per rule, and every violation."""

    premises: dict[str, int]
    violations: list[Violation]

    @property
    def holds(self) -> bool:
        return not self.violations


def _rule(
    name: str,
    title: str,
    function: Callable[[Indexed], Finding] | None,
    *,
    issue: int = 2,
    where: str = "sim",
) -> Rule:
    return Rule(name=name, title=title, issue=issue, function=function, where=where)


_ALL: Final = (
    _rule("S0", "the projection is what the events say", safety_jobs.s0_projection),
    _rule("S1", "durable submit", safety_clients.s1_durable_submit),
    _rule("S2", "idempotent submit", safety_clients.s2_idempotent_submit),
    _rule("S3", "legal transitions", safety_jobs.s3_legal_transitions),
    _rule("S4", "terminal absorbs", safety_jobs.s4_terminal_absorbs),
    _rule("S5", "one live attempt", safety_jobs.s5_one_live_attempt),
    _rule("S6", "fenced outputs", safety_jobs.s6_fenced_outputs),
    _rule("S7", "shards exactly once", safety_shards.s7_shards_exactly_once),
    _rule("S8", "success has outputs", safety_jobs.s8_success_has_outputs),
    _rule("S9", "intent before create", safety_capacity.s9_intent_before_create),
    _rule("S10", "one user per slice", safety_capacity.s10_one_user_per_slice),
    _rule("S11", "gang atomic", safety_capacity.s11_gang_atomic),
    _rule("S12", "quota", safety_capacity.s12_quota),
    _rule("S13", "cancel wins", safety_clients.s13_cancel_wins),
    _rule("S14", "safe delete", safety_capacity.s14_safe_delete),
    _rule("S15", "budgets apart", safety_jobs.s15_budgets_apart),
    _rule("S16", "one effective leader", safety_jobs.s16_one_effective_leader),
    _rule("S17", "team walls", real_processes.s17_team_walls, issue=3, where="process"),
    _rule("S18", "logs account for loss", real_processes.s18_logs_account_for_loss, issue=3, where="process"),
    _rule("S19", "no secret at rest", real_processes.s19_no_secret_at_rest, issue=3, where="process"),
    _rule("S20", "read your writes", safety_clients.s20_read_your_writes),
    _rule("S21", "upgrades replay", real_processes.s21_upgrades_replay, issue=3, where="process"),
    _rule("S22", "what was sent is what runs", real_processes.s22_what_was_sent_runs, issue=3, where="process"),
    _rule("L1", "free capacity is used", liveness_capacity.l1_free_capacity_is_used),
    _rule("L2", "silence closes", liveness.l2_silence_closes),
    _rule("L3", "cancel in time", liveness.l3_cancel_in_time),
    _rule("L4", "no leak", liveness_capacity.l4_no_leak),
    _rule("L5", "shards make progress", None, issue=6),
    _rule("L6", "fair share", liveness_fairness.l6_fair_share),
    _rule("L7", "the hopeless end", liveness.l7_hopeless_ends),
    _rule("L8", "quiescence", liveness.l8_quiescence),
    _rule("L9", "store outage", liveness.l9_store_outage),
    _rule("L10", "orderly shutdown", real_processes.l10_orderly_shutdown, issue=3, where="process"),
    _rule("L11", "scale", liveness.l11_scale, where="bench"),
    _rule("L12", "reasons are fresh", liveness.l12_reasons_are_fresh),
)

RULES: Final[Mapping[str, Rule]] = {rule.name: rule for rule in _ALL}


def check(history: History, *, rules: Sequence[str] | None = None) -> Report:
    """Check a history against the named rules, or against all that have a function."""
    indexed = Indexed(history)
    premises: dict[str, int] = {}
    violations: list[Violation] = []
    for name in RULES if rules is None else rules:
        function = RULES[name].function
        if function is None:
            continue
        finding = function(indexed)
        premises[name] = finding.premises
        violations += finding.violations
    return Report(premises=premises, violations=violations)


def total_premises(reports: Iterable[Report]) -> dict[str, int]:
    """How often each rule was put to the test over many histories."""
    totals: Counter[str] = Counter(dict.fromkeys(RULES, 0))
    for report in reports:
        totals.update(report.premises)
    return dict(totals)


def missing_premises(totals: Mapping[str, int], landed_issue: int, *, where: str = "sim") -> list[str]:
    """Rules whose issue has landed but whose premise never occurred in a whole run: each fails the build."""
    return [
        rule.name
        for rule in _ALL
        if rule.issue <= landed_issue and rule.where == where and totals.get(rule.name, 0) == 0
    ]
