"""Reservations over HTTP: who may make, replace and end them, what others see, and another team's are not there."""

from __future__ import annotations

import pytest

from penstock.domain.nouns import Reservation
from tests.unit.server.house import START, House


@pytest.fixture
def stocked(house: House) -> House:
    house.pool("big", min=1)
    house.tick()
    return house


def slice_of(house: House) -> str:
    id: str = house.get("/v1/slices")["slices"][0]["id"]
    return id


def test_a_slice_is_reserved_and_everybody_of_the_team_sees_it(stocked: House) -> None:
    id = slice_of(stocked)
    made = stocked.call("PUT", f"/v1/slices/{id}/reservation", json={"for_s": 3600, "note": "demo"})
    assert made.status == 200
    assert (made.json["of"], made.json["user"], made.json["note"]) == (id, "sam", "demo")
    assert made.json["until"] - made.json["since"] == pytest.approx(3600)
    shown = stocked.get("/v1/slices", "viewer")["slices"][0]["reserved"]
    assert (shown["user"], shown["note"]) == ("sam", "demo")


def test_nobody_takes_anothers_reservation_but_administrators(stocked: House) -> None:
    path = f"/v1/slices/{slice_of(stocked)}/reservation"
    stocked.call("PUT", path, json={})
    said = stocked.refused(409, "PUT", path, "second", json={})
    assert "reserved by sam" in said["detail"]
    stocked.refused(409, "DELETE", path, "second")
    assert stocked.call("PUT", path, "admin", json={"user": "sue"}).json["user"] == "sue"
    assert stocked.call("DELETE", path, "second").status == 204
    assert stocked.get("/v1/slices")["slices"][0]["reserved"] is None
    assert stocked.call("DELETE", path, "second").status == 204  # again is no error


def test_submitters_reserve_for_themselves_and_viewers_not_at_all(stocked: House) -> None:
    path = f"/v1/slices/{slice_of(stocked)}/reservation"
    assert stocked.refused(403, "PUT", path, json={"user": "sue"})["field"] == "user"
    stocked.refused(403, "PUT", path, "viewer", json={})


def test_prolonging_keeps_since(stocked: House) -> None:
    path = f"/v1/slices/{slice_of(stocked)}/reservation"
    first = stocked.call("PUT", path, json={"for_s": 60}).json
    second = stocked.call("PUT", path, json={"for_s": 7200}).json
    assert second["since"] == first["since"]
    assert second["until"] > first["until"]


def test_a_pool_is_reserved_as_a_whole_and_stays_so_when_it_is_changed(stocked: House) -> None:
    assert stocked.call("PUT", "/v1/pools/big/reservation", json={"note": "all mine"}).json["of"] == "pool:big"
    stocked.call("PUT", "/v1/pools/big", "admin", json={"accelerator": "v5e-8", "min": 1, "max": 2})
    shown = stocked.get("/v1/slices")["slices"][0]["reserved"]
    assert (shown["of"], shown["user"]) == ("pool:big", "sam")
    assert stocked.call("DELETE", "/v1/pools/big/reservation").status == 204
    assert stocked.get("/v1/slices")["slices"][0]["reserved"] is None


def test_another_teams_slices_and_pools_are_not_there(stocked: House) -> None:
    id = slice_of(stocked)
    for method in ("PUT", "DELETE"):
        for path in (f"/v1/slices/{id}/reservation", "/v1/pools/big/reservation"):
            theirs = stocked.refused(404, method, path, "stranger", json={} if method == "PUT" else None)
            assert "lab" not in theirs["detail"]


def test_a_reservation_that_is_over_is_not_shown_and_binds_nobody(stocked: House) -> None:
    id = slice_of(stocked)
    over = Reservation(user="sam", since=START - 100, until=START - 1)
    stocked.wait(stocked.controller.commands.reserve_slice(id, over, None))
    assert stocked.get("/v1/slices")["slices"][0]["reserved"] is None
    assert stocked.call("PUT", f"/v1/slices/{id}/reservation", "second", json={}).json["user"] == "sue"


def test_bad_values_are_refused(stocked: House) -> None:
    path = f"/v1/slices/{slice_of(stocked)}/reservation"
    stocked.refused(400, "PUT", path, json={"for_s": 0})
    stocked.refused(400, "PUT", path, json={"for_s": 1e9})
    stocked.refused(400, "PUT", path, json={"note": "a\nb"})
    stocked.refused(404, "PUT", "/v1/slices/nothing/reservation", json={})


# --- budgets ---
def test_a_queue_shows_its_budget_and_what_is_spent(house: House) -> None:
    body = {"budget": {"limit": 500, "unit": "usd", "window": "month"}}
    made = house.call("PUT", "/v1/queues/lab", "admin", json=body)
    assert made.status == 200, made.body
    assert made.json["budget"] == {**made.json["budget"], "limit": 500.0, "spent": 0.0, "window": "month"}
    assert house.call("PUT", "/v1/queues/lab", "admin", json={}).json["budget"] is None
    house.refused(400, "PUT", "/v1/queues/lab", "admin", json={"budget": {"limit": -1}})
    house.refused(400, "PUT", "/v1/queues/lab", "admin", json={"budget": {"limit": 1, "window": "year"}})


def test_a_spent_budget_is_why_a_job_waits(house: House) -> None:
    house.pool("big")
    house.call("PUT", "/v1/queues/lab", "admin", json={"budget": {"limit": 0}})
    id = house.submit(on=["v5e-8"])
    house.tick()
    why = house.get(f"/v1/jobs/{id}/why")
    assert why["code"] == "budget"
    assert why["sentence"].startswith("queue lab: budget of $0.00 for January 2027 is used up")
    assert not house.get("/v1/slices")["slices"]  # nothing is made for it
