"""S17: nothing of one team in any answer to another, not by list, id, filter, name, stream or error text."""

from __future__ import annotations

import re

import pytest

from penstock.domain.nouns import Role
from penstock.server.app import all_routes
from penstock.server.routing import Route
from tests.unit.server.house import House

CANARY = "xyzzy"


@pytest.fixture
def furnished(house: House) -> House:
    """Team lab has one of everything, all of it named so that a leak shows."""
    house.submit(name=CANARY, tags=[CANARY], note=CANARY, env={"A": CANARY}, idempotency_key=CANARY)
    house.pool(f"{CANARY}-pool", min=1)
    assert house.call("PUT", f"/v1/queues/{CANARY}-queue", "admin", json={}).status == 200
    house.call("PUT", f"/v1/secrets/{CANARY}", "admin", json={"value": CANARY})
    house.tick()
    return house


def filled(house: House, route: Route) -> str:
    """The route's path about something of lab's."""
    jobs = house.get("/v1/jobs")["jobs"]
    slices = house.get("/v1/slices")["slices"]
    slot = {
        "id": slices[0]["id"] if "slices" in route.path else jobs[0]["id"],
        "name": {"pools": f"{CANARY}-pool", "queues": f"{CANARY}-queue"}.get(route.path.split("/")[2], CANARY),
        "sha256": "0" * 64,
        "attempt": "a1",
    }
    return re.sub(r"\{(\w+)(:path)?\}", lambda found: slot[found[1]], route.path)


LOOKING = [route for route in all_routes() if route.method == "GET" and route.role is Role.VIEWER]


@pytest.mark.parametrize("route", LOOKING, ids=lambda route: route.path)
def test_a_stranger_sees_nothing_by_looking(furnished: House, route: Route) -> None:
    path = filled(furnished, route)
    own = furnished.call("GET", path, "viewer")
    theirs = furnished.call("GET", path, "stranger")
    assert theirs.status in ((200, 404) if "{" not in route.path else (404,))
    shown = theirs.body.decode().replace(path.rpartition("/")[2], "")
    assert CANARY not in shown.replace(f"{CANARY}-pool", "").replace(f"{CANARY}-queue", "") or "{" not in route.path
    assert '"lab"' not in theirs.body.decode()
    assert own.status in (200, 404, 503)
    if theirs.status == 200:
        assert CANARY not in theirs.body.decode()


def test_what_is_anothers_and_what_is_nowhere_read_alike(furnished: House) -> None:
    job = furnished.get("/v1/jobs")["jobs"][0]["id"]
    nowhere = "j" + "z" * 16
    for path in ("", "/why", "/result", "/events", "/logs", "/artifacts"):
        theirs = furnished.refused(404, "GET", f"/v1/jobs/{job}{path}", "stranger")
        none = furnished.refused(404, "GET", f"/v1/jobs/{nowhere}{path}", "stranger")
        assert theirs["detail"].replace(job, "ID") == none["detail"].replace(nowhere, "ID")
    for method, path in (("POST", "cancel"), ("POST", "resume"), ("POST", "rerun")):
        furnished.refused(404, method, f"/v1/jobs/{job}/{path}", "stranger")


def test_a_name_that_is_taken_is_refused_without_saying_by_whom(furnished: House) -> None:
    for kind, body in (("pools", {"accelerator": "v5e-8"}), ("queues", {})):
        path = f"/v1/{kind}/{CANARY}-{kind[:-1]}"
        said = furnished.refused(409, "PUT", path, "stranger", json=body)
        assert "lab" not in said["detail"]
        assert said["advice"] == "choose another"
    furnished.refused(404, "DELETE", f"/v1/pools/{CANARY}-pool", "stranger")


def test_a_queue_of_others_is_not_there(furnished: House) -> None:
    job = {"payload": {"type": "snippet", "code": ""}, "queue": f"{CANARY}-queue"}
    theirs = furnished.refused(404, "POST", "/v1/jobs", "stranger", json=job)
    none = furnished.refused(404, "POST", "/v1/jobs", "stranger", json={**job, "queue": "nowhere"})
    assert theirs["detail"].replace(job["queue"], "Q") == none["detail"].replace("nowhere", "Q")


def test_filters_find_nothing_of_others(furnished: House) -> None:
    for query in ({"user": "sam"}, {"tag": CANARY}, {"queue": "lab"}, {"state": "queued"}, {"since": 0}):
        assert furnished.get("/v1/jobs", "stranger", **query) == {"jobs": [], "next": None}


def test_a_shared_pool_shows_to_those_it_is_shared_with_without_others_slices(furnished: House) -> None:
    furnished.pool("shared", teams=("other",), min=1)
    furnished.tick()
    (pool,) = furnished.get("/v1/pools", "stranger")["pools"]
    assert (pool["name"], pool["slices"]) == ("shared", 0)
    assert furnished.get("/v1/slices", "stranger") == {"slices": []}


def test_operators_see_all(furnished: House) -> None:
    assert len(furnished.get("/v1/jobs", "operator")["jobs"]) == 1
    assert len(furnished.get("/v1/pools", "operator")["pools"]) == 1
    assert {event["kind"] for event in furnished.get("/v1/events", "operator")["events"]} >= {"quota.limit_set"}
