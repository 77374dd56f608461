"""`bench/fleet.py --quick`: forty nodes of the emulated cloud, made at the pace that a thousand are made at.

What is judged are calls in the emulator's books, not seconds, so that a slow machine changes nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.process.google_cloud import ROOT

TIMEOUT_S = 600.0


@pytest.mark.long
def test_a_fleet_is_made_at_its_pace_and_nobody_says_too_often(tmp_path: Path) -> None:
    report = tmp_path / "fleet.json"
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench" / "fleet.py"), "--quick", "--out", str(report)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    seen = {row["what"]: row["measured"] for row in json.loads(report.read_text())["rows"]}
    assert seen["answers 429"] == 0
    assert seen["creates called for, all in all"] == 40
    assert seen["of those not granted"] == 0
    assert 1 < seen["creates ahead of one a second"] <= 31
    assert seen["listings in a reconcile"] == 4
