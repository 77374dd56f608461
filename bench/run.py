"""Every figure of speed and size that issue 3 promises, measured from outside and set against its bound.

`make bench-run`, or `python bench/run.py [--quick] [--only PART] [--out FILE]`. Uses only what users have: the `tpu`
command, the SDK and HTTP, on the embedded default (SQLite and a directory on the disk of the working directory, real
agents and sandboxes). Other systems are measured in the same run where they are installed. Exits with 1 when a bound is
missed or a part fails. `--quick` shows within two minutes that everything runs; it is too short to be judged.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import yardsticks
from core import Bound, Row, table
from served import POOL, TPU, Served, Weight, p, wall_and_cpu

from penstock import Client
from penstock.client.wishes import Isolation
from penstock.wire.api import CommandRequest, JobRequest, JobView, QueueRequest, SnippetRequest

HERE = Path(__file__).parent
ROOT = HERE.parent
CLIENTS = 8
SLICES = 4  #: what an embedded server makes for a pool by itself
FOLLOWERS, LINES_PER_S, LINE_BYTES = 100, 10_000, 64
WAIT_S_MAX = 900.0
#: Bounds of p50 and p99 in milliseconds.
ISOLATIONS: tuple[tuple[Isolation, tuple[float, float | None]], ...] = (
    ("fork", (60.0, 250.0)),
    ("inline", (15.0, None)),
)
JNP = "result = float(jnp.ones((100,100)).sum())"
#: Says when it started and, asked to stop, when it did; in the shell's own clock, so that nothing else is measured.
STAMPS = "trap 'date +%s.%N; exit 143' TERM; date +%s.%N; sleep 600 & wait"
WRITER = """
import sys, time
lines, per_s, size = map(int, sys.argv[1:])
step = per_s // 100
began = time.monotonic()
for first in range(0, lines, step):
    text = "".join(f"{number:0{size - 1}d}\\n" for number in range(first, min(first + step, lines)))
    sys.stdout.write(text)
    sys.stdout.flush()
    rest = began + (first + step) / per_s - time.monotonic()
    if rest > 0:
        time.sleep(rest)
