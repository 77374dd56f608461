"""`tpu cloud selftest` against an emulator whose world differs from the facts in two rows and has a forgotten node."""

from __future__ import annotations

import subprocess
from pathlib import Path
from urllib.request import urlopen

import msgspec
import pytest

from tests.process.google_cloud import GoogleCloud, google_cloud
from tests.process.shop import TPU

WORLD = """
runtime_versions = ["v0"]          # tpu.nodes.no_version says that there is no such thing
[delays]
create = 0.3
delete = 0.2
provision = 0.3
maintenance_notice = 0.5
[zones.us-central1-b]
types = ["v5litepod-8"]            # tpu.nodes.type_elsewhere says that it is not offered there
"""
PROJECT = "my-project"
FORGOTTEN = {"what": "create", "zone": "us-west1-c", "project": PROJECT, "type": "v5litepod-8"}


def selftest(cloud: GoogleCloud, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    place = ("--project", PROJECT, "--zone", "us-south1-a", "--endpoint", cloud.url, "--minutes", "0.2")
    argv = [*TPU, "cloud", "selftest", *place, "--report", str(folder / "report.json"), *words]
    return subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def nodes(cloud: GoogleCloud) -> list[str]:
    return [each["name"].rpartition("/")[2] for each in cloud.control("GET", "nodes")]


@pytest.mark.long
def test_differences_are_told_and_everything_is_tidied(tmp_path: Path) -> None:
    (tmp_path / "world.toml").write_text(WORLD)
    with google_cloud("--world", str(tmp_path / "world.toml")) as cloud:
        label = {"penstock-selftest": "old"}
        cloud.control("POST", "happen", [{**FORGOTTEN, "name": "forgotten", "labels": label}])
        shown = selftest(cloud, tmp_path, "--budget", "100")
        assert shown.returncode == 2
        assert "add --yes" in shown.stderr
        assert f"left over from an earlier run: projects/{PROJECT}/locations/us-west1-c/nodes/forgotten" in shown.stdout
        assert {each["name"].rpartition("/")[2] for each in cloud.control("GET", "history")} == {"forgotten"}
        assert nodes(cloud) == ["forgotten"], "a plan changes nothing"
        done = selftest(cloud, tmp_path, "--budget", "100", "--yes")
        assert done.returncode == 1, done.stderr
        assert nodes(cloud) == []
        with urlopen(f"{cloud.url}/v2/projects/{PROJECT}/locations/-/queuedResources", timeout=10) as answer:
            assert msgspec.json.decode(answer.read()).get("queuedResources", []) == []
    text = (tmp_path / "report.json").read_text()
    report = msgspec.json.decode(text)
    differing = {row["fact"]: row for row in report["results"] if row["verdict"] == "differs"}
    assert set(differing) == {"tpu.nodes.no_version", "tpu.nodes.type_elsewhere"}
    for name, row in differing.items():
        assert name in done.stdout
        assert row["seen_status"] == 200
        assert row["differences"][0].startswith("status: 200, not 400")
    assert [row["fact"] for row in report["results"] if row["verdict"] == "blocked"] == []
    assert sum(row["verdict"] == "holds" for row in report["results"]) > 40
    assert report["leftovers"] == ["projects/PROJECT/locations/us-west1-c/nodes/forgotten"]
    assert (report["undeleted"], PROJECT in text) == ([], False)
    assert 0 < report["spent_usd"] < 5


def test_others_things_are_left_alone_and_nothing_is_made_without_money(tmp_path: Path) -> None:
    with google_cloud() as cloud:
        cloud.control("POST", "happen", [{**FORGOTTEN, "name": "n1", "zone": "us-south1-a"}])
        done = selftest(cloud, tmp_path, "--budget", "0", "--yes")
        assert done.returncode == 0, done.stdout + done.stderr
        assert nodes(cloud) == ["n1"]
        assert [each["what"] for each in cloud.control("GET", "history") if "selftest" in each["name"]] == []
        report = msgspec.json.decode((tmp_path / "report.json").read_bytes())
        why = {row["fact"]: row["why"] for row in report["results"] if row["verdict"] == "skipped"}
        assert "$0.00 of the budget are left" in why["tpu.nodes.created"]
        assert why["tpu.list.empty"] == "needs a project without other nodes"
        assert {row["fact"] for row in report["results"] if row["verdict"] == "holds"} >= {"tpu.types", "tpu.versions"}
        some = selftest(cloud, tmp_path, "--budget", "2", "--yes", "tpu.nodes.exists")
        assert (some.returncode, "1 hold, 0 differ" in some.stdout) == (0, True), some
        assert nodes(cloud) == ["n1"]


def test_bad_input_is_told_in_a_line(tmp_path: Path) -> None:
    argv = [*TPU, "cloud", "selftest", "--budget", "1"]
    for words, said in (
        (("--project", "P!"), "project: 'P!' is not the name of a project"),
        (("--project", PROJECT, "--zone", "../x"), "zone: '../x' is not the name of a zone"),
        (("--project", PROJECT, "--endpoint", "tpu"), "endpoint: 'tpu' is not an address"),
        (("--project", PROJECT, "--budget", "-1"), "--budget"),
    ):
        done = subprocess.run([*argv, *words], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, said in done.stderr) == (2, True), done.stderr
    dead = ("--project", PROJECT, "--endpoint", "http://127.0.0.1:9")
    done = subprocess.run([*argv, *dead], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "cannot be listed: no answer" in done.stderr) == (3, True), done
