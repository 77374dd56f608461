"""Fleets, zones, hosts and the replacing of slices, over HTTP: who may ask, what is changed, what is told."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.controller.slices import fail_slice
from penstock.domain.lifecycle import SliceState
from penstock.domain.nouns import Slice, Zone
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
    assert house.get("/v1/slices/tpu-local-0/hosts") == {"hosts": [{"index": 0, "inside": "", "outside": ""}]}
    asked: list[tuple[str, str]] = []

    async def tell(name: str, zone: str) -> tuple[Address, ...]:
        asked.append((name, zone))
        if len(asked) > 1:
            raise Transient("503: later")
        return (Address("10.0.0.1", "34.1.2.3"), Address("10.0.0.2"))

    house.service.addresses = {"local": tell}
    assert house.get("/v1/slices/tpu-local-0/hosts")["hosts"] == [
        {"index": 0, "inside": "10.0.0.1", "outside": "34.1.2.3"},
        {"index": 1, "inside": "10.0.0.2", "outside": ""},
    ]
    assert asked == [(slices(house)[0].id, "local")]
    assert "503: later" in house.refused(503, "GET", "/v1/slices/tpu-local-0/hosts")["detail"]
    house.refused(404, "GET", "/v1/slices/tpu-local-0/hosts", "stranger")
