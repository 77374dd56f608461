"""The bundle in buckets: put once by its hash, found by region, and no harm where a bucket is away."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import pytest

from penstock.objects.memory import MemoryObjects
from penstock.ports.objects import ObjectsError
from penstock.wiring import bundle_roots
from penstock.wiring.bundle import Bundle
from penstock.wiring.bundle_roots import BundleRoot, BundleRoots

DATA = b"python and wheels"
SHA = hashlib.sha256(DATA).hexdigest()


class Clock:
    """Time passes when somebody sleeps."""

    def __init__(self) -> None:
        self.slept = 0.0

    def now(self) -> float:
        return self.slept

    def steady(self) -> float:
        return self.slept

    async def sleep(self, seconds: float) -> None:
        self.slept += seconds
        await asyncio.sleep(0)


class Writes:
    """Counts what is written, and refuses the first so many."""

    def __init__(self, refused: int = 0) -> None:
        self.count, self.refused = 0, refused

    async def before(self, verb: str, path: str) -> None:
        if verb == "put_new":
            self.count += 1
            if self.count <= self.refused:
                raise ObjectsError("not now")

    async def after(self, verb: str, path: str) -> None:
        pass


def bundle_in(folder: Path) -> Bundle:
    (folder / "bundle").write_bytes(DATA)
    return Bundle(path=str(folder / "bundle"), sha256=SHA, size=len(DATA), built_for="2.31")


def roots_of(clock: Clock, main: BundleRoot, emulator: str = "", **regions: BundleRoot) -> BundleRoots:
    named = {region.replace("_", "-"): root for region, root in regions.items()}
    return BundleRoots(main, named, clock, {"STORAGE_EMULATOR_HOST": emulator} if emulator else {})


def test_it_is_put_once_into_every_bucket_and_found_by_region(tmp_path: Path) -> None:
    writes = Writes()
    main, west = MemoryObjects(faults=writes), MemoryObjects()
    made = bundle_in(tmp_path)
    for _ in range(2):  # a server that is started again finds it there
        roots = roots_of(
            Clock(),
            BundleRoot("gs://b/team", main),
            europe_west4=BundleRoot("gs://eu", west),
            us_east1=BundleRoot("/d", west),
        )
        assert roots.url("us-central1-a", SHA) == "", "before it is there, hosts ask the server"
        asyncio.run(roots.put(made))
        assert roots.url("us-central1-a", SHA) == f"https://storage.googleapis.com/b/team/agent/{SHA}"
        assert roots.url("europe-west4-a", SHA) == f"https://storage.googleapis.com/eu/agent/{SHA}"
        assert roots.url("us-east1-d", SHA) == "", "a directory is no place that hosts reach"
        assert roots.url("us-central1-a", "0" * 64) == ""
    for objects in (main, west):
        found = objects.peek(f"agent/{SHA}")
        assert found is not None
        assert found.data == DATA
    assert writes.count == 1


def test_a_bucket_that_is_away_is_tried_again_and_the_others_do_not_wait_for_it(tmp_path: Path) -> None:
    clock = Clock()
    main, west = MemoryObjects(faults=Writes(refused=2)), MemoryObjects()
    roots = roots_of(clock, BundleRoot("gs://b", main), europe_west4=BundleRoot("gs://eu", west))
    asyncio.run(roots.put(bundle_in(tmp_path)))
    assert clock.slept == 2 * bundle_roots.AGAIN_S
    assert roots.url("us-central1-a", SHA)
    assert roots.url("europe-west4-a", SHA)


@pytest.mark.parametrize("address", ["file:///root", "s3://bucket/x", "/root"])
def test_only_cloud_storage_is_read_with_a_machines_account(tmp_path: Path, address: str) -> None:
    objects = MemoryObjects()
    roots = roots_of(Clock(), BundleRoot(address, objects))
    asyncio.run(roots.put(bundle_in(tmp_path)))
    assert not objects.paths()
    assert roots.url("us-central1-a", SHA) == ""


@pytest.mark.parametrize("emulator", ["http://127.0.0.1:9", "127.0.0.1:9", "http://127.0.0.1:9/"])
def test_an_emulated_storage_is_named_as_for_googles_own_clients(tmp_path: Path, emulator: str) -> None:
    roots = roots_of(Clock(), BundleRoot("gs://b/a b", MemoryObjects()), emulator)
    asyncio.run(roots.put(bundle_in(tmp_path)))
    assert roots.url("us-central1-a", SHA) == f"http://127.0.0.1:9/b/a%20b/agent/{SHA}"
