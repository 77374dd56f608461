"""The Cloud TPU provider against the emulated API, in one process and by a clock that the test moves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import msgspec
import pytest

from penstock.capacity import startup, tpu_requests, tpu_vm
from penstock.capacity.startup import TOKEN_KEY
from penstock.capacity.tpu_rest import FixedTokens, TpuRest
from penstock.domain import limits
from penstock.domain.cloud import CloudWish, Mount
from penstock.domain.nouns import Slice
from penstock.emulator.gcs import GcsEmulator
from penstock.emulator.google import GoogleEmulator, TpuEmulator
from penstock.emulator.tpu_faults import TpuFault
from penstock.emulator.tpu_hosts import NoHosts
from penstock.emulator.tpu_world import Capacity, Delays, Happening, Quota, Reservation, World
from penstock.ports.capacity import (
    CREATING,
    FAILED,
    PREEMPTED,
    READY,
    NameTaken,
    PermissionDenied,
    QuotaExceeded,
    RateLimited,
    Transient,
)

ZONE = "us-central1-a"


class HandClock:
    def __init__(self) -> None:
        self.at = 1_000.0

    def now(self) -> float:
        return self.at

    def steady(self) -> float:
        return self.at

    async def sleep(self, seconds: float) -> None:
        self.at += seconds
        await asyncio.sleep(0)


class Scene:
    """A provider, the emulator it speaks to, and the clock of both."""

    def __init__(self, world: World) -> None:
        self.clock = HandClock()
        self.tpu = TpuEmulator(world, self.clock.now, NoHosts(), sleep=self.clock.sleep)
        application = GoogleEmulator(self.tpu, GcsEmulator((), self.clock.now))
        self.rest = TpuRest(
            "p1",
            FixedTokens("t"),
            endpoint="http://emulator",
            clock=self.clock,
            transport=httpx2.ASGITransport(app=application, raise_app_exceptions=False),
        )
        self.told: list[str] = []
        self.heard = asyncio.Event()
        self.capacity = tpu_vm.TpuVmCapacity(
            self.rest,
            label="house",
            clock=self.clock,
            metadata=lambda it: {"startup-script": f"#!/bin/sh\necho {it.id}\n"},
            changed=self._hear,
        )

    def _hear(self, zone: str) -> None:
        self.told.append(zone)
        self.heard.set()

    @asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.capacity.run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def until_told(self) -> None:
        async with asyncio.timeout(10), self.following():
            await self.heard.wait()


def slice_of(id: str = "s1", **more: Any) -> Slice:
    given = {"accelerator": "v5e-8", "chips": 8, "hosts": 1, "zone": ZONE, **more}
    return Slice(id=id, team="t", pool="p", provider="tpu_vm", intended_at=0.0, **given)


def play(scene: Scene, coroutine: Coroutine[Any, Any, Any]) -> Any:
    async def whole() -> Any:
        try:
            return await coroutine
        finally:
            await scene.rest.close()

    return asyncio.run(whole())


def test_a_node_is_asked_for_becomes_ready_and_is_ours() -> None:
    scene = Scene(World(delays=Delays(create=60.0)))

    async def story() -> None:
        asked = await scene.capacity.create(slice_of(spot=True, cloud=CloudWish(kind="spot", tags=("a",))))
        assert (asked.state, asked.label) == (CREATING, "house")
        soon = await scene.capacity.get("s1", ZONE)
        assert soon is not None
        assert (soon.state, soon.provider_id) == (CREATING, asked.provider_id)
        scene.clock.at += 61
        (later,) = (await scene.capacity.list(ZONE)).slices
        assert (later.state, later.label, later.provider_id) == (READY, "house", asked.provider_id)
        node = await scene.rest.call("GET", f"{scene.rest.zone(ZONE)}/nodes/s1")
        assert node["metadata"]["startup-script"] == "#!/bin/sh\necho s1\n"
        assert node["metadata"][tpu_requests.MACHINE_KEY] == asked.provider_id
        assert node["acceleratorType"] == "v5litepod-8"
        assert node["schedulingConfig"]["spot"] is True
        await scene.capacity.delete("s1", ZONE)
        assert await scene.capacity.get("s1", ZONE) is None
        await scene.capacity.delete("s1", ZONE)

    play(scene, story())


def test_a_stockout_inside_the_operation_is_told_and_shown_with_its_reason() -> None:
    scene = Scene(World(capacity=(Capacity(chips=0),)))

    async def story() -> None:
        await scene.capacity.create(slice_of())
        await scene.until_told()
        assert scene.told == [ZONE]
        for shown in ((await scene.capacity.list(ZONE)).slices[0], await scene.capacity.get("s1", ZONE)):
            assert shown is not None
            assert (shown.state, shown.label) == (FAILED, "house")
            assert "capacity" in shown.detail
        await scene.capacity.delete("s1", ZONE)
        assert (await scene.capacity.list(ZONE)).slices == ()

    play(scene, story())


@pytest.mark.parametrize(
    ("world", "error"),
    [
        (World(quotas=(Quota(chips=4),)), QuotaExceeded),
        (World(quotas=(Quota(chips=4, status=403),)), QuotaExceeded),
        (World(faults=(TpuFault(kind="refuse", call="nodes.create", status=503),)), Transient),
        (
            World(faults=(TpuFault(kind="refuse", call="nodes.create", status=403, message="no right"),)),
            PermissionDenied,
        ),
        (World(faults=(TpuFault(kind="lose", call="nodes.create"),)), Transient),
        (World(faults=(TpuFault(kind="cut", call="nodes.create"),)), Transient),
    ],
)
def test_refusals_are_typed(world: World, error: type[Exception]) -> None:
    scene = Scene(world)
    with pytest.raises(error):
        play(scene, scene.capacity.create(slice_of()))


def test_asked_too_often_says_when_to_come_again() -> None:
    scene = Scene(World(create_calls_per_minute=1, retry_after_s=17))

    async def story() -> None:
        await scene.capacity.create(slice_of())
        with pytest.raises(RateLimited) as told:
            await scene.capacity.create(slice_of("s2"))
        assert told.value.retry_after_s == 17

    play(scene, story())


def test_a_type_or_zone_that_is_not_there_is_not_asked_for_again_and_again() -> None:
    scene = Scene(World())
    with pytest.raises(PermissionDenied):
        play(scene, scene.capacity.create(slice_of(zone="mars-north1-a")))


def test_a_reply_lost_on_the_way_leaves_one_node_that_is_found_by_name() -> None:
    scene = Scene(World(faults=(TpuFault(kind="lose", call="nodes.create"),)))

    async def story() -> None:
        with pytest.raises(Transient):
            await scene.capacity.create(slice_of())
        with pytest.raises(NameTaken):
            await scene.capacity.create(slice_of())
        found = await scene.capacity.get("s1", ZONE)
        assert found is not None
        assert found.label == "house"

    play(scene, story())


def test_what_others_made_is_shown_as_theirs() -> None:
    scene = Scene(World(happenings=(Happening(what="create", name="s1", zone=ZONE, type="v5litepod-8"),)))

    async def story() -> None:
        with pytest.raises(NameTaken):
            await scene.capacity.create(slice_of())
        found = await scene.capacity.get("s1", ZONE)
        assert found is not None
        assert found.label is None

    play(scene, story())


def test_a_preempted_node_is_preempted_and_a_stopped_one_has_failed() -> None:
    scene = Scene(World())

    async def story() -> None:
        for name in ("s1", "s2"):
            await scene.capacity.create(slice_of(name, spot=True, cloud=CloudWish(kind="spot")))
        node = next(node for node in scene.tpu.cloud.books.nodes.values() if node.id == "s1")
        scene.tpu.cloud.preempt(node)
        await scene.rest.call("POST", f"{scene.rest.zone(ZONE)}/nodes/s2:stop", body={})
        states = {seen.name: seen.state for seen in (await scene.capacity.list(ZONE)).slices}
        assert states == {"s1": PREEMPTED, "s2": FAILED}

    play(scene, story())


def test_a_listing_reads_all_pages_and_never_passes_off_a_zone_out_of_reach_as_empty() -> None:
    scene = Scene(World(page_size=3))

    async def story() -> None:
        for number in range(10):
            await scene.capacity.create(slice_of(f"s{number}"))
        whole = await scene.capacity.list(ZONE)
        assert (len(whole.slices), whole.complete) == (10, True)
        scene.tpu.faults.plant([TpuFault(kind="unreachable", call="nodes.list")])
        with pytest.raises(Transient):
            await scene.capacity.list(ZONE)

    play(scene, story())


@pytest.mark.parametrize(
    "wish",
    [
        CloudWish(kind="spot", queued=True, wait_s=3600.0),
        CloudWish(kind="flex-start", life_s=7200.0),
        CloudWish(kind="reserved", reservation="projects/p1/locations/us-central1-a/reservations/r1"),
    ],
    ids=lambda wish: wish.kind,
)
def test_queued_resources_come_stay_under_one_name_and_go_with_their_node(wish: CloudWish) -> None:
    name = wish.reservation.rpartition("/")[2]
    reservations = (Reservation(name=name, zone=ZONE, type="*", chips=64),) if name else ()
    scene = Scene(World(delays=Delays(accept=5.0, create=30.0), reservations=reservations))

    async def story() -> None:
        asked = await scene.capacity.create(slice_of(cloud=wish))
        waiting = await scene.capacity.get("s1", ZONE)
        assert waiting is not None
        assert (waiting.state, waiting.provider_id, waiting.label) == (CREATING, asked.provider_id, "house")
        scene.clock.at += 60
        (ready,) = (await scene.capacity.list(ZONE)).slices
        assert (ready.state, ready.provider_id, ready.label) == (READY, asked.provider_id, "house")
        await scene.capacity.delete("s1", ZONE)
        scene.clock.at += 60
        assert (await scene.capacity.list(ZONE)).slices == ()
        assert await scene.capacity.get("s1", ZONE) is None

    play(scene, story())


def test_a_queued_resource_whose_node_was_taken_is_preempted() -> None:
    scene = Scene(World())

    async def story() -> None:
        await scene.capacity.create(slice_of(spot=True, cloud=CloudWish(kind="spot", queued=True)))
        scene.clock.at += 60
        assert (await scene.capacity.list(ZONE)).slices[0].state == READY
        scene.tpu.cloud.preempt(next(iter(scene.tpu.cloud.books.nodes.values())))
        scene.clock.at += 60
        (seen,) = (await scene.capacity.list(ZONE)).slices
        assert seen.state == PREEMPTED

    play(scene, story())


def test_every_option_of_a_pool_reaches_the_request() -> None:
    wish = CloudWish(
        kind="preemptible",
        runtime_version="v2-alpha-tpuv5-lite",
        network="n1",
        subnetwork="sub1",
        external_ip=False,
        service_account="a@b.iam",
        tags=("x", "y"),
        disks=("projects/p1/zones/z/disks/d", "plain"),
        mounts=(Mount("nfs", "h:/e", "/mnt/e"),),
    )
    body = tpu_requests.node_body(slice_of(cloud=wish), "house", "m1", {}, tpu_requests.Defaults(), project="p2")
    assert body["runtimeVersion"] == "v2-alpha-tpuv5-lite"
    assert body["networkConfig"] == {"network": "n1", "subnetwork": "sub1", "enableExternalIps": False}
    assert body["schedulingConfig"] == {"spot": False, "preemptible": True, "reserved": False}
    assert body["serviceAccount"]["email"] == "a@b.iam"
    assert body["tags"] == ["x", "y"]
    # The API wants full names; a plain one is a disk of the slice's own zone.
    named = ("projects/p1/zones/z/disks/d", f"projects/p2/zones/{ZONE}/disks/plain")
    assert body["dataDisks"] == [{"sourceDisk": name, "mode": "READ_ONLY"} for name in named]
    assert msgspec.json.decode(msgspec.json.encode(wish), type=CloudWish) == wish


def test_what_is_ours_bears_the_label_of_this_installation() -> None:
    scene = Scene(World())
    mine = tpu_vm.TpuVmCapacity(
        scene.rest, label="house", owner="house-1", clock=scene.clock, metadata=lambda _: {}, changed=None
    )

    async def story() -> None:
        assert (await mine.create(slice_of("s1"))).label == "house"
        await scene.capacity.create(slice_of("s2"))  # another installation, which calls itself as our controller does
        shown = {seen.name: seen.label for seen in (await mine.list(ZONE)).slices}
        assert shown == {"s1": "house", "s2": None}
        found = await mine.get("s1", ZONE)
        assert found is not None
        assert found.label == "house"

    play(scene, story())


BOOT = startup.Boot(server="https://a.example", bundle_url="https://a.example/b", sha256="ab" * 32, built_for="2.31")


def test_a_node_of_an_earlier_release_keeps_the_token_that_it_boots_with() -> None:
    scene = Scene(World())
    script = "#!/bin/sh\n# Penstock brings this host up.\nset -eu\nTOKEN=$(meta attributes/penstock-join)\n"
    scene.capacity._metadata = lambda _: {TOKEN_KEY: "secret", startup.SCRIPT_KEY: script}

    async def story() -> None:
        await scene.capacity.create(slice_of())
        await scene.capacity.list(ZONE)
        assert scene.capacity.with_token == set(), "so that it is not chosen"
        await scene.capacity.clear_token("s1", ZONE)
        metadata = (await scene.rest.call("GET", f"{scene.rest.zone(ZONE)}/nodes/s1"))["metadata"]
        assert metadata[TOKEN_KEY] == "secret"

    play(scene, story())


def test_the_join_token_is_taken_out_of_a_nodes_metadata_and_all_else_stays() -> None:
    scene = Scene(World())
    given = startup.metadata(BOOT, "s1", "secret")
    scene.capacity._metadata = lambda _: given

    async def story() -> None:
        path = f"{scene.rest.zone(ZONE)}/nodes/s1"
        await scene.capacity.create(slice_of())
        assert scene.capacity.with_token == set(), "until it is seen"
        await scene.capacity.list(ZONE)
        assert scene.capacity.with_token == {"s1"}
        before = (await scene.rest.call("GET", path))["metadata"]
        await scene.capacity.clear_token("s1", ZONE)
        assert scene.capacity.with_token == set()
        after = (await scene.rest.call("GET", path))["metadata"]
        assert after == {key: value for key, value in before.items() if key != TOKEN_KEY}
        assert before[TOKEN_KEY] == "secret"
        await scene.capacity.list(ZONE)
        assert scene.capacity.with_token == set(), "nor after a restart of the server"
        await scene.capacity.clear_token("s1", ZONE)  # again is no harm, nor is one that is gone
        await scene.capacity.delete("s1", ZONE)
        await scene.capacity.clear_token("s1", ZONE)

    play(scene, story())


@pytest.mark.parametrize(
    ("headers", "rest_s"),
    [
        ({"retry-after": "25"}, 25.0),
        ({"retry-after": "Sun, 15 Nov 2026 12:00:40 GMT", "date": "Sun, 15 Nov 2026 12:00:00 GMT"}, 40.0),
        ({"retry-after": "Sun, 15 Nov 2026 11:00:00 GMT", "date": "Sun, 15 Nov 2026 12:00:00 GMT"}, 0.0),
        ({"retry-after": "Sun, 15 Nov 2026 12:00:40 GMT"}, limits.RATE_REST_S),
        ({"retry-after": "soon"}, limits.RATE_REST_S),
        ({"retry-after": "86400"}, limits.RATE_REST_S_MAX),
        ({}, limits.RATE_REST_S),
    ],
)
def test_a_kind_of_call_rests_for_as_long_as_the_service_says(headers: dict[str, str], rest_s: float) -> None:
    clock, sent = HandClock(), 0
    said = {
        "error": {"code": 429, "message": "Quota exceeded: ReadRequests per minute", "status": "RESOURCE_EXHAUSTED"}
    }

    def answer(request: httpx2.Request) -> httpx2.Response:
        nonlocal sent
        sent += 1
        return httpx2.Response(429, json=said, headers=headers)

    async def story() -> None:
        rest = TpuRest("p1", FixedTokens("t"), endpoint="http://x", clock=clock, transport=httpx2.MockTransport(answer))
        path = f"{rest.zone(ZONE)}/nodes/s1"
        for wait_s in (0.0, rest_s - 0.5, 0.5):
            clock.at += max(0.0, wait_s)
            with pytest.raises(RateLimited):
                await rest.call("GET", path)
        assert sent == (2 if rest_s else 3)
        for method, other in (
            ("GET", f"{rest.zone(ZONE)}/nodes"),
            ("DELETE", path),
            ("GET", path.replace("-a/", "-b/")),
        ):
            before = sent
            with pytest.raises(RateLimited):
                await rest.call(method, other)
            assert sent == before + 1, "other calls were not what it was tired of"
        await rest.close()

    asyncio.run(story())
