"""JAX on emulated hosts: from nothing but a startup script and an archive in a bucket to the catalogue's devices.

The archive is the agent's own bundle, so this is also the proof that it needs nothing of the image.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import msgspec
import pytest

from penstock.domain.catalogue import find
from penstock.wiring.bundle import build
from tests.missing import need_machines
from tests.process.google_cloud import BUCKET, google_cloud
from tests.process.machine import until

ZONE = "/v2/projects/p1/locations/us-central1-a"
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
    need_machines()
    bundle = build(tmp_path, ("jax", "requests"))
    accelerator = find("v5e-16")
    with google_cloud(machines=True) as cloud:
        target = f"{cloud.url}/upload/storage/v1/b/{BUCKET}/o?uploadType=media&name=bundle"
        upload = ["curl", "-sSf", "-o", "/dev/null", "-T", bundle.path, "-X", "POST", target]
        subprocess.run(upload, check=True, timeout=120)
        script = SCRIPT.replace("STORAGE", urlsplit(cloud.url).netloc).replace("BUCKET", BUCKET)
        body = {
            "acceleratorType": "v5litepod-16",
            "runtimeVersion": "v2-alpha-tpuv5-lite",
            "metadata": {"startup-script": script},
        }

        def call(path: str, content: object) -> object:
            request = Request(cloud.url + ZONE + path, msgspec.json.encode(content), method="POST")
            with urlopen(request, timeout=60) as answer:
                return msgspec.json.decode(answer.read())

        def devices() -> list[str]:
            found = msgspec.to_builtins(call("/nodes/pod:getGuestAttributes", {"queryPath": "test/devices"}))
            return [item["value"] for each in found["guestAttributes"] for item in each["queryValue"]["items"]]

        call("/nodes?nodeId=pod", body)
        until(lambda: len(devices()) == accelerator.hosts, 300)
        wanted = [f"{accelerator.chips_per_host} {host} {accelerator.hosts}" for host in range(accelerator.hosts)]
        assert devices() == wanted, "devices of the host, its rank, and how many hosts there are, as JAX finds them"
        assert accelerator.chips_per_host * accelerator.hosts == accelerator.jax_devices
