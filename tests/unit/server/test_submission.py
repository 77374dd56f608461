"""The embedded default: a pool for whoever needs one, and nothing else by itself."""

from __future__ import annotations

from penstock.domain.nouns import Role
from penstock.server.auth import Token, Tokens, token_hash
from tests.unit.server.house import JOB, House


def pools(house: House) -> list[tuple[str, str, int]]:
    return [(pool["name"], pool["accelerator"], pool["max"]) for pool in house.get("/v1/pools")["pools"]]


def test_a_pool_is_made_for_what_no_pool_can_hold(embedded: House) -> None:
    embedded.submit(on=["v5e-8"])
    assert pools(embedded) == [("local-lab-v5e-8", "v5e-8", 4)]
    embedded.submit(on=["v5e-8"])
    embedded.submit(on=["v4-8", "v5e-8"])
    assert len(pools(embedded)) == 1
    embedded.submit(on=["v5e-8"], slices=6)
    assert pools(embedded) == [("local-lab-v5e-8", "v5e-8", 6)]
    batch = {"jobs": [{**JOB, "on": ["v4-8"]}, {**JOB, "on": ["v4-8"]}]}
    assert embedded.call("POST", "/v1/jobs/batch", json=batch).status == 201
    assert [name for name, _, _ in pools(embedded)] == ["local-lab-v4-8", "local-lab-v5e-8"]


def test_no_pool_is_made_for_who_names_a_place(embedded: House) -> None:
    for place in ({"pool": "mine"}, {"slice": "s01"}, {"zones": ["moon"]}):
        embedded.submit(**place)
    assert pools(embedded) == []


def test_a_pool_somebody_made_is_used(embedded: House) -> None:
    embedded.pool("own")
    embedded.submit(on=["v5e-8"])
    assert [name for name, _, _ in pools(embedded)] == ["own"]
    embedded.submit(on=["v5e-8"], spot=True)
    assert [name for name, _, _ in pools(embedded)] == ["local-lab-v5e-8", "own"]


def test_a_deleted_pool_is_made_again(embedded: House) -> None:
    embedded.submit(on=["v5e-8"])
    assert embedded.call("DELETE", "/v1/pools/local-lab-v5e-8", "admin").status == 204
    assert pools(embedded) == []
    embedded.submit(on=["v5e-8"])
    assert pools(embedded) == [("local-lab-v5e-8", "v5e-8", 4)]


def test_elsewhere_no_pool_is_made(house: House) -> None:
    house.submit(on=["v5e-8"])
    assert pools(house) == []


def test_every_team_with_a_token_gets_a_queue(embedded: House) -> None:
    rows = [Token(sha256=token_hash(team), name="n", team=team, role=Role.ADMIN) for team in ("default", "new")]
    embedded.service.tokens = Tokens(rows=tuple(rows))
    for _ in range(2):
        embedded.wait(embedded.service.welcome_teams())
    queues = embedded.wait(embedded.store.read(lambda reader: [(one.name, one.team) for one in reader.queues()]))
    assert ("default", "default") in queues
    assert ("new", "new") in queues


def test_the_queue_of_a_job_that_names_none(house: House) -> None:
    assert house.call("PUT", "/v1/queues/another", "admin", json={}).status == 200
    assert house.get(f"/v1/jobs/{house.submit()}")["queue"] == "lab"
    assert house.get(f"/v1/jobs/{house.submit(queue='another')}")["queue"] == "another"
    said = house.refused(404, "POST", "/v1/jobs", "operator", json=JOB)
    assert (said["field"], said["detail"]) == ("queue", "queue: team 'ops' has no queue")
    id = house.submit("operator", team="lab")
    assert house.get(f"/v1/jobs/{id}", "operator")["team"] == "lab"


def test_an_administrator_may_submit_for_somebody_and_nobody_else_may(house: House) -> None:
    for caller, user in (("admin", "zoe@example.com"), ("submitter", "sam")):
        job = house.call("POST", "/v1/jobs", caller, json={**JOB, "user": user}).json["id"]
        assert house.get(f"/v1/jobs/{job}")["user"] == user
    refused = house.refused(403, "POST", "/v1/jobs", json={**JOB, "user": "sue"})
    assert (refused["code"], refused["field"]) == ("forbidden", "user")
    bad = house.refused(400, "POST", "/v1/jobs", "admin", json={**JOB, "user": "a\nb"})
    assert bad["field"] == "user"


def test_a_key_that_is_used_already_names_its_job(house: House) -> None:
    job = house.submit(idempotency_key="k")
    assert house.refused(409, "POST", "/v1/jobs", json={**JOB, "note": "x", "idempotency_key": "k"})["job"] == job


def test_whoever_names_a_pool_or_a_slice_names_its_kind(house: House) -> None:
    house.pool("own", min=1)
    house.tick()
    (slice,) = house.get("/v1/slices")["slices"]
    for place in ({"pool": "own"}, {"slice": slice["id"]}):
        assert house.get(f"/v1/jobs/{house.submit(**place)}")["on"] == ["v5e-8"]
        assert house.get(f"/v1/jobs/{house.submit(on=['v4-8'], **place)}")["on"] == ["v4-8"]
    assert house.get(f"/v1/jobs/{house.submit(pool='nowhere')}")["on"] == ["v5e-1"]
    house.refused(400, "POST", "/v1/jobs", json={**JOB, "pool": "a\nb"})
