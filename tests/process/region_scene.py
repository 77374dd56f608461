"""An emulated cloud with machines and two buckets, and a server whose regions each have one of them.

The tests of regions, of bundles in buckets and of what payloads can reach use it. The server can be killed and started
again. What truly happened is read from the emulator's own books. It must not judge anything.
"""

from __future__ import annotations

import contextlib
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from penstock.emulator.gcs_faults import Fault
from tests.missing import need_machines
from tests.process.google_cloud import BUCKET, GoogleCloud, google_cloud
from tests.process.machine import until
from tests.process.shop import TPU, Shop

PROJECT = "p1"
#: Two regions that the catalogue has v6e in, on two continents, and the bucket of each.
US, EU = "us-central1", "europe-west4"
ZONES = {US: f"{US}-b", EU: f"{EU}-a"}
BUCKETS = {US: BUCKET, EU: "bucket-of-europe"}
WITHIN_S = 240.0  #: for anything on machines that have to come up: a quiet machine needs a tenth of it


class RegionScene:
    """The emulator, and the server that uses it."""

    def __init__(self, cloud: GoogleCloud, folder: Path) -> None:
        self.cloud = cloud
        self.folder = folder
        self.shop = Shop(folder / "home")
        self.shop.home.path.mkdir()
        self.shop.environment["STORAGE_EMULATOR_HOST"] = cloud.url
        self._server: subprocess.Popen[bytes] | None = None
        regions = "".join(f'{region} = "gs://{bucket}/team"\n' for region, bucket in BUCKETS.items())
        (self.shop.home.path / "penstock.toml").write_text(
            f'[server]\nroot = "gs://{BUCKET}/team"\nlocal_hosts = 0\n'
            f'[tpu_vm]\nproject = "{PROJECT}"\nendpoint = "{cloud.url}"\nbundle = ["msgspec"]\n[regions]\n{regions}'
        )

    # --- the server ---
    def serve(self) -> None:
        with (self.folder / "server.log").open("ab") as log:
            self._server = subprocess.Popen(
                [*TPU, "serve"], env=self.shop.environment, cwd=self.folder, stdout=subprocess.PIPE, stderr=log
            )
        assert self._server.stdout is not None
        assert self._server.stdout.readline().startswith(b"http"), self.log()
        until(lambda: self.shop.call("GET", "/v1/queues")[1]["queues"])

    def kill(self) -> None:
        if self._server is not None:
            self._server.kill()
            self._server.wait()
            assert self._server.stdout is not None
            self._server.stdout.close()

    def log(self) -> str:
        return (self.folder / "server.log").read_text()

    # --- the cloud's books ---
    def storage(self, what: str, method: str = "GET", content: object = None) -> Any:
        body = None if content is None else msgspec.json.encode(content)
        request = urllib.request.Request(f"{self.cloud.url}/_emulator/{what}", body, method=method)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return msgspec.json.decode(answer.read() or b"null")

    def plant(self, *faults: Fault) -> None:
        self.storage("faults", "POST", list(faults))

    def heal(self) -> None:
        self.storage("faults", "DELETE")

    def written(self, region: str, below: str = "") -> list[dict[str, Any]]:
        """Every write to a region's bucket there ever was, in order, below a path of the root."""
        prefix = f"team/{below}"
        return [
            each
            for each in self.storage("history")
            if each["verb"] == "put" and each["bucket"] == BUCKETS[region] and each["name"].startswith(prefix)
        ]

    def nodes(self) -> dict[str, Any]:
        """What there truly is, by name."""
        return {each["name"].rpartition("/")[2]: each for each in self.cloud.control("GET", "nodes")}

    def happen(self, what: str, name: str, **more: object) -> None:
        assert any(self.cloud.control("POST", "happen", [{"what": what, "name": name, **more}]))

    def dry(self, zone: str) -> None:
        self.cloud.control("POST", "capacity", [{"chips": 0, "zone": zone}])

    # --- jobs ---
    def pool(self, name: str, zones: str, *words: str, kind: str = "v6e-1") -> None:
        made = self.shop.tpu("pool", "create", name, "--type", kind, "--zones", zones, "--idle", "1h", *words)
        assert made.returncode == 0, made.stderr

    def drop(self, name: str) -> None:
        assert self.shop.tpu("pools", "rm", name).returncode == 0

    def slice_of(self, job: str) -> str:
        """Where a job runs, once it does."""
        self.soon(lambda: self.shop.view(job)["state"] == "running")
        return str(self.shop.view(job)["slice"])

    def soon(self, what: Callable[[], object]) -> None:
        try:
            until(what, WITHIN_S)
        except AssertionError:
            raise AssertionError(f"it did not come about in time; the server said:\n{self.log()[-4000:]}") from None

    def disk(self, slice: str, host: int = 0) -> Path:
        """The disk of a host."""
        return Path(self.nodes()[slice]["hosts"][host]["disk"])


@contextlib.contextmanager
def region_scene(folder: Path) -> Iterator[RegionScene]:
    need_machines()
    with google_cloud("--bucket", BUCKETS[EU], machines=True) as cloud:
        scene = RegionScene(cloud, folder)
        try:
            scene.serve()
            yield scene
        finally:
            scene.kill()
