"""How large a workload the simulator plays, and what the learned zone order is worth.

`python bench/workload.py [--day] [--zones] [--seeds N] [--scale F] [--json]`. `--day` plays `examples/workloads/day.toml`
(ten thousand slices, a million jobs, one virtual day) and notes wall time and peak memory; `--zones` plays
`examples/workloads/zones.toml` in learned and in fixed order for many seeds. Without either, both.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import msgspec

from penstock.sim.workload import Progress, WorkloadResult, run_workload
from penstock.sim.workload_file import Workload, read_workload

EXAMPLES = Path(__file__).parent.parent / "examples" / "workloads"


def scaled(workload: Workload, share: float) -> Workload:
    """The same day with a share of the slices and of the jobs."""
    return msgspec.structs.replace(
        workload,
        zones=tuple(msgspec.structs.replace(zone, chips=round(zone.chips * share)) for zone in workload.zones),
        pools=tuple(msgspec.structs.replace(pool, max=round(pool.max * share)) for pool in workload.pools),
        jobs=tuple(msgspec.structs.replace(job, count=round(job.count * share)) for job in workload.jobs),
    )


def play_day(share: float) -> dict[str, object]:
    workload = scaled(read_workload(EXAMPLES / "day.toml"), share)
    started, cpu = time.perf_counter(), time.process_time()

    def show(at: Progress) -> None:
        if at.ended and round(at.virtual_h * 120) % 120 == 0:
            spent = time.perf_counter() - started
            print(f"{at.virtual_h:5.1f} h  {at.ended:>9,} of {at.jobs:,} jobs  {spent:6.0f} s", file=sys.stderr)

    result = run_workload(workload, show)
    spent = time.perf_counter() - started
    return {
        "slices_max": workload.pools[0].max,
        "wall_s": round(spent, 1),
        "cpu_s": round(time.process_time() - cpu, 1),
        "peak_rss_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        "events_per_s": round(result.events / spent),
        **msgspec.to_builtins(result),
    }


def play_zones(seed: int) -> tuple[WorkloadResult, WorkloadResult]:
    """One seed in learned and in fixed order."""
    path = EXAMPLES / "zones.toml"
    learned = run_workload(read_workload(path, seed=seed, order="learned"))
    return learned, run_workload(read_workload(path, seed=seed, order="fixed"))


def compare_zones(seeds: int) -> dict[str, object]:
    with ProcessPoolExecutor() as workers:
        pairs = list(workers.map(play_zones, range(seeds)))
    learned = statistics.mean(pair[0].makespan_h for pair in pairs)
    fixed = statistics.mean(pair[1].makespan_h for pair in pairs)
    return {
        "seeds": seeds,
        "learned_makespan_h": round(learned, 3),
        "fixed_makespan_h": round(fixed, 3),
        "saved": round(1 - learned / fixed, 4),
        "seeds_where_learned_was_shorter": sum(a.makespan_h < b.makespan_h for a, b in pairs),
        "learned_refusals": statistics.mean(pair[0].refusals for pair in pairs),
        "fixed_refusals": statistics.mean(pair[1].refusals for pair in pairs),
        "learned_usd": round(statistics.mean(pair[0].usd or 0.0 for pair in pairs), 2),
        "fixed_usd": round(statistics.mean(pair[1].usd or 0.0 for pair in pairs), 2),
        "unfinished": sum(one.unfinished for pair in pairs for one in pair),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--day", action="store_true", help="only the scale run")
    parser.add_argument("--zones", action="store_true", help="only learned against fixed order")
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the day's slices and jobs")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    figures: dict[str, dict[str, object]] = {}
    if asked.zones or not asked.day:
        figures["zones"] = compare_zones(asked.seeds)
    if asked.day or not asked.zones:
        figures["day"] = play_day(asked.scale)
    if asked.json:
        print(json.dumps(figures, indent=2))
    else:
        for name, row in figures.items():
            print(name)
            for key, value in row.items():
                print(f"  {key:<34} {value}")


if __name__ == "__main__":
    main()
