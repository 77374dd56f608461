"""The real gcloud against the emulator: every command that a user of TPUs types, with its exit code and JSON.

The table is that of the feasibility study; a short walk through it is in the default suite, all of it is `long`,
because each command costs a second or two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.process.google_cloud import BUCKET, Gcloud, GoogleCloud, Said, google_cloud, need_gcloud

ZONE = "projects/p1/locations/us-central1-a"
V5E = "--accelerator-type=v5litepod-8 --version=v2-alpha-tpuv5-lite"
QUEUED_V5E = "--accelerator-type=v5litepod-8 --runtime-version=v2-alpha-tpuv5-lite"
WORLD = """
quotas = [{ chips = 8, zone = "us-west4-a" }]
capacity = [{ chips = 0, zone = "us-south1-a" }]
reservations = [{ name = "r1", zone = "us-east5-a", type = "v6e-*", chips = 32 }]
clusters = [{ name = "c1", location = "us-central1-a" }, { name = "c2", location = "us-west4" }]
[zones.us-west1-c]
flex_start = false
"""


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[GoogleCloud]:
    need_gcloud()
    (tmp_path / "world.toml").write_text(WORLD)
    with google_cloud("--world", str(tmp_path / "world.toml")) as cloud:
        yield cloud


@pytest.fixture
def gcloud(cloud: GoogleCloud, tmp_path: Path) -> Gcloud:
    return Gcloud(cloud, tmp_path)


class Row(NamedTuple):
    """A command, how it must end, and what its JSON must hold."""

    command: str
    holds: Callable[[Any], bool] | None = None
    rc: int = 0
    says: str = ""


def walk(gcloud: Gcloud, rows: list[Row], ask: Callable[[str], Said] | None = None) -> None:
    for row in rows:
        said = (ask or gcloud.tpus)(row.command)
        shown = f"{row.command}: {said}"
        assert said.rc == row.rc, shown
        assert row.says in said.err, shown
        assert row.holds is None or row.holds(said.json()), shown


def names(found: list[dict[str, Any]]) -> list[str]:
    return [each["name"].rpartition("/")[2] for each in found]


def test_gcloud_walks_through_the_life_of_nodes(cloud: GoogleCloud, gcloud: Gcloud, tmp_path: Path) -> None:
    walk(
        gcloud,
        [
            Row(
                f"tpu-vm create t1 {V5E} --spot --labels=job=j1 --metadata=startup-script=true",
                lambda node: (
                    (node["name"], node["state"], node["health"]) == (f"{ZONE}/nodes/t1", "READY", "HEALTHY")
                    and node["schedulingConfig"]["spot"] is True
                    and node["metadata"] == {"startup-script": "true"}
                    and node["labels"] == {"job": "j1"}
                    and len(node["networkEndpoints"]) == 1
                ),
            ),
            Row(f"tpu-vm create t1 {V5E}", rc=1, says=f"ALREADY_EXISTS: Resource '{ZONE}/nodes/t1' already exists"),
            Row("tpu-vm list --zone=-", lambda found: names(found) == ["t1"]),
            Row(
                f"queued-resources create q1 --node-id=qn1 {QUEUED_V5E} --spot --valid-until-duration=6h",
                lambda queued: (
                    queued["state"]["state"] in ("WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE")
                    and queued["queueingPolicy"] == {"validUntilDuration": "21600s"}
                    and queued["tpu"]["nodeSpec"][0]["nodeId"] == "qn1"
                ),
            ),
            Row("queued-resources delete q1", rc=1, says="FAILED_PRECONDITION"),
            Row(
                "queued-resources delete q1 --force --async",
                lambda operation: operation["metadata"]["verb"] == "delete",
            ),
            Row("tpu-vm delete t1", says="Deleted tpu [t1]"),
        ],
    )
    assert cloud.happened("t1") == [
        "node.CREATING", "host.up", "node.READY", "node.DELETING", "host.down", "node.gone",
    ]  # fmt: skip
    (tmp_path / "f.txt").write_text("hello")
    assert gcloud("storage", "cp", "f.txt", f"gs://{BUCKET}/a/f.txt").rc == 0
    again = gcloud("storage", "cp", "--if-generation-match=0", "f.txt", f"gs://{BUCKET}/a/f.txt")
    assert (again.rc, "HTTPError 412" in again.err) == (1, True)
    assert gcloud("storage", "cat", f"gs://{BUCKET}/a/f.txt") == Said(0, "hello", "")


@pytest.mark.long
def test_every_command_for_nodes(gcloud: Gcloud) -> None:
    disk = "source=projects/p1/zones/us-east5-a/disks/d1,mode=read-only"
    alpha = "--type=v6e --topology=4x4 --version=v2-alpha-tpuv6e --zone=us-east5-a --internal-ips --reserved"
    walk(
        gcloud,
        [
            Row(f"tpu-vm create t1 {V5E} --async", lambda operation: operation["done"] is False),
            Row("tpu-vm create t2 --accelerator-type=v5litepod-16 --version=v2-alpha-tpuv5-lite", lambda n: n["id"]),
            Row(
                f"alpha tpu-vm create t3 {alpha} --data-disk={disk}",
                lambda node: (
                    node["acceleratorConfig"] == {"type": "V6E", "topology": "4x4"}
                    and node["acceleratorType"] == "v6e-16"
                    and len(node["networkEndpoints"]) == 4
                    and node["networkEndpoints"][0].get("accessConfig", {}) == {}
                    and node["dataDisks"][0]["mode"] == "READ_ONLY"
                ),
            ),
            Row("tpu-vm list", lambda found: names(found) == ["t1", "t2"]),
            Row("tpu-vm list --zone=-", lambda found: names(found) == ["t1", "t2", "t3"]),
            Row("tpu-vm list --page-size=1", lambda found: names(found) == ["t1", "t2"]),
            Row("tpu-vm describe t1", lambda node: node["state"] == "READY"),
            Row("tpu-vm describe nobody", rc=1, says="NOT_FOUND"),
            Row("tpu-vm stop t1", lambda operation: operation["response"]["state"] == "STOPPED"),
            Row("tpu-vm stop t2", rc=1, says="FAILED_PRECONDITION"),
            Row("tpu-vm start t1", lambda operation: operation["response"]["state"] == "READY"),
            Row(
                "tpu-vm update t1 --update-labels=x=y --add-tags=t",
                lambda operation: (
                    (operation["response"]["labels"], operation["response"]["tags"]) == ({"x": "y"}, ["t"])
                ),
            ),
            Row("alpha tpu-vm simulate-maintenance-event t1 --workers=0", lambda operation: operation["done"]),
            Row("tpu-vm describe t1", lambda node: node["health"] == "UNHEALTHY_MAINTENANCE"),
            Row("tpu-vm get-guest-attributes t2", lambda found: found is not None),
            Row("tpu-vm service-identity create", lambda found: "@" in str(found)),
            Row("alpha tpu-vm delete t3 --zone=us-east5-a", says="Deleted tpu [t3]"),
            Row("tpu-vm delete t2 --async", lambda operation: operation["metadata"]["verb"] == "delete"),
            Row("tpu-vm delete t2", rc=1, says="NOT_FOUND"),
        ],
    )
    dry = gcloud("compute", "tpus", "tpu-vm", "ssh", "t1", "--dry-run")
    assert dry.rc == 0, dry
    assert "HostKeyAlias=tpu." in dry.out


@pytest.mark.long
def test_every_command_for_queued_resources(gcloud: Gcloud) -> None:
    flex = "--provisioning-model=flex-start --max-run-duration=1h"
    walk(
        gcloud,
        [
            Row(
                f"queued-resources create ms --node-count=2 --node-prefix=ms {QUEUED_V5E}",
                lambda queued: (
                    queued["tpu"]["nodeSpec"][0]["multisliceParams"] == {"nodeCount": 2, "nodeIdPrefix": "ms"}
                ),
            ),
            Row(
                "tpu-vm list",
                lambda found: names(found) == ["ms-0", "ms-1"] and all(n["multisliceNode"] for n in found),
            ),
            Row("queued-resources list", lambda found: names(found) == ["ms"]),
            Row("queued-resources describe ms", lambda queued: queued["state"]["state"] == "ACTIVE"),
            Row("queued-resources reset ms", lambda operation: operation["done"]),
            Row("queued-resources delete ms", rc=1, says="FAILED_PRECONDITION"),
            Row("queued-resources delete ms --force", says="Deleted queued_resource [ms]"),
            Row(
                f"alpha queued-resources create ml --node-count=2 {QUEUED_V5E} --best-effort",
                lambda q: "bestEffort" in q,
            ),
            Row("alpha queued-resources perform-maintenance ml --node-names=ml-0", lambda operation: operation["done"]),
            Row("alpha queued-resources delete ml --force --async", lambda operation: "name" in operation),
            Row(f"queued-resources create gu --node-id=gu {QUEUED_V5E} --guaranteed", lambda q: "guaranteed" in q),
            Row(
                f"alpha queued-resources create fx --node-id=fx {QUEUED_V5E} {flex}",
                lambda queued: (
                    (queued["provisioningModel"], queued["runDuration"]["maxRunDuration"]) == ("FLEX_START", "3600s")
                ),
            ),
            Row(
                f"alpha queued-resources create fy --node-id=fy {QUEUED_V5E} {flex} --zone=us-west1-c",
                rc=1,
                says="FLEX_START provisioning model is not supported",
            ),
            Row(
                f"queued-resources create wa --node-id=wa {QUEUED_V5E} --zone=us-south1-a --valid-until-duration=1h",
                lambda queued: queued["state"]["state"] == "WAITING_FOR_RESOURCES",
            ),
            Row("queued-resources delete wa --zone=us-south1-a", says="Deleted queued_resource [wa]"),
            Row(
                "alpha queued-resources create re --node-id=re --accelerator-type=v6e-8 --zone=us-east5-a --reserved"
                " --runtime-version=v2-alpha-tpuv6e",
                lambda queued: queued["guaranteed"]["reserved"] is True,
            ),
            Row(
                "alpha reservations list --zone=us-east5-a",
                lambda found: (names(found), found[0]["standard"]["usage"]["total"]) == (["r1"], "8"),
            ),
        ],
    )


@pytest.mark.long
def test_every_command_for_node_pools(cloud: GoogleCloud, gcloud: Gcloud) -> None:
    v5e = "--cluster=c1 --zone=us-central1-a --machine-type=ct5lp-hightpu-4t"
    flex = "--enable-autoscaling --min-nodes=0 --max-nodes=2 --flex-start --reservation-affinity=none"
    walk(
        gcloud,
        [
            Row("clusters list", lambda found: [each["location"] for each in found] == ["us-central1-a", "us-west4"]),
            Row(
                f"node-pools create np1 {v5e} --tpu-topology=4x4 --num-nodes=4 --spot --node-labels=job=j1",
                lambda found: found[0]["name"] == "np1" and found[0]["status"] == "RUNNING",
            ),
            Row(
                f"node-pools create np1 {v5e} --tpu-topology=4x4 --num-nodes=4 --async",
                rc=1,
                says="code=409, message=Already exists: projects/p1/zones/us-central1-a/clusters/c1/nodePools/np1.",
            ),
            Row(
                f"node-pools create np2 {v5e} --tpu-topology=4x4 --num-nodes=3 --async",
                rc=1,
                says="code=400, message=Node count 3 is not a valid size of TPU pod slice with topology 4x4",
            ),
            Row(
                f"node-pools create np3 {v5e} --tpu-topology=2x4 {flex} --async",
                lambda operation: operation["targetLink"].endswith("/clusters/c1/nodePools/np3"),
            ),
            Row(
                "node-pools list --cluster=c1 --zone=us-central1-a",
                lambda found: (
                    [(each["name"], each["status"]) for each in found] == [("np1", "RUNNING"), ("np3", "RUNNING")]
                ),
            ),
            Row(
                "node-pools describe np1 --cluster=c1 --zone=us-central1-a",
                lambda pool: (
                    pool["config"]["labels"] == {"job": "j1"}
                    and (pool["config"]["machineType"], pool["config"]["spot"]) == ("ct5lp-hightpu-4t", True)
                    and len(pool["config"]["oauthScopes"]) == 6
                    and pool["management"] == {"autoRepair": True, "autoUpgrade": True}
                    and (pool["initialNodeCount"], pool["placementPolicy"]) == (4, {"tpuTopology": "4x4"})
                    and pool["upgradeSettings"]["maxSurge"] == 1
                ),
            ),
            Row(
                "node-pools describe np3 --cluster=c1 --zone=us-central1-a",
                lambda pool: (
                    (pool["autoscaling"]["enabled"], pool["autoscaling"]["maxNodeCount"]) == (True, 2)
                    and pool["config"]["flexStart"] is True
                    and pool["config"]["reservationAffinity"] == {"consumeReservationType": "NO_RESERVATION"}
                ),
            ),
            Row("node-pools delete np1 --cluster=c1 --zone=us-central1-a", says="Deleted"),
            Row(
                "node-pools delete np1 --cluster=c1 --zone=us-central1-a --async",
                rc=1,
                says="code=404, message=Not found: projects/p1/zones/us-central1-a/clusters/c1/nodePools/np1.",
            ),
            Row(
                "operations list",
                lambda found: (
                    sorted((each["operationType"], each["status"]) for each in found)
                    == [("CREATE_NODE_POOL", "DONE"), ("CREATE_NODE_POOL", "DONE"), ("DELETE_NODE_POOL", "DONE")]
                ),
            ),
        ],
        gcloud.container,
    )
    assert cloud.happened("np1") == ["pool.PROVISIONING", "pool.RUNNING", "pool.STOPPING", "pool.gone"]


@pytest.mark.long
def test_every_command_for_what_is_offered(gcloud: Gcloud, tmp_path: Path) -> None:
    walk(
        gcloud,
        [
            Row("tpu-vm accelerator-types list", lambda found: "v5litepod-16" in names(found)),
            Row(
                "tpu-vm accelerator-types describe v5litepod-16",
                lambda found: found["acceleratorConfigs"] == [{"type": "V5LITE_POD", "topology": "4x4"}],
            ),
            Row("accelerator-types list", lambda found: "v5litepod-16" in names(found)),
            Row("tpu-vm versions list", lambda found: "v2-alpha-tpuv6e" in names(found)),
            Row(
                "tpu-vm versions describe tpu-ubuntu2204-base", lambda found: found["version"] == "tpu-ubuntu2204-base"
            ),
            Row("locations list", lambda found: "us-central2-b" in [each["locationId"] for each in found]),
        ],
    )
    (tmp_path / "f.txt").write_text("hello")
    assert gcloud("storage", "cp", "f.txt", f"gs://{BUCKET}/a/f.txt").rc == 0
    assert gcloud("storage", "ls", f"gs://{BUCKET}/a/").out == f"gs://{BUCKET}/a/f.txt\n"
    assert gcloud("storage", "rm", f"gs://{BUCKET}/a/f.txt").rc == 0
    assert gcloud("storage", "cat", f"gs://{BUCKET}/a/f.txt").rc == 1


@pytest.mark.long
def test_what_goes_wrong_reaches_the_user(cloud: GoogleCloud, gcloud: Gcloud) -> None:
    walk(
        gcloud,
        [
            Row(f"tpu-vm create s1 {V5E} --zone=us-south1-a", rc=1, says="There is no more capacity in the zone"),
            Row(f"tpu-vm create z1 {V5E} --zone=mars-west1-a", rc=1, says="PERMISSION_DENIED"),
            Row(f"tpu-vm create z1 {V5E} --zone=us-central2-b", rc=1, says="was not found in zone us-central2-b"),
            Row(f"tpu-vm create b1 {V5E} --zone=us-west4-a", lambda node: node["state"] == "READY"),
            Row(f"tpu-vm create b2 {V5E} --zone=us-west4-a", rc=1, says="RESOURCE_EXHAUSTED: Quota limit"),
        ],
    )
    assert '"code": 8' in gcloud.tpus(f"tpu-vm create s1 {V5E} --zone=us-south1-a").err
    cloud.control("POST", "happen", [{"what": "preempt", "name": "b1"}])
    assert gcloud.tpus("tpu-vm describe b1 --zone=us-west4-a").json()["state"] == "PREEMPTED"
    cloud.control("POST", "faults", [{"kind": "refuse", "call": "nodes.get", "status": 404}])
    assert gcloud.tpus("tpu-vm describe b1 --zone=us-west4-a").rc == 1
    cloud.control("POST", "faults", [{"kind": "unreachable", "zone": "us-west4-a"}])
    assert gcloud.tpus("tpu-vm list --zone=-").json() == [], "gcloud says nothing of a zone that could not be reached"
