"""Taking over TPUs that exist, over HTTP with a cloud of the test's own: by two at once, again, and what fails.

The cloud's labels and real hosts are in tests/unit/capacity/test_adoption.py and tests/process/test_adoption.py.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from penstock.controller.slices import release
from penstock.domain.lifecycle import SliceState
from penstock.domain.nouns import Slice, Team
from penstock.ports.capacity import CapacityError, Existing, PermissionDenied, Transient, Unsent
from penstock.ports.store import Reader
from tests.unit.server.house import House

ASKED = {"name": "by-hand", "zone": "us-west4-a"}


class OneTpu:
    """A cloud with one TPU; `label` is the slice that it is called."""

    def __init__(self) -> None:
        self.label: str | None = None
        self.labelled: list[str] = []
        self.meeting: asyncio.Barrier | None = None  #: where those who have looked wait for each other
        self.broken: CapacityError | None = None
        self.refusal: CapacityError | None = None

    def check(self) -> None:
        if self.broken is not None:
            raise self.broken

    async def inspect(self, name: str, zone: str) -> Existing | None:
        owner = None if self.label is None else "ours"
        found = Existing(name=name, zone=zone, accelerator="v5litepod-8", state="READY", owner=owner, slice=self.label)
        if self.meeting is not None:
            await self.meeting.wait()
        return found

    async def take(self, found: Existing, slice: Slice, *, own: bool) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.label = slice.id
        self.labelled.append(slice.id)

    def script(self, slice: Slice) -> str:
        return f"set up {slice.id}"


@pytest.fixture
def cloud(house: House) -> OneTpu:
    house.wait(house.controller.commands.put_team(Team(name="ops")))
    made = OneTpu()
    house.service.adopter = made
    return made


def slices(house: House) -> list[Slice]:
    def read(reader: Reader) -> list[Slice]:
        return [each for each in reader.live_slices() if each.pool == "by-hand"]

    return house.wait(house.store.read(read))


def adopt(house: House) -> Any:
    answer = house.call("POST", "/v1/adopt", "operator", ASKED)
    assert answer.status == 200, answer.body
    return answer.json


def test_two_who_adopt_at_once_get_one_slice(house: House, cloud: OneTpu) -> None:
    async def both() -> tuple[Any, Any]:
        cloud.meeting = asyncio.Barrier(2)  # both have seen that nobody has it

        async def one() -> Any:
            headers = {"authorization": "Bearer token-operator", "content-type": "application/json"}
            reply = await house._client.post("/v1/adopt", headers=headers, content=msgspec.json.encode(ASKED))
            return reply.status_code, reply.json()

        return await asyncio.gather(one(), one())

    (first, said), (second, told) = house.wait(both())
    assert (first, second) == (200, 200), (said, told)
    (slice,) = slices(house)
    assert said["slice"] == told["slice"] == slice.id
    assert set(cloud.labelled) == {slice.id}
    assert slice.state is SliceState.CREATING


def test_asked_again_on_its_way_it_is_the_same_and_in_use_it_is_refused(house: House, cloud: OneTpu) -> None:
    first = adopt(house)
    assert adopt(house)["slice"] == first["slice"]
    cloud.label = None  # the server died before it had set it
    assert adopt(house)["slice"] == first["slice"]
    assert cloud.label == first["slice"]
    house.wait(house.store.transact(release, first["slice"], "test"))
    said = house.refused(503, "POST", "/v1/adopt", "operator", json=ASKED)
    assert f"by-hand is being let go as slice {first['slice']}" in said["detail"]
    assert "again" in said["advice"]
    assert len(slices(house)) == 1
    cloud.label = None  # and now it was
    assert adopt(house)["slice"] != first["slice"]


def test_a_pool_of_that_name_is_not_made_into_one(house: House, cloud: OneTpu) -> None:
    house.pool("by-hand")
    said = house.refused(409, "POST", "/v1/adopt", "operator", json=ASKED)
    assert "is the name of a pool already" in said["detail"]
    assert slices(house) == []
    assert cloud.labelled == []


@pytest.mark.parametrize("error", [Unsent("the agent bundle is being built"), PermissionDenied("it cannot be built")])
def test_nothing_is_begun_that_cannot_go_on(house: House, cloud: OneTpu, error: CapacityError) -> None:
    cloud.broken = error
    answer = house.call("POST", "/v1/adopt", "operator", ASKED)
    assert answer.status == (503 if isinstance(error, Unsent) else 409)
    assert str(error) in answer.json["detail"]
    assert slices(house) == []


def test_a_label_that_could_not_be_written_now_is_written_when_asked_again(house: House, cloud: OneTpu) -> None:
    cloud.refusal = Transient("503: later")
    for _ in range(3):
        house.refused(503, "POST", "/v1/adopt", "operator", json=ASKED)
    (slice,) = slices(house)
    cloud.refusal = None
    assert adopt(house)["slice"] == slice.id
    assert cloud.labelled == [slice.id]


def test_a_label_that_may_not_be_written_leaves_the_name_free(house: House, cloud: OneTpu) -> None:
    cloud.refusal = PermissionDenied("tpu.nodes.update denied")
    said = house.refused(409, "POST", "/v1/adopt", "operator", json=ASKED)
    assert "tpu.nodes.update denied" in said["detail"]
    assert "by-hand" not in {pool["name"] for pool in house.get("/v1/pools", "operator")["pools"]}


def test_why_hosts_could_not_be_set_up_is_seen_by_all(
    house: House, cloud: OneTpu, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "penstock.audit")
    slice = adopt(house)["slice"]
    path = f"/v1/slices/{slice}/unreached"
    wrong = {"hosts": [{"index": 0, "said": "ssh could not enter it: Permission denied\x1b[31m (publickey)"}]}
    house.refused(403, "POST", path, "admin", json=wrong)
    house.refused(404, "POST", "/v1/slices/s0none/unreached", "operator", json=wrong)
    said = house.refused(400, "POST", path, "operator", json={"hosts": [{"index": 9, "said": "no"}]})
    assert "9 is no host of slice" in said["detail"]
    assert house.call("POST", path, "operator", wrong).status == 204
    lines = [record.getMessage() for record in caplog.records if "not set up" in record.getMessage()]
    assert lines == [f"ops/olga tells why hosts of slice {slice} are not set up"], "and it is seen who told"
    (shown,) = [each for each in house.get("/v1/slices", "operator")["slices"] if each["id"] == slice]
    assert shown["state"] == "creating"
    assert shown["arriving"].startswith("not set up by olga: ssh could not enter it: Permission denied")
    assert "\x1b" not in shown["arriving"]
