"""`tpu extract`: what a run cost, what a mesh takes, workers on a directory, models of the Hub; all on no device."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.extract_tiny.make import make
from penstock.cli import extract
from penstock.cli.extract_cost import tag_of
from penstock.cli.main import run
from penstock.extract.plan import RunPlan
from penstock.objects.directory import DirectoryObjects
from penstock.wire.cost import CostRow, JobCost
from penstock.wire.problems import problem
from tests.process.extraction import cheap_plan
from tests.unit.cli.stand_in import StandIn, job
from tests.unit.extract.cheap import calls_to, finish
from tests.unit.objects.fake_hub import FakeHub, serving

HOUR = 3600.0
ATTEMPT = "a01hzy3k8q2x4m6n8"
WORKER = f"{ATTEMPT}.0.1a2b3c4d"  #: as `replica_name` makes them


@pytest.fixture
def plan(tmp_path: Path) -> RunPlan:
    """Of a finished run in `acts`, by one replica of a job."""
    plan = cheap_plan(30, 7)
    asyncio.run(finish(calls_to(DirectoryObjects(tmp_path / "acts")), plan, WORKER))
    return plan


def asked(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    capsys.readouterr()
    assert run(["extract", *words]) == code
    said = capsys.readouterr()
    return said.err if code else said.out


def facts(text: str) -> dict[str, str]:
    return {name: rest.strip() for name, _, rest in (line.partition(" ") for line in text.splitlines())}


def spent(usd: float | None, unpriced: float = 0.0) -> JobCost:
    row = CostRow(key="j0001", chip_s=2 * HOUR, usd=usd, usd_known=4.5, unpriced_chip_s=unpriced)
    mine = CostRow(key=ATTEMPT, chip_s=HOUR, usd=usd)
    lost = CostRow(key="a00000000000000lost", chip_s=HOUR, usd=2.25)
    return JobCost(id="j0001", row=row, attempts=(mine, lost))


# --- cost ---
def test_the_status_has_the_money_of_the_jobs_of_the_run(
    plan: RunPlan, tmp_path: Path, server: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    server.jobs["j0001"] = job(tags=(tag_of(plan.run),))
    server.job_cost = spent(4.5)
    words = ("status", "--run", str(tmp_path / "acts"))
    lines = asked(capsys, *words).splitlines()
    columns = lines[0].split()
    assert columns == ["worker", "state", "unit", "samples", "shards", "committed", "tokens", "cost", "seen"]
    cells = dict(zip(columns, lines[1].split(), strict=True))
    assert (cells["worker"], cells["samples"], cells["shards"], cells["committed"]) == (WORKER, "30", "20", "5")
    assert cells["cost"] == "$4.50"
    assert facts("\n".join(lines[2:]))["cost"] == "$4.50; 2.00 chip-hours of j0001"
    assert {"tag": tag_of(plan.run)}.items() <= server.queries[0].items()
    found = json.loads(asked(capsys, *words, "--json"))
    assert found["cost"] == {"usd": 4.5, "chip_s": 2 * HOUR, "jobs": ["j0001"], "why": ""}
    assert [worker["usd"] for worker in found["workers"]] == [4.5]


def test_a_price_nobody_knows_is_unknown(
    plan: RunPlan, tmp_path: Path, server: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    server.jobs["j0001"] = job()
    server.job_cost = spent(None, unpriced=HOUR)
    text = asked(capsys, "watch", "--run", str(tmp_path / "acts"))
    assert "unknown" in text.splitlines()[1]
    assert facts(text)["cost"] == "unknown; 2.00 chip-hours of j0001"
    assert text.splitlines()[-1].strip() == "1.00 chip-hours have no known price; the rest is $4.50"


def test_with_the_bucket_alone_the_cost_is_a_dash_and_why(
    plan: RunPlan, tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = asked(capsys, "status", "--run", str(tmp_path / "acts"))
    assert facts(text)["cost"] == "- (a bucket knows no prices, and no server is configured here)"
    assert json.loads(asked(capsys, "status", "--run", str(tmp_path / "acts"), "--json"))["cost"]["usd"] is None


def test_a_server_that_knows_no_job_of_it_or_refuses_hides_nothing_else(
    plan: RunPlan, tmp_path: Path, server: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("status", "--run", str(tmp_path / "acts"))
    assert "no job of this run" in facts(asked(capsys, *words))["cost"]
    server.refusals["/v1/jobs"] = problem("unavailable", "not now")
    text = asked(capsys, *words)
    assert facts(text)["cost"].startswith("- (the server does not say: not now")
    assert "5 of 5 committed" in text


def test_the_dashboard_fits_eighty_columns_with_its_cost(
    plan: RunPlan,
    tmp_path: Path,
    server: StandIn,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server.jobs["j0001"] = job()
    server.job_cost = spent(12_345.67)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    lines = asked(capsys, "status", "--run", str(tmp_path / "acts")).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == ["worker", "state", "samples", "shards", "committed", "cost"]


# --- workers, meshes and models ---
@pytest.fixture
def tiny(tmp_path: Path) -> list[str]:
    """The words that name a tiny model and its data."""
    make(tmp_path / "in")
    words = ["--model", str(tmp_path / "in" / "model"), "--data", str(tmp_path / "in" / "docs.jsonl")]
    return [*words, "--id", "id", "--width", "256", "--sites", "resid_post:1", "--unit-rows", "100"]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str | None]]:
    """How many workers would run here, and with which mesh."""
    found: list[tuple[int, str | None]] = []

    def run_here(_address: str, count: int, mesh: str | None) -> int:
        found.append((count, mesh))
        return 0

    monkeypatch.setattr(extract, "_run_here", run_here)
    return found


def test_workers_on_a_directory_run_on_this_machine(
    tiny: list[str],
    tmp_path: Path,
    home: Path,
    started: list[tuple[int, str | None]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [*tiny, "--out", str(tmp_path / "acts")]
    assert "/runs/" in asked(capsys, *words, "--workers", "2")
    asked(capsys, *words, "--workers", "1", "--mesh", "data=1")
    asked(capsys, *words, "--workers", "9-99")  # there are four units
    assert started == [(2, None), (1, "data=1"), (4, None)]
    for more, said in (
        (["--on", "v5e-8"], "is a directory, and --on is for a job"),
        (["--spot"], "is a directory, and --spot"),
        (["--here", "1"], "--here and --workers both run workers"),
    ):
        line = asked(capsys, *words, "--workers", "2", *more, code=2)
        assert said in line
        assert line.count("\n") == 1
    assert len(started) == 3


def test_a_job_is_found_by_the_tag_of_its_run(
    tiny: list[str], server: StandIn, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("penstock.wiring.extraction.make_run", lambda plan, out: f"{out}/runs/{plan.run}")
    words = [*tiny, "--out", "gs://b/acts", "--workers", "1-3", "--tag", "mine", "--mesh", "tensor=2"]
    words += ["--on", "v5e-8", "--spot", "--zones", "us-a,us-b", "--zone", "us-c"]
    assert run(["extract", *words]) == 0
    said = capsys.readouterr()
    address = said.out.strip()
    assert "the hosts must see the model and the data, which lie on this machine" in said.err
    (request,) = server.submitted
    assert (request.zones, request.spot) == (("us-a", "us-b", "us-c"), True)
    assert request.tags == ("mine", tag_of(address.rpartition("/")[2]))
    command: Any = request.payload
    assert command.argv[-2:] == ("--mesh", "tensor=2")


def test_the_memory_of_a_dry_run_is_that_of_a_device_of_the_mesh(
    tiny: list[str], home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def memory(*mesh: str) -> dict[str, int]:
        found: dict[str, int] = json.loads(asked(capsys, *tiny, "--dry-run", "--json", *mesh))["memory_of_one_row"]
        return found

    one = memory()
    assert memory("--mesh", "data=4") == one
    split, cut = memory("--mesh", "fsdp=2"), memory("--mesh", "tensor=2")
    # Norms and biases stay whole on some axis; the matrices are all there is otherwise.
    assert 0.45 * one["weights"] < split["weights"] < 0.55 * one["weights"]
    assert split["working"] > one["working"], "the layer that is gathered comes on top"
    assert cut["weights"] < 0.85 * one["weights"]
    assert cut["working"] < one["working"]
    assert memory("--mesh", "fsdp=2,tensor=2")["weights"] < min(split["weights"], cut["weights"])
    text = asked(capsys, *tiny, "--dry-run", "--mesh", "data=2,tensor=2")
    assert "with the mesh data=2,tensor=2, a row a step" in text
    assert "4 = 1 × 3 + 1" in asked(capsys, *tiny, "--dry-run", "--mesh", "tensor=3", code=2)


@pytest.fixture
def fake(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with serving() as known:
        monkeypatch.setenv("HF_ENDPOINT", known.endpoint)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        yield known


def test_a_model_of_the_hub_is_pinned_in_the_plan(
    tiny: list[str], tmp_path: Path, fake: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "in" / "model"
    commit = fake.add("org/tiny", {path.name: path.read_bytes() for path in folder.iterdir()})
    words = ["--model", "org/tiny", *tiny[2:], "--out", str(tmp_path / "acts")]
    address = asked(capsys, *words).strip()
    (path,) = (tmp_path / "acts").glob("runs/*/plan.json")
    work = json.loads(path.read_bytes())["work"]
    assert (work["model"], work["tokenizer"]) == (f"hf://org/tiny@{commit}",) * 2
    assert all(text.startswith(("sha256:", "sha1:")) for text in work["files"].values())
    assert not [each for each in fake.asked if each.path.endswith("model.safetensors")], "a plan needs no weights"
    # The branch moves on; the commit is the same run.
    fake.add("org/tiny", {"config.json": b"{}"})
    assert asked(capsys, *words[2:], "--model", f"org/tiny@{commit}").strip() == address
    line = asked(capsys, *words[2:], "--model", "org/none", code=2)
    assert "is no directory here, and no model on the Hub" in line
    assert line.count("\n") == 1


def test_where_the_network_does_not_allow_it_one_line_says_so(
    tiny: list[str], home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    line = asked(capsys, *tiny[2:], "--model", "org/tiny", "--dry-run", code=3)
    assert "org/tiny is no directory here" in line
    assert "http://127.0.0.1:9 cannot be reached from here" in line
    assert line.count("\n") == 1
