"""`tpu pools`, `queues`, `slices`, `secret`: what is sent and shown; secrets are neither shown nor typed."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from penstock.cli.main import run
from penstock.domain.cloud import CloudWish, Mount
from penstock.wire.api import SliceView
from tests.unit.cli.stand_in import StandIn

CANARY = "canary-8c1f"


def a_slice(id: str, pool: str, job: str | None = None) -> SliceView:
    return SliceView(
        id=id, team="lab", pool=pool, provider="local", zone="local", accelerator="v5e-8", chips=8, hosts=1,
        state="ready", job=job,
    )  # fmt: skip


def test_pools_are_made_listed_and_removed(server: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["pools"]) == 0
    assert "tpu pools set NAME" in capsys.readouterr().out
    options = "--on v5e-8 --min 1 --max 4 --spot --zone a --zone b --provider tpu_vm --idle 5m"
    assert run(["pools", "set", "big", *options.split()]) == 0
    pool = server.pools["big"]
    assert (pool.accelerator, pool.min, pool.max, pool.spot, pool.zones, pool.provider, pool.idle_s) == (
        "v5e-8", 1, 4, True, ("a", "b"), "tpu_vm", 300.0,
    )  # fmt: skip
    assert run(["pools"]) == 0
    assert "0 of 1..4" in capsys.readouterr().out
    assert run(["pools", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["name"] == "big"
    assert run(["pools", "rm", "big"]) == 0
    assert capsys.readouterr().out == "big is removed; it had no slices\n"
    assert run(["pools", "rm", "big"]) == 5
    assert server.pools == {}


def test_what_is_removed_is_said(server: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    server.slices += [a_slice("s1", pool="big", job="j1"), a_slice("s2", pool="big"), a_slice("s3", pool="other")]
    for name in ("big", "other"):
        server.pool(name, "v5e-8")
        assert run(["pools", "rm", name]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "big is removed; 2 slices of it are let go, 1 of them when its job has ended",
        "other is removed; 1 slice of it is let go",
    ]
    server.pool("big", "v5e-8")
    assert run(["pools", "rm", "big", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"name": "big", "removed": True, "slices": 2, "in_use": 1}
    for flags, said in (((), "night is removed\n"), (("--json",), '{\n  "name": "night",\n  "removed": true\n}\n')):
        assert run(["queues", "set", "night"]) == 0
        capsys.readouterr()
        assert run(["queues", "rm", "night", *flags]) == 0
        assert capsys.readouterr().out == said


def test_a_pool_may_race_zones(server: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["pool", "create", "fast", "--type", "v5e-8", "--zones", "a,b,c", "--max", "4", "--race", "2"]) == 0
    assert server.pools["fast"].race == 2
    assert capsys.readouterr().out == "fast: 0 to 4 slices of v5e-8 in a, b, c, 2 zones at once\n"
    assert run(["pool", "create", "here", "--type", "v5e-8", "--race", "2"]) == 2
    assert "name its zones with --zones" in capsys.readouterr().err
    assert run(["pool", "create", "fast", "--type", "v5e-8", "--zones", "a,b", "--race", "many"]) == 2


def test_queues_are_made_and_listed(server: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["queues", "set", "night", "--weight", "2", "--quota", "64", "--paused"]) == 0
    queue = server.queues["night"]
    assert (queue.weight, queue.quota_chips, queue.borrow_chips, queue.paused) == (2.0, 64, None, True)
    capsys.readouterr()
    assert run(["queues"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["night", "0", "64", "-", "2", "0", "-", "paused", "lab"]


def test_a_queue_may_have_a_budget(server: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["queues", "set", "night", "--budget", "500usd/month"]) == 0
    assert capsys.readouterr().out == "night: weight 1, budget $12.50 of $500.00 per month\n"
    for text, limit, unit, window in (
        ("$20/day", 20.0, "usd", "day"),
        ("1000chip-hours/week", 1000.0, "chip_hours", "week"),
        ("0.5USD/Month", 0.5, "usd", "month"),
    ):
        assert run(["queues", "set", "night", "--budget", text]) == 0
        budget = server.queues["night"].budget
        assert budget is not None
        assert (budget.limit, budget.unit, budget.window) == (limit, unit, window)
    capsys.readouterr()
    for bad in ("500", "500eur/month", "usd/month", "500usd/year", "-5usd/day", "1e3usd/day", "5usd/day\n6"):
        assert run(["queues", "set", "night", f"--budget={bad}"]) == 2
        assert "500usd/month" in capsys.readouterr().err


def test_what_is_not_named_of_a_queue_stays(server: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["queues", "set", "night"]
    assert run([*words, "--weight", "3", "--quota", "8", "--borrow", "2", "--band", "1", "--budget", "9usd/day"]) == 0
    assert run([*words, "--paused"]) == 0
    queue = server.queues["night"]
    assert (queue.weight, queue.quota_chips, queue.borrow_chips, queue.band, queue.paused) == (3.0, 8, 2, 1, True)
    assert queue.budget is not None
    assert (queue.budget.limit, queue.budget.unit, queue.budget.window) == (9.0, "usd", "day")
    assert run([*words, "--running", "--no", "quota", "--no", "budget"]) == 0
    queue = server.queues["night"]
    assert (queue.quota_chips, queue.borrow_chips, queue.budget, queue.paused) == (None, 2, None, False)
    assert capsys.readouterr().out.splitlines()[-1] == "night: weight 3, borrows 2 chips, band 1"


def test_slices_say_who_uses_them(server: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    for id, state, job in (("s1", "ready", "j1"), ("s2", "ready", None), ("s3", "creating", None)):
        server.slices.append(
            SliceView(
                id=id,
                team="lab",
                pool="big",
                provider="local",
                zone="local",
                accelerator="v5e-8",
                chips=8,
                hosts=1,
                state=state,
                job=job,
            )
        )
    assert run(["slices"]) == 0
    used = {line.split()[0]: line.split()[7] for line in capsys.readouterr().out.splitlines()[1:]}
    assert used == {"s1": "j1", "s2": "free", "s3": "-"}
    assert run(["slices", "--state", "creating", "--json"]) == 0
    assert [each["id"] for each in json.loads(capsys.readouterr().out)] == ["s3"]


@pytest.mark.parametrize(
    ("data", "value"), [(f"{CANARY}\n", CANARY), (CANARY, CANARY), (f"{CANARY}\n\n", f"{CANARY}\n")]
)
def test_a_secret_comes_from_standard_input(
    data: str, value: str, server: StandIn, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data.encode())))
    assert run(["secret", "set", "KEY"]) == 0
    assert server.secrets == {"KEY": value}
    streams = capsys.readouterr()
    assert CANARY not in streams.out + streams.err


def test_a_secret_comes_from_a_file_as_it_is(server: StandIn, tmp_path: Path) -> None:
    (tmp_path / "key").write_text(f"{CANARY}\n")
    assert run(["secret", "set", "KEY", "--file", str(tmp_path / "key")]) == 0
    assert server.secrets == {"KEY": f"{CANARY}\n"}


@pytest.mark.parametrize(
    ("args", "data", "told"),
    [
        (["KEY", CANARY], b"", "a value on the command line is seen by everybody"),
        (["KEY"], b"", "the value of KEY is empty"),
        (["KEY"], b"\xff\xfe", "is not UTF-8 text"),
        (["KEY"], CANARY.encode() * 10_000, "is over 65536 characters"),
    ],
)
def test_a_bad_secret_is_refused_without_being_shown(
    args: list[str],
    data: bytes,
    told: str,
    server: StandIn,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert run(["secret", "set", *args]) == 2
    streams = capsys.readouterr()
    assert told in streams.err
    assert CANARY not in streams.out + streams.err
    assert server.secrets == {}


def test_secrets_are_listed_by_name_and_removed(server: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    server.secrets = {"A": CANARY, "B": CANARY}
    assert run(["secret", "ls"]) == 0
    assert capsys.readouterr().out == "A\nB\n"
    assert run(["secret", "rm", "A"]) == 0
    assert server.secrets == {"B": CANARY}


def test_a_pool_of_a_cloud_is_said_in_one_line(server: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    options = "--type v5e-8 --zones us-*,europe-west4-a --min 0 --max 40 --spot --idle 10m --network n"
    more = "--runtime-version r --mount nfs:10.0.0.2:/x:/mnt/x --mount gcs:b:/mnt/b --no-external-ip --disk d"
    assert run(["pool", "create", "c", *options.split(), *more.split()]) == 0
    assert "0 to 40 slices of v5e-8 in us-*, europe-west4-a" in capsys.readouterr().out
    pool = server.pools["c"]
    assert (pool.provider, pool.zones, pool.max, pool.spot) == ("tpu_vm", ("us-*", "europe-west4-a"), 40, True)
    assert pool.cloud == CloudWish(
        kind="spot",
        network="n",
        runtime_version="r",
        external_ip=False,
        disks=("d",),
        mounts=(Mount("nfs", "10.0.0.2:/x", "/mnt/x"), Mount("gcs", "b", "/mnt/b")),
    )
    assert run(["pools"]) == 0
    assert "tpu_vm" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "kind", "spot"),
    [
        ("--reserved r1", CloudWish(kind="reserved", reservation="r1"), False),
        ("--reserved any", CloudWish(kind="reserved"), False),
        ("--flex-start --life 2h", CloudWish(kind="flex-start", life_s=7200.0), False),
        ("--preemptible", CloudWish(kind="preemptible"), True),
        ("--queued --wait 1h", CloudWish(queued=True, wait_s=3600.0), False),
        ("", CloudWish(), False),
    ],
)
def test_each_way_to_buy(server: StandIn, words: str, kind: CloudWish, spot: bool) -> None:
    assert run(["pool", "create", "c", "--type", "v5e-8", "--zones", "us-*", *words.split()]) == 0
    assert (server.pools["c"].cloud, server.pools["c"].spot) == (kind, spot)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--zones us-* --reserved r --spot", "a slice is bought in one way"),
        ("--zones us-* --mount nfs", "is not KIND:SOURCE:PATH"),
        ("--network n", "these options are for slices of a cloud"),
        ("--flex-start", "these options are for slices of a cloud"),
    ],
)
def test_words_that_make_no_sense_together(
    server: StandIn, capsys: pytest.CaptureFixture[str], words: str, told: str
) -> None:
    assert run(["pool", "create", "c", "--type", "v5e-8", *words.split()]) == 2
    assert told in capsys.readouterr().err
    assert server.pools == {}


def test_slices_show_how_far_their_hosts_are(server: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    server.slices.append(
        SliceView(
            id="s1", team="lab", pool="c", provider="tpu_vm", zone="us-west4-a", accelerator="v5e-8", chips=8, hosts=1,
            state="creating", arriving="unpacking",
        )
    )  # fmt: skip
    assert run(["slices"]) == 0
    assert "unpacking" in capsys.readouterr().out
