"""`tpu extract` as users meet it: the demo with its killed worker, every question about a run, and what is refused.

The long one runs it as a job of Penstock with replicas, on slices of this machine and the emulated Cloud Storage, and
takes one slice away.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.extract_tiny.make import make
from penstock.cli.main import run
from penstock.objects.bucket import open_gcs
from tests.contract.objects.servers import BUCKET, gcs_emulator
from tests.tidy.tracked import ROOT
from tests.unit.objects import fake_hub

WITHIN_S = 300.0
TPU = [sys.executable, "-c", "from penstock.cli.main import main; main()"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the demo leaves."""
    folder = tmp_path_factory.mktemp("demo")
    argv = [sys.executable, str(ROOT / "tools" / "demo_extract.py"), "--folder", str(folder)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=WITHIN_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "killed -9" in done.stdout
    assert "Every row once" in done.stdout
    return folder


def asked(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    capsys.readouterr()
    assert run(["extract", *words]) == code
    said = capsys.readouterr()
    return said.err if code else said.out


@pytest.mark.long
def test_the_run_of_the_demo_answers_every_question(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address = str(folder / "acts")
    status = json.loads(asked(capsys, "status", "--run", address, "--json"))
    assert (status["sealed"], status["committed"], status["facts"]["documents"]) == (True, 40, 400)
    assert len(status["workers"]) in (1, 2, 3), "of a sealed run those with commits: of whom is chance"
    checked = json.loads(asked(capsys, "verify", "--run", address, "--json"))
    assert (checked["problems"], checked["garbage"], checked["objects"]) == ([], 0, 200)
    assert "400 of 400" in asked(capsys, "watch", "--run", address)
    assert "resid_post.3" in asked(capsys, "stats", "--run", address)
    page = tmp_path / "page.html"
    asked(capsys, "stats", "--run", address, "--html", str(page))
    assert "<polyline" in page.read_text()
    assert "http" not in page.read_text(), "a page needs nothing from elsewhere"
    assert asked(capsys, "gc", "--run", address) == "0 objects removed\n"
    words = ("export", "--run", address, "--site", "mlp_out:2", "--to", str(tmp_path / "hf"), "--context", "64")
    assert "examples of 64 rows" in asked(capsys, *words)
    assert "committed and sound" in asked(capsys, "requeue", "u000003", "--run", address, code=2)


@pytest.mark.long
def test_the_same_command_continues_the_same_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", str(folder / "model"), "--data", str(folder / "docs.jsonl"), "--id", "id", "--width", "256"]
    words += ["--sites", "resid_post:1,3;mlp_out:2", "--unit-rows", "10", "--out", str(folder / "acts")]
    address = asked(capsys, *words).strip()
    assert json.loads(asked(capsys, "status", "--run", address, "--json"))["sealed"]
    dry = json.loads(asked(capsys, *words, "--max-samples", "15", "--dry-run", "--json"))
    assert (dry["rows"], dry["units"]) == (15, 2)
    assert dry["run"] not in address


@pytest.mark.long
def test_damage_is_found_and_mended(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    address = str(folder / "acts")
    victim = next(folder.glob("acts/runs/*/data/u000007/*/mlp_out.2.safetensors"))
    facts, data = victim.stat(), bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(bytes(data))
    os.utime(victim, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    capsys.readouterr()
    assert run(["extract", "verify", "--run", address]) == 1
    assert "u000007" in capsys.readouterr().out
    assert "makes it again" in asked(capsys, "requeue", "u000007", "--run", address)
    argv = [*TPU, "extract", "worker", "--run", address]
    subprocess.run(argv, check=True, timeout=WITHIN_S, capture_output=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    assert "problems  0" in asked(capsys, "verify", "--run", address)


@pytest.mark.long
def test_a_worker_fetches_its_model_from_the_hub(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path)
    files = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    data = ["--data", str(tmp_path / "docs.jsonl"), "--id", "id", "--width", "256", "--max-samples", "40"]
    words = ["--model", "org/tiny", *data, "--sites", "resid_post:1", "--out", str(tmp_path / "acts"), "--here", "1"]
    with fake_hub.serving() as hub:
        commit = hub.add("org/tiny", files)
        hub.cuts = [10**9, 1000]  # the first large file comes in two pieces, after the header of the weights
        own = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "hf"), "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(
            [*TPU, "extract", *words],
            env=os.environ | own,
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        asked_for = [each.headers.get("range") for each in hub.of("store")]
        header = "bytes=0-262143"  # of the weights, when the run is planned and before they are fetched
        assert asked_for == [header, None, "bytes=1000-", header, None]
    assert f"hf://org/tiny@{commit}: what of it is not yet in" in done.stderr
    checked = json.loads(asked(capsys, "verify", "--run", str(tmp_path / "acts"), "--json"))
    assert (checked["sealed"], checked["problems"]) == (True, [])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--model is missing"),
        (["--model", "m", "--data", "d", "--sites", "embed"], "--out is missing"),
        (["--model", "m", "--data", "d", "--sites", "embed", "--out", "x", "--workers", "3", "--spot"], "a directory"),
        (["--model", "{f}/nothing", "--data", "d", "--sites", "embed", "--out", "x"], "config.json"),
        (["--model", "{f}/model", "--data", "{f}/no.jsonl", "--sites", "embed", "--out", "x"], "matches no file"),
        (["--model", "{f}/model", "--data", "{f}/docs.jsonl", "--sites", "resid:1", "--out", "x"], "is no site"),
        (
            ["--model", "{f}/model", "--data", "{f}/docs.jsonl", "--column", "no", "--sites", "embed", "--out", "x"],
            "column: 'no' gives nothing in any of the 200 rows looked at",
        ),
        (["--template", "@{f}/model/model.safetensors"], "is no UTF-8; name a file of text"),
        (["worker", "--run", "{f}"], "holds 0 runs"),
        (["status", "--run", "{f}/runs/" + "0" * 32], "has no plan there"),
        (["old-shard", "{f}/docs.jsonl"], "is not a shard of activations"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    make(tmp_path)
    line = asked(capsys, *(word.replace("{f}", str(tmp_path)) for word in words), code=2)
    assert said in line
    assert line.count("\n") == 1


def test_what_was_not_given_and_what_was_found_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path)
    (tmp_path / "template.jinja").write_text("Q: {{ id }}\nA: {{ text }}")
    with (tmp_path / "docs.jsonl").open("a") as file:
        file.write('{"id": 5}\n')
    words = ["--model", str(tmp_path / "model"), "--data", str(tmp_path / "docs.jsonl"), "--sites", "head_out:1"]
    words += ["--template", f"@{tmp_path}/template.jinja"]
    dry = asked(capsys, *words, "--dry-run")
    assert "512 tokens a row, as --width is not given: the model has no more positions" in dry
    assert "refused" not in dry, "the last row is not among those looked at"
    few = ["--max-samples", "20", "--out", str(tmp_path / "acts")]
    plan = json.loads(asked(capsys, *words, *few, "--dry-run", "--json"))
    assert (plan["rows"], plan["width"], plan["rows_looked_at"], plan["rows_refused"]) == (20, 512, 20, 0)
    capsys.readouterr()
    assert run(["extract", *words, *few]) == 0
    said = capsys.readouterr()
    assert "20 rows in all (--max-samples is the total, not each worker's) in 10 units" in said.err
    (written,) = (tmp_path / "acts").glob("runs/*/plan.json")
    work = json.loads(written.read_bytes())["work"]
    assert work["source"]["reading"]["template"] == "Q: {{ id }}\nA: {{ text }}"
    assert work["config"]["hidden_size"] == 64
    (tmp_path / "docs.jsonl").write_text('{"id": 5}\n{"id": "a", "text": "water"}\n')
    dry = asked(capsys, *words, "--dry-run")
    assert "1 of 2 rows looked at give nothing; the first the template" in dry
    assert "as --width is not given" not in asked(capsys, *words, "--dry-run", "--width", "256")


@pytest.fixture
def installation(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Environment of an embedded server and of an emulated bucket that holds model and data."""
    make(tmp_path / "in")
    with gcs_emulator() as emulator:
        objects = open_gcs(BUCKET, "", emulator.environment)

        async def upload() -> None:
            for path in (tmp_path / "in").rglob("*"):
                if path.is_file():
                    await objects.put(str(path.relative_to(tmp_path)), path.read_bytes())

        asyncio.run(upload())
        environment = {**os.environ, **emulator.environment, "PENSTOCK_HOME": str(tmp_path / "home")}
        environment.pop("PENSTOCK_URL", None)
        try:
            yield environment
        finally:
            subprocess.run([*TPU, "down"], env=environment, check=True, timeout=WITHIN_S, capture_output=True)


@pytest.mark.long
def test_replicas_of_a_job_are_workers_and_a_lost_slice_costs_its_unit_only(installation: dict[str, str]) -> None:
    def tpu(*words: str) -> str:
        done = subprocess.run(
            [*TPU, *words], env=installation, timeout=WITHIN_S, check=False, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def job() -> Any:
        found = json.loads(tpu("ps", "--all", "--json"))
        return (found if isinstance(found, list) else found["jobs"])[0]

    root = f"gs://{BUCKET}"
    words = ["--model", f"{root}/in/model", "--data", f"{root}/in/docs.jsonl", "--id", "id", "--width", "256"]
    words += ["--sites", "resid_post:1,3", "--unit-rows", "4", "--out", f"{root}/acts", "--workers", "1-3"]
    address = tpu("extract", *words, "--on", "v5e-8", "--env", "STORAGE_EMULATOR_HOST").strip()
    deadline = time.monotonic() + 3 * WITHIN_S  # the lost worker's lease has to run out first
    preempted = False
    while job()["state"] not in ("succeeded", "failed", "cancelled"):
        assert time.monotonic() < deadline, tpu("extract", "status", "--run", address)
        if not preempted and json.loads(tpu("extract", "status", "--run", address, "--json"))["committed"] >= 3:
            slices = json.loads(tpu("slices", "--json"))
            tpu("local", "preempt", (slices if isinstance(slices, list) else slices["slices"])[0]["id"])
            preempted = True
        time.sleep(1)
    assert preempted
    assert job()["state"] == "succeeded"
    checked = json.loads(tpu("extract", "verify", "--run", address, "--json"))
    assert (checked["sealed"], checked["problems"], checked["garbage"]) == (True, [], 0)
    # The replicas' names lead to their attempts, and the job's tag to the job: what they held is what the run cost.
    status = json.loads(tpu("extract", "status", "--run", address, "--json"))
    assert status["cost"]["jobs"] == [job()["id"]]
    assert status["cost"]["chip_s"] > 0
    assert (status["cost"]["usd"], {worker["usd"] for worker in status["workers"]}) == (0.0, {0.0})