"""


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """How much each part does."""

    commands: int = 10
    starts: int = 5
    submits: int = 500
    submit_s: float = 5.0
    batches: int = 3
    snippets: int = 300
    jnp: int = 30
    drained: int = 10_000
    preempted: int = 3
    log_s: int = 10
    yard: int = 200
    yard_many: int = 2_000


QUICK = Sizes(
    commands=3,
    starts=1,
    submits=50,
    submit_s=1.0,
    batches=1,
    snippets=30,
    jnp=3,
    drained=200,
    preempted=1,
    log_s=2,
    yard=20,
    yard_many=100,
)


def at_most(value: float) -> Bound:
    return Bound(value, True)


def snippet(code: str, isolation: Isolation) -> JobRequest:
    return JobRequest(payload=SnippetRequest(code, {}, isolation), pool=POOL)


class Bench:
    """Runs the parts and gathers rows, notes and problems; a part that fails does not stop the others."""

    def __init__(self, sizes: Sizes, folder: Path) -> None:
        self.sizes = sizes
        self.rows: list[Row] = []
        self.problems: list[str] = []
        self.skipped: list[str] = []
        self._folder = folder
        self._homes = iter(range(1_000))

    @property
    def parts(self) -> dict[str, Callable[[], Iterator[Row]]]:
        return {
            "commands": self._commands,
            "install": self._install,
            "server": self._server,
            "submits": self._submits,
            "snippets": self._snippets,
            "drain": self._drain,
            "preemption": self._preemption,
            "followers": self._followers,
            "yardsticks": self._yardsticks,
        }

    def run(self, only: list[str]) -> None:
        for name, part in self.parts.items():
            if only and name not in only:
                continue
            print(f"bench-run: {name} …", file=sys.stderr, flush=True)
            try:
                for row in part():
                    self.rows.append(row)
            except Exception as error:  # noqa: BLE001 (whatever it is, the other parts are still worth their figures)
                traceback.print_exc()
                self.problems.append(f"{name}: {type(error).__name__}: {error}")

    @property
    def judged(self) -> bool:
        """A quick run is not judged by its figures."""
        return self.sizes != QUICK

    @property
    def ok(self) -> bool:
        return not self.problems and (not self.judged or all(row.ok for row in self.rows))

    def _serve(self) -> Served:
        return Served(self._folder / str(next(self._homes)))

    # --- the command line ---
    def _commands(self) -> Iterator[Row]:
        with self._serve() as served, served.client() as client:
            for _ in range(20):
                client.submit(JobRequest(payload=CommandRequest(("true",))))
            bounds = {"tpu --help": 150.0, "tpu ps": 250.0}
            for words in (["--help"], ["ps"], ["exec", "-c", "result = 1"]):
                wall, cpu = wall_and_cpu([TPU, *words], self.sizes.commands, served.environment)
                name = "tpu " + (words[0] if len(words) == 1 else "exec, one snippet")
                bound = at_most(bounds[name]) if name in bounds else None
                yield Row(part="commands", what=f"{name}, wall", measured=wall * 1e3, unit="ms", bound=bound)
                yield Row(part="commands", what=f"{name}, processor", measured=cpu * 1e3, unit="ms")

    # --- the bare install ---
    def _install(self) -> Iterator[Row]:
        """As `pip install penstock` leaves it, bytecode included: what peers were measured with."""
        folder = self._folder / "install"
        python = folder / "venv" / "bin" / "python"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
        into = [*pip, "--python", str(python), "install"]
        lock = ROOT / "locks" / "client.txt"
        for command in (
            [*into, "--require-hashes", "-r", str(lock)],
            [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT)],
        ):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                last = (done.stderr.strip().splitlines() or ["no word"])[-1]
                self.skipped.append(f"install: no index can be reached, it seems: {last}")
                return
        (wheel,) = folder.glob("*.whl")
        subprocess.run([*into, "--no-deps", "--no-index", str(wheel)], check=True)
        files = [path.stat() for path in (folder / "venv" / "lib").rglob("*") if path.is_file()]
        size = sum(found.st_blocks * 512 for found in files)
        packages = len(list((folder / "venv" / "lib").rglob("*.dist-info")))
        mib = size / (1 << 20)
        yield Row(part="install", what="size on disk (dstack 134)", measured=mib, unit="MiB", bound=at_most(40))
        yield Row(part="install", what="packages (dstack 51)", measured=packages, unit="", bound=at_most(20))

    # --- the server ---
    def _server(self) -> Iterator[Row]:
        ready, memory = [], []
        for _ in range(self.sizes.starts):
            with self._serve() as served:
                ready.append(served.ready_s)
                time.sleep(2.0)  # idle: what it does after its start is done
                memory.append(served.weigh().server_mib)
        median = statistics.median(ready)
        yield Row(part="server", what="ready after", measured=median * 1e3, unit="ms", bound=at_most(1000))
        yield Row(part="server", what="idle memory", measured=max(memory), unit="MiB", bound=at_most(100))

    # --- submits ---
    def _submits(self) -> Iterator[Row]:
        """Into a queue that is paused: taking in is measured, not running."""
        part = "submits, HTTP"
        with self._serve() as served, served.client() as client:
            client.put_queue("paused", QueueRequest(paused=True))
            request = JobRequest(payload=SnippetRequest("pass"), queue="paused")
            times = _timed(lambda: client.submit(request), self.sizes.submits)
            yield Row(part=part, what="one, p50 (Iris 69 ms)", measured=p(times, 50) * 1e3, unit="ms", bound=at_most(5))
            yield Row(part=part, what="one, p99", measured=p(times, 99) * 1e3, unit="ms")
            before = served.weigh()
            count, taken_s, slow = _by_many(served, request, self.sizes.submit_s)
            used = served.weigh().server_cpu_s - before.server_cpu_s
            rate = count / taken_s
            yield Row(part=part, what=f"{CLIENTS} clients (Iris 13/s)", measured=rate, unit="/s", bound=Bound(500))
            yield Row(part=part, what=f"{CLIENTS} clients, p99", measured=slow * 1e3, unit="ms")
            yield Row(part=part, what="server's processor, each", measured=used / count * 1e3, unit="ms")
            rates = []
            for _ in range(self.sizes.batches):
                began = time.monotonic()
                client.submit_many([request] * 10_000)
                rates.append(10_000 / (time.monotonic() - began))
            rate = statistics.median(rates)
            yield Row(part=part, what="batches of 10,000", measured=rate, unit="/s", bound=Bound(3000))

    # --- one warm snippet after another ---
    def _snippets(self) -> Iterator[Row]:
        with self._serve() as served, served.client() as client:
            served.pool(client, 1)
            for isolation, bounds in ISOLATIONS:
                part = f"snippets, {isolation}"
                _timed(lambda: client.exec("pass", isolation=isolation, pool=POOL), 5)  # noqa: B023 (called here)
                before = served.weigh()
                times = _timed(lambda: client.exec("pass", isolation=isolation, pool=POOL), self.sizes.snippets)  # noqa: B023
                used = served.weigh()
                iris = " (Iris 1.4 s)" if isolation == "fork" else ""
                what = f"pass, submit to result, p50{iris}"
                yield Row(part=part, what=what, measured=p(times, 50) * 1e3, unit="ms", bound=at_most(bounds[0]))
                slow = None if bounds[1] is None else at_most(bounds[1])
                yield Row(part=part, what="pass, p99", measured=p(times, 99) * 1e3, unit="ms", bound=slow)
                yield from _cpu_rows(part, before, used, len(times))
                _timed(lambda: client.exec(JNP, isolation=isolation, pool=POOL), 1)  # noqa: B023
                times = _timed(lambda: client.exec(JNP, isolation=isolation, pool=POOL), self.sizes.jnp)  # noqa: B023
                yield Row(part=part, what="jnp.ones((100,100)).sum(), p50", measured=p(times, 50) * 1e3, unit="ms")

    # --- many snippets ---
    def _drain(self) -> Iterator[Row]:
        count = self.sizes.drained
        for isolation, _ in ISOLATIONS:
            part = f"drain, {isolation}"
            with self._serve() as served, served.client() as client:
                _warm_all(served, client, isolation)
                before = served.weigh()
                began = time.time()  # noqa: TID251 (compared with the server's stamps)
                client.submit_many([snippet("pass", isolation)] * count)
                ended = _drained(client, began, count)
                used = served.weigh()
                rate = count / (max(job.finished_at or 0.0 for job in ended) - began)
                wrong = sum(job.state != "succeeded" for job in ended)
                if wrong:
                    self.problems.append(f"{part}: {wrong} of {count} did not succeed")
                bound = Bound(100) if isolation == "fork" else None
                yield Row(part=part, what=f"{count:,} no-ops (Iris 6.4/s)", measured=rate, unit="/s", bound=bound)
                yield from _cpu_rows(part, before, used, count)
                yield Row(part=part, what="server's memory after", measured=used.server_mib, unit="MiB")
                what = f"{SLICES} agents' memory, {used.others} processes"
                yield Row(part=part, what=what, measured=used.others_mib, unit="MiB")

    # --- slices taken away ---
    def _preemption(self) -> Iterator[Row]:
        silent: list[float] = []
        noticed: list[float] = []
        with self._serve() as served, served.client() as client:
            served.pool(client, 2)
            for _ in range(self.sizes.preempted):
                job = client.submit(JobRequest(payload=CommandRequest(("sh", "-c", STAMPS)), pool=POOL)).id
                _stamps(client, job, 1, 1)
                for number, notice_s in ((1, 0.0), (2, 20.0)):
                    slice = client.get(job).attempts[-1].slices[0]
                    began = time.time()  # noqa: TID251 (compared with the payload's own stamps)
                    client.preempt(slice, notice_s=notice_s)
                    (again, *_) = _stamps(client, job, number + 1, 1)
                    if notice_s:
                        left = _stamps(client, job, number, 2)[1]
                        noticed.append(again - left)
                    else:
                        silent.append(again - began)
                client.cancel(job)
                client.wait(job, WAIT_S_MAX)
        part = "preemption"
        yield Row(
            part=part, what="no notice, next attempt runs, worst", measured=max(silent), unit="s", bound=at_most(3)
        )
        yield Row(part=part, what="notice, after the exit, worst", measured=max(noticed), unit="s", bound=at_most(1))

    # --- followers of a log ---
    def _followers(self) -> Iterator[Row]:
        part = f"logs, {FOLLOWERS} followers"
        lines = LINES_PER_S * self.sizes.log_s
        expected = hashlib.sha256()
        for number in range(lines):
            expected.update(f"{number:0{LINE_BYTES - 1}d}\n".encode())
        with self._serve() as served, served.client() as client:
            served.pool(client, 1)
            client.exec("pass", pool=POOL)  # the slice is there
            # The job waits for another one, so that all follow before the first line is written.
            gate = client.submit(JobRequest(payload=CommandRequest(("sh", "-c", "sleep 600")), pool=POOL)).id
            argv = (sys.executable, "-c", WRITER, str(lines), str(LINES_PER_S), str(LINE_BYTES))
            job = client.submit(JobRequest(payload=CommandRequest(argv), pool=POOL)).id
            options = [served.url, job, str(FOLLOWERS), str(lines * LINE_BYTES), expected.hexdigest()]
            environment = {**served.environment, "PENSTOCK_TOKEN": served.token}
            command = [sys.executable, str(HERE / "followers.py"), *options]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
                assert process.stdout is not None
                if process.stdout.readline().strip() != "following":
                    raise RuntimeError("the followers could not begin")
                before = served.weigh()
                client.cancel(gate)
                ended = client.wait(job, WAIT_S_MAX)
                report: dict[str, Any] = msgspec.json.decode(process.stdout.read())
                used = served.weigh()
        took_s = (ended.finished_at or 0.0) - (ended.started_at or 0.0)
        what = f"of them whole, {lines:,} lines"
        yield Row(part=part, what=what, measured=report["whole"], unit="", bound=Bound(FOLLOWERS))
        if report["whole"] != FOLLOWERS:
            self.problems.append(f"followers: the worst had {report['worst']}")
        yield Row(part=part, what="lines written", measured=lines / took_s, unit="/s", bound=Bound(0.8 * LINES_PER_S))
        share = (used.server_cpu_s - before.server_cpu_s) / took_s * 100
        yield Row(part=part, what="server's processor, of one core", measured=share, unit="%")
        yield Row(part=part, what="last follower after the first", measured=report["spread_s"] * 1e3, unit="ms")
        yield Row(part=part, what="server's memory after", measured=used.server_mib, unit="MiB")

    # --- others ---
    def _yardsticks(self) -> Iterator[Row]:
        yield from yardsticks.import_jax(self.sizes.commands)
        for other in (yardsticks.rq, yardsticks.dask):
            rows, why = other(self.sizes.yard, self.sizes.yard_many)
            yield from rows
            if why:
                self.skipped.append(why)


def _timed(one: Callable[[], object], count: int) -> list[float]:
    times = []
    for _ in range(count):
        began = time.monotonic()
        one()
        times.append(time.monotonic() - began)
    return times


def _cpu_rows(part: str, before: Weight, after: Weight, count: int) -> Iterator[Row]:
    server, others = after.server_cpu_s - before.server_cpu_s, after.others_cpu_s - before.others_cpu_s
    yield Row(part=part, what="server's processor, each", measured=server / count * 1e3, unit="ms")
    yield Row(part=part, what="agents' processor, each", measured=others / count * 1e3, unit="ms")


def _by_many(served: Served, request: JobRequest, seconds: float) -> tuple[int, float, float]:
    """Submits by several clients at once: how many, in what time, and the p99 of one."""
    times: list[float] = []
    began = time.monotonic()

    def submit() -> None:
        with served.client() as client:
            while time.monotonic() < began + seconds:
                times.extend(_timed(lambda: client.submit(request), 1))

    threads = [threading.Thread(target=submit) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(times), time.monotonic() - began, p(times, 99)


def _warm_all(served: Served, client: Client, isolation: Isolation) -> None:
    """All slices are there, and each has run a snippet."""
    served.pool(client, SLICES, kept=SLICES)
    deadline = time.monotonic() + WAIT_S_MAX
    while sum(each.state == "ready" for each in client.slices()) < SLICES:
        if time.monotonic() > deadline:
            raise RuntimeError("the slices do not become ready")
        time.sleep(0.1)
    for accepted in client.submit_many([snippet("import time; time.sleep(0.5)", isolation)] * (2 * SLICES)):
        client.wait(accepted.id, WAIT_S_MAX)


def _drained(client: Client, since: float, count: int) -> list[JobView]:
    """Wait without asking for much, then everything that ended."""
    deadline = time.monotonic() + WAIT_S_MAX
    while client.page(state="queued,provisioning,running", limit=1).jobs:
        if time.monotonic() > deadline:
            raise RuntimeError(f"not drained within {WAIT_S_MAX:g} s")
        time.sleep(0.5)
    ended = list(client.jobs(since=since))
    if len(ended) != count:
        raise RuntimeError(f"{len(ended)} jobs of {count} are listed")
    return ended


def _stamps(client: Client, job: str, attempt: int, count: int) -> list[float]:
    """The times that the payload of one attempt wrote down, as soon as there are so many."""
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline:
        attempts = client.get(job).attempts
        if len(attempts) >= attempt:
            said = client.log_bytes(job, stream="out", attempt=attempts[attempt - 1].id).split()
            if len(said) >= count:
                return [float(each) for each in said]
        time.sleep(0.05)
    raise RuntimeError(f"attempt {attempt} of {job} did not run: {client.get(job)}")


def as_json(bench: Bench) -> bytes:
    answer = {
        "ok": bench.ok,
        "judged": bench.judged,
        "problems": bench.problems,
        "skipped": bench.skipped,
        "machine": {
            "cores": os.cpu_count(),
            "processor": platform.machine(),
            "system": f"{platform.system()} {platform.release()}",
            "python": platform.python_version(),
            "load": os.getloadavg(),
        },
        "rows": [{**msgspec.to_builtins(row), "times_better": row.ratio, "ok": row.ok} for row in bench.rows],
    }
    return msgspec.json.format(msgspec.json.encode(answer), indent=1)


def main() -> int:
    parser = argparse.ArgumentParser(description="every figure of speed and size that issue 3 promises")
    parser.add_argument("--quick", action="store_true", help="small sizes, nothing judged")
    parser.add_argument("--only", action="append", default=[], metavar="PART", help="only this part; may be repeated")
    parser.add_argument("--out", type=Path, default=None, help="write the figures here as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-bench-", dir=".", ignore_cleanup_errors=True) as folder:
        bench = Bench(QUICK if options.quick else Sizes(), Path(folder).absolute())
        unknown = set(options.only) - bench.parts.keys()
        if unknown:
            parser.error(f"--only: {', '.join(sorted(unknown))} is none of {', '.join(bench.parts)}")
        bench.run(options.only)
    print(table(bench.rows, judged=bench.judged))
    for reason in bench.skipped:
        print(f"skipped: {reason}")
    for problem in bench.problems:
        print(f"problem: {problem}")
    if options.out is not None:
        options.out.write_bytes(as_json(bench))
    return 0 if bench.ok else 1


if __name__ == "__main__":
    sys.exit(main())
