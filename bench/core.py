"""Every figure that issue 2 promises, measured and set against its bound: `make bench-core`.

`python bench/core.py [--quick] [--out FILE]`, under `tools/with_postgres` for the PostgreSQL half. Runs
`bench/store.py`, `bench/tick.py` at three sizes and the simulator, each in a process of its own so that memory and
caches start afresh, and prints one table: what was measured, the bound, and how many times better than it. Exits with
1 when a bound is missed or a part fails. `--quick` shows within a minute that everything runs; its sizes are too small
to be judged.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from penstock.domain.invariants.history import History, Record
from penstock.domain.invariants.rules import check, missing_premises
from penstock.sim.check import LANDED_ISSUE

HERE = Path(__file__).parent
TPU = Path(sys.executable).with_name("tpu")
PART_S_MAX = 1800  #: the longest part, a million jobs, takes a few minutes


class Bound(msgspec.Struct, frozen=True):
    """A promise: at least (a rate) or at most (a time, a size)."""

    value: float
    at_most: bool = False

    def ratio(self, measured: float) -> float:
        """How many times better than promised; below 1 it is missed."""
        if self.at_most:
            return self.value / measured if measured else float("inf")
        return measured / self.value


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the table. Without a bound it is there for comparison."""

    part: str
    what: str
    measured: float
    unit: str
    bound: Bound | None = None

    @property
    def ratio(self) -> float | None:
        return None if self.bound is None else self.bound.ratio(self.measured)

    @property
    def ok(self) -> bool:
        return self.ratio is None or self.ratio >= 1.0


class PartFailed(Exception):
    """A part ended without figures."""


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """How much each part does."""

    few_queued: int = 10_000
    many_queued: int = 1_000_000
    slices: int = 10_000
    steady_slices: int = 5_000
    ticks: int = 200
    seeds: int = 20


QUICK = Sizes(few_queued=100, many_queued=1_000, slices=100, steady_slices=50, ticks=5, seeds=1)


def run_part(name: str, command: list[str], environment: dict[str, str]) -> tuple[Any, float]:
    """A part's own report, and the processor time it took. Exit code 1 only says that it missed a bound itself."""
    print(f"bench-core: {name} …", file=sys.stderr, flush=True)
    before = os.times()
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=PART_S_MAX)
    except subprocess.TimeoutExpired:
        raise PartFailed(f"{name} took more than {PART_S_MAX} s") from None
    after = os.times()
    cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
    if done.returncode not in (0, 1):
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        raise PartFailed(f"{name} ended with {done.returncode}: {last}")
    try:
        return json.loads(done.stdout), cpu_s
    except json.JSONDecodeError:
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        raise PartFailed(f"{name} printed no report: {last}") from None


def store_rows(report: dict[str, Any]) -> list[Row]:
    rows = [
        Row(
            part=f"store, {figure['database']}",
            what=figure["what"],
            measured=figure["per_second"],
            unit="/s",
            bound=None if figure["floor"] is None else Bound(figure["floor"]),
        )
        for figure in report["figures"]
    ]
    for how, times in report.get("claims_per_procrastinate_claim", {}).items():
        rows.append(Row(part="store, postgres", what=f"claims {how}, per procrastinate's", measured=times, unit="×"))
    return rows


def tick_rows(few: dict[str, Any], many: dict[str, Any], steady: dict[str, Any]) -> list[Row]:
    where = f"tick, {many['slices']:,} slices"
    queued = f"{many['queued']:,} queued"
    growth = many["tick_p99_ms"] / few["tick_p99_ms"]
    return [
        Row(part=where, what=f"p99, {few['queued']:,} queued", measured=few["tick_p99_ms"], unit="ms"),
        Row(part=where, what=f"p99, {queued}", measured=many["tick_p99_ms"], unit="ms", bound=Bound(100.0, True)),
        Row(part=where, what="p99, the second per the first", measured=growth, unit="×", bound=Bound(1.5, True)),
        Row(part=where, what=f"memory, {queued}", measured=many["rss_mib"], unit="MiB", bound=Bound(1024.0, True)),
        Row(part=where, what=f"p99 of 100 submits, {queued}", measured=many["submit_100_p99_ms"], unit="ms"),
        Row(part=where, what="placing on all of them at once", measured=many["dispatch_s"] * 1e3, unit="ms"),
        Row(
            part=f"tick, {steady['running']:,} running",
            what="p99, nothing new (Iris: 257 ms)",
            measured=steady["steady_p99_ms"],
            unit="ms",
            bound=Bound(50.0, True),
        ),
    ]


def sim_rows(report: dict[str, Any], cpu_s: float) -> list[Row]:
    """Events are what the controller handles: ticks, messages, calls and commits. Per second of one core's time."""
    return [
        Row(
            part="simulator",
            what="events, all rules checked",
            measured=report["handled"] / cpu_s,
            unit="/s",
            bound=Bound(5000.0),
        ),
        Row(part="simulator", what="of which commits", measured=report["events"] / cpu_s, unit="/s"),
        Row(part="simulator", what="virtual time per real", measured=report["virtual_h"] * 3600 / cpu_s, unit="×"),
    ]


