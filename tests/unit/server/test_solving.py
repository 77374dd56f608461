"""`tpu solve` on the server: orders reach every host, silence is seen, failures are counted, walls stand."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.controller.jobs import NotFound
from penstock.domain import limits
from penstock.domain.cloud import CloudWish, Mount
from penstock.domain.lifecycle import SliceState
from penstock.domain.nouns import Principal, Role, Slice
from penstock.ports.capacity import CapacityError
from penstock.server import solving
from penstock.server.routing import Refusal
from penstock.wire.solving import Finding, SolveReport, SolveRequest, SolveView, Verdict
from tests.unit.server.house import House
from tests.unit.server.plant import Host, Plant, plant

ADMIN = Principal(name="ada", team="lab", role=Role.ADMIN)
STRANGER = Principal(name="stan", team="other", role=Role.ADMIN)
OPERATOR = Principal(name="olga", team="ops", role=Role.OPERATOR)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """For who waits until hosts are found silent; who has them answer must not be in a hurry."""
    for name in ("SOLVE_HEARD_S", "SOLVE_RESTART_S"):
        monkeypatch.setattr(limits, name, 0.5)


def run(story: Any, home: Path) -> None:
    async def play() -> None:
        async with plant(home) as made:
            await story(made)

    asyncio.run(play())


async def begin(made: Plant, slice: str, by: Principal = ADMIN, *, dry_run: bool = False) -> SolveView:
    call = made.call(by, params={"id": slice}, body=SolveRequest(dry_run))
    return await solving.solve(made.service, call)


async def look(made: Plant, view: SolveView, by: Principal = ADMIN, wait: str = "10") -> SolveView:
    call = made.call(by, params={"id": view.slice}, query={"run": view.run, "wait": wait})
    return await solving.solved(made.service, call)


async def report(made: Plant, host: Host, view: SolveView, verdict: Verdict = "well", check: str = "disk") -> None:
    body = SolveReport(run=view.run, findings=(Finding(check=check, verdict=verdict, evidence="it is so"),))
    await solving.report(made.service, host.call(body=body))


async def answer(made: Plant, host: Host, view: SolveView, verdict: Verdict = "well") -> None:
    """As an agent does: the order, one more sync, the report."""
    orders = await host.sync(wait_s=5.0)
    assert orders.solve is not None
    assert orders.solve.run == view.run
    assert (await host.sync()).solve is None, "an order is not repeated at once"
    await report(made, host, view, verdict)


async def slice_now(made: Plant, id: str) -> Slice:
    found = await made.store.read(lambda reader: reader.slice(id))
    assert found is not None
    return found


async def refused(awaited: Any) -> str:
    with pytest.raises(Refusal) as caught:
        await awaited
    return caught.value.problem.code


def test_every_host_is_told_at_once_and_its_answer_is_shown(tmp_path: Path) -> None:
    async def story(made: Plant) -> None:
        await made.submit("v5e-16")
        hosts = await made.hosts("v5e-16")
        slice = hosts[0].slice
        await made.until(lambda: _is(made, slice, SliceState.READY))
        attempt = await hosts[0].launched()
        held = hosts[0].held(attempt)
        waiting = asyncio.create_task(hosts[0].sync(held, wait_s=5.0))
        await asyncio.sleep(0.05)
        view = await begin(made, slice[:12], dry_run=True)
        assert (view.done, view.well, [host.findings for host in view.hosts]) == (False, False, [()] * len(hosts))
        async with asyncio.timeout(5):
            orders = await waiting
        assert orders.solve is not None
        assert (orders.solve.run, orders.solve.dry_run) == (view.run, True)
        assert abs(orders.solve.now - made.clock.now()) < 60
        again = await begin(made, slice, dry_run=True)
        assert again.run == view.run, "asked twice, looked at once"
        assert await refused(begin(made, slice)) == "conflict"
        await report(made, hosts[0], view)
        for host in hosts[1:]:
            orders = await host.sync(host.held(attempt), wait_s=5.0)
            assert orders.solve is not None
            await report(made, host, view, "found")
        done = await look(made, view)
        assert (done.done, done.well, done.failures) == (True, False, 0)
        assert [[each.check for each in host.findings] for host in done.hosts] == [["agent", "disk"]] * len(hosts)
        assert await refused(report(made, hosts[0], view)) == "conflict"

    run(story, tmp_path)


def test_an_order_says_what_the_pool_says_now(tmp_path: Path) -> None:
    async def story(made: Plant) -> None:
        host = await made.ready()
        pool = await made.store.read(lambda reader: reader.pool("small"))
        assert pool is not None
        mounts = (Mount("nfs", "10.0.0.2:/x", "/mnt/x"), Mount("disk", "d", "/mnt/d"))
        await made.controller.commands.put_pool(msgspec.structs.replace(pool, cloud=CloudWish(mounts=mounts)))

        async def known() -> bool:
            return made.controller.snapshot.pools["small"].cloud is not None

        await made.until(known)
        await begin(made, host.slice)
        order = (await host.sync()).solve
        assert order is not None
        assert (order.mounts, order.ours_alone) == (mounts, False), "a local machine has other users"

    run(story, tmp_path)


async def _is(made: Plant, slice: str, state: SliceState) -> bool:
    return (await slice_now(made, slice)).state is state


def test_other_teams_see_nothing_and_operators_everything(tmp_path: Path) -> None:
    async def story(made: Plant) -> None:
        host = await made.ready()
        with pytest.raises(NotFound):
            await begin(made, host.slice, STRANGER)
        view = await begin(made, host.slice, OPERATOR)
        await answer(made, host, view)
        with pytest.raises(NotFound):
            await look(made, view, STRANGER)
        assert (await look(made, view)).well
        with pytest.raises(NotFound):
            await solving.solved(made.service, made.call(ADMIN, params={"id": "sother"}, query={"run": view.run}))

    run(story, tmp_path)


@pytest.mark.usefixtures("short")
def test_a_silent_agent_is_restarted_and_counts_as_mended(tmp_path: Path) -> None:
    async def story(made: Plant) -> None:
        host = await made.ready()
        restarted: list[tuple[str, int]] = []
        back: list[asyncio.Task[None]] = []

        async def restart(slice: Slice, index: int) -> None:
            restarted.append((slice.id, index))
            back.append(asyncio.create_task(answer(made, host, view)))

        made.service.restart_agent = restart
        dry = await begin(made, host.slice, dry_run=True)
        # It got the order and hangs: that its connection took bytes proves nothing.
        assert (await host.sync()).solve is not None
        done = await look(made, dry)
        assert ([each.verdict for each in done.hosts[0].findings], restarted) == (["found"], [])
        view = await begin(made, host.slice)
        done = await look(made, view)
        assert restarted == [(host.slice, 0)]
        assert {each.check: each.verdict for each in done.hosts[0].findings} == {"agent": "fixed", "disk": "well"}
        assert done.well
        await asyncio.gather(*back)

    run(story, tmp_path)


def test_what_cannot_be_mended_twice_in_a_row_is_given_up(tmp_path: Path) -> None:
    async def story(made: Plant) -> None:
        host = await made.ready()

        async def solve(verdict: Verdict) -> SolveView:
            view = await begin(made, host.slice)
            await answer(made, host, view, verdict)
            return await look(made, view)

        assert (await solve("unfixed")).failures == 1
        assert (await solve("fixed")).failures == 0
        assert (await solve("waits")).failures == 0, "what waits for a job is no failure"
        assert (await solve("unknown")).failures == 1
        last = await solve("unfixed")
        assert last.failures == limits.SOLVE_FAILURES_MAX == 2
        assert "host 0, disk: it is so" in last.quarantined
        slice = await slice_now(made, host.slice)
        assert slice.state is SliceState.DELETING
        assert slice.why.startswith("`tpu solve` failed 2 times")
        assert await refused(begin(made, host.slice)) == "conflict"

    run(story, tmp_path)


@pytest.mark.usefixtures("short")
def test_a_job_on_a_slice_that_is_given_up_ends_first(tmp_path: Path) -> None:
    async def story(made: Plant) -> None:
        job, host, attempt = await made.running()

        async def cannot(slice: Slice, index: int) -> None:
            raise CapacityError(f"no way to host {index} of {slice.provider}")

        made.service.restart_agent = cannot
        for _ in range(limits.SOLVE_FAILURES_MAX):
            done = await look(made, await begin(made, host.slice))
            (agent,) = done.hosts[0].findings
            assert (agent.verdict, agent.fix) == ("unfixed", "no way to host 0 of local")
        assert (await slice_now(made, host.slice)).state is SliceState.DRAINING
        await host.exit(attempt)
        await made.until(lambda: _is(made, host.slice, SliceState.DELETING))
        assert (await made.job(job)).state.value == "succeeded"

    run(story, tmp_path)


def test_only_administrators_may(house: House) -> None:
    house.pool("p", min=1)
    house.tick()
    (slice,) = house.get("/v1/slices")["slices"]
    path = f"/v1/slices/{slice['id']}/solve"
    for user in ("viewer", "submitter"):
        assert house.refused(403, "POST", path, user)["code"] == "forbidden"
        assert house.refused(403, "GET", f"{path}?run=x", user)["code"] == "forbidden"
    assert house.refused(404, "POST", path, "stranger")["code"] == "not_found"
    assert house.refused(404, "GET", f"{path}?run=x", "admin")["code"] == "not_found"
    assert house.refused(403, "POST", "/v1/agent/solved", "operator", json={"run": "x", "findings": []})
