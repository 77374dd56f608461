"""Fleets, zones, hosts and the replacing of slices, over HTTP: who may ask, what is changed, what is told."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.controller.slices import fail_slice
from penstock.domain import limits
from penstock.domain.lifecycle import SliceState
from penstock.domain.nouns import Slice, Zone
from penstock.planner.snapshot import Mute, Witness
from penstock.ports.capacity import Address, Transient
from penstock.ports.store import Reader, Transaction
from tests.unit.server.house import START, House

FLEET: dict[str, Any] = {"accelerator": "v5e-8", "per_zone": 2}


def learned(house: House, **known: Any) -> None:
    zone = Zone(provider="local", zone="local", accelerator="v5e-8", spot=False, **known)

    def save(tx: Transaction) -> None:
        tx.add(zone, "zone.learned")

    house.wait(house.store.transact(save))


def slices(house: House) -> list[Slice]:
    def read(reader: Reader) -> list[Slice]:
        return sorted(reader.live_slices(), key=lambda one: one.number or 0)

    return house.wait(house.store.read(read))


def nowhere(index: int) -> dict[str, Any]:
    """A host whose addresses nobody knows."""
    return {"index": index, "inside": "", "outside": "", "trouble": ""}


def fail(house: House, slice: Slice) -> None:
    def save(tx: Transaction) -> None:
        fail_slice(tx, slice, "broken")

    house.wait(house.store.transact(save))


def test_a_fleet_holds_its_count_per_zone_and_numbers_its_slices(house: House) -> None:
    made = house.call("PUT", "/v1/pools/f", "admin", json=FLEET).json
    assert (made["per_zone"], made["min"], made["max"]) == (2, 0, 2)
    house.tick()
    assert [each["title"] for each in house.get("/v1/slices")["slices"]] == ["tpu-local-0", "tpu-local-1"]
    grown = house.call("PUT", "/v1/pools/f", "admin", json={**FLEET, "per_zone": 3}).json
    assert (grown["per_zone"], grown["max"]) == (3, 3)
    kept = house.call("PUT", "/v1/pools/f", "admin", json={"accelerator": "v5e-8", "max": 1}).json
    assert (kept["per_zone"], kept["max"]) == (3, 3), "a request that does not speak of fleets makes no pool of one"
    said = house.refused(400, "PUT", "/v1/pools/f", "admin", json={**FLEET, "per_zone": -1})
    assert said["field"] == "per_zone"
    house.refused(400, "PUT", "/v1/pools/f", "admin", json={**FLEET, "per_zone": 10**6})


def test_zones_tell_what_was_learned(house: House) -> None:
    house.pool("p")
    fresh = house.get("/v1/zones")["zones"]
    assert [(one["zone"], one["tries"], one["odds"]) for one in fresh] == [("local", 0, 0.5)]
    learned(
        house, grants=3.0, tries=4, ready_s=12.5, life_s=60.0, backoff_until=START + 3600, streak=1, tried_at=START,
        why="no more capacity",
    )  # fmt: skip
    (zone,) = house.get("/v1/zones")["zones"]
    assert zone["odds"] > 0.9
    assert 3500 < zone["rests_s"] <= 3600
    assert {key: zone[key] for key in ("ready_s", "life_s", "refusals", "why", "tries", "usd_per_hour")} == {
        "ready_s": 12.5, "life_s": 60.0, "refusals": 1, "why": "no more capacity", "tries": 4, "usd_per_hour": 0.0,
    }  # fmt: skip
    assert house.get("/v1/zones", "stranger") == {"zones": []}


def test_recreate_tries_resting_zones_and_touches_nothing_that_works(house: House) -> None:
    house.call("PUT", "/v1/pools/f", "admin", json=FLEET)
    house.tick()
    before = slices(house)
    fail(house, before[1])
    learned(house, backoff_until=START + 3600, streak=3, tries=3, why="dry")
    reply = house.call("POST", "/v1/pools/f/recreate", "admin").json
    assert reply == {
        "pool": "f", "wanted": 2, "ready": 0, "coming": 1, "broken": ["tpu-local-1"], "retried": ["local"],
    }  # fmt: skip
    house.tick()
    after = slices(house)
    assert after[0].id == before[0].id
    assert [one.state for one in after if one.id == before[1].id] == [SliceState.DELETING]
    (new,) = [one for one in after if one.id not in {each.id for each in before}]
    assert new.title == before[1].title
    assert house.call("POST", "/v1/pools/f/recreate", "admin").json["retried"] == []


def test_recreate_names_each_place_once_and_only_those_that_are_to_be_filled(house: House) -> None:
    house.call("PUT", "/v1/pools/f", "admin", json=FLEET)
    for _ in range(2):
        house.tick()
        (second,) = [one for one in slices(house) if one.number == 1 and one.state is SliceState.INTENDED]
        fail(house, second)
    assert len(slices(house)) == 3
    assert house.call("POST", "/v1/pools/f/recreate", "admin").json["broken"] == ["tpu-local-1"]
    house.call("PUT", "/v1/pools/f", "admin", json={**FLEET, "per_zone": 1})
    assert house.call("POST", "/v1/pools/f/recreate", "admin").json["broken"] == []


@pytest.mark.parametrize(("user", "status"), [("submitter", 403), ("stranger", 404)])
def test_who_may_repair_and_replace(house: House, user: str, status: int) -> None:
    house.call("PUT", "/v1/pools/f", "admin", json=FLEET)
    house.tick()
    house.refused(status, "POST", "/v1/pools/f/recreate", user)
    house.refused(status, "POST", f"/v1/slices/{slices(house)[0].id}/replace", user)
    house.refused(status, "POST", "/v1/slices/tpu-local-0/replace", user)


def test_a_slice_is_replaced_by_id_or_by_its_place(house: House) -> None:
    house.call("PUT", "/v1/pools/f", "admin", json=FLEET)
    house.tick()
    first, second = slices(house)
    reply = house.call("POST", "/v1/slices/tpu-local-0/replace", "admin").json
    assert reply == {"id": first.id, "state": "deleting", "job": None}
    assert house.call("POST", f"/v1/slices/{first.id}/replace", "admin").json["state"] == "deleting"
    house.tick()
    again = house.call("POST", "/v1/slices/tpu-local-0/replace", "admin", json={"now": True}).json
    assert again["id"] not in (first.id, second.id), "the place means the slice that is in it now"
    house.refused(404, "POST", "/v1/slices/tpu-local-9/replace", "admin")
    said = house.refused(409, "POST", "/v1/slices/s/replace", "admin")
    assert said["code"] == "ambiguous"


def test_hosts_are_asked_of_the_provider(house: House) -> None:
    house.call("PUT", "/v1/pools/f", "admin", json=FLEET)
    house.tick()
    assert house.get("/v1/slices/tpu-local-0/hosts") == {"hosts": [nowhere(0)]}
    asked: list[tuple[str, str]] = []

    async def tell(name: str, zone: str) -> tuple[Address, ...]:
        asked.append((name, zone))
        if len(asked) > 1:
            raise Transient("503: later")
        return (Address("10.0.0.1", "34.1.2.3"), Address("10.0.0.2"))

    house.service.addresses = {"local": tell}
    assert house.get("/v1/slices/tpu-local-0/hosts")["hosts"] == [
        {**nowhere(0), "inside": "10.0.0.1", "outside": "34.1.2.3"},
        {**nowhere(1), "inside": "10.0.0.2"},
    ]
    assert asked == [(slices(house)[0].id, "local")]
    (told,) = house.get("/v1/slices/tpu-local-0/hosts")["hosts"]
    assert told == {**nowhere(0), "trouble": "the API of zone local refused: 503: later"}
    house.refused(404, "GET", "/v1/slices/tpu-local-0/hosts", "stranger")


async def hang(name: str, zone: str) -> tuple[Address, ...]:
    await asyncio.Event().wait()
    raise AssertionError


def test_hosts_of_a_zone_that_hangs_are_told_soon_as_they_were_last_known(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "HOSTS_ASK_S", 0.05)
    house.call("PUT", "/v1/pools/f", "admin", json=FLEET)
    house.tick()
    house.service.addresses = {"local": hang}
    (told,) = house.get("/v1/slices/tpu-local-0/hosts")["hosts"]
    assert told["trouble"].startswith("the API of zone local did not answer within ")
    assert told["inside"] == ""
    house.service.known_addresses = {"local": lambda name, zone: (Address("10.0.0.1"),)}
    (told,) = house.get("/v1/slices/tpu-local-0/hosts")["hosts"]
    assert told["inside"] == "10.0.0.1"
    assert told["trouble"]


@pytest.mark.parametrize(
    ("mute", "told"),
    [
        (Mute(seconds=42.0), "the API of zone local has not answered for 42 s"),
        (Mute(seconds=42.0, said="no right", denied=True), "the API of zone local has refused for 42 s: no right"),
    ],
)
def test_a_zone_that_cannot_be_seen_is_told_of_everywhere(house: House, mute: Mute, told: str) -> None:
    house.call("PUT", "/v1/pools/f", "admin", json=FLEET)
    house.tick()
    first, second = slices(house)
    house.call("POST", f"/v1/slices/{first.id}/replace", "admin")
    job = house.submit(on=["v5e-8"])
    house.tick()
    house.controller.snapshot.witness = Witness(mute={("local", "local"): mute})
    (zone,) = house.get("/v1/zones")["zones"]
    assert (zone["silent_s"], zone["denied"], zone["said"]) == (42.0, mute.denied, mute.said)
    assert house.clock.now() - 60 < zone["silent_since"] < house.clock.now() - 41
    shown = {each["id"]: each["why"] for each in house.get("/v1/slices")["slices"]}
    assert f"ada wants another; {told}; it may exist until then, and is deleted when that answers" in shown[first.id]
    assert shown[second.id] == f"{told}; it is asked for again when that answers"
    assert told in "\n".join(house.get(f"/v1/jobs/{job}/why")["details"])
    house.service.addresses = {"local": hang}
    for host in house.get("/v1/slices/tpu-local-0/hosts")["hosts"]:
        assert host["trouble"].startswith(told), "without asking: it would not answer"
    house.controller.snapshot.witness = Witness()
    (zone,) = house.get("/v1/zones")["zones"]
    assert (zone["silent_s"], zone["silent_since"]) == (0.0, None)
