"""The agent bundle in buckets, so that hosts fetch it from their own region and not all from this server.

`wiring.cloud` runs it once the bundle is packed, and asks it for an address whenever it makes a slice. It lies at
`agent/<sha256>` of every root that is a bucket of Cloud Storage, written once: a root that has it is left alone. A
bucket that cannot be written to is tried again and costs nothing else, because hosts fall back on the server. It must
not hold anything but code: whoever reads the bucket may read it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import quote

from penstock.domain.catalogue_egress import region_of
from penstock.ports.clock import Clock
from penstock.ports.objects import AlreadyThere, Objects, ObjectsError
from penstock.wiring.bundle import Bundle

logger = logging.getLogger(__name__)

STORAGE: Final = "https://storage.googleapis.com"
AGAIN_S: Final = 60.0


class BundleRoot(NamedTuple):
    """A root that may hold the bundle: its address as settings write it, and its objects."""

    address: str
    objects: Objects


class BundleRoots:
    """Where the bundle is, by region."""

    def __init__(
        self,
        main: BundleRoot,
        regions: Mapping[str, BundleRoot],
        clock: Clock,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self._main, self._regions = main, dict(regions)
        self._clock = clock
        emulator = environment.get("STORAGE_EMULATOR_HOST", "")
        self._storage = (emulator if "://" in emulator else f"http://{emulator}") if emulator else STORAGE
        self._there: set[tuple[str, str]] = set()  #: (address, hash)

    async def put(self, made: Bundle) -> None:
        """Put a bundle where it is not; goes on until all buckets have it."""
        missing = {root.address: root for root in (self._main, *self._regions.values()) if _is_cloud_storage(root)}
        while missing:
            for address, root in list(missing.items()):
                try:
                    await _put(root.objects, made)
                except (ObjectsError, OSError) as error:
                    logger.warning("hosts fetch the agent bundle from this server, not from %s: %s", address, error)
                    continue
                self._there.add((address, made.sha256))
                del missing[address]
            if missing:
                await self._clock.sleep(AGAIN_S)

    def url(self, zone: str, sha256: str) -> str:
        """Where hosts of a zone find the bundle with this hash; "": in no bucket."""
        root = self._regions.get(region_of(zone), self._main)
        if (root.address, sha256) not in self._there:
            return ""
        inside = f"{root.address.removeprefix('gs://').rstrip('/')}/{_path(sha256)}"
        return f"{self._storage.rstrip('/')}/{quote(inside)}"


def _is_cloud_storage(root: BundleRoot) -> bool:
    return root.address.startswith("gs://")


def _path(sha256: str) -> str:
    return f"agent/{sha256}"


async def _put(objects: Objects, made: Bundle) -> None:
    path = _path(made.sha256)
    if path in await objects.list(path):
        return
    data = await asyncio.to_thread(Path(made.path).read_bytes)
    try:
        await objects.put_new(path, data)
    except AlreadyThere:
        return  # another server was faster, or an answer was lost: the name is the hash, and hosts compare it
