"""Fleets on an emulated cloud whose hosts really run: made, broken, repaired, entered over ssh, resized, deleted.

The real `tpu` against a real server and a real emulator; hosts have a real sshd. What truly happened is read from the
emulator's own books.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.process.broken_host import image
from tests.process.machine import until
from tests.process.shop import TPU
from tests.process.ssh_keys import Keys, need_sshd
from tests.process.test_tpu_vm import PROJECT, Scene, scene_at

pytestmark = pytest.mark.slow
A, B = "us-central1-a", "us-central1-b"
FOREIGN = "us-west4-a"
READY_S = 120.0
DISK = {"hello": "from the disk\n"}


class Fleet(Scene):
    """The scene, and a user who has a key."""

    keys: Keys

    def run(self, *words: str, code: int = 0) -> str:
        done = subprocess.run(
            [*TPU, *words],
            env={**self.shop.environment, "PENSTOCK_SSH": self.keys.command},
            cwd=self.shop.desk,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=READY_S,
            check=False,
        )
        assert done.returncode == code, f"{words}: {done.returncode}: {done.stdout}{done.stderr}"
        assert "Traceback" not in done.stderr
        return done.stdout + done.stderr

    def status(self, name: str) -> Any:
        return json.loads(self.run("fleet", "status", name, "--json"))

    def ready(self, name: str) -> dict[str, str]:
        """Titles and ids of the slices that are ready, once all are."""
        self.run("fleet", "status", name, "--wait", f"{READY_S:.0f}s")
        return {each["title"]: each["id"] for each in self.status(name)["slices"] if each["state"] == "ready"}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    need_sshd()
    folder = tmp_path_factory.mktemp("fleet")
    keys = Keys(folder / "keys")
    words = ("--ssh-key", str(keys.public), "--ssh-port", str(keys.port), "--disk", f"d1={image(folder, DISK)}")
    with scene_at(folder, '"msgspec"', *words) as scene:
        made = Fleet(scene.cloud, scene.shop)
        made.keys = keys
        yield made


def test_a_fleet_is_made_repaired_and_deleted(fleet: Fleet) -> None:
    said = fleet.run("fleet", "create", "--zones", f"{A},{B}", "--per-zone", "2", "--type", "v3-8")
    assert "fleet-v3-8: 2 slices of v3-8 in each of us-central1-a, us-central1-b" in said
    assert "there is a pool 'fleet-v3-8' already" in fleet.run(
        "fleet", "create", "--zones", A, "--per-zone", "1", "--type", "v3-8", code=2
    )
    before = fleet.ready("fleet-v3-8")
    assert set(before) == {f"tpu-{zone}-{number}" for zone in (A, B) for number in (0, 1)}
    assert len(fleet.nodes()) == 4

    broken = before[f"tpu-{B}-1"]
    fleet.happen("preempt", broken)
    fleet.run("fleet", "recreate", "fleet-v3-8")
    until(lambda: broken not in fleet.ready("fleet-v3-8").values(), READY_S)
    after = fleet.ready("fleet-v3-8")
    assert set(after) == set(before)
    assert {title for title in before if before[title] != after[title]} == {f"tpu-{B}-1"}
    until(lambda: broken not in fleet.nodes(), READY_S)

    assert "ODDS" in fleet.run("zones")
    zones = {each["zone"]: each for each in json.loads(fleet.run("zones", "--json"))}
    assert zones[B]["life_s"] is not None
    assert zones[A]["life_s"] is None
    assert zones[A]["ready_s"] > 0

    assert "add --yes" in fleet.run("fleet", "resize", "--per-zone", "1", code=2)
    fleet.run("fleet", "resize", "--per-zone", "1", "--yes")
    until(lambda: len(fleet.nodes()) == 2, READY_S)
    assert set(fleet.ready("fleet-v3-8")) == {f"tpu-{zone}-0" for zone in (A, B)}, "the highest places go"
    assert "add --yes" in fleet.run("fleet", "delete", code=2)
    assert "is deleted" in fleet.run("fleet", "delete", "--yes")
    until(lambda: not fleet.nodes(), READY_S)
    assert "no fleets" in fleet.run("fleet")


@pytest.mark.long
def test_hosts_are_entered_over_ssh(fleet: Fleet) -> None:
    words = ("--zones", "us-central2-b", "--per-zone", "1", "--type", "v4-16", "--disk", "d1")
    fleet.run("fleet", "create", "gang", *words)
    (title,) = fleet.ready("gang")
    described = json.loads(fleet.run("describe", title, "--json"))
    hosts = len(described["addresses"])
    assert hosts == described["hosts"] > 1

    said = fleet.run("ssh", title, "--", "echo $((6*7)) on $(hostname)").splitlines()
    assert sorted(line.partition(" on ")[0] for line in said) == [f"[{index}] 42" for index in range(hosts)]
    assert len({line.partition(" on ")[2] for line in said}) == hosts
    assert fleet.run("ssh", title, "--host", "1", "--", "echo", "a  b").strip() == "a  b"
    told = fleet.run("ssh", "gang", "--", "case $(hostname) in *-w-1) exit 7;; esac", code=7)
    assert f"1 of {hosts} hosts failed: {title}/1 with 7" in told
    assert f"has {hosts} hosts" in fleet.run("ssh", title, "--host", "99", "--", "true", code=5)
    assert "there is no 'nothing'" in fleet.run("ssh", "nothing", "--", "true", code=5)
    assert f"penstock-{described['id']}-0" in fleet.keys.known_hosts.read_text()

    (fleet.shop.desk / "data").mkdir()
    (fleet.shop.desk / "data" / "a b").write_text("content")
    fleet.run("scp", "-r", "data", f"{title}:/tmp/")
    assert fleet.run("ssh", title, "--", "cat '/tmp/data/a b'; echo").splitlines().count("[0] content") == 1
    fleet.run("scp", "--host", "1", f"{title}:/tmp/data/a b", "back")
    assert (fleet.shop.desk / "back").read_text() == "content"
    assert "not both" not in fleet.run("scp", "here", "there", code=2)
    fleet.run("scp", f"{title}:/nowhere", "here", code=1)

    node = fleet.nodes()[described["id"]]
    fleet.run("mount", "gang", "disk:no:/mnt/no", code=1)  # no such disk: it is told, and the pool has it all the same
    assert "/mnt/no" in fleet.run("mount", "gang")
    fleet.run("mount", "gang", "--rm", "/mnt/no")
    assert "no mounts" in fleet.run("mount", "gang")
    assert all((Path(host["disk"]) / "mnt" / "no").is_dir() for host in node["hosts"])
    fleet.run("mount", "gang", "disk:d1:/mnt/d1")

    def mounted() -> list[str]:
        return sorted(fleet.run("ssh", title, "--", "mountpoint -q /mnt/d1 && cat /mnt/d1/hello").splitlines())

    assert mounted() == [f"[{index}] from the disk" for index in range(hosts)]

    assert "add --yes" in fleet.run("restart", title, code=2)
    fleet.run("restart", title, "--yes")
    until(lambda: fleet.ready("gang").get(title) not in (None, described["id"]), READY_S)
    assert mounted() == [f"[{index}] from the disk" for index in range(hosts)], "new hosts have it from their boot"
    fleet.run("fleet", "delete", "gang", "--yes")


@pytest.mark.long
def test_zones_whose_api_hangs_or_refuses_delay_no_other_are_told_of_and_heal(fleet: Fleet) -> None:
    well, hung, denied = "us-central1-a", "us-south1-a", "us-west1-c"
    refusal = {"kind": "refuse", "zone": denied, "status": 403, "message": "Permission denied on it", "times": 10**9}
    hanging = {"kind": "hang", "zone": hung, "times": 10**9}
    fleet.cloud.control("POST", "faults", [hanging, refusal])
    fleet.run("fleet", "create", "split", "--zones", f"{well},{hung},{denied}", "--per-zone", "1", "--type", "v5e-1")

    def slices() -> list[Any]:
        return [each for each in fleet.shop.call("GET", "/v1/slices")[1]["slices"] if each["pool"] == "split"]

    def ready() -> set[str]:
        return {each["zone"] for each in slices() if each["state"] == "ready"}

    def silent() -> set[str]:
        return {each["zone"] for each in fleet.shop.call("GET", "/v1/zones")[1]["zones"] if each["silent_since"]}

    until(lambda: ready() == {well} and silent() == {hung, denied}, READY_S)
    for words in (["fleet", "status", "split"], ["zones"]):
        told = {line.split()[0].rstrip(":"): line for line in fleet.run(*words).splitlines() if "its API" in line}
        assert "its API has not answered for" in told[hung]
        assert "its API has refused for" in told[denied]
        assert "Permission denied on it" in told[denied]
    # What was never made is not kept, and nothing more is tried where nothing can be seen.
    until(lambda: denied not in {each["zone"] for each in slices()}, READY_S)
    assert max(_intended(fleet, denied), _intended(fleet, hung)) <= 2

    fleet.cloud.control("DELETE", "faults")
    assert len(fleet.ready("split")) == 3
    assert silent() == set()

    fleet.cloud.control("POST", "faults", [hanging, refusal])
    for zone, said in ((hung, "answer"), (denied, "Permission denied on it")):
        shown = fleet.run("describe", f"tpu-{zone}-0")
        assert said in shown.partition(f"the API of zone {zone} ")[2]
        assert "addresses are the last known ones" in shown
    assert fleet.run("ssh", f"tpu-{denied}-0", "--", "echo in").splitlines()[0] == "in"
    fleet.run("fleet", "delete", "split", "--yes")
    left = "it may exist until then, and is deleted when that answers"
    until(lambda: any(each["zone"] == denied and left in each["why"] for each in slices()), READY_S)
    assert left in fleet.run("check-status")
    assert len(fleet.nodes(denied)) == 1
    fleet.cloud.control("DELETE", "faults")
    until(lambda: not fleet.nodes(denied), READY_S)


def _intended(fleet: Fleet, zone: str) -> int:
    """How many slices were ever wanted there by the fleet of the test above."""
    events = [json.loads(line) for line in fleet.run("events", "--json").splitlines()]
    wanted = [each["body"] for each in events if each["kind"] == "slice.intended"]
    return sum(body["pool"] == "split" and body["zone"] == zone for body in wanted)


@pytest.mark.long
def test_a_tpu_that_exists_is_adopted_and_stays(fleet: Fleet) -> None:
    made = {"what": "create", "project": PROJECT, "zone": FOREIGN, "type": "v5litepod-8", "labels": {"team": "blue"}}
    fleet.cloud.control("POST", "happen", [{**made, "name": "by-hand"}, {**made, "name": "given-away"}])
    until(lambda: {each["state"] for each in fleet.nodes(FOREIGN).values()} == {"READY"})
    fleet.run("adopt", "nothing", "--zone", FOREIGN, code=5)
    assert "by-hand is ready" in fleet.run("adopt", "by-hand", "--zone", FOREIGN)
    assert "already" in fleet.run("adopt", "by-hand", "--zone", FOREIGN, code=6)
    assert fleet.log.read_text().count(" adopts TPU by-hand") == 1
    said = fleet.run("run", "--on", "by-hand", "--", "python3", "-c", "import platform; print('at', platform.node())")
    assert "at t1v-n-" in said
    assert len(fleet.nodes(FOREIGN)) == 2, "nothing is made for it"
    fleet.run("pools", "rm", "by-hand")
    until(lambda: fleet.nodes(FOREIGN)["by-hand"]["labels"] == {"team": "blue"}, READY_S)
    assert fleet.nodes(FOREIGN)["by-hand"]["state"] == "READY"

    fleet.run("adopt", "given-away", "--zone", FOREIGN, "--own")
    fleet.run("pools", "rm", "given-away")
    until(lambda: set(fleet.nodes(FOREIGN)) == {"by-hand"}, READY_S)
