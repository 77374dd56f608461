"""Writes the store an older release leaves behind: `python make.py TREE OUT SEED`, with TREE its unpacked sources.

Run by hand once per release, for `test_releases`: the release's own simulator plays one seed on a file, which is kept
as it was when the faults stopped, with jobs in every state. It must not import anything of the present tree.
"""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path
from typing import Any

import apsw
from backports import zstd

FAULTS_S = 400.0


def main(tree: str, out: str, seed: str) -> None:
    sys.path.insert(0, f"{tree}/src")
    sqlite: Any = importlib.import_module("penstock.store.sqlite")
    seeds: Any = importlib.import_module("penstock.sim.seed")
    recorder: Any = importlib.import_module("penstock.domain.invariants.history").Recorder
    live, kept = Path(f"{out}.live"), Path(f"{out}.db")
    inline, world = sqlite.SqliteStore.inline, recorder.world

    def keep(self: object, kind: str, subject: str = "", **body: object) -> None:
        world(self, kind, subject, **body)
        if kind == "heal":
            for end in ("", "-wal"):
                shutil.copy(f"{live}{end}", f"{kept}{end}")

    recorder.world = keep
    sqlite.SqliteStore.inline = staticmethod(lambda clock: inline(clock, str(live)))
    seeds.run_seed(int(seed), fault_s=FAULTS_S)
    connection = apsw.Connection(str(kept))
    for line in ("pragma wal_checkpoint(truncate)", "pragma journal_mode=delete", "vacuum"):
        connection.execute(line).fetchall()
    connection.close()
    Path(f"{kept}.zst").write_bytes(zstd.compress(kept.read_bytes(), 19))


if __name__ == "__main__":
    main(*sys.argv[1:])
