"""`tpu fleet`, `zones`, `describe`, `restart`, `mount`, `ssh`: what is sent, shown and asked. ssh itself is real in
tests/process/test_fleets.py; here a program that writes down its words stands for it."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from penstock.cli.main import run
from penstock.cli.ssh import program
from penstock.domain.cloud import CloudWish, Mount
from penstock.wire.api import SliceView
from penstock.wire.capacity import HostView, ZoneView
from tests.unit.cli.stand_in import StandIn

A, B = "us-central1-a", "us-central1-b"


def slice_view(id: str, zone: str = A, number: int = 0, state: str = "ready", **more: object) -> SliceView:
    known: dict[str, object] = {
        "team": "lab", "pool": "fleet-v3-8", "provider": "tpu_vm", "accelerator": "v3-8", "chips": 4, "hosts": 1,
        "title": f"tpu-{zone}-{number}",
    }  # fmt: skip
    return SliceView(id=id, zone=zone, state=state, **{**known, **more})  # type: ignore[arg-type]


@pytest.fixture
def fleet(server: StandIn) -> StandIn:
    """A fleet of two in each of two zones, one of them broken and replaced."""
    cloud = CloudWish()
    server.pool("fleet-v3-8", "v3-8", provider="tpu_vm", zones=(A, B), max=4, per_zone=2, slices=4, cloud=cloud)
    server.pool("other", "v5e-8")
    server.slices = [
        slice_view("s1", A, 0, job="j1"),
        slice_view("s2", A, 1, "deleting", why="the provider took it away"),
        slice_view("s9", A, 1, "creating", arriving="unpacking"),
        slice_view("s3", B, 0),
    ]
    kind = {"provider": "tpu_vm", "accelerator": "v3-8", "spot": False}
    server.zones = [
        ZoneView(zone=A, odds=0.91, tries=5, ready_s=72.0, life_s=7200.0, usd_per_hour=8.0, **kind),  # type: ignore[arg-type]
        ZoneView(zone=B, odds=0.1, tries=3, rests_s=95.0, refusals=2, why="no more capacity", **kind),  # type: ignore[arg-type]
    ]
    return server


def test_a_fleet_is_asked_for(server: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fleet", "create", "--zones", f"{A},{B}", "--per-zone", "4", "--type", "v3-8"]) == 0
    made = server.pools["fleet-v3-8"]
    assert (made.per_zone, made.zones, made.provider, made.cloud) == (4, (A, B), "tpu_vm", CloudWish())
    assert "fleet-v3-8: 4 slices of v3-8 in each of" in capsys.readouterr().out
    assert run(["fleet", "create", "--zones", A, "--per-zone", "1", "--type", "v3-8"]) == 2
    assert "tpu fleet resize" in capsys.readouterr().err
    words = "--zones us-* --per-zone 1 --type v5e-8 --spot --mount nfs:h:/x:/mnt/x"
    assert run(["fleet", "create", *words.split()]) == 0
    assert server.pools["fleet-v5e-8-spot"].cloud == CloudWish(kind="spot", mounts=(Mount("nfs", "h:/x", "/mnt/x"),))
    assert (
        run(["fleet", "create", "x", "--zones", "local", "--per-zone", "1", "--type", "v5e-1", "--network", "n"]) == 2
    )


def test_status_shows_places_and_what_happens_there(fleet: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fleet", "status"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "fleet-v3-8: 2 of 4 ready, 1 coming, 1 leaving"
    assert [line.split()[:3] for line in lines[2:6]] == [
        [f"tpu-{A}-0", "ready", "j1"],
        [f"tpu-{A}-1", "creating", "-"],
        [f"tpu-{A}-1", "deleting", "-"],
        [f"tpu-{B}-0", "ready", "free"],
    ]
    assert "unpacking" in lines[3]
    assert lines[6] == f"{B} is asked again in 1m35s: no more capacity"
    assert run(["fleet", "status", "fleet-v3-8", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["wanted"], told["ready"], told["coming"], told["leaving"]) == (4, 2, 1, 1)
    assert run(["fleet"]) == 0
    assert "2 of 4" in capsys.readouterr().out
    assert run(["fleet", "status", "--wait", "0s"]) == 1
    assert run(["fleet", "status", "other"]) == 5


def test_lists_of_slices_have_names_where_there_are_any(fleet: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check-status", "--state", "ready"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[:2] for line in lines] == [["NAME", "ID"], [f"tpu-{A}-0", "s1"], [f"tpu-{B}-0", "s3"]]


def test_recreate_tells_what_it_does(fleet: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fleet", "recreate"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "fleet-v3-8: 5 of 8 ready, 1 coming, 2 missing",
        "being replaced: tpu-a-1",
        "tried again now: us-central1-b",
    ]


@pytest.mark.parametrize("words", ["--per-zone 1", f"--zones {A}", f"--zones {A},europe-west4-a --per-zone 3"])
def test_whatever_goes_is_asked_for(fleet: StandIn, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fleet", "resize", *words.split()]) == 2
    assert "add --yes" in capsys.readouterr().err
    assert (fleet.pools["fleet-v3-8"].per_zone, fleet.pools["fleet-v3-8"].zones) == (2, (A, B))
    assert run(["fleet", "resize", *words.split(), "--yes"]) == 0
    assert fleet.pools["fleet-v3-8"].cloud == CloudWish()


def test_waiting_tells_how_far_it_is(fleet: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fleet", "status", "--wait", "0s"]) == 1
    said = capsys.readouterr()
    assert said.err == "fleet-v3-8: 2 of 4 ready, 1 coming, 1 leaving\n"
    assert said.out.startswith("fleet-v3-8: 2 of 4 ready, 1 coming, 1 leaving\nNAME")
    assert run(["fleet", "delete", "--yes", "--wait", "0s"]) == 1
    assert capsys.readouterr().err.splitlines()[0] == "fleet-v3-8: 4 slices still there"


def test_a_fleet_in_one_zone_is_in_that_zone(server: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fleet", "create", "one", "--zones", A, "--per-zone", "1", "--type", "v3-8"]) == 0
    assert capsys.readouterr().out.startswith(f"one: 1 slice of v3-8 in {A}; ")


def test_among_pools_a_fleet_has_a_count_and_is_never_idle(fleet: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["pools"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("fleet-v3-8")]
    assert line.split()[4:] == ["4", "of", "4", "on-demand", "-", "lab"]


def test_growing_asks_nobody(fleet: StandIn) -> None:
    assert run(["fleet", "resize", "--per-zone", "6"]) == 0
    assert fleet.pools["fleet-v3-8"].per_zone == 6
    assert run(["fleet", "resize", "--zones", "us-*"]) == 0, "a pattern that all of its zones fit takes none away"
    assert run(["fleet", "resize"]) == 2


def test_a_fleet_is_deleted_with_a_word(fleet: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fleet", "delete"]) == 2
    assert "Delete fleet-v3-8 with 4 slices, 1 of them in use?" in capsys.readouterr().err
    assert run(["fleet", "delete", "other", "--yes"]) == 5, "a pool is no fleet"
    assert run(["fleet", "delete", "--yes", "--wait", "0s"]) == 1
    assert "still there" in capsys.readouterr().err
    assert set(fleet.pools) == {"other"}
    assert run(["fleet", "delete", "--yes"]) == 5


def test_with_several_fleets_a_name_is_needed(fleet: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    fleet.pool("second", "v5e-8", per_zone=1)
    assert run(["fleet", "recreate"]) == 2
    assert "which fleet? there are fleet-v3-8, second" in capsys.readouterr().err


def test_zones_are_a_table(fleet: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["zones"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert rows[0] == [A, "v3-8", "-", "91%", "5", "1m12s", "2h00m", "8.00", "-"]
    assert rows[1] == [B, "v3-8", "-", "10%", "3", "-", "-", "?", "1m35s", "no", "more", "capacity"]
    assert run(["zones", "--type", "v5e-8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    assert run(["zones", "--type", "v99"]) == 2


def test_one_slice_is_described_by_any_of_its_names(fleet: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    fleet.hosts["s9"] = (HostView(index=0, inside="10.0.0.9", outside="34.0.0.9"),)
    for word in (f"tpu-{A}-1", "s9"):
        assert run(["describe", word]) == 0
        said = capsys.readouterr().out
        assert "34.0.0.9, 10.0.0.9" in said
        assert "unpacking" in said
    fleet.hosts["s9"] = (HostView(index=0, inside="127.16.0.9", outside="127.16.0.9"),)
    assert run(["describe", "s9"]) == 0
    assert capsys.readouterr().out.count("127.16.0.9") == 1, "one address is one address"
    assert run(["describe", "s2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["why"] == "the provider took it away"
    assert run(["describe", "s"]) == 2
    assert run(["describe", "x"]) == 5


def test_restart_asks_and_tells(fleet: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["restart", "s1"]) == 2
    assert "Job j1 is on" in capsys.readouterr().err
    assert fleet.replaced == []
    assert run(["restart", "s1", "--yes", "--now"]) == 0
    assert run(["reapply", f"tpu-{B}-0", "--yes"]) == 0
    assert fleet.replaced == [("s1", True), ("s3", False)]


def test_a_slice_of_a_fleet_is_a_place_to_run(fleet: StandIn, project: Path) -> None:
    assert run(["run", "--detach", "--on", f"slice:tpu-{B}-0", "train.py"]) == 0
    assert fleet.submitted[-1].slice == "s3"


def recorder(tmp_path: Path, code: int = 0) -> Path:
    """An ssh that writes down what it was told and says who it is."""
    path = tmp_path / "ssh"
    path.write_text(
        f'#!/bin/sh\nprintf "%s\\n" "$*" >>{tmp_path}/told\necho hello\ncat >>{tmp_path}/read\nexit {code}\n'
    )
    path.chmod(0o755)
    (tmp_path / "scp").symlink_to(path)
    return path


@pytest.fixture
def gang(fleet: StandIn) -> StandIn:
    """One slice of two hosts, one of which has no address outside."""
    fleet.slices = [slice_view("s3", B, 0, hosts=2)]
    fleet.hosts["s3"] = (HostView(index=0, inside="10.0.0.1", outside="34.0.0.1"), HostView(index=1, inside="10.0.0.2"))
    return fleet


def test_a_command_runs_on_all_hosts(gang: StandIn, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    ssh = recorder(tmp_path)
    assert run(["ssh", "s3", "--ssh", f"{ssh} -F x", "-l", "ada", "--", "echo", "a b"]) == 0
    assert sorted(capfdbinary.readouterr().out.splitlines()) == [b"[0] hello", b"[1] hello"]
    told = sorted((tmp_path / "told").read_text().splitlines(), key=lambda line: "10.0.0.2" in line)
    assert told[0].startswith("-F x -o HostKeyAlias=penstock-s3-0 -o CheckHostIP=no")
    assert told[0].endswith("-T -l ada 34.0.0.1 -- echo 'a b'")
    assert "HostKeyAlias=penstock-s3-1" in told[1]
    assert told[1].endswith("10.0.0.2 -- echo 'a b'")


def test_one_host_is_entered(gang: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_SSH", str(recorder(tmp_path, 3)))
    assert run(["ssh", f"tpu-{B}-0", "--internal"]) == 3
    (told,) = (tmp_path / "told").read_text().splitlines()
    assert told.endswith(" 10.0.0.1")


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        ("ssh s3 --host 2 -- true", 5, "has 2 hosts, 0 to 1"),
        ("ssh nowhere -- true", 5, "there is no 'nowhere'"),
        ("ssh s3 --ssh telnet -- true", 2, "runs no ssh"),
        ("scp one", 2, "give what to copy"),
        ("scp one two", 2, "copy either to a slice or from one"),
        ("scp s3:one s3:two", 2, "copy either to a slice or from one"),
        ("scp s3:one s3:two here", 2, "copy one path from a slice at a time"),
        ("mount other nfs:h:/x:/mnt/x", 6, "makes no machines of its own"),
        ("mount fleet-v3-8 nfs", 2, "is not KIND:SOURCE:PATH"),
    ],
)
def test_what_cannot_be_is_told_in_one_line(
    gang: StandIn, words: str, code: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words.split()) == code
    said = capsys.readouterr().err
    assert told in said
    assert said.count("\n") == 1


def test_a_local_slice_has_no_machine_to_enter(gang: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    gang.slices[0] = msgspec.structs.replace(gang.slices[0], provider="local")
    assert run(["ssh", "s3", "--", "true"]) == 3
    assert "tpu run --on slice:s3" in capsys.readouterr().err


def test_files_go_to_all_hosts_and_come_from_one(
    gang: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_SSH", str(recorder(tmp_path)))
    assert run(["scp", "-r", "data", "-odd", "s3:/tmp/"]) == 2, "what looks like an option is one"
    assert run(["scp", "-r", "--", "data", "-odd", "s3:/tmp/"]) == 0
    told = sorted((tmp_path / "told").read_text().splitlines(), key=lambda line: "10.0.0.2" in line)
    assert [line.partition(" -- ")[2] for line in told] == [
        "./data ./-odd 34.0.0.1:/tmp/",
        "./data ./-odd 10.0.0.2:/tmp/",
    ]
    (tmp_path / "told").unlink()
    assert run(["scp", "--host", "1", "s3:/a", "/there"]) == 0
    assert (tmp_path / "told").read_text().strip().endswith("-- 10.0.0.2:/a /there")


def test_a_mount_is_for_hosts_that_are_there_and_that_come(
    gang: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_SSH", str(recorder(tmp_path)))
    assert run(["mount", "fleet-v3-8"]) == 0
    assert "no mounts" in capsys.readouterr().out
    assert run(["mount", "fleet-v3-8", "nfs:10.0.0.2:/export:/mnt/data"]) == 0
    pool = gang.pools["fleet-v3-8"]
    assert pool.cloud is not None
    assert pool.cloud.mounts == (Mount("nfs", "10.0.0.2:/export", "/mnt/data"),)
    assert pool.per_zone == 2
    script = (tmp_path / "read").read_text()
    assert script.count("mountpoint -q /mnt/data || mount -t nfs") == 2
    assert run(["mount", "fleet-v3-8", "--rm", "/mnt/data"]) == 0
    assert gang.pools["fleet-v3-8"].cloud == CloudWish()
    assert (tmp_path / "read").read_text() == script, "hosts that are there are left alone"


def test_the_users_own_ssh_is_used() -> None:
    assert program("scp", "nsenter -n /usr/bin/ssh -F x") == ["nsenter", "-n", "/usr/bin/scp", "-F", "x"]
    assert program("ssh", None) == ["ssh"]


NO_ANSWER = f"the API of zone {A} has not answered for 42 s; see whether the server reaches the API"


@pytest.mark.parametrize("address", ["", "10.0.0.9"])
def test_what_is_known_is_shown_though_the_zone_does_not_answer(
    fleet: StandIn, address: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fleet.hosts["s9"] = (HostView(index=0, inside=address, trouble=NO_ANSWER),)
    assert run(["describe", "s9"]) == 0
    said = capfd.readouterr().out
    assert f"tpu-{A}-1" in said
    assert "unpacking" in said
    assert f"{NO_ANSWER}; addresses are {'the last known ones' if address else 'not known'}" in said
    assert run(["describe", "s9", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["addresses"][0]["trouble"] == NO_ANSWER
    code = run(["ssh", "s9", "--ssh", str(recorder(tmp_path)), "--", "true"])
    told = capfd.readouterr().err
    assert NO_ANSWER in told
    assert (code, (tmp_path / "told").exists()) == ((0, True) if address else (3, False))


@pytest.mark.parametrize(
    ("denied", "said", "told"),
    [
        (False, "", "its API has not answered for 1m10s (since 20"),
        (True, "no right", "its API has refused for 1m10s (since 20"),
    ],
)
def test_zones_that_cannot_be_seen_are_told_of(
    fleet: StandIn, denied: bool, said: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    silent = {"silent_s": 70.0, "silent_since": 1_700_000_000.0, "denied": denied, "said": said}
    fleet.zones[0] = msgspec.structs.replace(fleet.zones[0], **silent)
    for words in (["fleet", "status"], ["zones"]):
        assert run(words) == 0
        shown = next(line for line in capsys.readouterr().out.splitlines() if told in line)
        assert A in shown
        assert said in shown
        assert "nothing is made there until" in shown
