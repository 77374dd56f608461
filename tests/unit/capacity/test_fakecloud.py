"""The fake cloud itself: true capacity and quota, and the life of every machine."""

from __future__ import annotations

import asyncio

import pytest

from penstock.capacity.fake import FakeCapacity
from penstock.capacity.fakecloud import GONE
from penstock.ports.capacity import (
    FAILED,
    PREEMPTED,
    READY,
    REPAIRING,
    NameTaken,
    QuotaExceeded,
    Stockout,
)
from tests.unit.capacity.bench import ZONE, Bench, story, wanted


def test_a_zone_has_so_many_chips_and_no_more() -> None:
    async def tell(bench: Bench) -> None:
        await bench.port.create(wanted("s1"))
        with pytest.raises(Stockout):
            await bench.port.create(wanted("s2", chips=9))
        await bench.port.create(wanted("s3"))
        with pytest.raises(Stockout):
            await bench.port.create(wanted("s4", chips=1))
        assert bench.cloud.used_chips(ZONE) == 16
        bench.cloud.preempt("s1")  # the chips are somebody else's now
        assert bench.cloud.used_chips(ZONE) == 8
        await bench.port.create(wanted("s5", zone="other"))

    story(tell, chips=16)


def test_quota_counts_until_the_delete_is_done() -> None:
    async def tell(bench: Bench) -> None:
        bench.cloud.set_quota(8)
        await bench.port.create(wanted("s1"))
        bench.cloud.preempt("s1")
        with pytest.raises(QuotaExceeded):
            await bench.port.create(wanted("s2"))
        await bench.port.delete("s1", ZONE)
        with pytest.raises(QuotaExceeded):
            await bench.port.create(wanted("s2"))
        await asyncio.sleep(5.1)
        await bench.port.create(wanted("s2"))
        assert bench.cloud.billed_chips() == 8

    story(tell)


def test_providers_do_not_see_each_other() -> None:
    async def tell(bench: Bench) -> None:
        other = FakeCapacity(bench.cloud, name="gke")
        await bench.port.create(wanted("s1"))
        await other.create(wanted("s2"))
        assert [seen.name for seen in (await bench.port.list(ZONE)).slices] == ["s1"]
        assert [seen.name for seen in (await other.list(ZONE)).slices] == ["s2"]
        assert await other.get("s1", ZONE) is None
        await other.delete("s1", ZONE)
        assert [vm.name for vm in bench.cloud.vms()] == ["s1", "s2"]
        assert bench.cloud.billed_chips("gke") == 8

    story(tell)


def test_chips_over_time_take_the_newest_spot_machines() -> None:
    async def tell(bench: Bench) -> None:
        bench.cloud.schedule(ZONE, [(20.0, 16), (40.0, 24)])
        for name, spot in (("s1", True), ("s2", True), ("s3", False)):
            await bench.port.create(wanted(name, spot=spot))
        await asyncio.sleep(21.0)
        assert [vm.state for vm in bench.cloud.vms()] == [READY, PREEMPTED, READY]
        with pytest.raises(Stockout):
            await bench.port.create(wanted("s4"))
        await asyncio.sleep(20.0)
        await bench.port.create(wanted("s4"))

    story(tell, chips=24)


def test_refusals_follow_the_zone_s_rate() -> None:
    async def tell(bench: Bench) -> None:
        refused = 0
        for number in range(200):
            try:
                await bench.port.create(wanted(f"s{number}"))
            except Stockout:
                refused += 1
        assert 100 < refused < 180

    story(tell, refusal_rate=0.7)


def test_spot_machines_are_preempted_at_the_zone_s_rate() -> None:
    async def tell(bench: Bench) -> None:
        for number in range(200):
            await bench.port.create(wanted(f"s{number}", spot=number % 2 == 0))
        await asyncio.sleep(10.0 + 3600.0)
        taken = [vm for vm in bench.cloud.vms() if vm.state == PREEMPTED]
        assert all(vm.spot for vm in taken)
        assert 45 < len(taken) < 80  # 1 - 1/e of 100

    story(tell, preemptions_per_hour=1.0)


