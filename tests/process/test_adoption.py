"""`tpu adopt` on an emulated cloud with real sshds: TPUs that somebody else made are used, and stay theirs.

Rebooted, stopped, deleted behind our back, adopted twice, adopted by those who may not. What truly happened to them is
read from the emulator's own books.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import msgspec
import pytest

from tests.process.machine import until
from tests.process.shop import TPU
from tests.process.ssh_keys import Keys, need_sshd
from tests.process.test_fleets import READY_S, Fleet
from tests.process.test_tpu_vm import PROJECT, scene_at

pytestmark = [pytest.mark.slow, pytest.mark.long]
ONE, GANG = "us-west4-a", "us-central2-b"
#: What its owner had put on it.
LABELS, METADATA = {"team": "blue"}, {"own": "value"}


class Owner(Fleet):
    """Somebody who has TPUs already, and their key."""

    def call(self, method: str, path: str, body: object = None) -> Any:
        """The cloud's API, as its owner's other tools use it."""
        content = None if body is None else msgspec.json.encode(body)
        address = f"{self.cloud.url}/v2/projects/{PROJECT}/locations/{path}"
        with urlopen(Request(address, content, method=method), timeout=30) as answer:
            return msgspec.json.decode(answer.read())

    def make(self, name: str, zone: str = ONE, kind: str = "v5litepod-1", **metadata: str) -> None:
        body = {"acceleratorType": kind, "runtimeVersion": "tpu-vm-base", "labels": LABELS}
        self.call("POST", f"{zone}/nodes?nodeId={name}", {**body, "metadata": {**METADATA, **metadata}})
        self.is_(name, zone, "READY")

    def is_(self, name: str, zone: str, state: str) -> None:
        until(lambda: self.node(name, zone)["state"] == state)

    def node(self, name: str, zone: str = ONE) -> Any:
        return self.call("GET", f"{zone}/nodes/{name}")

    def free(self, name: str, zone: str = ONE) -> None:
        """Wait until nothing of ours is on it; it was never deleted, and nothing was made in its place."""
        until(lambda: self.node(name, zone).get("labels") == LABELS, READY_S)
        assert self.node(name, zone).get("metadata") == METADATA
        happened = self.cloud.happened(name)
        assert "node.DELETING" not in happened
        assert "node.gone" not in happened
        assert happened.count("node.CREATING") == 1

    def slices(self, pool: str) -> list[Any]:
        return [each for each in self.shop.call("GET", "/v1/slices")[1]["slices"] if each["pool"] == pool]


@pytest.fixture(scope="module")
def owner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Owner]:
    need_sshd()
    folder = tmp_path_factory.mktemp("owner")
    keys = Keys(folder / "keys")
    with scene_at(folder, '"msgspec"', "--ssh-key", str(keys.public), "--ssh-port", str(keys.port)) as scene:
        made = Owner(scene.cloud, scene.shop)
        made.keys, made.server = keys, scene.server
        yield made


def test_a_gang_of_hosts_is_adopted_rebooted_and_let_go(owner: Owner) -> None:
    owner.make("big", GANG, "v4-16")
    assert "big is ready" in owner.run("adopt", "big", "--zone", GANG)
    job = owner.shop.submit("say('up'); time.sleep(3600)", on="v4-16", pool="big")
    owner.shop.says(job, b"up", hosts=2)
    slice = owner.slice_of(job)

    for host in (0, 1):  # both, as a reboot of the node does
        owner.happen("stop_host", "big", host=host)
        owner.happen("start_host", "big", host=host)
    until(lambda: len(owner.shop.view(job)["attempts"]) >= 2 and owner.shop.view(job)["state"] == "running", READY_S)
    assert owner.slice_of(job) == slice, "its hosts came back by themselves"
    assert owner.shop.view(job)["attempts"][0]["cause"] not in (None, "bug")

    owner.shop.command("cancel", job)
    owner.run("pools", "rm", "big")
    owner.free("big", GANG)
    assert owner.node("big", GANG)["state"] == "READY"


def test_a_startup_script_of_the_owner_is_left_alone(owner: Owner) -> None:
    script = "#!/bin/sh\necho mine >/var/mine\n"
    owner.make("scripted", **{"startup-script": script})
    told = owner.run("adopt", "scripted", "--zone", ONE)
    assert "has a startup script of its own: after a reboot, adopt it again" in told
    assert owner.node("scripted")["metadata"] == {**METADATA, "startup-script": script}
    (slice,) = owner.slices("scripted")

    owner.happen("stop_host", "scripted")
    owner.happen("start_host", "scripted")
    until(lambda: not [each for each in owner.slices("scripted") if each["state"] == "ready"], 300)
    until(lambda: owner.node("scripted")["labels"] == LABELS, 300)
    assert "scripted is ready" in owner.run("adopt", "scripted", "--zone", ONE)
    assert [each["id"] for each in owner.slices("scripted") if each["state"] == "ready"] != [slice["id"]]
    owner.run("pools", "rm", "scripted")
    until(lambda: owner.node("scripted")["labels"] == LABELS, READY_S)
    assert owner.node("scripted")["metadata"] == {**METADATA, "startup-script": script}


def test_one_that_is_stopped_is_let_go_and_can_be_adopted_again(owner: Owner) -> None:
    owner.make("rested")
    owner.run("adopt", "rested", "--zone", ONE)
    owner.call("POST", f"{ONE}/nodes/rested:stop")
    owner.free("rested")
    assert "is STOPPED, not READY" in owner.run("adopt", "rested", "--zone", ONE, code=6)
    owner.call("POST", f"{ONE}/nodes/rested:start")
    owner.is_("rested", ONE, "READY")
    owner.run("adopt", "rested", "--zone", ONE)
    assert "here" in owner.run("run", "--on", "rested", "--", "echo", "here")
    owner.run("pools", "rm", "rested")
    owner.free("rested")


def test_one_that_is_deleted_behind_our_back_is_missed_and_not_replaced(owner: Owner) -> None:
    owner.make("taken")
    owner.run("adopt", "taken", "--zone", ONE)
    job = owner.shop.submit("say('up'); time.sleep(3600)", on="v5e-1", pool="taken")
    owner.shop.says(job, b"up")
    owner.call("DELETE", f"{ONE}/nodes/taken")
    until(lambda: owner.shop.view(job)["state"] == "queued", READY_S)
    until(lambda: not owner.slices("taken"), 300)
    why = owner.run("why", job)
    assert "taken" in why
    assert "adopt" in why
    assert "taken" not in owner.nodes(ONE)
    assert not [name for name in owner.nodes(ONE) if name.startswith("s0")], "nothing is made in its place"
    owner.shop.command("cancel", job)
    owner.make("taken")  # its owner makes another of that name
    assert "taken is ready" in owner.run("adopt", "taken", "--zone", ONE)
    owner.run("pools", "rm", "taken")
    until(lambda: owner.node("taken").get("labels") == LABELS, READY_S)


def test_two_who_adopt_at_once_make_one_slice(owner: Owner) -> None:
    owner.make("wanted")
    words = [*TPU, "adopt", "wanted", "--zone", ONE]
    environment = {**owner.shop.environment, "PENSTOCK_SSH": owner.keys.command}
    both = [
        subprocess.Popen(words, env=environment, cwd=owner.shop.desk, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for _ in range(2)
    ]
    said = [each.communicate(timeout=READY_S)[0].decode() for each in both]
    codes = sorted(each.returncode for each in both)
    assert codes in ([0, 0], [0, 6]), said
    assert not any("Traceback" in one for one in said)
    (slice,) = owner.slices("wanted")
    happened = [json.loads(line) for line in owner.run("events", "--json").splitlines()]
    made = [each["id"] for each in happened if each["kind"] == "slice.intended" and each["body"]["pool"] == "wanted"]
    assert made == [slice["id"]], "none was begun and given up for the other's"
    assert slice["state"] == "ready"
    assert owner.node("wanted")["labels"]["penstock-slice"] == slice["id"]
    owner.run("pools", "rm", "wanted")
    owner.free("wanted")


def test_those_who_may_not_adopt_change_nothing(owner: Owner, tmp_path: Path) -> None:
    owner.make("foreign")
    tokens = owner.shop.home.path / "tokens.json"
    submitter, admin = "a" * 43, "b" * 43
    rows = msgspec.json.decode(tokens.read_bytes())
    tokens.write_bytes(msgspec.json.encode([*rows, *_rows(submitter=submitter, admin=admin)]))
    for token in (submitter, admin):
        with_token = {**owner.shop.environment, "PENSTOCK_TOKEN": token, "PENSTOCK_URL": owner.shop.server.url}
        done = subprocess.run(
            [*TPU, "adopt", "foreign", "--zone", ONE], env=with_token, cwd=tmp_path, capture_output=True, check=False
        )
        assert done.returncode == 4, done.stderr
        assert done.stderr.count(b"\n") == 1
    owner.free("foreign")

    refusal = {"kind": "refuse", "call": "nodes.patch", "name": "foreign", "status": 403, "times": 100}
    owner.cloud.control("POST", "faults", [{**refusal, "message": "Permission 'tpu.nodes.update' denied"}])
    told = owner.run("adopt", "foreign", "--zone", ONE, code=6)
    assert "Permission 'tpu.nodes.update' denied" in told
    assert told.count("\n") == 1
    owner.cloud.control("DELETE", "faults")
    owner.free("foreign")
    assert "foreign" not in owner.run("pools")

    stranger = Keys(tmp_path / "stranger")
    stranger.config.write_text(stranger.config.read_text().replace(f"Port {stranger.port}", f"Port {owner.keys.port}"))
    told = owner.run("adopt", "foreign", "--zone", ONE, "--ssh", stranger.command, code=1)
    assert "Permission denied" in told
    assert "`tpu pools rm foreign` lets it go" in told
    assert "adopt it again within 5m00s" in told
    (begun,) = [each for each in owner.slices("foreign") if each["state"] == "creating"]
    assert "ssh could not enter it: " in begun["arriving"]
    assert "Permission denied" in owner.run("slices")
    assert "foreign is ready" in owner.run("adopt", "foreign", "--zone", ONE), "with the right key it goes on"
    owner.run("pools", "rm", "foreign")
    owner.free("foreign")


def _rows(**tokens: str) -> list[dict[str, str]]:
    """Rows of the tokens file: users of the one team, named as their roles."""
    return [
        {"sha256": hashlib.sha256(token.encode()).hexdigest(), "name": role, "team": "default", "role": role}
        for role, token in tokens.items()
    ]
