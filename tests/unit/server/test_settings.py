"""What people set: pools, queues, secrets, maintenance; and the server's words about itself."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from penstock.domain.nouns import Zone
from penstock.ports.store import Transaction
from tests.unit.server.house import House

POOL: dict[str, Any] = {"accelerator": "v5e-8"}


def test_a_pool_is_made_changed_and_deleted(house: House) -> None:
    made = house.call("PUT", "/v1/pools/p", "admin", json=POOL).json
    assert made == {
        "name": "p", "team": "lab", "provider": "local", "accelerator": "v5e-8", "zones": ["local"], "min": 0,
        "max": 1, "spot": False, "idle_s": 600.0, "slices": 0, "cloud": None, "per_zone": None, "race": 1,
    }  # fmt: skip
    assert house.call("PUT", "/v1/pools/p", "admin", json={**POOL, "max": 3}).json["max"] == 3
    assert house.get("/v1/pools/p")["max"] == 3
    assert house.call("DELETE", "/v1/pools/p", "admin").status == 204
    house.refused(404, "GET", "/v1/pools/p")
    house.refused(404, "DELETE", "/v1/pools/p", "admin")
    assert house.get("/v1/pools") == {"pools": []}


@pytest.mark.parametrize(
    ("changes", "status", "field"),
    [
        ({"accelerator": "v5x-8"}, 400, "accelerator"),
        ({"max": -1}, 400, "max"),
        ({"max": 10**6}, 400, "max"),
        ({"min": 2}, 409, "min"),
        ({"zones": []}, 400, "zones"),
        ({"zones": ["a", "a"]}, 400, "zones"),
        ({"zones": ["a\n"]}, 400, "zones"),
        ({"idle_s": -1}, 400, "idle_s"),
        ({"race": 0}, 400, "race"),
        ({"race": 5}, 400, "race"),
        ({"race": 2, "per_zone": 1}, 409, "race"),
        ({"provider": "moon"}, 404, "provider"),
        ({"team": "other"}, 403, "team"),
    ],
)
def test_a_bad_pool_is_refused_in_one_line(house: House, changes: dict[str, Any], status: int, field: str) -> None:
    said = house.refused(status, "PUT", "/v1/pools/p", "admin", json={**POOL, **changes})
    assert said["field"] == field
    assert said["detail"].startswith(f"{field}: ")


def test_what_a_pool_is_made_of_never_changes(house: House) -> None:
    house.call("PUT", "/v1/pools/p", "admin", json=POOL)
    said = house.refused(409, "PUT", "/v1/pools/p", "admin", json={"accelerator": "v4-8"})
    assert (said["field"], said["code"]) == ("accelerator", "conflict")


def test_what_a_request_does_not_name_stays(house: House) -> None:
    house.pool("p", race=2, teams=("other",))
    house.call("PUT", "/v1/pools/p", "admin", json={**POOL, "max": 9})
    pool = house.wait(house.store.read(lambda reader: reader.pool("p")))
    assert pool is not None
    assert (pool.max, pool.race, pool.teams) == (9, 2, ("other",))
    raced = house.call("PUT", "/v1/pools/p", "admin", json={**POOL, "race": 3}).json
    assert (raced["race"], raced["max"]) == (3, 1)
    assert house.get("/v1/pools/p")["race"] == 3
    assert house.call("PUT", "/v1/pools/p", "admin", json={**POOL, "per_zone": 2}).json["race"] == 1


def test_a_queue_is_made_and_changed(house: House) -> None:
    house.submit()
    made = house.call("PUT", "/v1/queues/q", "admin", json={"weight": 2.0, "quota_chips": 8}).json
    assert (made["weight"], made["quota_chips"], made["team"], made["waiting"]) == (2.0, 8, "lab", 0)
    assert house.call("PUT", "/v1/queues/q", "admin", json={"paused": True}).json["paused"] is True
    assert [queue["name"] for queue in house.get("/v1/queues")["queues"]] == ["lab", "q"]
    assert house.get("/v1/queues/lab")["waiting"] == 1
    said = house.refused(400, "PUT", "/v1/queues/q", "admin", json={"weight": 0})
    assert said["field"] == "weight"


def test_secrets_go_in_and_only_names_come_out(house: House, caplog: pytest.LogCaptureFixture) -> None:
    canary = "canary-5550123"
    with caplog.at_level(logging.DEBUG):
        assert house.call("PUT", "/v1/secrets/KEY", "admin", json={"value": canary}).status == 204
        house.refused(400, "PUT", "/v1/secrets/KEY", "admin", json={"value": canary, "x": 1})
        house.refused(400, "PUT", "/v1/secrets/a-b", "admin", json={"value": canary})
        answers = [house.call("GET", path, "admin").body for path in ("/v1/secrets", "/v1/events", "/v1/server")]
    assert house.get("/v1/secrets", "admin") == {"names": ["KEY"]}
    assert house.get("/v1/secrets", "stranger") == {"names": []}
    assert all(canary.encode() not in answer for answer in answers)
    assert canary not in caplog.text
    assert "lab/ada sets secret KEY" in caplog.text
    assert house.call("DELETE", "/v1/secrets/KEY", "admin").status == 204
    house.refused(404, "DELETE", "/v1/secrets/KEY", "admin")


def test_maintenance_is_for_operators(house: House) -> None:
    assert house.refused(403, "POST", "/v1/maintenance", "admin", json={"on": True})["code"] == "forbidden"
    assert house.call("POST", "/v1/maintenance", "operator", json={"on": True}).json == {"on": True}
    assert house.wait(house.store.read(lambda reader: reader.control())).maintenance


def test_the_server_says_who_it_is_and_who_calls(house: House) -> None:
    seen = house.get("/v1/server")
    assert (seen["version"], seen["api"], seen["leading"]) == ("0.0.0", "v1", False)
    assert (seen["principal"], seen["team"], seen["role"]) == ("sam", "lab", "submitter")
    house.tick()
    assert house.get("/v1/server")["leading"] is True


def test_a_slice_can_be_taken_away_where_it_is_local(house: House) -> None:
    house.pool("p", min=1)
    house.tick()
    (slice,) = house.get("/v1/slices")["slices"]
    assert (slice["pool"], slice["team"], slice["state"], slice["chips"]) == ("p", "lab", "intended", 8)
    path = f"/v1/slices/{slice['id'][:12]}/preempt"
    assert house.refused(409, "POST", path, "admin")["field"] == "id"
    taken: list[tuple[str, float]] = []

    async def take(id: str, notice_s: float) -> None:
        taken.append((id, notice_s))

    house.service.preempt = take
    assert house.call("POST", path, "admin", json={"notice_s": 30}).status == 204
    assert house.call("POST", path, "admin").status == 204
    assert taken == [(slice["id"], 30.0), (slice["id"], 0.0)]
    house.refused(403, "POST", path, "submitter")
    house.refused(404, "POST", path, "stranger")
    house.refused(404, "POST", "/v1/slices/szzz/preempt", "admin")


# --- pools of a cloud ---
CLOUD_POOL: dict[str, Any] = {"accelerator": "v5e-8", "provider": "tpu_vm", "zones": ["us-west*"]}


def test_a_pool_of_a_cloud_has_its_zones_by_pattern_and_keeps_its_wishes(cloudy: House) -> None:
    made = cloudy.call("PUT", "/v1/pools/c", "admin", json={**CLOUD_POOL, "spot": True}).json
    assert made["zones"] == ["us-west1-c", "us-west4-a"]
    assert (made["spot"], made["cloud"]) == (True, {"kind": "spot"})
    wish = {"kind": "preemptible", "network": "n", "mounts": [{"kind": "nfs", "source": "h:/x", "path": "/mnt/x"}]}
    made = cloudy.call("PUT", "/v1/pools/c", "admin", json={**CLOUD_POOL, "cloud": wish}).json
    assert (made["spot"], made["cloud"]) == (True, wish)
    again = cloudy.call("PUT", "/v1/pools/c", "admin", json={**CLOUD_POOL, "spot": True, "max": 7}).json
    assert (again["max"], again["cloud"]) == (7, wish), "what is not named stays"


@pytest.mark.parametrize(
    ("changes", "status", "field"),
    [
        ({"zones": ["mars-*"]}, 409, "zones"),
        ({"zones": ["local"]}, 409, "zones"),
        ({"zones": ["europe-west4-a"]}, 409, "zones"),
        ({"cloud": {"kind": "cheap"}}, 400, "cloud.kind"),
        ({"cloud": {"tags": ["A"]}}, 400, "cloud.tags"),
        ({"cloud": {"kind": "spot", "reservation": "r"}}, 409, "cloud.reservation"),
        ({"cloud": {"kind": "reserved"}, "spot": True}, 409, "spot"),
        ({"accelerator": "tpu7x-8"}, 409, "provider"),
        ({"provider": "local", "zones": ["local"], "cloud": {}}, 409, "cloud"),
    ],
)
def test_a_bad_pool_of_a_cloud_is_refused(cloudy: House, changes: dict[str, Any], status: int, field: str) -> None:
    said = cloudy.refused(status, "PUT", "/v1/pools/c", "admin", json={**CLOUD_POOL, **changes})
    assert said["field"] == field
    assert said["detail"].startswith(f"{field}: ")


def test_an_option_nobody_knows_is_refused(cloudy: House) -> None:
    cloudy.refused(400, "PUT", "/v1/pools/c", "admin", json={**CLOUD_POOL, "cloud": {"colour": "red"}})


def test_a_change_of_how_slices_are_made_lets_resting_zones_be_tried_again(cloudy: House) -> None:
    cloudy.call("PUT", "/v1/pools/c", "admin", json=CLOUD_POOL)
    zone = Zone(provider="tpu_vm", zone="us-west1-c", accelerator="v5e-8", spot=False, backoff_until=9e9, broken=3)

    def rest(tx: Transaction) -> None:
        tx.add(zone, "zone.learned", body={})

    cloudy.wait(cloudy.store.transact(rest))
    cloudy.call("PUT", "/v1/pools/c", "admin", json={**CLOUD_POOL, "max": 2})
    (kept,) = cloudy.wait(cloudy.store.read(lambda reader: reader.zones()))
    assert kept.broken == 3
    cloudy.call("PUT", "/v1/pools/c", "admin", json={**CLOUD_POOL, "cloud": {"network": "other"}})
    (forgiven,) = cloudy.wait(cloudy.store.read(lambda reader: reader.zones()))
    assert (forgiven.broken, forgiven.backoff_until) == (0, 0.0)
