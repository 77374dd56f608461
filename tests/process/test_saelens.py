"""SAELens itself trains on a run: its trainer takes our iterator as it is, its loader reads what `export` wrote."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from penstock import extract
from penstock.objects.directory import DirectoryObjects
from tests.missing import missing, need_module
from tests.process.extraction import WIDTH, cheap_plan, tokens_of
from tests.tidy.tracked import ROOT
from tests.unit.extract.cheap import calls_to, finish

WITHIN_S = 600.0
LOCK = ROOT / "locks" / "saelens.txt"
HOOK, CONTEXT = "blocks.1.hook_resid_post", 16
COLD = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "PYTHONWARNINGS": "ignore"}


@pytest.fixture(scope="module")
def saelens() -> Path:
    """A folder with SAELens and what its training imports beyond our environment; kept for the next time."""
    need_module("torch")
    folder = Path(sys.prefix) / "saelens"
    stamp = folder / f".installed-{hashlib.sha256(LOCK.read_bytes()).hexdigest()[:16]}"
    if not stamp.exists():
        shutil.rmtree(folder, ignore_errors=True)
        argv = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        argv += ["--no-compile", "--require-hashes", "--target", str(folder), "-r", str(LOCK)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=WITHIN_S, check=False)
        if done.returncode:
            missing(f"SAELens, which cannot be installed here: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
        stamp.touch()
    return folder


@pytest.mark.long
def test_saelens_trains_from_the_iterator_and_from_the_export(saelens: Path, tmp_path: Path) -> None:
    plan = cheap_plan(600, 100)
    asyncio.run(finish(calls_to(DirectoryObjects(tmp_path / "acts")), plan))
    with extract.open(str(tmp_path / "acts")) as run:
        extract.export_dataset(run, "resid_post:1", tmp_path / "hf", context=CONTEXT, column=HOOK)
        assert run.width("resid_post:1") == WIDTH
        beginning = run.block(next(iter(run.blocks(2 * CONTEXT))), "tokens").tolist()
    assert set(beginning) <= {int(token) for row in range(plan.rows) for token in tokens_of(row)}
    argv = [sys.executable, str(ROOT / "tests" / "process" / "saelens_trains.py")]
    argv += [str(tmp_path / "acts"), str(tmp_path / "hf"), "resid_post:1", HOOK, str(CONTEXT)]
    environment = os.environ | COLD | {"PYTHONPATH": f"{saelens}{os.pathsep}{ROOT}", "HOME": str(tmp_path)}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=WITHIN_S, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["same"], "SAELens reads other vectors than were written"
    assert found["tokens"] == beginning
    for way in ("iterator", "export"):
        seen = found[way]
        assert (seen["steps"], seen["shapes"]) == (100, [[64, WIDTH]])
        assert seen["last"] < 0.05 * seen["first"], f"{way}: the error fell from {seen['first']} to {seen['last']} only"
