"""`tpu extract`: what a run cost, workers on a directory and as a job, models of the Hub; all on no device."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import extract, extract_view, extract_workers
from penstock.cli.extract_cost import tag_of
from penstock.cli.main import run
from penstock.extract import open as open_run
from penstock.extract.plan import RunPlan
from penstock.extract.verify import Checked
from penstock.objects.directory import DirectoryObjects
from penstock.wire.cost import CostRow, JobCost
from penstock.wire.problems import problem
from penstock.wiring.extraction import Left, left
from tests.process.extraction import cheap_plan, document_of, tokens_of
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


# --- where a run is looked for ---
READING = (["status"], ["watch"], ["verify"], ["stats"], ["refused"])
WRITING = (["gc"], ["requeue", "u000001"], ["worker"])


@pytest.mark.parametrize("words", [*READING, *WRITING], ids=lambda words: words[0])
def test_a_run_that_is_not_there_is_told_in_one_line_and_not_made(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nowhere = tmp_path / "nowhere"
    monkeypatch.chdir(tmp_path)
    said = asked(capsys, *words, "--run", "nowhere", code=2)
    assert said.startswith("tpu: run: 'nowhere' is no directory; give one that is there, gs://… or s3://… (see ")
    assert said.count("\n") == 1
    assert not nowhere.exists()


@pytest.mark.parametrize("words", READING, ids=lambda words: words[0])
def test_reading_writes_nothing(
    words: list[str], plan: RunPlan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run may be another user's, or on a disk that is read only."""
    acts = tmp_path / "acts"
    shutil.rmtree(acts / ".penstock")  # as in a copy of what counts
    there = tree(acts)
    asked(capsys, *words, "--run", str(acts))
    with open_run(str(acts)) as run:
        assert len(run.values(document_of(1), plan.sites[0]))
    assert tree(acts) == there


def tree(folder: Path) -> list[tuple[str, int]]:
    """Also when each was last changed, which of a folder tells of files that came and went."""
    return sorted((str(path), path.stat().st_mtime_ns) for path in (folder, *folder.rglob("*")))


