"""`docs/howto/from-gcloud-scripts.md`, executed: its commands are typed in order against an emulated cloud with hosts.

Only numbers are made smaller. Between the sections a slice is taken away, as it happens to fleets.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.process.machine import until
from tests.process.ssh_keys import Keys, need_sshd
from tests.process.test_tpu_vm import PROJECT, Scene, scene_at
from tests.tidy.tracked import ROOT

pytestmark = pytest.mark.slow
PAGE = ROOT / "docs" / "howto" / "from-gcloud-scripts.md"
#: Two machines do what eight do; that a slice is gone is believed only after a minute, and seen here by other means.
SMALLER = (
    ("delete --yes --wait 10m", "delete --yes"),
    ("--per-zone 4", "--per-zone 1"),
    ("--per-zone 2", "--per-zone 0"),
    ("--array 0-3", "--array 0-1"),
)
EXTRACT = "import os, sys\nprint('stream', os.environ.get('PENSTOCK_ARRAY_INDEX'), flush=True)\n"


def blocks() -> dict[str, list[str]]:
    """The commands of each section."""
    sections = PAGE.read_text().split("\n## ")[1:]
    return {
        section.partition("\n")[0]: [
            line for block in re.findall(r"```\n(.*?)```", section, re.DOTALL) for line in block.strip().splitlines()
        ]
        for section in sections
    }


class Shell:
    """A shell in which `tpu` is a command."""

    def __init__(self, scene: Scene, keys: Keys) -> None:
        self.scene = scene
        tools = scene.shop.desk.parent / "tools"
        tools.mkdir()
        (tools / "tpu").write_text(
            f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c "from penstock.cli.main import main; main()" "$@"\n'
        )
        (tools / "tpu").chmod(0o755)
        path = f"{tools}:{os.environ['PATH']}"
        self._environment = {**scene.shop.environment, "PATH": path, "PENSTOCK_SSH": keys.command}

    def type(self, line: str) -> str:
        for old, new in SMALLER:
            line = line.replace(old, new)
        done = subprocess.run(
            ["bash", "-c", line], env=self._environment, cwd=self.scene.shop.desk, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{line}: exit code {done.returncode}: {done.stdout}{done.stderr}"
        return done.stdout

    def section(self, title: str) -> str:
        return "".join(self.type(line) for line in blocks()[title])


def test_every_command_of_the_page_is_typed() -> None:
    titles = [title for title, lines in blocks().items() if lines]
    assert titles == [
        "Create", "Status", "Deploy", "Monitor", "Look at the machines", "Recreate what is preempted",
        "Resize, list, delete", "TPUs you have already",
    ]  # fmt: skip
    assert all(line.startswith("tpu ") for lines in blocks().values() for line in lines)


@pytest.mark.long
def test_the_older_workflow_in_tpu_commands(tmp_path: Path) -> None:
    need_sshd()
    keys = Keys(tmp_path / "keys")
    with scene_at(tmp_path, '"msgspec"', "--ssh-key", str(keys.public), "--ssh-port", str(keys.port)) as scene:
        shell = Shell(scene, keys)
        (scene.shop.desk / "extract.py").write_text(EXTRACT)
        shell.section("Create")
        status = shell.section("Status")
        assert "2 of 2 ready" in status
        assert {each["zone"] for each in _slices(scene)} == {"us-central1-a", "us-central1-b"}
        shell.section("Deploy")
        until(lambda: [job["state"] for job in _jobs(scene)] == ["succeeded"] * 2, 120)
        assert {f"stream {index}" for index in (0, 1)} == {
            scene.shop.log(job["id"]).decode().strip() for job in _jobs(scene)
        }
        monitored = shell.section("Monitor")
        assert "succeeded" in monitored
        assert {"us-central1-a: 1 free", "us-central1-b: 1 free"} <= set(monitored.splitlines()), "of `tpu monitor`"
        assert shell.section("Look at the machines").count("t1v-n-") == 2
        (lost,) = [each["id"] for each in _slices(scene) if each["zone"] == "us-central1-b"]
        scene.happen("preempt", lost)
        until(lambda: all(each["id"] != lost or each["state"] != "ready" for each in _slices(scene)), 120)
        assert "2 of 2 ready" in shell.section("Recreate what is preempted")
        assert "tpu-us-central1-b-0" in {each["title"] for each in _slices(scene)}
        assert "is deleted" in shell.section("Resize, list, delete")
        until(lambda: scene.nodes() == {}, 120)

        mine = {"what": "create", "name": "my-tpu", "project": PROJECT, "zone": "us-central1-a", "type": "v5litepod-8"}
        scene.cloud.control("POST", "happen", [mine])
        until(lambda: scene.nodes()["my-tpu"]["state"] == "READY")
        assert "stream None" in shell.section("TPUs you have already")
        until(lambda: scene.nodes()["my-tpu"]["labels"] == {}, 120)
        assert scene.nodes()["my-tpu"]["state"] == "READY"


def _slices(scene: Scene) -> list[dict[str, str]]:
    found: list[dict[str, str]] = scene.shop.call("GET", "/v1/slices")[1]["slices"]
    return found


def _jobs(scene: Scene) -> list[dict[str, str]]:
    found: list[dict[str, str]] = scene.shop.call("GET", "/v1/jobs")[1]["jobs"]
    return found