@pytest.mark.parametrize("when", ["creating", "ready", "repairing"])
def test_preemption_without_notice(when: str) -> None:
    async def tell(bench: Bench) -> None:
        await bench.port.create(wanted())
        if when != "creating":
            await asyncio.sleep(11.0)
        if when == "repairing":
            bench.cloud.maintain("s1", 100.0)
        bench.cloud.preempt("s1")
        assert await bench.state() == PREEMPTED
        assert bench.told[-1][2:] == ((False, False), PREEMPTED)
        await asyncio.sleep(200.0)
        assert await bench.state() == PREEMPTED

    assert story(tell).kinds()[-1] == "vm.preempted"


@pytest.mark.parametrize("undo", [False, True])
def test_preemption_while_deleting(undo: bool) -> None:
    async def tell(bench: Bench) -> None:
        await bench.port.create(wanted())
        await asyncio.sleep(11.0)
        await bench.port.delete("s1", ZONE)
        bench.cloud.preempt("s1", undo_delete=undo)
        assert bench.told[-1][2] == (False, False)
        await asyncio.sleep(6.0)
        assert await bench.state() == (PREEMPTED if undo else None)
        await bench.port.delete("s1", ZONE)
        await asyncio.sleep(6.0)
        assert await bench.state() is None

    story(tell)


def test_preemption_with_notice() -> None:
    async def tell(bench: Bench) -> None:
        await bench.port.create(wanted())
        await asyncio.sleep(11.0)
        bench.cloud.preempt("s1", notice_s=30.0)
        assert bench.notices == ["s1"]
        await asyncio.sleep(29.0)
        assert await bench.state() == READY
        await asyncio.sleep(2.0)
        assert await bench.state() == PREEMPTED

    story(tell)


def test_a_notice_does_not_strike_a_successor_of_the_same_name() -> None:
    async def tell(bench: Bench) -> None:
        await bench.port.create(wanted())
        await asyncio.sleep(11.0)
        bench.cloud.preempt("s1", notice_s=30.0)
        bench.cloud.delete_outside("s1")
        await bench.port.create(wanted())
        await asyncio.sleep(60.0)
        assert await bench.state() == READY

    story(tell)


def test_maintenance_brings_the_same_hosts_back() -> None:
    async def tell(bench: Bench) -> None:
        await bench.port.create(wanted())
        await asyncio.sleep(11.0)
        vm = bench.cloud.vm("s1")
        assert vm is not None
        before = vm.hosts
        bench.cloud.maintain("s1", 60.0)
        assert (vm.state, vm.hosts) == (REPAIRING, (None, None))
        await asyncio.sleep(61.0)
        assert (vm.state, vm.hosts) == (READY, before)

    story(tell)


def test_hosts_stop_and_are_replaced_under_the_same_name() -> None:
    async def tell(bench: Bench) -> None:
        await bench.port.create(wanted())
        await asyncio.sleep(11.0)
        vm = bench.cloud.vm("s1")
        assert vm is not None
        first, second = vm.hosts
        bench.cloud.stop_host("s1", 1)
        assert (vm.state, vm.hosts) == (READY, (first, None))
        bench.cloud.replace_host("s1", 1)
        assert vm.hosts[0] == first
        assert vm.hosts[1] not in (None, second)

    story(tell)


def test_ready_while_dead_failed_while_alive_and_deleted_by_hand() -> None:
    async def tell(bench: Bench) -> None:
        for name in ("dead", "failed", "deleted"):
            await bench.port.create(wanted(name))
        await asyncio.sleep(11.0)
        bench.cloud.die_unseen("dead")
        assert await bench.state("dead") == READY
        assert bench.told[-1][2:] == ((False, False), READY)
        bench.cloud.fail("failed")
        assert await bench.state("failed") == FAILED
        assert bench.told[-1][2:] == ((True, True), FAILED)
        bench.cloud.delete_outside("deleted")
        assert await bench.state("deleted") is None
        assert bench.told[-1][3] == GONE
        assert bench.calls("delete") == []

    assert story(tell).kinds("deleted")[-1] == "vm.deleted"


def test_somebody_else_s_machine_shows_its_own_label() -> None:
    async def tell(bench: Bench) -> None:
        bench.cloud.create_outside(wanted("theirs"), "other-installation")
        bench.cloud.create_outside(wanted("nobody"), None)
        assert [seen.label for seen in (await bench.port.list(ZONE)).slices] == ["other-installation", None]
        with pytest.raises(NameTaken):
            await bench.port.create(wanted("theirs"))

    story(tell)
