"""The buckets the suite runs on: memory, a directory, the emulated Cloud Storage, and an S3 server.

Servers run in processes of their own, once for all tests; each test has a prefix of its own. Where the S3 server is not
installed its tests skip with the reason, except in CI, where they fail: green must not mean unseen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import count
from pathlib import Path

import pytest

from penstock.objects.bucket import open_gcs, open_s3
from penstock.objects.directory import DirectoryObjects
from penstock.objects.memory import MemoryObjects
from penstock.ports.objects import Ranged
from tests.contract.objects.servers import BUCKET, S3_ENVIRONMENT, Emulator, gcs_emulator, s3_server
from tests.missing import missing

#: Each call is one more client of the same bucket.
Open = Callable[[], Ranged]
#: Each call is an empty bucket.
Make = Callable[[], Open]

ADAPTERS = ["memory", "directory", "gcs", "s3"]
_prefixes = (f"p{number}/" for number in count())


@pytest.fixture(scope="session")
def gcs() -> Iterator[Emulator]:
    with gcs_emulator() as emulator:
        yield emulator


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    if find_spec("moto") is None:
        missing("an S3 server: moto is not installed; it is in the dev group")
    with s3_server() as url:
        yield url


def buckets(kind: str, request: pytest.FixtureRequest) -> Make:
    match kind:
        case "memory":

            def memory() -> Open:
                bucket = MemoryObjects(now=time.time)  # noqa: TID251 (as the other buckets' clocks)
                return lambda: bucket.by("a client")

            return memory
        case "directory":
            folders: pytest.TempPathFactory = request.getfixturevalue("tmp_path_factory")

            def directory() -> Open:
                root: Path = folders.mktemp("root")
                return lambda: DirectoryObjects(root)

            return directory
        case "gcs":
            emulator: Emulator = request.getfixturevalue("gcs")

            def cloud() -> Open:
                prefix = next(_prefixes)
                return lambda: open_gcs(BUCKET, prefix, emulator.environment)

            return cloud
        case _:
            url: str = request.getfixturevalue("s3")

            def amazon() -> Open:
                prefix = next(_prefixes)
                return lambda: open_s3(BUCKET, prefix, {**S3_ENVIRONMENT, "AWS_ENDPOINT_URL": url}, time.time)  # noqa: TID251

            return amazon


@pytest.fixture(params=ADAPTERS)
def client_of(request: pytest.FixtureRequest) -> Open:
    return buckets(request.param, request)()


@pytest.fixture(params=[kind for kind in ADAPTERS if kind != "memory"])
def empty(request: pytest.FixtureRequest) -> Make:
    """Empty buckets of a kind that is to be compared with memory."""
    return buckets(request.param, request)
