"""JAX on emulated hosts: from nothing but a startup script and an archive in a bucket to the catalogue's devices.

The archive is the agent's own bundle, so this is also the proof that it needs nothing of the image.
"""

from __future__ import annotations

import subprocess
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import msgspec
import pytest

from penstock.domain.catalogue import find
from penstock.emulator.tpu_world import api_type
from penstock.wiring.bundle import build
from tests.missing import need_machines
from tests.process.google_cloud import BUCKET, google_cloud
from tests.process.machine import until

ZONE = "/v2/projects/p1/locations/us-central1-a"
NODES = (("pod", find("v5e-16"), "v2-alpha-tpuv5-lite"), ("old", find("v3-8"), "tpu-ubuntu2204-base"))
SCRIPT = """#!/bin/sh
M=http://metadata.google.internal/computeMetadata/v1/instance
publish() { curl -sS -X PUT -H 'Metadata-Flavor: Google' --data-binary "$2" "$M/guest-attributes/test/$1"; }
mkdir -p /opt/bundle && cd /opt/bundle
curl -sSf http://STORAGE/BUCKET/bundle | tar -xz || publish devices failed
cat >ask.py <<'END'
import jax
from jax._src.clusters.cloud_tpu_cluster import GceTpuCluster as cluster
print(jax.local_device_count(), cluster.get_process_id(), cluster.get_process_count())
END
publish devices "$(bin/python3 ask.py 2>&1 | tail -n 1)"
"""


@pytest.mark.long
def test_jax_sees_as_many_devices_as_the_catalogue_says(tmp_path: Path) -> None:
    """v5e shows a chip as one device, v3 as two; nothing but the node's type may tell a bare host."""
    need_machines()
    bundle = build(tmp_path, ("jax", "requests"))
    with google_cloud(machines=True) as cloud:
        target = f"{cloud.url}/upload/storage/v1/b/{BUCKET}/o?uploadType=media&name=bundle"
        upload = ["curl", "-sSf", "-o", "/dev/null", "-T", bundle.path, "-X", "POST", target]
        subprocess.run(upload, check=True, timeout=120)
        script = SCRIPT.replace("STORAGE", urlsplit(cloud.url).netloc).replace("BUCKET", BUCKET)

        def call(path: str, content: object) -> object:
            request = Request(cloud.url + ZONE + path, msgspec.json.encode(content), method="POST")
            with urlopen(request, timeout=60) as answer:
                return msgspec.json.decode(answer.read())

        def devices(node: str) -> list[str]:
            found = msgspec.to_builtins(call(f"/nodes/{node}:getGuestAttributes", {"queryPath": "test/devices"}))
            return [item["value"] for each in found["guestAttributes"] for item in each["queryValue"]["items"]]

        def answered(node: str, hosts: int) -> bool:
            return len(devices(node)) == hosts

        for node, accelerator, version in NODES:
            body = {"runtimeVersion": version, "metadata": {"startup-script": script}}
            call(f"/nodes?nodeId={node}", {**body, "acceleratorType": api_type(accelerator)})
        for node, accelerator, _ in NODES:
            until(partial(answered, node, accelerator.hosts), 300)
            each = accelerator.jax_devices // accelerator.hosts
            wanted = [f"{each} {host} {accelerator.hosts}" for host in range(accelerator.hosts)]
            assert devices(node) == wanted, "devices of the host, its rank, how many hosts there are, as JAX finds them"
