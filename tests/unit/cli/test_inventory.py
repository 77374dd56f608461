"""`tpu find`, `reserve`, `release`: patterns by a grammar, who has what until when, and CSV that a sheet can trust."""

from __future__ import annotations

import csv
import io
import json
import time

import msgspec
import pytest

from penstock.cli.inventory import Until, matches
from penstock.cli.main import run
from penstock.cli.terminal import now_s
from penstock.wire.api import SliceView
from penstock.wire.inventory import ReservationView
from tests.unit.cli.stand_in import StandIn


def a_slice(id: str, accelerator: str = "v5e-8", **more: object) -> SliceView:
    known = {"team": "lab", "pool": "p", "provider": "local", "zone": "us-a", "chips": 8, "hosts": 1, "state": "ready"}
    return SliceView(id=id, accelerator=accelerator, **{**known, "idle_since": now_s() - 65.0, **more})  # type: ignore[arg-type]


def claim(user: str, note: str = "") -> ReservationView:
    return ReservationView(of="s", user=user, since=now_s() - 10.0, until=now_s() + 3605.0, note=note)


@pytest.mark.parametrize(
    ("pattern", "meant"),
    [
        ("v34", {"v3-8", "v4-8"}),
        ("v3", {"v3-8"}),
        ("v5", {"v5e-8", "v5e-16", "v5p-8"}),
        ("v5e", {"v5e-8", "v5e-16"}),
        ("v5litepod", {"v5e-8", "v5e-16"}),
        ("v5litepod-8", {"v5e-8"}),
        ("v5e-8", {"v5e-8"}),
        ("v5e-*", {"v5e-8", "v5e-16"}),
        ("v*", {"v3-8", "v4-8", "v5e-8", "v5e-16", "v5p-8"}),
        ("*", {"v3-8", "v4-8", "v5e-8", "v5e-16", "v5p-8"}),
    ],
)
def test_patterns(pattern: str, meant: set[str]) -> None:
    assert {name for name in ("v3-8", "v4-8", "v5e-8", "v5e-16", "v5p-8") if matches(pattern, name)} == meant


def test_find_shows_who_has_what_and_until_when(server: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    now = now_s()
    server.slices += [
        a_slice("s1", "v3-8", spot=True),
        a_slice("s2", "v4-8", spot=True, job="j1", user="bob", held_since=now - 30, held_until=now + 125),
        a_slice("s3", "v4-8", spot=True, reserved=claim("ann", "demo")),
        a_slice("s4", "v4-8"),
        a_slice("s5", "v3-8", spot=True, state="creating", made_at=now - 5),
        a_slice("s6", "v5e-8", spot=True),
    ]
    assert run(["find", "v34", "--spot"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [(line[0], line[5], line[6]) for line in lines] == [
        ("s1", "free", "-"), ("s2", "running", "bob"), ("s3", "reserved", "ann"), ("s5", "creating", "-"),
    ]  # fmt: skip
    assert lines[0][7:9] == ["1m05s", "-"]
    assert lines[1][7:] in (["30s", "in", "2m04s", "j1"], ["30s", "in", "2m05s", "j1"], ["31s", "in", "2m04s", "j1"])
    assert lines[2][-1] == "demo"
    assert run(["find", "v34", "-n", "--json"]) == 0
    assert [each["id"] for each in json.loads(capsys.readouterr().out)] == ["s4"]


def test_free_is_what_one_could_use_now(server: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    server.slices += [a_slice("s1"), a_slice("s2", reserved=claim("bob")), a_slice("s3", reserved=claim("ada"))]
    assert run(["find", "--free", "--json"]) == 0  # ada asks
    assert [each["id"] for each in json.loads(capsys.readouterr().out)] == ["s1", "s3"]
    assert run(["find", "--zone", "europe-*"]) == 0
    assert capsys.readouterr().out == "no such slices\n"


def test_a_pattern_that_means_nothing_is_refused(server: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    server.slices.append(a_slice("s1"))
    assert run(["find", "v5e-9"]) == 2
    assert "v5e-9" in capsys.readouterr().err


def test_csv_has_a_line_per_slice_and_no_formulas(server: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    server.slices += [
        a_slice("s1", reserved=claim("ann", '=HYPERLINK("http://x")'), title="tpu-us-a-0"),
        a_slice("s2", pool="a,b\n", idle_since=0.0),
    ]
    assert run(["find", "--csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert (rows[0]["title"], rows[0]["status"], rows[0]["user"]) == ("tpu-us-a-0", "reserved", "ann")
    assert rows[0]["note"] == '\'=HYPERLINK("http://x")'
    assert (rows[1]["pool"], rows[1]["since"], rows[1]["until"]) == ("a,b\\n", "1970-01-01T00:00:00Z", "")


def test_reserve_and_release_a_slice_or_a_pool(server: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    server.pool("big", "v5e-8")
    server.slices += [a_slice("s1"), a_slice("s2", title="tpu-us-a-0")]
    assert run(["reserve", "s1", "--until", "2h", "--note", "demo"]) == 0
    asked = server.reservations["slices", "s1"]
    assert (asked.for_s, asked.note, asked.user) == (7200.0, "demo", None)
    assert "reserved for ada until" in capsys.readouterr().out
    assert run(["reserve", "big", "--for", "bob"]) == 0
    assert server.reservations["pools", "big"].user == "bob"
    assert server.reservations["pools", "big"].for_s == 12 * 3600.0
    capsys.readouterr()
    assert run(["release", "big"]) == 0
    assert run(["release", "slice:s1"]) == 0
    assert capsys.readouterr().out == "big: no longer reserved\nslice:s1: no longer reserved\n"
    assert run(["release", "pool:big", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"of": "pool:big", "reserved": None}
    capsys.readouterr()
    assert run(["reserve", "tpu-us-a-0"]) == 0  # as `tpu find` shows it
    assert capsys.readouterr().out.startswith("tpu-us-a-0: reserved for ada until")
    assert list(server.reservations) == [("slices", "s2")]
    assert run(["release", "tpu-us-a-0"]) == 0
    assert run(["reserve", "tpu-us-a-9"]) == 5
    assert server.reservations == {}
    assert run(["reserve", "pool:other", "--until", "soon"]) == 2


def test_a_slice_of_a_reserved_pool_stays_reserved_with_it(server: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    server.slices.append(a_slice("s1", reserved=msgspec.structs.replace(claim("ann", "demo"), of="pool:big")))
    assert run(["release", "s1"]) == 0
    assert capsys.readouterr().out == "s1: no longer reserved; pool:big still is, for ann\n"


def test_until_is_an_hour_of_the_day_or_a_time() -> None:
    assert Until().convert("90m", None, None) == 5400.0
    soon = time.localtime(now_s() + 7200)
    left = Until().convert(f"{soon.tm_hour}:{soon.tm_min:02}", None, None)
    assert 7200 - 61 <= left <= 7200
    past = time.localtime(now_s() - 7200)
    assert Until().convert(f"{past.tm_hour:02}:{past.tm_min:02}", None, None) > 21 * 3600