def scale_problems(many: dict[str, Any]) -> list[str]:
    """Rule L11, which only this run can put to the test."""
    body: dict[str, object] = {
        "queued": many["queued"],
        "tick_s": many["tick_p99_ms"] / 1e3,
        "submit_p99_s": many["submit_100_p99_ms"] / 1e3,
        "memory_bytes": int(many["rss_mib"] * (1 << 20)),
    }
    seen = Record(order=1, seq=0, t=0.0, kind="bench", subject="tick", body=body)
    report = check(History(world=[seen]), rules=["L11"])
    problems = [f"{violation.rule}: {violation.message}" for violation in report.violations]
    missing = missing_premises(report.premises, LANDED_ISSUE, where="bench")
    return problems + [f"rule {rule} never had a premise" for rule in missing]


class Bench:
    """Runs the parts and gathers rows, reports and problems; a part that fails does not stop the others."""

    def __init__(self, sizes: Sizes, environment: dict[str, str]) -> None:
        self.sizes = sizes
        self.rows: list[Row] = []
        self.problems: list[str] = []
        self.reports: dict[str, Any] = {}
        self._environment = environment

    def run(self) -> None:
        for part in (self._store, self._tick, self._simulator):
            try:
                part()
            except PartFailed as reason:
                self.problems.append(str(reason))

    def _store(self) -> None:
        report, _ = run_part("store", [sys.executable, str(HERE / "store.py"), "--json"], self._environment)
        self.reports["store"] = report
        self.rows += store_rows(report)
        if "postgres_missing" in report and self.judged:
            self.problems.append(f"no PostgreSQL figures: {report['postgres_missing']}")

    def _tick(self) -> None:
        few = self._tick_at(self.sizes.few_queued, self.sizes.slices)
        many = self._tick_at(self.sizes.many_queued, self.sizes.slices)
        steady = self._tick_at(self.sizes.few_queued, self.sizes.steady_slices)
        self.reports["tick"] = [few, many, steady]
        self.rows += tick_rows(few, many, steady)
        if self.judged:
            self.problems += scale_problems(many)

    def _tick_at(self, queued: int, slices: int) -> dict[str, Any]:
        name = f"tick with {queued:,} queued and {slices:,} slices"
        options = ["--queued", str(queued), "--slices", str(slices), "--ticks", str(self.sizes.ticks), "--json"]
        report, _ = run_part(name, [sys.executable, str(HERE / "tick.py"), *options], self._environment)
        found: dict[str, Any] = report
        return found

    def _simulator(self) -> None:
        command = [str(TPU), "sim", "check", "--seeds", str(self.sizes.seeds), "--workers", "1", "--json"]
        report, cpu_s = run_part("simulator", command, self._environment)
        self.problems += [f"seed {failure['seed']} broke {failure['rule']}" for failure in report["violations"]]
        self.reports["simulator"] = {**report, "violations": len(report["violations"]), "process_cpu_s": cpu_s}
        self.rows += sim_rows(report, cpu_s)

    @property
    def judged(self) -> bool:
        """A quick run is not judged by its figures."""
        return self.sizes != QUICK

    @property
    def ok(self) -> bool:
        return not self.problems and (not self.judged or all(row.ok for row in self.rows))


def table(rows: list[Row], *, judged: bool = True) -> str:
    lines = [f"{'PART':22} {'FIGURE':38} {'MEASURED':>12}      {'BOUND':>14} {'TIMES BETTER':>13}"]
    for row in rows:
        bound, better = "", ""
        if row.bound is not None and row.ratio is not None:
            bound = f"{'≤' if row.bound.at_most else '≥'} {row.bound.value:,.10g}"
            better = f"{row.ratio:.2f}" + ("" if row.ok or not judged else " MISSED")
        measured = f"{row.measured:,.0f}" if row.measured >= 100 else f"{row.measured:,.2f}"
        lines.append(f"{row.part:22} {row.what:38} {measured:>12} {row.unit:4} {bound:>14} {better:>13}".rstrip())
    return "\n".join(lines)


def as_json(bench: Bench) -> bytes:
    answer = {
        "ok": bench.ok,
        "judged": bench.judged,
        "problems": bench.problems,
        "machine": {
            "cores": os.cpu_count(),
            "processor": platform.machine(),
            "system": f"{platform.system()} {platform.release()}",
            "python": platform.python_version(),
        },
        "rows": [{**msgspec.to_builtins(row), "times_better": row.ratio, "ok": row.ok} for row in bench.rows],
        "reports": bench.reports,
    }
    return msgspec.json.format(msgspec.json.encode(answer), indent=1)


def main() -> int:
    parser = argparse.ArgumentParser(description="every figure that issue 2 promises, against its bound")
    parser.add_argument("--quick", action="store_true", help="small sizes, SQLite only, nothing judged")
    parser.add_argument("--out", type=Path, default=None, help="write figures and reports here as JSON")
    options = parser.parse_args()
    environment = dict(os.environ)
    if options.quick:
        environment.pop("PENSTOCK_TEST_POSTGRES", None)  # its half needs procrastinate, which only `make` installs
    bench = Bench(QUICK if options.quick else Sizes(), environment)
    bench.run()
    print(table(bench.rows, judged=bench.judged))
    for problem in bench.problems:
        print(f"problem: {problem}")
    if options.out is not None:
        options.out.write_bytes(as_json(bench))
    return 0 if bench.ok else 1


if __name__ == "__main__":
    sys.exit(main())
