"""Hosts on their way: who may fetch the bundle, how far they are, and what a set-up that fails does."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from penstock.controller.jobs import NotFound
from penstock.domain import limits
from penstock.domain.lifecycle import SliceState
from penstock.domain.nouns import Pool, Slice, Zone, untried
from penstock.planner.snapshot import Snapshot
from penstock.server import arrivals, jobs, settings
from penstock.server.auth import host_credential, join_token
from penstock.server.routing import AgentHost, Call, Raw, Refusal
from tests.unit.server.plant import Plant, plant

SHA = "ab" * 32


def run(story: Any, home: Path) -> None:
    async def play() -> None:
        async with plant(home) as made:
            await story(made)

    asyncio.run(play())


async def coming(made: Plant, on: str = "v5e-8") -> Slice:
    """A slice that is there and whose hosts have not joined."""
    await made.submit(on=on)
    return await made.until(lambda: made._unjoined(on))


def call(made: Plant, slice: Slice, *, token: str | None = None, body: bytes = b"", **query: str) -> Call:
    bearer = join_token(made.service.key, slice.id) if token is None else token
    asked = {"slice": slice.id, "host": "0", "machine": f"vm-{slice.id}", "step": "fetching", **query}
    return made.call(
        None, params={"sha256": SHA}, query=asked, headers={"authorization": f"Bearer {bearer}"}, body=body
    )


async def refused(awaited: Any) -> str:
    with pytest.raises(Refusal) as caught:
        await awaited
    return caught.value.problem.code


async def answered(awaited: Any) -> bool:
    try:
        await awaited
    except Refusal:
        return False
    return True


async def zone_of(made: Plant) -> Zone:
    (zone,) = await made.store.read(lambda reader: reader.zones())
    return zone


async def slice_now(made: Plant, id: str) -> Slice:
    found = await made.store.read(lambda reader: reader.slice(id))
    assert found is not None
    return found


def test_the_bundle_is_for_whoever_has_the_join_token(tmp_path: Path) -> None:
    content = bytes(range(256)) * 10_000
    file = tmp_path / "bundle.tar.gz"
    file.write_bytes(content)

    async def story(made: Plant) -> None:
        slice = await coming(made)
        with pytest.raises(NotFound):
            await arrivals.fetch_bundle(made.service, call(made, slice))
        made.service.bundle = lambda sha256: file if sha256 == SHA else None
        answer = await arrivals.fetch_bundle(made.service, call(made, slice))
        assert isinstance(answer, Raw)
        assert not isinstance(answer.body, bytes)
        assert b"".join([piece async for piece in answer.body]) == content
        assert answer.headers["content-length"] == str(len(content))
        for token in ("x", join_token(made.service.key, "s-another")):
            assert (
                await refused(arrivals.fetch_bundle(made.service, call(made, slice, token=token))) == "unauthenticated"
            )
        # A host that has joined mends itself with it; its credential is good for its own slice alone.
        for name, fits in ((slice.id, True), ("s-another", False)):
            joined = call(made, slice, token=host_credential(made.service.key, AgentHost(name, 0, "life")))
            assert (await answered(arrivals.fetch_bundle(made.service, joined))) == fits
            assert await refused(arrivals.arriving(made.service, joined)) == "unauthenticated"
        nobody = made.call(None, params={"sha256": SHA}, query={"slice": slice.id})
        assert await refused(arrivals.fetch_bundle(made.service, nobody)) == "unauthenticated"

    run(story, tmp_path)


def test_progress_is_kept_for_people_and_ends_with_the_join(tmp_path: Path) -> None:
    async def story(made: Plant) -> None:
        slice = await coming(made, "v5e-16")
        known = arrivals.arrivals(made.service)
        assert known.tell(slice) == ""
        for host, step in (("0", "fetching"), ("1", "fetching"), ("2", "unpacking"), ("0", "starting")):
            await arrivals.arriving(made.service, call(made, slice, host=host, step=step))
        assert known.tell(slice) == "1 of 4 hosts starting, 1 of 4 hosts fetching, 1 of 4 hosts unpacking"
        await made.hosts("v5e-16")
        ready = await slice_now(made, slice.id)
        assert ready.state is SliceState.READY
        assert known.tell(ready) == ""

    run(story, tmp_path)


def test_a_job_that_waits_is_told_how_far_its_slice_is(tmp_path: Path) -> None:
    async def story(made: Plant) -> None:
        job = await made.submit()
        slice = await made.until(lambda: made._unjoined("v5e-8"))
        await arrivals.arriving(made.service, call(made, slice, step="unpacking"))
        why = await made.until(lambda: _details(made, job))
        assert why[0].startswith(f"slice {slice.id} in here: unpacking, asked for ")

    run(story, tmp_path)


def test_a_creation_that_is_unusually_slow_is_told_with_how_long(tmp_path: Path) -> None:
    async def story(made: Plant) -> None:
        job = await made.submit()
        slice = await made.until(lambda: made._unjoined("v5e-8"))
        await made.until(lambda: _details(made, job))
        (view,) = (await settings.list_slices(made.service, made.user_call(job))).slices
        assert (view.slow_since, view.arriving) == (None, "")
        made.clock.skip(limits.SLOW_UNKNOWN_S + 30.0)
        (view,) = (await settings.list_slices(made.service, made.user_call(job))).slices
        assert view.slow_since is not None
        assert view.slow_since == (slice.asked_at or slice.intended_at) + limits.SLOW_UNKNOWN_S
        assert "; unusually slow for " in view.arriving
        assert view.arriving.endswith(" s: none was ever ready there")
        assert "; unusually slow for " in (await _details(made, job))[0]

    run(story, tmp_path)


def test_what_a_zone_said_is_told_once_and_is_no_two_sentences() -> None:
    snapshot = Snapshot()
    pool = Pool(
        name="p", team="lab", provider="tpu_vm", accelerator="v5e-8", chips=8, hosts=1, zones=("us-a",), spot=True
    )
    snapshot.put_pool(pool)
    zone = msgspec.structs.replace(untried(pool, "us-a"), why="There is no more capacity (or so).")
    service: Any = SimpleNamespace(
        controller=SimpleNamespace(snapshot=snapshot), clock=SimpleNamespace(now=lambda: 1000.0)
    )
    job: Any = SimpleNamespace(spec=SimpleNamespace(team="lab", resources=SimpleNamespace(accelerators=("v5e-8",))))
    line = "zone us-a: There is no more capacity (or so)"
    snapshot.put_zone(zone)
    assert arrivals.capacity_details(service, job, "it waits") == (line,)
    said = "zone us-a of pool p refused lately: There is no more capacity (or so); the next try is in 2 s"
    assert arrivals.capacity_details(service, job, said) == ()
    snapshot.put_zone(msgspec.structs.replace(zone, broken=limits.SETUP_FAILURES_MAX))
    assert arrivals.capacity_details(service, job, said) == (line,), "with the cure, which no reason has"


async def _details(made: Plant, job: str) -> tuple[str, ...]:
    if job not in made.controller.reasons:
        return ()
    return (await jobs.why(made.service, made.user_call(job))).details


def test_a_stranger_or_another_machine_is_not_heard(tmp_path: Path) -> None:
    async def story(made: Plant) -> None:
        slice = await coming(made)
        assert await refused(arrivals.arriving(made.service, call(made, slice, token="x"))) == "unauthenticated"
        for asked in (call(made, slice, machine="vm-old"), call(made, slice, host="1")):
            assert await refused(arrivals.arriving(made.service, asked)) == "forbidden"
        gone = msgspec.structs.replace(slice, id="snone")
        with pytest.raises(NotFound):
            await arrivals.arriving(made.service, call(made, gone))

    run(story, tmp_path)


def test_a_set_up_that_fails_replaces_the_slice_and_says_why(tmp_path: Path) -> None:
    async def story(made: Plant) -> None:
        slice = await coming(made)
        log = b"one\nthe disk is full\x1b[31m\n\n"
        await arrivals.arriving(made.service, call(made, slice, step="failed", body=log))
        failed = await slice_now(made, slice.id)
        assert failed.state in (SliceState.FAILED, SliceState.DELETING)
        assert failed.why == "host 0 could not be set up: the disk is full [31m"
        zone = await zone_of(made)
        assert (zone.broken, zone.streak) == (1, 0)
        assert zone.why == f"host 0 of slice {slice.id} could not be set up: one | the disk is full [31m"
        events = await made.store.read(lambda reader: reader.events(after=0, limit=1000))
        (told,) = [event for event in events if event.kind == "slice.failed"]
        assert told.body["log"] == "one\nthe disk is full [31m\n"
        # Another host of the same slice is too late to count.
        assert await refused(arrivals.arriving(made.service, call(made, slice, step="failed"))) == "forbidden"
        assert (await zone_of(made)).broken == 1

    run(story, tmp_path)


def test_a_log_is_cut_to_its_end() -> None:
    text = arrivals._last_lines("\n".join(f"line {number} {'x' * 400}" for number in range(100)).encode())
    assert text.endswith("x" * 400)
    assert "line 99" in text
    assert len(text) <= arrivals._LOG_CHARACTERS
    assert arrivals._last_lines(b"\xff\x00 a\n") == "\ufffd  a"
