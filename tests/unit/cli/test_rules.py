"""`tpu rules`: the table, its two lines, the JSON keys, and the table of limits."""

from __future__ import annotations

import json
from typing import Any

from click.testing import CliRunner

from penstock.cli.main import run as run_tpu
from penstock.cli.rules import rules
from penstock.domain import limits
from penstock.domain.lifecycle import Cause
from penstock.domain.policies import PRESETS


def show(*arguments: str) -> str:
    result = CliRunner().invoke(rules, list(arguments))
    assert result.exit_code == 0, result.output
    return result.stdout


def read(*arguments: str) -> Any:
    return json.loads(show(*arguments, "--json"))


def test_the_table_has_a_row_per_preset_and_a_column_per_cause() -> None:
    header, *lines = [line.split() for line in show().split("\n\n")[0].splitlines()]
    assert header[0] == "PRESET"
    assert set(header[1:]) == {cause.value for cause in Cause}
    assert [line[0] for line in lines] == ["pre", "pass", "reapply", "rerun", "resume"]
    table = {line[0]: dict(zip(header[1:], line[1:], strict=True)) for line in lines}
    assert table["rerun"]["preempted"] == "resume"
    assert table["rerun"]["infra"] == "rerun"
    assert table["resume"]["preempted"] == "stop"
    assert set(table["pass"].values()) == {"stop"}


def test_budgets_and_back_off_stand_below_in_two_lines() -> None:
    budgets, backoff = show().split("\n\n")[1].splitlines()
    assert budgets == (
        "Budgets: 0 retries after user_error, oom, timeout; 100 after preempted, infra, lost; "
        "per replica, unless the job says otherwise."
    )
    assert backoff.startswith("Back-off: 2 s, doubling up to 300 s")
    assert "8 losses in a row within 60 s of the start end the job" in backoff


def test_json_has_exactly_the_published_keys() -> None:
    shown = read()
    assert list(shown) == ["presets", "budgets", "backoff"]
    assert list(shown["presets"]) == list(PRESETS)
    for name, preset in shown["presets"].items():
        assert list(preset) == ["summary", "on"]
        assert preset["summary"] == PRESETS[name].summary
        assert set(preset["on"]) == {cause.value for cause in Cause}
        assert set(preset["on"].values()) <= {"resume", "rerun", "stop"}
    assert shown["budgets"]["failure"] == {"default": 0, "causes": ["user_error", "oom", "timeout"]}
    assert shown["budgets"]["infra"] == {"default": 100, "causes": ["preempted", "infra", "lost"]}
    assert (shown["backoff"]["first_s"], shown["backoff"]["max_s"]) == (2.0, 300.0)


def test_limits_are_shown_with_value_unit_and_reason() -> None:
    lines = show("--limits").splitlines()
    assert lines[0].split() == ["NAME", "VALUE", "UNIT", "REASON"]
    assert len(lines) == 1 + len(limits.LIMITS)
    (tick,) = (line for line in lines if line.startswith("TICK_S "))
    assert tick.split(maxsplit=3)[1:] == [
        "5.0", "s", "the longest a decision waits when no event wakes the loop earlier",
    ]  # fmt: skip
    assert any(line.split()[:3] == ["BATCH_JOBS_MAX", "10,000", "jobs"] for line in lines)


def test_limits_as_json_keep_their_numbers() -> None:
    shown = {each["name"]: each for each in read("--limits")}
    assert shown["EVENTS_PER_READ"] == {
        "name": "EVENTS_PER_READ",
        "value": 20_000,
        "unit": "events",
        "reason": "the projection catches up in pages of this size",
    }


def test_the_command_is_found_and_refuses_arguments(capsys: Any) -> None:
    assert run_tpu(["rules"]) == 0
    assert "PRESET" in capsys.readouterr().out
    assert run_tpu(["rules", "pre"]) == 2
    assert "unexpected extra argument" in capsys.readouterr().err
