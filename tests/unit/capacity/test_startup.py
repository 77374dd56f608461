"""The startup script: it is a shell script, whatever it is told, and mounts are made at every boot."""

from __future__ import annotations

import subprocess

import pytest

from penstock.capacity.startup import SCRIPT_KEY, TOKEN_KEY, Boot, metadata
from penstock.domain.cloud import Mount

SHA = "ab" * 32
BOOT = Boot(
    server="https://a.example", bundle_url=f"https://a.example/v1/agent/bundle/{SHA}", sha256=SHA, built_for="2.31"
)
MOUNTS = (
    Mount("nfs", "10.0.0.2:/x", "/mnt/x"),
    Mount("gcs", "bucket", "/mnt/y"),
    Mount("disk", "d1", "/mnt/z"),
)


def test_it_is_a_shell_script_with_the_token_beside_it_not_in_it() -> None:
    made = metadata(BOOT, "s1", "the-token", MOUNTS)
    assert made[TOKEN_KEY] == "the-token"
    assert "the-token" not in made[SCRIPT_KEY]
    checked = subprocess.run(["sh", "-n"], input=made[SCRIPT_KEY], text=True, capture_output=True, check=False)
    assert checked.returncode == 0, checked.stderr
    assert made[SCRIPT_KEY].startswith("#!/bin/sh\n")


def test_mounts_are_made_once_and_quoted() -> None:
    script = metadata(BOOT, "s1", "t", (*MOUNTS, Mount("nfs", "h:/a b; reboot", "/mnt/$(id)")))[SCRIPT_KEY]
    assert "mountpoint -q /mnt/x || mount -t nfs" in script
    assert "'h:/a b; reboot' '/mnt/$(id)'" in script


@pytest.mark.parametrize("url", ["https://a.example/$(reboot)", 'https://a.example/"', "file:///etc", "https://a/`id`"])
def test_an_address_that_a_shell_would_read_otherwise_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="is no plain http address"):
        metadata(Boot(server="https://a.example", bundle_url=url, sha256=SHA, built_for="2.31"), "s1", "t")


def test_a_bundle_in_a_bucket_is_fetched_with_the_machines_own_account() -> None:
    boot = Boot(server="https://a.example", bundle_url="https://storage.example/b/o", sha256=SHA, built_for="2.31")
    script = metadata(boot, "s1", "t")[SCRIPT_KEY]
    (fetch,) = [line for line in script.splitlines() if line.startswith("fetch()")]
    assert "service-accounts/default/token" in fetch
    assert "$TOKEN" not in fetch, "the join token is for the server alone"
