"""How large a workload the simulator plays, and what the learned zone order is worth.

`python bench/workload.py [--day] [--zones] [--seeds N] [--scale F] [--json]`. `--day` plays day.toml of the example
workloads (ten thousand slices, a million jobs, one virtual day) and notes wall time and peak memory; `--zones` plays
zones.toml in learned and in fixed order for many seeds, going through all orders of its list, because nobody who writes
a list knows which zone is good; and flip.toml for how soon the learned order follows a change. Without either, both.
"""

from __future__ import annotations

import argparse
import itertools
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


def reordered(workload: Workload) -> Workload:
    """The same workload with its zones listed in another order: the seeds go through all orders in turn."""
    orders = list(itertools.permutations(zone.name for zone in workload.zones))
    names = orders[workload.seed % len(orders)]
    pools = tuple(msgspec.structs.replace(pool, zones=names) for pool in workload.pools)
    return msgspec.structs.replace(workload, pools=pools)


def play_zones(seed: int) -> tuple[WorkloadResult, WorkloadResult]:
    """One seed in learned and in fixed order."""
    path = EXAMPLES / "zones.toml"
    learned = run_workload(reordered(read_workload(path, seed=seed, order="learned")))
    return learned, run_workload(reordered(read_workload(path, seed=seed, order="fixed")))


def makespan_h(result: WorkloadResult) -> float:
    assert result.makespan_h is not None, f"seed {result.seed} left {result.unfinished} jobs unfinished"
    return result.makespan_h


def compare_zones(seeds: int) -> dict[str, object]:
    with ProcessPoolExecutor() as workers:
        pairs = list(workers.map(play_zones, range(seeds)))
    learned = statistics.mean(makespan_h(pair[0]) for pair in pairs)
    fixed = statistics.mean(makespan_h(pair[1]) for pair in pairs)
    return {
        "seeds": seeds,
        "learned_makespan_h": round(learned, 3),
        "fixed_makespan_h": round(fixed, 3),
        "saved": round(1 - learned / fixed, 4),
        "seeds_where_learned_was_shorter": sum(makespan_h(a) < makespan_h(b) for a, b in pairs),
        "learned_refusals": statistics.mean(pair[0].refusals for pair in pairs),
        "fixed_refusals": statistics.mean(pair[1].refusals for pair in pairs),
        "learned_usd": round(statistics.mean(pair[0].usd or 0.0 for pair in pairs), 2),
        "fixed_usd": round(statistics.mean(pair[1].usd or 0.0 for pair in pairs), 2),
    }


def tries_until_followed(seed: int) -> int:
    """Requests after the rates flip until most of the next ten go to the zone that is good by then."""
    workload = read_workload(EXAMPLES / "flip.toml", seed=seed)
    flips_at_h = max(zone.flips_at_h or 0.0 for zone in workload.zones)
    best = min(workload.zones, key=lambda zone: zone.refusal_rate_after if zone.flips_at_h else zone.refusal_rate).name
    zones: list[str] = []
    run_workload(workload, asked=lambda at_h, zone: zones.append(zone) if at_h >= flips_at_h else None)
    for tries in range(len(zones)):
        following = zones[tries : tries + 10]
        if following.count(best) > len(following) / 2:
            return tries
    return len(zones)


def follow_flips(seeds: int) -> dict[str, object]:
    with ProcessPoolExecutor() as workers:
        tries = sorted(workers.map(tries_until_followed, range(seeds)))
    return {"seeds": seeds, "tries_mean": statistics.mean(tries), "tries_max": tries[-1]}


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
        figures["flip"] = follow_flips(asked.seeds)
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
