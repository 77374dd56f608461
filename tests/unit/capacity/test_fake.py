"""The fake provider port: every fault a call can be told to have, and what is recorded of it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from penstock.capacity.fake import FakeCapacity, ScriptedFaults
from penstock.capacity.fakecloud import GONE, FakeCloud, Fault, FaultKind
from penstock.ports.capacity import (
    CREATING,
    DELETING,
    FAILED,
    READY,
    Capacity,
    NameTaken,
    PermissionDenied,
    QuotaExceeded,
    RateLimited,
    Stockout,
    Transient,
)
from penstock.sim.loop import run
from tests.unit.capacity.bench import ZONE, Bench, story, wanted


def test_it_is_a_capacity_port() -> None:
    cloud = FakeCloud(rng=random.Random(0))
    port: Capacity = FakeCapacity(cloud, name="gke")
    assert port.name == "gke"


def test_a_slice_lives_and_goes() -> None:
    async def tell(bench: Bench) -> None:
        seen = await bench.port.create(wanted())
        assert (seen.state, seen.label, seen.zone, seen.name) == (CREATING, "penstock", ZONE, "s1")
        await asyncio.sleep(9.9)
        assert await bench.state() == CREATING
        await asyncio.sleep(0.2)
        assert await bench.state() == READY
        await bench.port.delete("s1", ZONE)
        assert await bench.state() == DELETING
        await asyncio.sleep(5.1)
        assert await bench.state() is None
        await bench.port.delete("s1", ZONE)

    bench = story(tell)
    assert bench.kinds() == ["vm.created", "vm.ready", "vm.deleted"]
    assert [(hosts, state) for _, _, hosts, state in bench.told] == [
        ((True, True), READY),
        ((True, True), DELETING),
        ((False, False), GONE),
    ]
    created = bench.history.world[1] if bench.history.world[0].kind == "provider.call" else bench.history.world[0]
    assert created.body == {
        "provider_id": "fake-000001", "zone": ZONE, "label": "penstock", "chips": 8, "provider": "fake"
    }  # fmt: skip


def test_create_is_idempotent_by_name_and_ids_are_never_reused() -> None:
    async def tell(bench: Bench) -> None:
        first = await bench.port.create(wanted())
        with pytest.raises(NameTaken):
            await bench.port.create(wanted())
        bench.cloud.delete_outside("s1")
        second = await bench.port.create(wanted())
        assert first.provider_id != second.provider_id

    assert story(tell).calls("create") == ["ok", "NameTaken", "ok"]


# --- addressed faults ---


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (FaultKind.STOCKOUT, Stockout),
        (FaultKind.QUOTA, QuotaExceeded),
        (FaultKind.RATE_LIMIT, RateLimited),
        (FaultKind.TRANSIENT, Transient),
        (FaultKind.PERMISSION, PermissionDenied),
    ],
)
@pytest.mark.parametrize("verb", ["create", "get", "list", "delete"])
def test_a_refused_call_has_no_effect(kind: FaultKind, error: type[Exception], verb: str) -> None:
    async def tell(bench: Bench) -> None:
        bench.cloud.create_outside(wanted("old"), "penstock")
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "create": lambda: bench.port.create(wanted()),
            "get": lambda: bench.port.get("old", ZONE),
            "list": lambda: bench.port.list(ZONE),
            "delete": lambda: bench.port.delete("old", ZONE),
        }
        with pytest.raises(error):
            await calls[verb]()
        assert [vm.name for vm in bench.cloud.vms()] == ["old"]
        assert bench.cloud.vms()[0].state == CREATING
        await calls[verb]()  # only the first call was addressed

    assert story(tell, (verb, Fault(kind))).calls(verb) == [error.__name__, "ok"]


@pytest.mark.parametrize(("seconds", "expected"), [(0.0, None), (17.0, 17.0)])
def test_a_rate_limit_may_name_a_delay(seconds: float, expected: float | None) -> None:
    async def tell(bench: Bench) -> None:
        with pytest.raises(RateLimited) as caught:
            await bench.port.create(wanted())
        assert caught.value.retry_after_s == expected

    story(tell, ("create", Fault(FaultKind.RATE_LIMIT, seconds)))


@pytest.mark.parametrize("verb", ["create", "delete"])
def test_a_lost_reply_has_its_effect(verb: str) -> None:
    async def tell(bench: Bench) -> None:
        if verb == "create":
            with pytest.raises(Transient):
                await bench.port.create(wanted())
            assert await bench.state() == CREATING
        else:
            await bench.port.create(wanted())
            with pytest.raises(Transient):
                await bench.port.delete("s1", ZONE)
            assert await bench.state() == DELETING

    assert story(tell, (verb, Fault(FaultKind.LOST_REPLY))).calls(verb) == ["lost_reply"]


def test_a_slow_call_has_its_effect_before_its_answer() -> None:
    async def tell(bench: Bench) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30.0):
                await bench.port.create(wanted())
        assert await bench.state() == READY

    assert story(tell, ("create", Fault(FaultKind.SLOW, 60.0))).calls("create") == ["ok"]


def test_a_delayed_create_lands_after_the_delete() -> None:
    async def tell(bench: Bench) -> None:
        with pytest.raises(Transient):
            await bench.port.create(wanted())
        await bench.port.delete("s1", ZONE)
        await asyncio.sleep(299.0)
        assert await bench.state() is None
        await asyncio.sleep(2.0)
        assert await bench.state() == CREATING

    bench = story(tell, ("create", Fault(FaultKind.LATE_CREATE, 300.0)))
    assert bench.calls("create") == ["lost_reply"]
    assert bench.kinds() == ["vm.created"]


def test_a_delayed_create_does_not_double_what_exists() -> None:
    async def tell(bench: Bench) -> None:
        with pytest.raises(Transient):
            await bench.port.create(wanted())
        again = await bench.port.create(wanted())
        await asyncio.sleep(400.0)
        seen = await bench.port.get("s1", ZONE)
        assert seen is not None
        assert seen.provider_id == again.provider_id

    assert story(tell, ("create", Fault(FaultKind.LATE_CREATE, 300.0))).kinds().count("vm.created") == 1


def test_an_operation_that_never_ends() -> None:
    async def tell(bench: Bench) -> None:
        await bench.port.create(wanted())
        await asyncio.sleep(1e6)
        assert await bench.state() == CREATING
        await bench.port.delete("s1", ZONE)
        await asyncio.sleep(6.0)
        assert await bench.state() is None

    story(tell, ("create", Fault(FaultKind.NEVER_READY)))


@pytest.mark.parametrize(
    ("kind", "state", "hosts"),
    [
        (FaultKind.BROKEN_CREATE, FAILED, (True, True, True, True)),
        (FaultKind.HOST_MISSING, READY, (True, True, True, False)),
        (FaultKind.DEAD_ON_ARRIVAL, READY, (False, False, False, False)),
    ],
)
def test_creates_that_go_half_well(kind: FaultKind, state: str, hosts: tuple[bool, ...]) -> None:
    async def tell(bench: Bench) -> None:
        await bench.port.create(wanted(hosts=4))
        await asyncio.sleep(11.0)
        assert await bench.state() == state
        assert bench.told[-1][2] == hosts

    story(tell, ("create", Fault(kind)))


def test_a_stale_list_shows_the_past() -> None:
    async def tell(bench: Bench) -> None:
        await bench.port.create(wanted("s1"))
        await asyncio.sleep(60.0)
        await bench.port.create(wanted("s2"))
        await bench.port.delete("s1", ZONE)
        await asyncio.sleep(20.0)
        stale = await bench.port.list(ZONE)
        assert [(seen.name, seen.state) for seen in stale.slices] == [("s1", READY)]
        assert stale.complete
        now = await bench.port.list(ZONE)
        assert [(seen.name, seen.state) for seen in now.slices] == [("s2", READY)]

    story(tell, ("list", Fault(FaultKind.STALE_LIST, 30.0)))


@pytest.mark.parametrize(
    ("kind", "shown", "complete"),
    [
        (FaultKind.PARTIAL_PAGE, 2, False),
        (FaultKind.UNREACHABLE, 0, False),
        (FaultKind.EMPTY_PAGE, 0, True),
        (FaultKind.ITEM_MISSING, 3, True),
    ],
)
def test_listings_that_lack_something(kind: FaultKind, shown: int, complete: bool) -> None:
    async def tell(bench: Bench) -> None:
        for number in range(4):
            await bench.port.create(wanted(f"s{number}"))
        listing = await bench.port.list(ZONE)
        assert (len(listing.slices), listing.complete) == (shown, complete)
        back = await bench.port.list(ZONE)
        assert (len(back.slices), back.complete) == (4, True)

    story(tell, ("list", Fault(kind)))


def test_an_ignored_delete_deletes_nothing() -> None:
    async def tell(bench: Bench) -> None:
        await bench.port.create(wanted())
        await bench.port.delete("s1", ZONE)
        await asyncio.sleep(60.0)
        assert await bench.state() == READY

    story(tell, ("delete", Fault(FaultKind.DELETE_IGNORED)))


def test_a_slow_delete() -> None:
    async def tell(bench: Bench) -> None:
        await bench.port.create(wanted())
        await bench.port.delete("s1", ZONE)
        await asyncio.sleep(899.0)
        assert await bench.state() == DELETING
        await asyncio.sleep(2.0)
        assert await bench.state() is None

    story(tell, ("delete", Fault(FaultKind.SLOW_DELETE, 900.0)))


def test_faults_are_addressed_by_name_and_count() -> None:
    async def main() -> None:
        script = ScriptedFaults().add("create", Fault(FaultKind.STOCKOUT), name="s2", after=1, times=2)
        bench = Bench(script)
        await bench.port.create(wanted("s1"))
        await bench.port.create(wanted("s2"))
        bench.cloud.delete_outside("s2")
        for _ in range(2):
            with pytest.raises(Stockout):
                await bench.port.create(wanted("s2"))
        await bench.port.create(wanted("s2"))

    run(main())


class Hooks:
    """A `Faults` that raises by itself, before or after the effect."""

    def __init__(self, *, late: bool) -> None:
        self.late = late

    async def before(self, verb: str, name: str) -> Fault | None:
        if not self.late:
            raise Stockout("by the hook")
        return None

    async def after(self, verb: str, name: str) -> None:
        await asyncio.sleep(3.0)
        raise Transient("by the hook")


@pytest.mark.parametrize("late", [False, True])
def test_hooks_may_raise_and_sleep_themselves(late: bool) -> None:
    async def main() -> None:
        cloud = FakeCloud(rng=random.Random(0))
        port = FakeCapacity(cloud, faults=Hooks(late=late), latency_s=(1.0, 1.0))
        with pytest.raises(Transient if late else Stockout, match="by the hook"):
            await port.create(wanted())
        assert len(cloud.vms()) == int(late)
        assert asyncio.get_running_loop().time() == (3.5 if late else 0.5)

    run(main())
