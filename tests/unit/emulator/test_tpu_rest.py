"""The emulated Cloud TPU API call by call: what is refused, pages, and what each fault does."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from penstock.domain.admission import BadInput
from penstock.emulator.gcs import GcsEmulator
from penstock.emulator.google import GoogleEmulator
from penstock.emulator.tpu_rest import Hangs
from penstock.emulator.tpu_world import World, read_world
from tests.unit.emulator.tpu_world_by_hand import BEGIN, NODE, POD, ByHand


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "node.accelerator_type"),
        ([], "node"),
        ({**NODE, "runtimeVersion": ""}, "node.runtime_version"),
        ({**NODE, "labels": {"Upper": "x"}}, "node.labels"),
        ({**NODE, "labels": {"x": 1}}, "node.labels"),
        ({**NODE, "labels": {f"k{n}": "" for n in range(65)}}, "node.labels"),
        ({**NODE, "labels": {"x": "y" * 64}}, "node.labels"),
        ({**NODE, "metadata": {"startup-script": "x" * 262_145}}, "node.metadata"),
        ({**NODE, "tags": "t"}, "node.tags"),
        ({**NODE, "schedulingConfig": {"spot": "yes"}}, "node.scheduling_config.spot"),
        ({**NODE, "schedulingConfig": {"spot": True, "reserved": True}}, "node.scheduling_config"),
        ({**NODE, "networkConfig": {}, "networkConfigs": []}, "node.network_config"),
        ({**NODE, "networkConfig": {"queueCount": "x"}}, "node.network_config.queue_count"),
        ({**NODE, "acceleratorConfig": {"type": "V4", "topology": "2x2x1"}}, "node.accelerator_type"),
        ({**NODE, "acceleratorConfig": {"type": "V99", "topology": "1x1"}}, "node.accelerator_config.type"),
    ],
)
def test_a_bad_node_is_refused_by_its_field(body: Any, field: str) -> None:
    world = ByHand()
    refused = world.call("POST", "nodes?nodeId=n1", body, status=400)["error"]
    assert refused["status"] == "INVALID_ARGUMENT"
    assert refused["details"][0]["fieldViolations"][0]["field"] == field
    assert world.states() == {}


@pytest.mark.parametrize(
    ("config", "chips", "hosts"),
    [
        ({"type": "V5LITE_POD", "topology": "4x4"}, 16, 4),
        ({"type": 9, "topology": "2x4"}, 8, 1),
        ({"type": "V5P", "topology": "4x4x8"}, 128, 32),
    ],
)
def test_a_shape_can_be_asked_for_by_its_topology(config: dict[str, Any], chips: int, hosts: int) -> None:
    world = ByHand()
    world.create("n1", {"acceleratorConfig": config, "runtimeVersion": "tpu-ubuntu2204-base"})
    world.wait(1)
    found = world.true_node("n1")
    assert (found["chips"], len(found["hosts"])) == (chips, hosts)
    assert found["acceleratorConfig"]["topology"] == config["topology"]


@pytest.mark.parametrize(
    ("method", "target", "status"),
    [
        ("GET", "/v3/projects/p1/locations/us-central1-a/nodes", None),
        ("GET", "/v1/projects/p1/locations/us-central1-a/nodes", 404),
        ("PUT", "nodes/n1", 404),
        ("POST", "nodes/n1:explode", 404),
        ("POST", "nodes/n1:simulateMaintenanceEvent", 404),
        ("GET", "nodes?pageSize=-1", 400),
        ("GET", "nodes?pageSize=a", 400),
        ("GET", "nodes?whatever=1", 400),
        ("DELETE", "nodes/n1?requestId=1", 400),
        ("GET", "/v2/projects/p1/locations/-/nodes/n1", 403),
        ("PATCH", "nodes/n1", 404),
    ],
)
def test_calls_that_do_not_exist_are_refused(method: str, target: str, status: int | None) -> None:
    world = ByHand()
    answer = world.send(method, target)
    assert answer is not None
    assert answer.status == (status or 404)


def test_a_body_that_is_not_json_is_refused() -> None:
    world = ByHand()
    answer = world.send("POST", "nodes?nodeId=a", msgspec.Raw(b"{"))
    assert answer is not None
    assert answer.status == 400


def test_parameters_may_be_written_with_underscores() -> None:
    world = ByHand()
    world.call("POST", "nodes?node_id=a&%24alt=json%3Benum-encoding%3Dint", NODE)
    world.call(
        "PATCH",
        "nodes/a?update_mask=network_config.enable_external_ips",
        {"network_config": {"enable_external_ips": True}},
    )
    assert world.node("a")["networkConfig"]["enableExternalIps"] is True


def test_pages_hold_everything_once() -> None:
    world = ByHand(page_size=2)
    for name in "dbeca":
        world.create(name)
    seen: list[str] = []
    token = ""
    for _ in range(3):
        page = world.call("GET", f"nodes?pageSize=100&pageToken={token}")
        seen += [each["name"][-1] for each in page["nodes"]]
        token = page.get("nextPageToken", "")
    assert (seen, token) == (list("abcde"), "")


# --- faults ---


def fault(world: ByHand, **parts: Any) -> None:
    world.control("POST", "faults", [parts])


def test_a_refusal_before_and_after_the_effect() -> None:
    world = ByHand()
    fault(world, kind="refuse", call="nodes.create", status=429, retry_after_s=7)
    answer = world.send("POST", "nodes?nodeId=a", NODE)
    assert answer is not None
    assert (answer.status, answer.headers["retry-after"]) == (429, "7")
    assert world.states() == {}
    fault(world, kind="refuse_after", call="nodes.create", status=500)
    world.call("POST", "nodes?nodeId=a", NODE, status=500)
    assert world.states() == {"a": "READY"}


def test_a_lost_answer_and_a_cut_call() -> None:
    world = ByHand()
    fault(world, kind="lose", call="nodes.create")
    assert world.send("POST", "nodes?nodeId=a", NODE) is None
    fault(world, kind="cut", call="nodes.create")
    assert world.send("POST", "nodes?nodeId=b", NODE) is None
    assert world.states() == {"a": "READY"}


def test_a_slow_and_a_dead_api() -> None:
    world = ByHand()
    fault(world, kind="slow", seconds=20.0)
    fault(world, kind="hang", call="nodes.get")
    assert world.states() == {}
    assert world.slept == [20.0]
    with pytest.raises(Hangs):
        world.send("GET", "nodes/a")


def test_a_create_that_lands_after_it_was_refused() -> None:
    world = ByHand()
    fault(world, kind="late", call="nodes.create", seconds=30.0, status=503)
    fault(world, kind="late", call="nodes.create", seconds=40.0, status=503)
    world.call("POST", "nodes?nodeId=a", NODE, status=503)
    world.call("POST", "nodes?nodeId=a", NODE, status=503)
    assert world.states() == {}
    world.wait(31)
    assert world.states() == {"a": "READY"}
    world.wait(10)
    assert "late.refused" in [each["what"] for each in world.control("GET", "history")]


def test_listings_that_are_stale_or_not_whole() -> None:
    world = ByHand()
    world.create("a")
    world.wait(100)
    world.create("b")
    world.call("DELETE", "nodes/a")
    world.wait(10)
    assert world.states() == {"b": "READY"}
    fault(world, kind="stale", seconds=60.0)
    assert world.states() == {"a": "READY"}, "as it was before"
    fault(world, kind="hide", hidden="b")
    assert world.states() == {}
    world.create("c")
    fault(world, kind="short", most=1)
    page = world.call("GET", "nodes")
    assert (len(page["nodes"]), "nextPageToken" in page) == (1, True)
    fault(world, kind="unreachable", zone="us-central1-*", times=2)
    page = world.call("GET", "/v2/projects/p1/locations/-/nodes")
    assert page.get("nodes", []) == []
    assert "projects/p1/locations/us-central1-a" in page["unreachable"]
    world.call("GET", "nodes", status=503)
    assert world.states() == {"b": "READY", "c": "READY"}


def test_creates_that_never_end_or_end_badly() -> None:
    world = ByHand(faults=[{"kind": "stuck", "name": "a"}, {"kind": "broken", "name": "b"}])
    stuck, broken = world.create("a"), world.create("b", POD)
    world.wait(86_400)
    assert world.operation(stuck)["done"] is False
    assert world.operation(broken)["error"]["code"] == 13
    assert world.states() == {"a": "CREATING", "b": "READY"}
    assert all(host["up"] for host in world.true_node("b")["hosts"])


def test_faults_are_aimed_counted_and_taken_away() -> None:
    aimed = {
        "kind": "refuse",
        "call": "nodes.*",
        "zone": "us-*",
        "name": "a*",
        "skip": 1,
        "times": 2,
        "from_s": 10.0,
        "until_s": 20.0,
    }
    world = ByHand(faults=[aimed])
    world.call("GET", "nodes/abc", status=404)
    world.wait(10)
    for status in (404, 503, 503, 404):
        world.call("GET", "nodes/abc", status=status)
    world.call("GET", "nodes/b", status=404)
    assert [(each["passed"], each["struck"]) for each in world.control("GET", "faults")] == [(1, 2)]
    world.control("DELETE", "faults", status=204)
    assert world.control("GET", "faults") == []
    refused = world.control("POST", "faults", [{"kind": "explode"}], status=400)
    assert "explode" in refused["error"]["message"]


def test_chance_is_drawn_by_the_seed() -> None:
    def struck(seed: int) -> list[int]:
        world = ByHand(seed=seed, faults=[{"kind": "refuse", "rate": 0.5, "times": 1000}])
        return [answer.status for _ in range(40) if (answer := world.send("GET", "nodes"))]

    assert struck(1) == struck(1)
    assert struck(1) != struck(2)
    assert 8 < struck(1).count(503) < 32


# --- the control address and the script ---


def test_time_can_be_put_ahead() -> None:
    world = ByHand(delays={"create": 3600.0})
    world.create("a")
    assert world.control("POST", "advance", {"seconds": 3601})["now_s"] == 3601
    assert world.states() == {"a": "READY"}
    world.control("GET", "nothing", status=404)


def test_a_zone_may_take_its_own_time() -> None:
    world = ByHand(delays={"create": 5.0}, zones={"us-central1-a": {"create": 60.0}, "us-west4-a": {"create": 0.0}})
    world.create("a")
    world.wait(59)
    assert world.states() == {"a": "CREATING"}
    world.wait(1)
    assert world.states() == {"a": "READY"}


def test_calls_are_counted_by_minute_and_answer() -> None:
    world = ByHand(create_calls_per_minute=2, faults=[{"kind": "cut", "call": "nodes.list"}])
    for name in "abc":
        world.send("POST", f"nodes?nodeId={name}", NODE)
    world.send("GET", "nodes")
    world.wait(60)
    world.send("GET", "nodes")
    zone = "us-central1-a"
    assert [tuple(each.values()) for each in world.control("GET", "calls")] == [
        (0, "nodes.create", zone, 200, 2),
        (0, "nodes.create", zone, 429, 1),
        (0, "nodes.list", zone, 0, 1),
        (1, "nodes.list", zone, 200, 1),
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("seed = ", "is not TOML"),
        ("colour = 1", "colour"),
        ("[[capacity]]\nzone = 'x'", "chips"),
        ("[[preemptions]]\nstate = 'GONE'", "GONE"),
        ("[delays]\ncreate = 'long'", "create"),
    ],
)
def test_a_bad_script_is_told_in_one_line(text: str, says: str) -> None:
    with pytest.raises(BadInput) as caught:
        read_world(text, "w.toml")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_script_can_name_zones_and_types() -> None:
    world = ByHand(read_world('[zones.mars-west1-a]\ntypes = ["v6e-8"]\n[zones.us-west4-a]\nopen = false', "w"))
    found = [each["locationId"] for each in world.call("GET", "/v2/projects/p1/locations")["locations"]]
    assert "mars-west1-a" in found
    assert "us-west4-a" not in found
    world.call("POST", "/v2/projects/p1/locations/mars-west1-a/nodes?nodeId=a", {**NODE, "acceleratorType": "v6e-8"})
    world.call("GET", "/v2/projects/p1/locations/us-west4-a/nodes", status=403)
    with pytest.raises(BadInput, match="v9-8"):
        ByHand(World(zones=read_world('[zones.a]\ntypes = ["v9-8"]', "w").zones))


def test_happenings_come_at_their_moment() -> None:
    happenings = [{"what": "create", "at_s": 10.0, "name": "x", "zone": "us-central1-a", "type": "v5litepod-4"}]
    world = ByHand(happenings=[*happenings, *happenings, {"what": "preempt", "at_s": 20.0, "name": "x"}])
    assert world.states() == {}
    world.wait(11)
    assert world.states() == {"x": "READY"}
    world.wait(10)
    assert world.states() == {"x": "PREEMPTED"}
    assert "happening.refused" in [each["what"] for each in world.control("GET", "history")]


def test_one_application_serves_both_apis() -> None:
    async def get(path: str) -> tuple[int, bytes]:
        application = GoogleEmulator(ByHand().emulator, GcsEmulator(["bkt"], lambda: BEGIN))
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": b""}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "GET", "raw_path": path.encode(), "query_string": b"", "headers": []}
        await application(scope, receive, send)
        return sent[0]["status"], sent[1]["body"]

    assert asyncio.run(get("/v2/projects/p1/locations/us-central1-a/nodes")) == (200, b"{}")
    assert b"storage#bucket" in asyncio.run(get("/storage/v1/b/bkt"))[1]
    assert b"compute#project" in asyncio.run(get("/compute/v1/projects/p1"))[1]
    assert asyncio.run(get("/_emulator/history"))[0] == 200
    assert asyncio.run(get("/_emulator/tpu/history")) == (200, b"[]")
