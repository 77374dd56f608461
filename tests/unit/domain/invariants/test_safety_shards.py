"""S7 holds on a lawful run of shards and breaks on each way to lose, double or forge one."""

import pytest

from tests.unit.domain.invariants.scribe import Scribe

UNITS = [[0, 0, 10], [1, 10, 20]]


def objects(unit: int) -> list[list[object]]:
    return [[f"runs/r1/data/{unit}/a1/rows", 1, f"d{unit}"]]


def manifest(*units: int) -> list[list[object]]:
    return [[unit, unit * 10, unit * 10 + 10, objects(unit)] for unit in units]


def committed(scribe: Scribe, unit: int) -> None:
    scribe.world("shard.claimed", f"r1/{unit}", attempt="a1", fence=1)
    scribe.world("object.put", f"runs/r1/data/{unit}/a1/rows", generation=1, checksum=f"d{unit}", writer="a1")
    scribe.world("object.put", f"runs/r1/commits/{unit}", generation=1, checksum=f"c{unit}", writer="a1")
    recorded(scribe, unit)


def recorded(scribe: Scribe, unit: int, checksum: str = "") -> None:
    scribe.world(
        "shard.committed", f"r1/{unit}", attempt="a1", fence=1, generation=1, checksum=checksum or f"c{unit}",
        objects=objects(unit),
    )  # fmt: skip


@pytest.fixture
def run() -> Scribe:
    scribe = Scribe()
    scribe.world("shard.planned", "r1", units=UNITS, rows=20)
    return scribe


def test_each_unit_once(run: Scribe) -> None:
    committed(run, 0)
    committed(run, 1)
    run.world("dataset.complete", "r1", manifest="m", units=manifest(0, 1))
    assert run.premises("S7") == 3


def test_second_commit_accepted(run: Scribe) -> None:
    committed(run, 0)
    run.world("object.put", "runs/r1/commits/0", generation=2, checksum="c9", writer="a2")
    run.world("shard.committed", "r1/0", attempt="a2", fence=2, generation=2, checksum="c9")
    assert run.broken("S7") == ["unit 0 was committed twice"]


def test_complete_too_early(run: Scribe) -> None:
    committed(run, 0)
    run.world("dataset.complete", "r1", manifest="m", units=manifest(0, 1))
    committed(run, 1)
    assert run.broken("S7") == ["complete although unit 1 was not committed"]


@pytest.mark.parametrize("units", [(0,), (0, 1, 1)])
def test_manifest_names_a_unit_not_once(run: Scribe, units: tuple[int, ...]) -> None:
    committed(run, 0)
    committed(run, 1)
    run.world("dataset.complete", "r1", manifest="m", units=manifest(*units))
    assert run.broken("S7") == [f"the manifest names unit 1 {units.count(1)} times"]


def test_manifest_with_an_unplanned_unit(run: Scribe) -> None:
    committed(run, 0)
    committed(run, 1)
    run.world("dataset.complete", "r1", manifest="m", units=manifest(0, 1, 2))
    assert run.broken("S7") == ["the manifest names unit 2, which was never planned"]


def test_manifest_that_differs_from_the_commit_record(run: Scribe) -> None:
    committed(run, 0)
    committed(run, 1)
    lines = manifest(0, 1)
    lines[1][3] = [["runs/r1/data/1/a2/rows", 1, "forged"]]
    run.world("dataset.complete", "r1", manifest="m", units=lines)
    assert run.broken("S7") == ["unit 1: manifest and commit record differ"]


def test_manifest_with_other_rows(run: Scribe) -> None:
    committed(run, 0)
    committed(run, 1)
    lines = manifest(0, 1)
    lines[1][2] = 19
    run.world("dataset.complete", "r1", manifest="m", units=lines)
    assert run.broken("S7") == ["unit 1 covers other rows than planned"]


def test_a_commit_record_that_the_bucket_never_had(run: Scribe) -> None:
    committed(run, 0)
    run.world("object.put", "runs/r1/data/1/a1/rows", generation=1, checksum="d1", writer="a1")
    recorded(run, 1, checksum="other")
    assert run.broken("S7") == ["the bucket never had the commit record of unit 1"]


def test_a_commit_that_names_data_stored_later(run: Scribe) -> None:
    run.world("object.put", "runs/r1/commits/0", generation=1, checksum="c0", writer="a1")
    recorded(run, 0)
    run.world("object.put", "runs/r1/data/0/a1/rows", generation=1, checksum="d0", writer="a1")
    assert run.broken("S7") == ["unit 0 names generation 1 of runs/r1/data/0/a1/rows: never stored"]


def test_commit_of_an_unplanned_unit(run: Scribe) -> None:
    committed(run, 7)
    assert run.broken("S7") == ["unit 7 was committed but never planned"]


@pytest.mark.parametrize("units", [[[0, 0, 10], [1, 9, 20]], [[0, 0, 10], [1, 11, 20]], [[0, 0, 10], [1, 10, 19]]])
def test_ranges_overlap_leave_gaps_or_end_early(units: list[list[int]]) -> None:
    scribe = Scribe()
    scribe.world("shard.planned", "r1", units=units, rows=20)
    assert scribe.broken("S7")


def test_complete_without_a_plan() -> None:
    scribe = Scribe()
    scribe.world("dataset.complete", "r9", manifest="m", units=[])
    assert scribe.broken("S7") == ["complete without a plan"]
