"""The startup script: it is a shell script, whatever it is told, and mounts are made at every boot."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest

from penstock.capacity.startup import SCRIPT_KEY, TOKEN_KEY, Boot, metadata
from penstock.domain.cloud import Mount
from tests.missing import missing

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


@pytest.mark.parametrize("url", ["https://a.example/$(reboot)", "gs://bucket/agent/x"])
def test_an_address_of_a_bucket_is_checked_as_well(url: str) -> None:
    with pytest.raises(ValueError, match="is no plain http address"):
        metadata(msgspec.structs.replace(BOOT, bucket_url=url), "s1", "t")


def lines_of(boot: Boot) -> dict[str, str]:
    script = metadata(boot, "s1", "t")[SCRIPT_KEY]
    checked = subprocess.run(["sh", "-n"], input=script, text=True, capture_output=True, check=False)
    assert checked.returncode == 0, checked.stderr
    return {line.partition("(")[0].partition("=")[0]: line for line in script.splitlines()}


def test_a_bundle_in_a_bucket_is_fetched_with_the_machines_own_account_and_then_from_the_server() -> None:
    lines = lines_of(msgspec.structs.replace(BOOT, bucket_url="https://storage.example/b/agent/x"))
    assert lines["SOURCES"] == "SOURCES='bucket server'"
    assert "service-accounts/default/token" in lines["from_bucket"]
    assert '"https://storage.example/b/agent/x"' in lines["from_bucket"]
    assert "$TOKEN" not in lines["from_bucket"], "the join token is for the server alone"
    assert "service-accounts" not in lines["from_server"], "and the account's for the bucket"
    assert "$TOKEN" in lines["from_server"]


def test_without_a_bucket_the_server_is_asked_alone() -> None:
    lines = lines_of(BOOT)
    assert lines["SOURCES"] == "SOURCES='server'"
    assert "from_bucket" not in lines


def test_a_host_that_has_joined_comes_up_without_a_token_and_any_other_does_not(tmp_path: Path) -> None:
    """The very line of the script, under the shell's `set -e` and with a metadata server that has no such key."""
    (line,) = [each for each in metadata(BOOT, "s1", "t")[SCRIPT_KEY].splitlines() if each.startswith("TOKEN=")]
    script = f'set -eu\nSTATE={tmp_path}\nmeta() {{ return 22; }}\n{line}\necho "up:$TOKEN"\n'

    def boots() -> tuple[int, str]:
        done = subprocess.run(["sh"], input=script, text=True, capture_output=True, check=False)
        return done.returncode, done.stdout

    assert boots()[1] == ""
    assert boots()[0] != 0
    (tmp_path / "host").mkdir()
    (tmp_path / "host" / "credential.json").touch()
    assert boots() == (0, "up:\n")


def test_systemd_understands_how_the_agent_is_kept(tmp_path: Path) -> None:
    """The properties that `systemd-run` is given, as the unit that it makes of them. No systemd runs here that could
    start one; its own checker reads it."""
    if shutil.which("systemd-analyze") is None:
        missing("systemd-analyze: nothing else here reads units as systemd does")
    script = metadata(BOOT, "s1", "t")[SCRIPT_KEY]
    (command,) = re.findall(r"systemd-run (.*?) \"\$@\"", script, re.DOTALL)
    given = re.findall(r"--property=(\S+)", command)
    assert "KillMode=process" in given, "payloads live on while the agent is restarted"
    unit = tmp_path / "penstock-agent.service"

    def said(*lines: str) -> str:
        unit.write_text("\n".join(("[Service]", "ExecStart=/bin/sleep 1", *lines, "")))
        words = ["systemd-analyze", "verify", "--man=no", str(unit)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
        return "".join(line for line in done.stderr.splitlines() if unit.name in line)

    assert said(*given) == ""
    assert "KillMod" in said("KillMod=process"), "a word that systemd does not know would be seen"
