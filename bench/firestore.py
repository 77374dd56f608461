"""What issue 4 promises of the Firestore bridge, on Google's own emulator: latency with a warm slice, and a burst.

`make bench-firestore`, or `python bench/firestore.py [--quick] [--out FILE]`. Emulator, server, bridge and clients
share the machine, so the emulator's own speed is measured in the same run, with the same client and nothing else going
on: a document of the burst is written four or five times (made, taken, its job, running, ended), so that speed is the
most a burst could reach. How often each payload ran is read from marks the payloads leave. Exits with 1 when a bound
is missed, or a document is lost or ran twice.
"""

from __future__ import annotations

import argparse
import os
import platform
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from core import Bound, Row, table
from served import TPU, Served, cpu_s, p

ROOT = Path(__file__).parent.parent
PROJECT = "demo-bench"
SLICES = 4
WRITERS = 8
START_S_MAX = 60.0
BURST_S_MAX = 600.0
MARK = """import os
with open(os.environ["PENSTOCK_CHECKPOINT_DIR"] + "/ran", "a") as file: file.write({name!r} + "\\n")
"""


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """How much each part does."""

    single: int = 60
    burst: int = 1_000
    writes: int = 1_000


QUICK = Sizes(single=10, burst=100, writes=200)


@contextmanager
def emulator(folder: Path) -> Iterator[tuple[str, int]]:
    """Google's emulator; its HOST:PORT and its pid."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    with (folder / "emulator.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "tools" / "firestore_emulator.py"), f"--port={port}"], stdout=log, stderr=log
        )
    try:
        deadline = time.monotonic() + START_S_MAX
        while True:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"no emulator: {(folder / 'emulator.log').read_text()[-300:]}")
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5).close()
                break
            except OSError:
                time.sleep(0.1)
        yield f"127.0.0.1:{port}", process.pid
    finally:
        process.terminate()
        process.wait(30)


@contextmanager
def bridge(served: Served, host: str) -> Iterator[int]:
    """A bridge of its own process; its pid."""
    log = served.home / "bridge.log"
    environment = {**served.environment, "FIRESTORE_EMULATOR_HOST": host}
    with log.open("wb") as out:
        process = subprocess.Popen(
            [TPU, "bridge", "firestore", "--project", PROJECT], env=environment, stdout=out, stderr=subprocess.STDOUT
        )
    try:
        deadline = time.monotonic() + START_S_MAX
        while b"listening:" not in log.read_bytes():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"no bridge: {log.read_text()[-500:]}")
            time.sleep(0.05)
        yield process.pid
    finally:
        process.terminate()
        process.wait(30)


def limit(db: Any, count: int) -> list[Row]:
    """What the emulator takes from clients like ours when it has nothing else to do."""
    collection = db.collection("limit")
    numbers = range(count)
    began = time.monotonic()
    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(lambda n: collection.document(f"d{n}").set({"status": "x", "code": "result = 1"}), numbers))
    made = count / (time.monotonic() - began)
    began = time.monotonic()
    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(lambda n: collection.document(f"d{n}").update({"status": "y"}), numbers))
    changed = count / (time.monotonic() - began)
    watch = collection.where(filter=_equals("status", "pending")).limit(16).on_snapshot(lambda *_: None)
    time.sleep(0.5)
    began = time.monotonic()
    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(lambda n: collection.document(f"d{n}").update({"status": "z"}), numbers))
    listened = count / (time.monotonic() - began)
    watch.unsubscribe()
    return [
        Row(part="emulator alone", what=f"documents made, {WRITERS} threads", measured=made, unit="/s"),
        Row(part="emulator alone", what=f"documents changed, {WRITERS} threads", measured=changed, unit="/s"),
        Row(part="emulator alone", what="the same while one query is watched", measured=listened, unit="/s"),
    ]


def latency(db: Any, count: int) -> list[Row]:
    """One document at a time, watched as a client watches: from before it is written until `running` is seen."""
    collection = db.collection("tpu_jobs")
    seen_s: dict[str, list[float]] = {"scheduled": [], "running": [], "completed": []}
    for number in range(count + 5):
        reference = collection.document(f"single{number}")
        ended = threading.Event()
        at: dict[str, float] = {}

        def on_snapshot(found: Sequence[Any], *_: object, at: Any = at, ended: Any = ended) -> None:
            for one in found:
                if one.exists:
                    at.setdefault(one.get("status"), time.monotonic())
                    if one.get("status") in ("completed", "failed"):
                        ended.set()

        watch = reference.on_snapshot(on_snapshot)
        time.sleep(0.1)  # until it listens; a client that is late sees less, not more
        began = time.monotonic()
        # Long enough that `running` is a state of its own and not written together with the end.
        reference.set({"code": "import time\ntime.sleep(0.15)\nresult = 1", "status": "pending"})
        if not ended.wait(60):
            raise RuntimeError(f"single{number} did not end: {reference.get().to_dict()}")
        watch.unsubscribe()
        if number >= 5:  # the first ones warm everything up
            for status, times in seen_s.items():
                if status in at:
                    times.append(1000 * (at[status] - began))
    if len(seen_s["running"]) < 0.9 * count:
        raise RuntimeError(f"only {len(seen_s['running'])} of {count} were seen running")
    bound = Bound(200.0, at_most=True)
    return [
        Row(part="one document", what="to scheduled, p50", measured=p(seen_s["scheduled"], 50), unit="ms"),
        Row(part="one document", what="to running, p50", measured=p(seen_s["running"], 50), unit="ms", bound=bound),
        Row(part="one document", what="to running, p99", measured=p(seen_s["running"], 99), unit="ms"),
    ]


def burst(db: Any, served: Served, count: int, bridge: int, emulator: int) -> list[Row]:
    """Many documents as fast as clients can write them; all must end, each payload having run once."""
    collection = db.collection("tpu_jobs")
    names = [f"burst{number}" for number in range(count)]

    def make(name: str) -> None:
        submitter = f"user{int(name.removeprefix('burst')) % 10}@example.com"
        content = {"code": MARK.format(name=name), "status": "pending", "metadata": {"submitted_by": submitter}}
        collection.document(name).set(content)

    used = [cpu_s(bridge), cpu_s(emulator), served.weigh().cpu_s]
    began = time.monotonic()
    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(make, names))
    written = time.monotonic() - began
    left = collection.where(filter=_equals("status", "pending")).count()
    taken = ended = None
    while ended is None:
        now = time.monotonic() - began
        if now > BURST_S_MAX:
            raise RuntimeError("the burst did not end")
        if taken is None and int(left.get()[0][0].value) == 0:
            taken = now
        time.sleep(0.25)
        if taken is not None and _over(collection, names[-1]) and _all_over(collection, names):
            ended = time.monotonic() - began
    runs = Counter(
        word
        for file in (served.home / "root" / "jobs").glob("*/checkpoints/*/ran")
        for word in file.read_text().split()
    )
    wrong = {name: runs[name] for name in names if runs[name] != 1}
    if wrong:
        raise RuntimeError(f"{len(wrong)} payloads were lost or repeated, such as {next(iter(wrong.items()))}")
    assert taken is not None
    now_used = [cpu_s(bridge), cpu_s(emulator), served.weigh().cpu_s]
    each_ms = [1000 * (after - before) / count for before, after in zip(used, now_used, strict=True)]
    memory = next(
        int(line.split()[1]) / 1024
        for line in Path(f"/proc/{bridge}/status").read_text().splitlines()
        if line.startswith("VmHWM")
    )
    figures = (
        ("written by clients", count / written, "/s"),
        ("taken by the bridge", count / taken, "/s"),
        ("ended, each run once", count / ended, "/s"),
        ("processor time of the bridge, each", each_ms[0], "ms"),
        ("processor time of the emulator, each", each_ms[1], "ms"),
        ("processor time of server and jobs, each", each_ms[2], "ms"),
        ("bridge's largest size", memory, "MiB"),
    )
    return [Row(part=f"burst of {count:,}", what=what, measured=value, unit=unit) for what, value, unit in figures]


def _equals(field: str, value: str) -> Any:
    from google.cloud.firestore_v1.base_query import FieldFilter

    return FieldFilter(field, "==", value)


def _over(collection: Any, name: str) -> bool:
    return (collection.document(name).get().to_dict() or {}).get("status") in ("completed", "failed")


def _all_over(collection: Any, names: Sequence[str]) -> bool:
    """Asked rarely: it reads them all. A document that failed is a fault of the bench."""
    found = {each.id: each.get("status") for each in collection.select(["status"]).stream()}
    failed = [name for name in names if found.get(name) == "failed"]
    if failed:
        raise RuntimeError(f"{failed[0]} failed: {collection.document(failed[0]).get().to_dict()}")
    return all(found.get(name) == "completed" for name in names)


def measure(sizes: Sizes, folder: Path) -> list[Row]:
    with emulator(folder) as (host, java), Served(folder / "home") as served:
        os.environ["FIRESTORE_EMULATOR_HOST"] = host
        from google.cloud import firestore

        db = firestore.Client(project=PROJECT)
        with served.client() as client:
            served.pool(client, SLICES, kept=SLICES)
        rows = limit(db, sizes.writes)
        with bridge(served, host) as pid:
            rows += latency(db, sizes.single)
            rows += burst(db, served, sizes.burst, pid, java)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description="what issue 4 promises of the Firestore bridge")
    parser.add_argument("--quick", action="store_true", help="small sizes, nothing judged")
    parser.add_argument("--out", type=Path, default=None, help="write the figures here as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-bench-", dir=".", ignore_cleanup_errors=True) as folder:
        rows = measure(QUICK if options.quick else Sizes(), Path(folder).absolute())
    print(table(rows, judged=not options.quick))
    if options.out is not None:
        machine = {"cores": os.cpu_count(), "python": platform.python_version(), "load": os.getloadavg()}
        report = {"machine": machine, "rows": [{**msgspec.to_builtins(row), "ok": row.ok} for row in rows]}
        options.out.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
    return 0 if options.quick or all(row.ok for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
