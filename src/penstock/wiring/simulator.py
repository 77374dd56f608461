"""The simulator as commands use it: seeds under faults, planted bugs, and workloads. Picks nothing, hides nothing."""

from __future__ import annotations

from penstock.sim.bugs import BUGS
from penstock.sim.check import COVERING_SEEDS, Caught, Report, SeedReport, catch, check_seeds
from penstock.sim.tally import ZoneSums
from penstock.sim.workload import Progress, WorkloadResult, run_workload
from penstock.sim.workload_file import read_workload

__all__ = [
    "BUGS",
    "COVERING_SEEDS",
    "Caught",
    "Progress",
    "Report",
    "SeedReport",
    "WorkloadResult",
    "ZoneSums",
    "catch",
    "check_seeds",
    "read_workload",
    "run_workload",
]