@pytest.mark.parametrize(
    ("shut", "said"),
    [
        ("acts", "{acts}: Permission denied"),
        ("acts/runs", "runs/: Permission denied"),
        (".", "run: '{acts}' cannot be opened: Permission denied; give another, or have it opened"),
    ],
)
def test_what_may_not_be_read_is_told_at_once(
    shut: str, said: str, plan: RunPlan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And not after the patience that a bucket gets that does not answer."""
    with tempfile.TemporaryDirectory(dir="/tmp") as above:  # pytest's own are closed to others anyway
        acts = Path(above) / "acts"
        shutil.copytree(tmp_path / "acts", acts)
        for path in (Path(above), *Path(above).rglob("*")):
            path.chmod(0o755)
        # Once as ourselves: modules are loaded on the way, and their files may be closed to others, too.
        asked(capsys, "verify", "--run", str(acts))
        asked(capsys, "verify", "--run", str(acts / "nowhere"), code=2)
        (Path(above) / shut).chmod(0)
        began = time.monotonic()
        with somebody():
            code = run(["extract", "verify", "--run", str(acts)])
        assert time.monotonic() - began < 30
        (Path(above) / shut).chmod(0o755)
        assert code
        told = capsys.readouterr().err
        assert told.startswith(f"tpu: {said.format(acts=acts)}")
        assert told.count("\n") == 1


@contextlib.contextmanager
def somebody() -> Iterator[None]:
    """Not root, from whom nothing is closed."""
    us = os.geteuid()
    if not us:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(us)


# --- rows that gave nothing ---
def test_rows_that_gave_nothing_are_listed(plan: RunPlan, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = [row for row in range(plan.rows) if not len(tokens_of(row))]
    lines = asked(capsys, "refused", "--run", str(tmp_path / "acts"), "--json").splitlines()
    assert [json.loads(line)["row"] for line in lines] == empty
    said = asked(capsys, "refused", "--run", str(tmp_path / "acts"))
    assert all(document_of(row) in said for row in empty)
    assert f"{len(empty)} gave nothing (`tpu extract refused` lists them)" in asked(
        capsys, "status", "--run", str(tmp_path / "acts")
    )


def test_rows_of_an_open_run_are_listed_as_far_as_it_is(
    plan: RunPlan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked(capsys, "requeue", plan.units[1].id, "--force", "--run", str(tmp_path / "acts"))
    lines = asked(capsys, "refused", "--run", str(tmp_path / "acts"), "--json").splitlines()
    assert [json.loads(line)["row"] for line in lines] == [21]


def test_ids_that_several_rows_have_are_told_of(capsys: pytest.CaptureFixture[str]) -> None:
    checked = Checked(
        run="r",
        sealed=True,
        units=1,
        committed=1,
        objects=3,
        bytes=9,
        rows_sha256="0",
        open=(),
        garbage=0,
        shared_ids=2,
        problems=(),
        damaged=(),
    )
    extract_view.echo_checked(checked)
    assert facts(capsys.readouterr().out)["ids"].startswith("2 name several input rows each")


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


# --- workers and models ---
@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, tuple[str, ...]]]:
    """How many workers would run here, and with which options."""
    found: list[tuple[int, tuple[str, ...]]] = []

    def run_none(argv: tuple[str, ...], count: int) -> tuple[int, list[int]]:
        found.append((count, argv[argv.index("--run") + 2 :]))
        return 0, [0] * count

    monkeypatch.setattr(extract_workers, "run", run_none)
    return found


def test_workers_on_a_directory_run_on_this_machine(
    tiny: list[str],
    tmp_path: Path,
    home: Path,
    started: list[tuple[int, tuple[str, ...]]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [*tiny, "--out", str(tmp_path / "acts")]
    assert "/runs/" in asked(capsys, *words, "--workers", "2")
    asked(capsys, *words, "--workers", "1", "--mesh", "data=1")
    asked(capsys, *words, "--workers", "9-99")  # there are four units
    asked(capsys, *words, "--here", "7")
    assert started == [(2, ()), (1, ("--mesh", "data=1")), (4, ()), (4, ())]
    for more, said in (
        (["--on", "v5e-8"], "is a directory, and --on is for a job"),
        (["--spot"], "is a directory, and --spot"),
        (["--here", "1"], "--here and --workers both run workers"),
    ):
        line = asked(capsys, *words, "--workers", "2", *more, code=2)
        assert said in line
        assert line.count("\n") == 1
    assert len(started) == 4


#: Every option that a worker has beside the run itself.
OWN = ("--lease", "5m", "--rows", "8", "--processes", "3", "--mesh", "data=1", "--cache", "/c")
OWN_FLAGS = ("--read-back", "--one-unit", "--no-sync")


def test_what_a_worker_can_be_told_is_told_to_all_of_them(
    tiny: list[str],
    tmp_path: Path,
    home: Path,
    started: list[tuple[int, tuple[str, ...]]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked(capsys, *tiny, "--out", str(tmp_path / "acts"), "--here", "1", *OWN, *OWN_FLAGS)
    ((_, words),) = started
    known = {opt for option in extract.worker_command.params for opt in option.opts} - {"--run"}
    assert {word for word in words if word.startswith("--")} == known, "an option that is not passed on"
    given: dict[str, Any] = {}

    def work(address: str, **more: Any) -> int:
        given.update(more, address=address)
        return 0

    monkeypatch.setattr("penstock.wiring.extraction.work", work)
    asked(capsys, "worker", "--run", "there", *words)
    del given["say"]
    assert given == {
        "address": "there",
        "lease_s": 300.0,
        "rows": 8,
        "processes": 3,
        "mesh": "data=1",
        "read_back": True,
        "one_unit": True,
        "synced": False,
        "cache": "/c",
    }


def commit(folder: Path, units: int) -> None:
    """As if so many units were done: what is asked is only whether there is a commit."""
    (run,) = (folder / "runs").iterdir()
    for number in range(units):
        (run / "commits").mkdir(exist_ok=True)
        (run / "commits" / f"u{number:06d}").write_bytes(b"{}")


def test_what_is_done_needs_no_worker(
    tiny: list[str],
    tmp_path: Path,
    home: Path,
    started: list[tuple[int, tuple[str, ...]]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = [*tiny, "--out", str(tmp_path / "acts")]
    asked(capsys, *words)
    commit(tmp_path / "acts", 3)
    asked(capsys, *words, "--workers", "4")
    commit(tmp_path / "acts", 4)
    asked(capsys, *words, "--here", "4")
    assert [count for count, _ in started] == [1, 1], "one unit is open; none is, and the run must be sealed"
    monkeypatch.setattr("penstock.wiring.extraction.left", lambda _address: Left(0, True))
    for more in (["--workers", "4"], ["--here", "2"]):
        capsys.readouterr()
        assert run(["extract", *words, *more]) == 0
        assert "nothing is left to do" in capsys.readouterr().err
    assert len(started) == 2


@pytest.mark.parametrize(
    ("rest", "replicas"),
    [(Left(4, False), (2, 3)), (Left(2, False), (2, 2)), (Left(1, False), (1, 1)), (Left(0, False), (1, 1))],
)
def test_a_job_has_no_more_replicas_than_there_are_open_units(
    tiny: list[str],
    server: StandIn,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rest: Left,
    replicas: tuple[int, int],
) -> None:
    monkeypatch.setattr("penstock.wiring.extraction.make_run", lambda plan, out: f"{out}/runs/{plan.run}")
    monkeypatch.setattr("penstock.wiring.extraction.left", lambda _address: rest)
    assert run(["extract", *tiny, "--out", "gs://b/acts", "--workers", "2-3", "--on", "v5e-8"]) == 0
    (request,) = server.submitted
    assert (request.replicas_min, request.replicas_max) == replicas


def test_what_is_left_of_a_run(plan: RunPlan, tmp_path: Path) -> None:
    folder = tmp_path / "acts" / "runs" / plan.run
    assert left(str(tmp_path / "acts")) == (0, True)
    (manifest,) = (folder / "manifest").iterdir()
    manifest.unlink()
    assert left(str(tmp_path / "acts")) == (0, False)
    (folder / "commits" / plan.units[1].id).unlink()
    assert left(str(tmp_path / "acts")) == (1, False)


def test_a_sealed_run_is_not_submitted(
    tiny: list[str], server: StandIn, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("penstock.wiring.extraction.make_run", lambda plan, out: f"{out}/runs/{plan.run}")
    monkeypatch.setattr("penstock.wiring.extraction.left", lambda _address: Left(0, True))
    assert run(["extract", *tiny, "--out", "gs://b/acts", "--workers", "2-3", "--on", "v5e-8"]) == 0
    assert not server.submitted
    assert "nothing is left to do" in capsys.readouterr().err


def test_a_job_is_found_by_the_tag_of_its_run(
    tiny: list[str], server: StandIn, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("penstock.wiring.extraction.make_run", lambda plan, out: f"{out}/runs/{plan.run}")
    monkeypatch.setattr("penstock.wiring.extraction.left", lambda _address: Left(4, False))
    words = [*tiny, "--out", "gs://b/acts", "--workers", "1-3", "--tag", "mine", "--mesh", "data=4,tensor=2"]
    words += ["--on", "v5e-8", "--spot", "--zones", "us-a,us-b", "--zone", "us-c"]
    assert run(["extract", *words]) == 0
    said = capsys.readouterr()
    address = said.out.strip()
    assert "the hosts must see the model and the data, which lie on this machine" in said.err
    (request,) = server.submitted
    assert (request.zones, request.spot) == (("us-a", "us-b", "us-c"), True)
    assert request.tags == ("mine", tag_of(address.rpartition("/")[2]))
    command: Any = request.payload
    assert command.argv[-2:] == ("--mesh", "data=4,tensor=2")


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
    weights = [each for each in fake.asked if each.path.endswith("model.safetensors")]
    assert {each.headers.get("range") for each in weights} <= {"bytes=0-262143"}, "a plan needs their header only"
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
