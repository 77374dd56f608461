"""Nodes that somebody else made: taken over by labels, known by their slice, let go or deleted as was agreed."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from penstock.capacity import startup, tpu_vm
from penstock.capacity.startup import Boot, by_hand, metadata
from penstock.capacity.tpu_requests import OWNER_LABEL, SLICE_LABEL
from penstock.emulator.tpu_world import World
from penstock.ports.capacity import READY, Address
from tests.unit.capacity.test_tpu_vm import ZONE, Scene, play, slice_of

NODE = {
    "acceleratorType": "v5litepod-8",
    "runtimeVersion": "v2-alpha-tpuv5-lite",
    "labels": {"who": "ada"},
    "schedulingConfig": {"spot": True},
}


async def foreign(scene: Scene, name: str = "by-hand", **changes: Any) -> None:
    path = f"{scene.rest.zone(ZONE)}/nodes"
    await scene.rest.call("POST", path, query={"nodeId": name}, body={**NODE, **changes})
    scene.clock.at += 600


async def labels(scene: Scene, name: str = "by-hand") -> dict[str, str]:
    node = await scene.rest.call("GET", f"{scene.rest.zone(ZONE)}/nodes/{name}")
    return dict(node.get("labels") or {})


def test_an_adopted_node_is_known_by_its_slice_and_stays_when_let_go() -> None:
    scene = Scene(World())

    async def story() -> None:
        assert await scene.capacity.inspect("by-hand", ZONE) is None
        await foreign(scene)
        found = await scene.capacity.inspect("by-hand", ZONE)
        assert found is not None
        assert (found.accelerator, found.spot, found.owner, found.slice) == ("v5litepod-8", True, None, None)
        await scene.capacity.adopt("by-hand", ZONE, "s7", "m7", own=False)
        found = await scene.capacity.inspect("by-hand", ZONE)
        assert found is not None
        assert (found.owner, found.slice) == ("house", "s7")
        (listed,) = (await scene.capacity.list(ZONE)).slices
        asked = await scene.capacity.get("s7", ZONE)
        assert listed == asked
        assert (listed.name, listed.provider_id, listed.state, listed.label) == ("s7", "m7", READY, "house")
        assert await scene.capacity.addresses("s7", ZONE) != ()
        await scene.capacity.delete("s7", ZONE)
        assert await labels(scene) == {"who": "ada"}
        gone = await scene.capacity.get("s7", ZONE)
        assert gone is None or gone.label is None
        assert all(each.label is None for each in (await scene.capacity.list(ZONE)).slices)
        await scene.capacity.delete("s7", ZONE)  # again, as the controller does until it is seen to be gone
        assert await labels(scene) == {"who": "ada"}

    play(scene, story())


def test_a_script_for_the_next_boot_comes_and_goes_with_the_labels() -> None:
    scene = Scene(World())
    boot = Boot(server="http://s", bundle_url="http://s/v1/agent/bundle/x", sha256="ab", built_for="2.31")
    ours = by_hand(metadata(boot, "s7", "token"), "m7")

    async def of(name: str) -> dict[str, str]:
        node = await scene.rest.call("GET", f"{scene.rest.zone(ZONE)}/nodes/{name}")
        return dict(node.get("metadata") or {})

    async def story() -> None:
        await foreign(scene, metadata={"own": "value"})
        await scene.capacity.adopt("by-hand", ZONE, "s7", "m7", own=False, script=ours)
        assert await of("by-hand") == {"own": "value", "startup-script": ours}
        found = await scene.capacity.inspect("by-hand", ZONE)
        assert found is not None
        assert not found.script, "it is ours"
        await scene.capacity.delete("s7", ZONE)
        assert await of("by-hand") == {"own": "value"}

        await foreign(scene, "scripted", metadata={"startup-script": "#!/bin/sh"})
        found = await scene.capacity.inspect("scripted", ZONE)
        assert found is not None
        assert found.script
        await scene.capacity.adopt("scripted", ZONE, "s8", "m8", own=False, script=ours)
        assert await of("scripted") == {"startup-script": "#!/bin/sh"}
        await scene.capacity.delete("s8", ZONE)
        assert await of("scripted") == {"startup-script": "#!/bin/sh"}

    play(scene, story())


def test_what_was_given_away_is_deleted() -> None:
    scene = Scene(World())

    async def story() -> None:
        await foreign(scene)
        await scene.capacity.adopt("by-hand", ZONE, "s7", "m7", own=True)
        await scene.capacity.delete("s7", ZONE)
        scene.clock.at += 60
        assert await scene.capacity.inspect("by-hand", ZONE) is None

    play(scene, story())


def test_what_another_installation_adopted_is_no_slice_of_ours() -> None:
    scene = Scene(World())

    async def story() -> None:
        await foreign(scene, labels={OWNER_LABEL: "penstock-others", SLICE_LABEL: "s7"})
        found = await scene.capacity.inspect("by-hand", ZONE)
        assert found is not None
        assert (found.owner, found.slice) == ("penstock-others", None)

    play(scene, story())


def test_addresses_are_remembered_from_listings_and_forgotten_with_their_slice() -> None:
    scene = Scene(World())

    async def story() -> None:
        await foreign(scene)
        await scene.capacity.adopt("by-hand", ZONE, "s7", "m7", own=False)
        assert scene.capacity.known_addresses("s7", ZONE) == ()
        await scene.capacity.list(ZONE)
        known = scene.capacity.known_addresses("s7", ZONE)
        assert known == await scene.capacity.addresses("s7", ZONE) != ()
        await scene.capacity.delete("s7", ZONE)
        await scene.capacity.list(ZONE)
        assert scene.capacity.known_addresses("s7", ZONE) == ()

    play(scene, story())


def test_a_server_that_was_restarted_deletes_no_adopted_node() -> None:
    scene = Scene(World())

    async def story() -> None:
        await foreign(scene)
        await scene.capacity.adopt("by-hand", ZONE, "s7", "m7", own=False)
        fresh = tpu_vm.TpuVmCapacity(scene.rest, label="house", clock=scene.clock, metadata=lambda _: {})
        await fresh.delete("s7", ZONE)  # it has not listed yet, and does not know which node that is
        assert (await labels(scene))["penstock-slice"] == "s7"
        await fresh.list(ZONE)
        await fresh.delete("s7", ZONE)
        assert await labels(scene) == {"who": "ada"}

    play(scene, story())


def test_a_strangers_label_makes_no_node_our_slice() -> None:
    scene = Scene(World())

    async def story() -> None:
        await scene.capacity.create(slice_of("s7"))
        await foreign(scene, labels={"penstock": "another", "penstock-slice": "s7", "penstock-machine": "x"})
        shown = {each.name: each.label for each in (await scene.capacity.list(ZONE)).slices}
        assert shown == {"s7": "house", "by-hand": "another"}
        await scene.capacity.delete("s7", ZONE)
        assert (await labels(scene))["penstock"] == "another"

    play(scene, story())


def test_addresses_are_those_of_all_hosts_in_order() -> None:
    scene = Scene(World())

    async def story() -> None:
        await scene.capacity.create(slice_of("s8", accelerator="v5e-16"))
        scene.clock.at += 600
        found = await scene.capacity.addresses("s8", ZONE)
        assert len(found) == 4
        assert all(isinstance(one, Address) and one.inside for one in found)
        assert await scene.capacity.addresses("nothing", ZONE) == ()

    play(scene, story())


@pytest.mark.parametrize("token", ["plain", "it's $(odd) `x`"])
def test_the_script_of_an_adopted_host_asks_no_metadata_of_ours(token: str) -> None:
    boot = Boot(server="http://s", bundle_url="http://s/v1/agent/bundle/x", sha256="ab", built_for="2.31")
    script = by_hand(metadata(boot, "s7", token), "m7")
    assert "attributes/penstock" not in script
    assert "attributes/agent-worker-number" in script
    lines = "\n".join(line for line in script.splitlines() if line.startswith(("TOKEN=", "MACHINE=")))
    shown = subprocess.run(
        ["sh", "-c", f'{lines}\nprintf "%s|%s" "$TOKEN" "$MACHINE"'], capture_output=True, check=True
    )
    assert shown.stdout.decode() == f"{token}|m7"
    assert startup.TOKEN_KEY == "penstock-join"
