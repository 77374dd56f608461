"""Limits: every number is in the table under its own name, with a unit and a reason; and they fit each other."""

from __future__ import annotations

from penstock.domain import limits


def test_the_table_holds_every_constant_under_its_own_name() -> None:
    constants = {name: value for name, value in vars(limits).items() if name.isupper() and name not in ("LIMITS", "N")}
    assert {row.name: row.value for row in limits.LIMITS} == constants
    assert len(limits.LIMITS) == len(constants)


def test_every_row_has_a_unit_and_a_reason() -> None:
    for row in limits.LIMITS:
        assert row.unit
        assert len(row.reason.split()) >= 3, row.name
        assert isinstance(row.value, float) == (row.unit == "s"), row.name
        assert ("_S" in row.name.removeprefix("TAGS")) >= (row.unit == "s"), row.name


def test_a_dead_leader_is_replaced_within_ten_seconds() -> None:
    poll_s = limits.LEADER_RENEW_S / 2
    assert limits.LEADER_TTL_S + 2 * poll_s <= 10.0
    assert limits.LEADER_TTL_S >= 3 * limits.LEADER_RENEW_S


def test_the_clocks_of_agents_fit_into_each_other() -> None:
    assert limits.SILENCE_S >= 3 * limits.SYNC_S
    assert limits.FENCE_WAIT_S > 2 * limits.FENCE_POLL_S
    assert limits.CUSTODY_S > 10 * limits.SILENCE_S
    assert limits.GRACE_S + limits.TICK_S < limits.CANCEL_DEADLINE_S < 60.0


def test_a_late_create_is_still_swept() -> None:
    assert limits.TOMBSTONE_S >= limits.CREATE_TIMEOUT_S + 15 * 60
    assert limits.GONE_LISTINGS_APART_S >= 60.0
    assert 2 * limits.GONE_LISTINGS_APART_S + 2 * limits.LIST_EVERY_S < limits.ORPHAN_S
