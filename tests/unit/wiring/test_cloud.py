"""What a server with a cloud is made of: how hosts reach it, and what they are told once the bundle is there."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest

from penstock.capacity.startup import SCRIPT_KEY, TOKEN_KEY
from penstock.domain.cloud import CloudWish, Mount
from penstock.domain.lifecycle import SliceState
from penstock.domain.nouns import Slice
from penstock.ports.capacity import PermissionDenied, RateLimited, Transient
from penstock.server.auth import join_token
from penstock.wiring.clock import SystemClock
from penstock.wiring.cloud import Cloud
from penstock.wiring.home import Unusable
from penstock.wiring.settings import CloudSettings, Value, cloud_settings, load_cloud

KEY = bytes(range(32))


def settings(folder: Path, **changes: Any) -> CloudSettings:
    values = load_cloud({"PENSTOCK_HOME": str(folder)})
    given = {"project": "p1", "endpoint": "http://127.0.0.1:1", "bundle": ("msgspec",), **changes}
    made = cloud_settings({**values, **{name: Value(value, "test") for name, value in given.items()}})
    assert made is not None
    return made


def cloud_of(folder: Path, url: str = "http://127.0.0.1:2", **changes: Any) -> Cloud:
    return Cloud(
        settings(folder, **changes),
        label="penstock",
        key=KEY,
        clock=SystemClock(),
        directory=folder / "bundles",
        url=url,
        changed=lambda _: None,
    )


def slice_of(**changes: Any) -> Slice:
    given = {"id": "s1", "pool": "p", "zone": "us-central1-a", "accelerator": "v5e-8", "chips": 8, "hosts": 1}
    return Slice(team="lab", provider="tpu_vm", intended_at=0.0, **{**given, **changes})


def test_real_hosts_must_be_told_how_to_reach_the_server(tmp_path: Path) -> None:
    real = "https://tpu.googleapis.com"
    with pytest.raises(Unusable, match=r"tpu_vm.agents_url: hosts of the cloud cannot reach http://127.0.0.1:2"):
        cloud_of(tmp_path, endpoint=real)
    cloud_of(tmp_path, endpoint=real, agents_url="https://a.example")
    cloud_of(tmp_path, endpoint=real, url="http://10.0.0.5:80")


def test_slices_are_asked_for_once_the_bundle_is_there(tmp_path: Path) -> None:
    async def story() -> None:
        cloud = cloud_of(tmp_path)
        with pytest.raises(Transient, match="is being built"):
            await cloud.capacity.create(slice_of())
        await cloud._build()
        mounts = (Mount("nfs", "h:/x", "/mnt/x"),)
        told = cloud._metadata(slice_of(cloud=CloudWish(mounts=mounts)))
        assert told[TOKEN_KEY] == join_token(KEY, "s1")
        assert "mount -t nfs" in told[SCRIPT_KEY]
        assert "SERVER=http://127.0.0.1:2\n" in told[SCRIPT_KEY]
        (archive,) = (tmp_path / "bundles").glob("*.tar.gz")
        sha256 = told[SCRIPT_KEY].partition("SHA256=")[2].split()[0]
        assert cloud.file(sha256) == archive
        assert cloud.file("0" * 64) is None

    asyncio.run(story())


def test_a_bundle_that_cannot_be_built_is_told_and_the_server_goes_on(tmp_path: Path) -> None:
    (tmp_path / "bundles").write_text("in the way")

    async def story() -> None:
        cloud = cloud_of(tmp_path)
        await cloud._build()
        with pytest.raises(PermissionDenied, match=r"the agent bundle cannot be built: .*bundles"):
            await cloud.capacity.create(slice_of())

    asyncio.run(story())


def test_two_installations_in_one_project_tell_their_things_apart(tmp_path: Path) -> None:
    first = cloud_of(tmp_path)
    other = Cloud(
        settings(tmp_path),
        label="penstock",
        key=b"x" * 32,
        clock=SystemClock(),
        directory=tmp_path / "bundles",
        url="http://127.0.0.1:2",
        changed=lambda _: None,
    )
    assert first.capacity._owner != other.capacity._owner
    assert first.capacity._owner == cloud_of(tmp_path).capacity._owner, "a restart finds its own"


class HandClock:
    """Sleeps take no time, but are counted."""

    def __init__(self) -> None:
        self.at = 0.0

    def now(self) -> float:
        return self.at

    def steady(self) -> float:
        return self.at

    async def sleep(self, seconds: float) -> None:
        self.at += seconds
        await asyncio.sleep(0)


def test_join_tokens_of_ready_slices_go_one_after_another_and_refusals_rest(tmp_path: Path) -> None:
    ready = [slice_of(id=f"s{n}", state=SliceState.READY, joined=("life",)) for n in range(3)]
    others = [slice_of(id="s9", state=SliceState.CREATING), slice_of(id="s8", state=SliceState.DELETING)]
    clock = HandClock()
    cloud = Cloud(
        settings(tmp_path),
        label="penstock",
        key=KEY,
        clock=clock,
        directory=tmp_path / "bundles",
        url="http://127.0.0.1:2",
        changed=lambda _: None,
        slices=lambda: [*ready, *others],
    )
    cleared: list[tuple[str, float]] = []

    async def clear(name: str, zone: str) -> None:
        assert zone == "us-central1-a"
        cleared.append((name, clock.at))
        if name == "s0" and len(cleared) == 1:
            raise RateLimited("asked too often")
        if name != "s2":  # what is accepted without effect rests as well
            cloud.capacity.with_token.discard(name)

    cloud.capacity.clear_token = clear  # type: ignore[method-assign]
    cloud.capacity.with_token.update({"s0", "s1", "s2", "s8", "s9", "gone"})

    async def story() -> None:
        task = asyncio.create_task(cloud._clear_tokens())
        async with asyncio.timeout(30.0):
            while len(cleared) < 5:  # noqa: ASYNC110 (what is waited for tells nobody)
                await asyncio.sleep(0)
        task.cancel()

    asyncio.run(story())
    assert [name for name, _ in cleared] == ["s0", "s1", "s2", "s0", "s2"]
    assert all(after - before >= 5.0 for (_, before), (_, after) in itertools.pairwise(cleared))
    assert cleared[3][1] - cleared[0][1] >= 60.0
    assert cleared[4][1] - cleared[2][1] >= 60.0
    assert cloud.capacity.with_token == {"s2", "s9"}, "a slice that is coming needs it; one that goes is forgotten"
