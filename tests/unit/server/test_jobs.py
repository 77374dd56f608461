"""Jobs over HTTP: taken in once, found by the start of their id, changed only by those who may."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.domain import limits
from tests.unit.server.house import JOB, START, House


def test_a_job_is_taken_in_with_the_servers_defaults(house: House) -> None:
    id = house.submit(name="first", tags=["a"], note="n")
    seen = house.get(f"/v1/jobs/{id}")
    assert seen["state"] == "queued"
    assert (seen["team"], seen["queue"], seen["user"]) == ("lab", "lab", "sam")
    assert (seen["kind"], seen["on"], seen["command"]) == ("snippet", ["v5e-1"], "result = 1")
    assert seen["cost_usd"] is None
    job = house.wait(house.controller.commands.job(id))
    assert job is not None
    assert job.spec.timeout_s == limits.TIMEOUT_S_DEFAULT


def test_what_a_request_says_arrives_in_the_spec(house: House) -> None:
    payload = {"type": "command", "argv": ["python", "train.py"], "setup": "pip install x"}
    house.service.secrets.put("lab", "KEY", "hidden")
    id = house.submit(
        payload=payload, on=["v4-8", "V5E-8"], pool="p", slice="s01", zones=["z"], spot=True, slices=2,
        memory_bytes=1 << 30, queue="lab", replicas_min=2, replicas_max=3, rule="resume", max_retries=4, priority=5,
        timeout_s=60, expected_s=30, env={"A": "1"}, secrets=["KEY"], outputs=["out/x.json"], array="sweep/7",
    )  # fmt: skip
    job = house.wait(house.controller.commands.job(id))
    assert job is not None
    spec, resources = job.spec, job.spec.resources
    assert (resources.accelerators, resources.slices, resources.chips) == (("v4-8", "v5e-8"), 2, 4)
    assert (resources.pool, resources.slice, resources.zones, resources.spot) == ("p", "s01", ("z",), True)
    assert (spec.replicas.min, spec.replicas.max) == (2, 3)
    assert (spec.rule.preset, spec.rule.failure_budget, spec.priority) == ("resume", 4, 5)
    assert (spec.timeout_s, spec.expected_s, resources.memory_bytes) == (60, 30, 1 << 30)
    assert spec.env == {"A": "1", "PENSTOCK_ARRAY_ID": "sweep", "PENSTOCK_ARRAY_INDEX": "7"}
    assert spec.tags == ("array:sweep",)
    assert [secret.name for secret in spec.secrets] == ["KEY"]
    assert len(spec.environment) == 16
    assert "hidden" not in repr(job)


def test_every_change_says_who_made_it(house: House) -> None:
    """S19: an audit record with the principal for every mutation."""
    id = house.submit()
    house.call("POST", f"/v1/jobs/{id}/cancel", "admin")
    events = house.wait(house.store.read(lambda reader: reader.events_of("job", id)))
    assert [(event.kind, event.actor) for event in events] == [
        ("job.created", "lab/sam"),
        ("job.cancel_requested", "lab/ada"),
        ("job.cancelled", "lab/ada"),
    ]


# --- keys ---
def test_a_key_makes_a_submit_repeatable(house: House) -> None:
    first = house.call("POST", "/v1/jobs", json=JOB, headers={"Idempotency-Key": "k1"})
    again = house.call("POST", "/v1/jobs", json={**JOB, "idempotency_key": "k1"})
    assert first.json == {"id": first.json["id"], "state": "queued", "created": True}
    assert again.json == {"id": first.json["id"], "state": "queued", "created": False}
    other = house.refused(409, "POST", "/v1/jobs", json={**JOB, "name": "x"}, headers={"Idempotency-Key": "k1"})
    assert (other["code"], other["field"]) == ("conflict", "idempotency_key")
    both = {**JOB, "idempotency_key": "k2"}
    assert house.refused(409, "POST", "/v1/jobs", json=both, headers={"Idempotency-Key": "k3"})["code"] == "conflict"
    bad = house.refused(400, "POST", "/v1/jobs", json=JOB, headers={"Idempotency-Key": "x" * 129})
    assert bad["field"] == "idempotency-key"


def test_keys_of_teams_are_apart(house: House) -> None:
    ours = house.submit(idempotency_key="k")
    theirs = house.submit("stranger", idempotency_key="k")
    assert ours != theirs


def test_a_batch_is_taken_whole_and_again_by_its_key(house: House) -> None:
    batch = {"jobs": [{**JOB, "name": f"n{number}"} for number in range(3)]}
    first = house.call("POST", "/v1/jobs/batch", json=batch, headers={"Idempotency-Key": "b"})
    again = house.call("POST", "/v1/jobs/batch", json=batch, headers={"Idempotency-Key": "b"})
    assert first.status == again.status == 201
    assert [job["created"] for job in first.json["jobs"]] == [True] * 3
    assert [job["created"] for job in again.json["jobs"]] == [False] * 3
    assert [job["id"] for job in first.json["jobs"]] == [job["id"] for job in again.json["jobs"]]


def test_one_bad_member_refuses_the_batch_and_is_named(house: House) -> None:
    batch = {"jobs": [JOB, JOB, {**JOB, "on": ["v5x-8"]}]}
    said = house.refused(400, "POST", "/v1/jobs/batch", json=batch)
    assert said["field"] == "jobs[2].on"
    assert said["detail"].startswith("jobs[2].on: 'v5x-8' is not a known accelerator")
    assert house.get("/v1/jobs")["jobs"] == []


# --- refusals ---
@pytest.mark.parametrize(
    ("changes", "status", "field"),
    [
        ({"on": ["v5x-8"]}, 400, "on"),
        ({"slices": 257}, 400, "slices"),
        ({"priority": 1001}, 400, "priority"),
        ({"priority": 2**63}, 400, "priority"),
        ({"rule": "never"}, 400, "rule"),
        ({"max_retries": -1}, 400, "max_retries"),
        ({"timeout_s": 0}, 400, "timeout_s"),
        ({"name": "a\x00b"}, 400, "name"),
        ({"name": "a\u202eb"}, 400, "name"),
        ({"name": "x" * 65_536}, 400, "name"),
        ({"note": "x" * 4097}, 400, "note"),
        ({"tags": ["x"] * 65}, 400, "tags"),
        ({"outputs": ["../x"]}, 400, "outputs"),
        ({"env": {"A=B": "1"}}, 400, "env"),
        ({"env": {"A": "\0"}}, 400, "env"),
        ({"env": {"A": "x" * 70_000}}, 400, "env"),
        ({"secrets": ["../KEY"]}, 400, "name"),
        ({"memory_bytes": 1}, 400, "memory_bytes"),
        ({"array": "x"}, 400, "array"),
        ({"payload": {"type": "command", "argv": ["a\0"]}}, 400, "payload.argv"),
        ({"payload": {"type": "snippet", "code": "", "variables": {"not a name": 1}}}, 400, "payload.variables"),
        ({"replicas_min": 2}, 409, "replicas_min"),
        ({"expected_s": 20, "timeout_s": 10}, 409, "expected_s"),
        ({"secrets": ["KEY"]}, 404, "secrets"),
        ({"payload": {"type": "command", "argv": ["x"], "snapshot": "0" * 64}}, 404, "payload.snapshot"),
        ({"team": "other"}, 403, "team"),
    ],
)
def test_a_bad_job_is_refused_in_one_line(house: House, changes: dict[str, Any], status: int, field: str) -> None:
    said = house.refused(status, "POST", "/v1/jobs", json={**JOB, **changes})
    assert said["field"] == field
    assert said["detail"].startswith(f"{field}: ")
    assert len(said["detail"]) < 400
    assert house.get("/v1/jobs")["jobs"] == []


def test_awkward_names_are_only_text(house: House) -> None:
    for name in ("..", "a/b", "$(rm -rf /)", "'; drop table jobs;--", "CON", "-rf", "e\u0301", "\u00e9", "🚀"):
        assert house.get(f"/v1/jobs/{house.submit(name=name, tags=[name])}")["name"] == name


def test_a_snapshot_that_is_there_is_taken(house: House) -> None:
    house.wait(house.objects.put("snapshots/lab/" + "a" * 64 + ".json", b"{}"))
    id = house.submit(payload={"type": "command", "argv": ["x"], "snapshot": "a" * 64})
    assert house.get(f"/v1/jobs/{id}")["snapshot"] == "a" * 64


def test_jobs_may_come_after_others_by_short_ids(house: House) -> None:
    first = house.submit()
    second = house.submit(after=[first])
    assert house.wait(house.controller.commands.job(second)).spec.after == (first,)  # type: ignore[union-attr]
    assert house.refused(404, "POST", "/v1/jobs", json={**JOB, "after": ["jzzz"]})["code"] == "not_found"
    assert house.refused(409, "POST", "/v1/jobs", json={**JOB, "after": ["j"]})["code"] == "ambiguous"
    theirs = house.submit("stranger")
    assert house.refused(404, "POST", "/v1/jobs", json={**JOB, "after": [theirs]})["code"] == "not_found"
    house.call("POST", f"/v1/jobs/{first}/cancel")
    assert house.refused(409, "POST", "/v1/jobs", json={**JOB, "after": [first]})["field"] == "after"


# --- looking ---
def test_short_ids_mean_the_only_one_of_the_team(house: House) -> None:
    ids = [house.submit(), house.submit("stranger"), house.submit()]
    shared = next(length for length in range(1, 18) if ids[0][:length] != ids[2][:length]) - 1
    said = house.refused(409, "GET", f"/v1/jobs/{ids[0][:shared]}")
    assert said["code"] == "ambiguous"
    assert ids[1] not in said["detail"]
    assert house.get(f"/v1/jobs/{ids[0][: shared + 1]}")["id"] == ids[0]
    assert house.refused(404, "GET", "/v1/jobs/jzzzz")["code"] == "not_found"


def test_pages_go_on_where_they_ended(house: House) -> None:
    ids = [house.submit(name=str(number)) for number in range(7)]
    seen: list[str] = []
    cursor: dict[str, str] = {}
    for _ in range(10):
        page = house.get("/v1/jobs", limit=3, **cursor)
        seen += [job["id"] for job in page["jobs"]]
        if page["next"] is None:
            break
        cursor = {"cursor": page["next"]}
    assert seen == ids[::-1]


def test_a_page_that_is_just_full_is_the_last(house: House) -> None:
    for _ in range(3):
        house.submit()
    assert house.get("/v1/jobs", limit=3)["next"] is None
    assert house.get("/v1/jobs", limit=2)["next"] is not None


def test_lists_are_filtered(house: House) -> None:
    old = house.submit(tags=["x"])
    sues = house.submit("second", tags=["x", "y"])
    house.call("POST", f"/v1/jobs/{old}/cancel")
    command = house.submit(payload={"type": "command", "argv": ["a"]})

    def ids(**query: Any) -> list[str]:
        return [job["id"] for job in house.get("/v1/jobs", **query)["jobs"]]

    assert ids(state="cancelled") == [old]
    assert ids(state="queued,cancelled") == [command, sues, old]
    assert ids(user="sue") == [sues]
    assert ids(tag="x") == [sues, old]
    assert ids(tag="x", state="queued") == [sues]
    assert ids(queue="lab") == [command, sues, old]
    assert ids(queue="other") == []
    assert ids(since=START - 5) == [command, sues, old]
    assert ids(since=START + 1000) == []
    since = house.get(f"/v1/jobs/{sues}")["created_at"]
    assert ids(since=since) == [command, sues]
    assert {job["kind"] for job in house.get("/v1/jobs")["jobs"]} == {"snippet", "command"}


def test_a_rare_filter_ends_its_page_early_and_says_where(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PAGE_JOBS_SCANNED", 2)
    monkeypatch.setattr("penstock.server.jobs._SCAN", 2)
    rare = house.submit(tags=["rare"])
    for _ in range(4):
        house.submit()
    page = house.get("/v1/jobs", tag="rare", limit=1)
    assert page["jobs"] == []
    seen = []
    while page["next"] is not None:
        page = house.get("/v1/jobs", tag="rare", limit=1, cursor=page["next"])
        seen += [job["id"] for job in page["jobs"]]
    assert seen == [rare]


def test_reads_follow_writes(house: House) -> None:
    """S20: what was answered shows in the next read."""
    id = house.submit()
    assert house.get("/v1/jobs")["jobs"][0]["id"] == id
    assert house.call("POST", f"/v1/jobs/{id}/cancel").json == {"id": id, "answer": "cancelled"}
    assert house.get(f"/v1/jobs/{id}")["state"] == "cancelled"
    assert house.call("POST", f"/v1/jobs/{id}/cancel").json == {"id": id, "answer": "already finished"}


# --- changing ---
def test_edits_change_what_may_change(house: House) -> None:
    id = house.submit()
    edited = house.call("PATCH", f"/v1/jobs/{id}", json={"priority": 7, "tags": ["new"]}).json
    assert (edited["priority"], edited["tags"]) == (7, ["new"])
    assert house.refused(400, "PATCH", f"/v1/jobs/{id}", json={"priority": 5000})["field"] == "priority"
    assert house.refused(400, "PATCH", f"/v1/jobs/{id}", json={"name": "x"})["field"] == "name"
    house.call("POST", f"/v1/jobs/{id}/cancel")
    assert house.refused(409, "PATCH", f"/v1/jobs/{id}", json={"priority": 1})["field"] == "priority"
    assert house.call("PATCH", f"/v1/jobs/{id}", json={"tags": []}).json["tags"] == []


def test_submitters_change_their_own_jobs_only(house: House) -> None:
    id = house.submit()
    for method, path, body in (
        ("PATCH", f"/v1/jobs/{id}", {"priority": 1}),
        ("POST", f"/v1/jobs/{id}/cancel", None),
    ):
        assert house.refused(403, method, path, "second", json=body)["code"] == "forbidden"
        assert house.refused(404, method, path, "stranger", json=body)["code"] == "not_found"
        assert house.call(method, path, "admin", json=body).status == 200


def test_again_is_a_new_job(house: House) -> None:
    id = house.submit(pool="p")
    said = house.refused(409, "POST", f"/v1/jobs/{id}/resume")
    assert "cancel it first" in said["detail"]
    house.call("POST", f"/v1/jobs/{id}/cancel")
    rerun = house.call("POST", f"/v1/jobs/{id[:14]}/rerun", "second").json["id"]
    seen = house.get(f"/v1/jobs/{rerun}")
    assert (seen["user"], seen["stage"], seen["parent"]) == ("sue", 0, None)
    resumed = house.call("POST", f"/v1/jobs/{id}/resume", json={"on": ["v4-8"], "idempotency_key": "r"})
    seen = house.get(f"/v1/jobs/{resumed.json['id']}")
    assert (seen["on"], seen["stage"], seen["parent"]) == (["v4-8"], 1, id)
    job = house.wait(house.controller.commands.job(resumed.json["id"]))
    assert job is not None
    assert job.spec.resources.pool is None
    repeated = house.call("POST", f"/v1/jobs/{id}/resume", json={"on": ["v4-8"]}, headers={"Idempotency-Key": "r"})
    assert repeated.json["created"] is False
    assert house.refused(400, "POST", f"/v1/jobs/{id}/rerun", json={"on": ["v5x-8"]})["field"] == "on"


# --- why ---
def test_why_says_what_the_planner_said(house: House) -> None:
    id = house.submit()
    assert house.refused(503, "GET", f"/v1/jobs/{id}/why")["code"] == "not_leading"
    house.tick()
    seen = house.get(f"/v1/jobs/{id}/why")
    assert (seen["id"], seen["state"], seen["code"]) == (id, "queued", "infeasible")
    assert "no pool of v5e-1" in seen["sentence"]
    house.call("POST", f"/v1/jobs/{id}/cancel")
    seen = house.get(f"/v1/jobs/{id}/why")
    assert (seen["state"], seen["code"]) == ("cancelled", "cancelled")
    assert seen["sentence"] == "It was cancelled by its user."
