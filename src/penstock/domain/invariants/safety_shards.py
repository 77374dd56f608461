"""Safety of work units: S7, each shard exactly once.

Called through `rules`. The bucket is the ledger, so everything here comes from the world: plans (`units` as
`[[unit, start, stop], …]`), accepted commit records (`objects` as `[[path, generation, checksum], …]`) and manifests
(`units` as `[[unit, start, stop, objects], …]`). What is missing from a line is not judged.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

import msgspec

from penstock.domain.invariants.finding import Finding
from penstock.domain.invariants.history import Record
from penstock.domain.invariants.indexed import Indexed

Objects = frozenset[tuple[str, str, str]]


class _Unit(msgspec.Struct, frozen=True):
    """One line of a plan or a manifest."""

    unit: str
    start: object
    stop: object
    objects: Objects


def _units(value: object) -> list[_Unit]:
    if not isinstance(value, list | tuple):
        return []
    units = []
    for line in value:
        fields: list[object] = [*line[:4]] if isinstance(line, list | tuple) else [line]
        fields += [None] * (4 - len(fields))
        units.append(_Unit(str(fields[0]), fields[1], fields[2], _objects(fields[3])))
    return units


def _objects(value: object) -> Objects:
    """Path, generation and checksum of each object a line names."""
    if not isinstance(value, list | tuple):
        return frozenset()
    return frozenset(
        (str(each[0]), str(each[1]), str(each[2]))
        for each in value
        if isinstance(each, list | tuple) and len(each) == 3
    )


def s7_shards_exactly_once(history: Indexed) -> Finding:
    """One accepted commit per unit; a complete dataset names each unit once and matches the plan and the bucket."""
    finding = Finding(rule="S7")
    plans = {record.subject: record for record in reversed(history.witnessed("shard.planned"))}
    commits: dict[str, dict[str, Record]] = defaultdict(dict)
    for record in history.witnessed("shard.committed"):
        finding.premises += 1
        run, _, unit = record.subject.rpartition("/")
        if unit in commits[run]:
            finding.broken("run", run, record.seq, f"unit {unit} was committed twice")
        else:
            commits[run][unit] = record
    _check_plans(finding, plans, commits)
    _check_bucket(finding, history, commits)
    for record in history.witnessed("dataset.complete"):
        finding.premises += 1
        plan = plans.get(record.subject)
        if plan is None:
            finding.broken("run", record.subject, record.seq, "complete without a plan")
        else:
            _check_manifest(finding, record, _units(plan.body.get("units")), commits[record.subject])
    return finding


def _check_plans(finding: Finding, plans: Mapping[str, Record], commits: Mapping[str, Mapping[str, Record]]) -> None:
    for run, plan in plans.items():
        units = _units(plan.body.get("units"))
        planned = {unit.unit for unit in units}
        for unit, record in commits.get(run, {}).items():
            if unit not in planned:
                finding.broken("run", run, record.seq, f"unit {unit} was committed but never planned")
        ranges = sorted(
            (unit.start, unit.stop) for unit in units if isinstance(unit.start, int) and isinstance(unit.stop, int)
        )
        rows = plan.body.get("rows")
        end = ranges[0][0] if ranges else 0
        if isinstance(rows, int) and ranges:
            end = 0
        for start, stop in ranges:
            if start != end or stop < start:
                finding.broken("run", run, plan.seq, f"ranges do not join at row {end}: next is {start}..{stop}")
            end = stop
        if isinstance(rows, int) and ranges and end != rows:
            finding.broken("run", run, plan.seq, f"ranges end at row {end} of {rows}")


def _check_bucket(finding: Finding, history: Indexed, commits: Mapping[str, Mapping[str, Record]]) -> None:
    """A commit record, and all that it names, were truly put, with that generation and checksum, before it."""
    if not commits:
        return
    stored: dict[tuple[str, str, str], Record] = {}
    kept: dict[tuple[str, str, str], Record] = {}
    for record in history.witnessed("object.put"):
        facts = (str(record.body.get("generation")), str(record.body.get("checksum")))
        stored.setdefault((record.subject, *facts), record)
        parts = record.subject.split("/", 2)
        if len(parts) == 3 and parts[0] == "runs":
            kept.setdefault((parts[1], *facts), record)
    for run, units in commits.items():
        for unit, commit in units.items():
            generation = str(commit.body.get("generation"))
            if (run, generation, str(commit.body.get("checksum"))) not in kept:
                finding.broken("run", run, commit.seq, f"the bucket never had the commit record of unit {unit}")
            for named in sorted(_objects(commit.body.get("objects"))):
                put = stored.get(named)
                if put is None or put.order > commit.order:
                    finding.broken(
                        "run", run, commit.seq, f"unit {unit} names generation {named[1]} of {named[0]}: never stored"
                    )


def _check_manifest(finding: Finding, complete: Record, planned: list[_Unit], commits: Mapping[str, Record]) -> None:
    run, seq = complete.subject, complete.seq
    lines = _units(complete.body.get("units"))
    named = Counter(line.unit for line in lines)
    for plan in planned:
        if named[plan.unit] != 1:
            finding.broken("run", run, seq, f"the manifest names unit {plan.unit} {named[plan.unit]} times")
        commit = commits.get(plan.unit)
        if commit is None or commit.order > complete.order:
            finding.broken("run", run, seq, f"complete although unit {plan.unit} was not committed")
    ranges = {plan.unit: (plan.start, plan.stop) for plan in planned}
    for line in lines:
        if line.unit not in ranges:
            finding.broken("run", run, seq, f"the manifest names unit {line.unit}, which was never planned")
            continue
        if (line.start, line.stop) != ranges[line.unit]:
            finding.broken("run", run, seq, f"unit {line.unit} covers other rows than planned")
        commit = commits.get(line.unit)
        if commit is not None and line.objects != _objects(commit.body.get("objects")):
            finding.broken("run", run, seq, f"unit {line.unit}: manifest and commit record differ")
