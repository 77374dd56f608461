"""`tpu emulator` as a command: one address for both APIs, the facts, and what it says to bad input."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import obstore
import pytest
from obstore.store import GCSStore

from tests.process.google_cloud import BUCKET, ROOT, google_cloud

_TPU = "from penstock.cli.main import main; main()"


def tpu(*words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-c", _TPU, *words]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_storage_is_at_the_same_address() -> None:
    with google_cloud() as cloud:
        key = {
            "gcs_base_url": cloud.url,
            "disable_oauth": True,
            "client_email": "",
            "private_key": "",
            "private_key_id": "",
        }
        store = GCSStore(
            BUCKET, service_account_key=msgspec.json.encode(key).decode(), client_options={"allow_http": True}
        )
        obstore.put(store, "a/b", b"bytes", mode="create")
        assert bytes(obstore.get(store, "a/b").bytes()) == b"bytes"
        assert cloud.control("GET", "nodes") == []


def test_facts_are_shown_and_checked() -> None:
    shown = tpu("emulator", "facts", "stockout", "--check")
    assert shown.returncode == 0, shown.stderr
    assert "https://github.com/hashicorp/terraform-provider-google/issues/21243" in shown.stdout
    assert "0 seen on the real service" in shown.stdout
    rows = msgspec.json.decode(tpu("emulator", "facts", "--json").stdout)
    assert {"what", "source", "seen", "probe", "expect"} <= rows["tpu.nodes.exists"].keys()


@pytest.mark.parametrize(
    ("world", "says"),
    [("seed = ", "is not TOML"), ("colour = 1", "colour"), ("[zones.x]\ntypes = ['v9-8']", "is no accelerator type")],
)
def test_a_bad_world_is_refused_in_one_line(tmp_path: Path, world: str, says: str) -> None:
    (tmp_path / "w.toml").write_text(world)
    done = tpu("emulator", "--no-vms", "--world", str(tmp_path / "w.toml"))
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def test_what_is_not_there_is_refused() -> None:
    assert tpu("emulator", "--no-vms", "--world", "/nowhere/w.toml").returncode == 2
    assert "a name is 3 to 63" in tpu("emulator", "--no-vms", "--bucket", "No Bucket").stderr
    if os.geteuid() != 0:
        done = tpu("emulator")
        assert (done.returncode, "add --no-vms" in done.stderr) == (2, True)
