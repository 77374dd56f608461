"""`tpu cost` and what `tpu show` says of a job's use: unknown stays unknown, and the parts are named."""

from __future__ import annotations

import json

import pytest

from penstock.cli.main import run
from penstock.wire.cost import CostPage, CostRow, JobCost
from tests.unit.cli.stand_in import StandIn, attempt, job

HOUR = 3600.0


def page() -> CostPage:
    mine = CostRow(
        key="ann", chip_s=10 * HOUR, useful_chip_s=6 * HOUR, lost_chip_s=3 * HOUR, setup_chip_s=HOUR,
        waited_chip_s=2 * HOUR, usd=12.0, usd_known=12.0, goodput=0.6, attempts=2, losses=1,
    )  # fmt: skip
    other = CostRow(key="b\x1bob", chip_s=HOUR, useful_chip_s=HOUR, usd=None, unpriced_chip_s=HOUR, goodput=1.0)
    nobody = CostRow(key="", kind="nobody", chip_s=5 * HOUR, idle_chip_s=5 * HOUR, usd=6.0, usd_known=6.0, goodput=0.0)
    total = CostRow(key="", kind="total", chip_s=16 * HOUR, usd=None, usd_known=18.0, unpriced_chip_s=HOUR, goodput=0.4)
    return CostPage(by="user", since=0.0, until=HOUR, rows=(mine, other, nobody), total=total)


def test_the_table_says_where_it_went_and_what_has_no_price(
    server: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    server.cost = page()
    assert run(["cost", "--by", "user", "--since", "30d", "--limit", "7"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == [
        "USER", "CHIP-HOURS", "USEFUL", "LOST", "UNKNOWN", "SET-UP", "IDLE", "QUEUED", "GOODPUT", "COST",
    ]  # fmt: skip
    assert lines[2].split() == ["ann", "10.00", "6.00", "3.00", "-", "1.00", "-", "2.00", "60%", "$12.00"]
    assert lines[3].split() == ["b\\x1bob", "1.00", "1.00", "-", "-", "-", "-", "-", "100%", "unknown"]
    assert lines[4].split()[0] == "(nobody)"
    assert lines[5].split()[-1] == "unknown"
    assert lines[6].startswith("1.00 chip-hours have no known price")
    query = server.queries[-1]
    assert (query["by"], query["limit"]) == ("user", "7")
    assert "until" not in query


def test_json_is_the_servers_answer(server: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    server.cost = page()
    assert run(["cost", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["rows"][1]["usd"] is None
    assert run(["cost", "--by", "shoe"]) == 2


def test_one_job_says_how_often_to_save(server: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    row = CostRow(key="j1", chip_s=10 * HOUR, useful_chip_s=6 * HOUR, lost_chip_s=4 * HOUR, usd=None, goodput=0.6)
    server.job_cost = JobCost(
        id="j1", row=row, saves=12, losses=2, save_s=2.0, between_losses_s=3600.0, save_every_s=120.0
    )
    assert run(["cost", "j1"]) == 0
    said = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    said = {name.strip(): text.strip() for name, text in said.items()}
    assert said["chip-hours"] == "10.00 (6.00 useful, 4.00 lost)"
    assert said["goodput"] == "60%"
    assert said["costs"] == "unknown"
    assert said["lost capacity"] == "2 times; expected every 1h00m"
    assert said["checkpoints"] == "12; one takes 2.0s"
    assert said["save every"] == "2m00s"


def test_show_has_goodput_and_why_no_interval_is_known(server: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    row = CostRow(key="j0001", chip_s=10.0, useful_chip_s=5.0, unknown_chip_s=5.0, goodput=0.5)
    used = JobCost(id="j0001", row=row, saves=1, advice="what a save costs is not known: wrap it")
    server.jobs["j0001"] = job(used=used, attempts=(attempt(),))
    assert run(["show", "j0001"]) == 0
    text = capsys.readouterr().out
    assert "50% at least; of 50% nobody knows" in text
    assert "unknown: what a save costs is not known: wrap it" in text
