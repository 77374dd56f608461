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

from tests.process.machine import until
from tests.process.shop import TPU
from tests.process.ssh_keys import Keys, need_sshd
from tests.process.test_tpu_vm import PROJECT, Scene, scene_at

pytestmark = pytest.mark.slow
A, B = "us-central1-a", "us-central1-b"
FOREIGN = "us-west4-a"
READY_S = 120.0


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
    with scene_at(folder, '"msgspec"', "--ssh-key", str(keys.public), "--ssh-port", str(keys.port)) as scene:
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
    assert set(fleet.ready("fleet-v3-8")) <= set(after)
    assert "add --yes" in fleet.run("fleet", "delete", code=2)
    assert "is deleted" in fleet.run("fleet", "delete", "--yes")
    until(lambda: not fleet.nodes(), READY_S)
    assert "no fleets" in fleet.run("fleet")


@pytest.mark.long
def test_hosts_are_entered_over_ssh(fleet: Fleet) -> None:
    fleet.run("fleet", "create", "gang", "--zones", "us-central2-b", "--per-zone", "1", "--type", "v4-16")
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
    fleet.run("mount", "gang", "disk:d1:/mnt/d1", code=1)  # no such disk: it is told, and the pool has it all the same
    assert "/mnt/d1" in fleet.run("mount", "gang")
    fleet.run("mount", "gang", "--rm", "/mnt/d1")
    assert "no mounts" in fleet.run("mount", "gang")
    assert all((Path(host["disk"]) / "mnt" / "d1").is_dir() for host in node["hosts"])

    assert "add --yes" in fleet.run("restart", title, code=2)
    fleet.run("restart", title, "--yes")
    until(lambda: fleet.ready("gang").get(title) not in (None, described["id"]), READY_S)
    fleet.run("fleet", "delete", "gang", "--yes")


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
