"""`tpu emulator` as a command: one address for both APIs, the facts, and what it says to bad input."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import obstore
import pytest
from obstore.store import GCSStore

from tests.process.google_cloud import BUCKET, ROOT, google_cloud

_TPU = "from penstock.cli.main import main; main()"


def tpu(*words: str, home: Path | None = None) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-c", _TPU, *words]
    env = None if home is None else {**os.environ, "PENSTOCK_HOME": str(home)}
    return subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)


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


def test_it_says_where_it_is_and_what_to_export() -> None:
    with google_cloud() as cloud:
        assert cloud.process is not None
        assert cloud.process.stdout is not None
        said = [cloud.process.stdout.readline().strip() for _ in range(5)]
    wanted = {"TPU": "", "CONTAINER": "", "STORAGE": "storage/v1/", "COMPUTE": "compute/v1/"}
    overrides = [f"export CLOUDSDK_API_ENDPOINT_OVERRIDES_{api}={cloud.url}/{path}" for api, path in wanted.items()]
    assert said == [*overrides, f"export STORAGE_EMULATOR_HOST={cloud.url}"]


def test_facts_are_shown_and_checked() -> None:
    shown = tpu("emulator", "facts", "stockout", "--check")
    assert shown.returncode == 0, shown.stderr
    assert "https://github.com/hashicorp/terraform-provider-google/issues/21243" in shown.stdout
    assert "0 seen on the real service" in shown.stdout
    rows = msgspec.json.decode(tpu("emulator", "facts", "--json").stdout)
    assert {"what", "source", "seen", "probe", "expect"} <= rows["tpu.nodes.exists"].keys()


def test_words_that_no_fact_has_are_bad_input_with_near_ones() -> None:
    done = tpu("emulator", "facts", "qouta")
    assert (done.returncode, done.stdout) == (2, "")
    said = "no behaviour has 'qouta' in its name or text; did you mean quota"
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    far = tpu("emulator", "facts", "xyzzyx", "quota", "--json")
    assert (far.returncode, far.stdout) == (2, "")
    assert "no behaviour has 'xyzzyx' in its name or text; `tpu emulator facts` lists all" in far.stderr
    assert tpu("emulator", "facts", "QUOTA").returncode == 0


@pytest.mark.parametrize("words", [("emulator", "--no-vms"), ("emulator", "gcs", "b-1"), ("serve",)])
def test_a_port_in_use_is_one_line_that_says_by_whom(tmp_path: Path, words: tuple[str, ...]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = tpu(*words, "--port", str(port), home=tmp_path)
    assert done.returncode == 3
    assert f"port {port} of 127.0.0.1 is in use by process {os.getpid()} (" in done.stderr
    assert "stop it, or choose another with --port; 0 takes any that is free" in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


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
