"""The ledger's rules: claims, who won a create-if-absent, and what a whole run is."""

from __future__ import annotations

import hashlib

import msgspec
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from penstock.domain import ledger
from penstock.domain.ledger import (
    Commit,
    DataObject,
    Incomplete,
    Lease,
    Manifest,
    Plan,
    Put,
    SeenLease,
    Unit,
    Verdict,
    next_lease,
    settle,
)


def commit(unit: Unit, attempt: str = "a1", run: str = "r") -> Commit:
    path = ledger.data_path(run, unit.id, attempt, "rows")
    data = DataObject(path=path, generation=7, checksum="c")
    return Commit(unit=unit.id, attempt=attempt, fence=1, start=unit.start, stop=unit.stop, objects=(data,))


def whole(plan: Plan) -> dict[str, Commit]:
    return {unit.id: commit(unit) for unit in plan.units}


@given(rows=st.integers(0, 5000), unit_rows=st.integers(1, 700))
def test_a_split_is_disjoint_and_covers(rows: int, unit_rows: int) -> None:
    plan = ledger.split("r", rows, unit_rows)
    covered = [row for unit in plan.units for row in range(unit.start, unit.stop)]
    assert covered == list(range(rows))
    assert len({unit.id for unit in plan.units}) == len(plan.units)
    assert ledger.verify(plan, ledger.assemble(plan, whole(plan))) == ()


def test_units_may_be_cut_anywhere_but_each_has_a_row() -> None:
    plan = ledger.cut("r", [3, 4, 9])
    assert [(unit.id, unit.start, unit.stop) for unit in plan.units] == [
        ("u000000", 0, 3),
        ("u000001", 3, 4),
        ("u000002", 4, 9),
    ]
    assert plan.rows == 9
    with pytest.raises(ValueError, match="do not rise from 0"):
        ledger.cut("r", [3, 3, 9])


@pytest.mark.parametrize(("rows", "unit_rows"), [(-1, 10), (10, 0)])
def test_a_senseless_split_is_refused(rows: int, unit_rows: int) -> None:
    with pytest.raises(ValueError, match=r"rows must be 0 or more, unit_rows 1 or more"):
        ledger.split("r", rows, unit_rows)


def test_paths() -> None:
    assert ledger.plan_path("r") == "runs/r/plan.json"
    assert ledger.lease_path("r", "u1", 3) == "runs/r/leases/u1/000003"
    assert ledger.lease_number(ledger.lease_path("r", "u1", 3)) == 3
    assert ledger.data_path("r", "u1", "a1", "rows") == "runs/r/data/u1/a1/rows"
    assert ledger.commit_path("r", "u1") == "runs/r/commits/u1"
    assert ledger.commit_path("r", "u1", 2) == "runs/r/commits/u1.2"
    assert ledger.void_path("r", "u1", 0) == "runs/r/commits/void/u1"
    assert ledger.void_path("r", "u1", 2) == "runs/r/commits/void/u1.2"


@pytest.mark.parametrize(
    ("names", "edition", "committed"),
    [
        ([], 0, False),
        (["u1"], 0, True),
        (["u1", "void/u1"], 1, False),
        (["u1", "u1.1", "void/u1"], 1, True),
        (["u1", "u1.1", "void/u1", "void/u1.1"], 2, False),
        (["u1", "u1.1"], 0, True),  # the void was made after the listing had passed by
        (["u1", "void/u10", "void/u1.x", "notes/u1"], 0, True),
        (["u10", "u1.x", "notes/u1"], 0, False),
    ],
)
def test_which_commit_counts_is_told_by_names_alone(names: list[str], edition: int, committed: bool) -> None:
    found = ledger.editions("r", [f"runs/r/commits/{name}" for name in names])
    assert (found.of("u1"), "u1" in found.committed) == (edition, committed)


def test_leases_of_before_they_said_their_length_are_read() -> None:
    old = b'{"unit":"u1","attempt":"a-1","fence":2}'
    lease = ledger.decode_lease(old)
    assert lease == ledger.Lease(unit="u1", attempt="a-1", fence=2)
    assert ledger.encode(lease) == old


def test_a_prefix_of_one_unit_does_not_catch_another() -> None:
    assert not ledger.lease_path("r", "u10", 0).startswith(ledger.leases_prefix("r", "u1"))


@pytest.mark.parametrize(
    ("existing", "now", "expected"),
    [
        ([], 0.0, 0),
        ([(0, 0.0)], 59.9, None),
        ([(0, 0.0)], 60.0, 1),
        ([(1, 50.0), (0, 0.0)], 100.0, None),
        ([(0, 0.0), (1, 50.0)], 110.0, 2),
        ([(2, 0.0), (0, 500.0)], 60.0, 3),
    ],
)
def test_the_newest_lease_decides(existing: list[tuple[int, float]], now: float, expected: int | None) -> None:
    leases = [SeenLease(number=number, since=since) for number, since in existing]
    assert next_lease(leases, now, 60.0) == expected


@pytest.mark.parametrize(
    ("put", "holder", "expected"),
    [
        (Put.CREATED, None, Verdict.WON),
        (Put.TAKEN, "me", Verdict.WON),
        (Put.TAKEN, "other", Verdict.LOST),
        (Put.TAKEN, None, Verdict.AGAIN),
        (Put.UNKNOWN, "me", Verdict.WON),
        (Put.UNKNOWN, "other", Verdict.LOST),
        (Put.UNKNOWN, None, Verdict.AGAIN),
    ],
)
def test_settle(put: Put, holder: str | None, expected: Verdict) -> None:
    assert settle(put, holder, "me") is expected


@given(
    tries=st.lists(
        st.tuples(st.sampled_from(["a", "b", "c"]), st.sampled_from(["ok", "lost_request", "lost_reply"])),
        max_size=30,
    )
)
def test_one_winner_whatever_replies_are_lost(tries: list[tuple[str, str]]) -> None:
    """A create-if-absent register; every writer settles by what it was told and what it reads back."""
    record: str | None = None
    verdicts: dict[str, set[Verdict]] = {}
    for writer, fate in tries:
        created = record is None and fate != "lost_request"
        taken = record is not None and fate != "lost_request"
        if created:
            record = writer
        put = Put.UNKNOWN if fate != "ok" else Put.TAKEN if taken else Put.CREATED
        verdicts.setdefault(writer, set()).add(settle(put, None if put is Put.CREATED else record, writer))
    winners = {writer for writer, said in verdicts.items() if Verdict.WON in said}
    assert winners == ({record} if record is not None else set())
    assert all({Verdict.WON, Verdict.LOST} - said for said in verdicts.values())


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["w1", "w2"]), st.booleans(), st.floats(0.0, 200.0)), min_size=1, max_size=40
    )
)
def test_two_workers_never_hold_the_same_lease(steps: list[tuple[str, bool, float]]) -> None:
    """Each step: a worker looks, some time passes, it tries to create the number it saw as next."""
    now = 0.0
    leases: dict[int, tuple[str, float]] = {}
    looked: dict[str, int | None] = {}
    held: dict[int, set[str]] = {}
    for worker, look, wait in steps:
        now += wait
        if look or worker not in looked:
            seen = [SeenLease(number=number, since=since) for number, (_, since) in leases.items()]
            looked[worker] = next_lease(seen, now, 60.0)
            continue
        number = looked.pop(worker)
        if number is None:
            continue
        created = number not in leases
        if created:
            leases[number] = (worker, now)
        if settle(Put.CREATED if created else Put.TAKEN, leases[number][0], worker) is Verdict.WON:
            held.setdefault(number, set()).add(worker)
    assert all(len(workers) == 1 for workers in held.values())
    assert sorted(leases) == list(range(len(leases)))


def test_records_survive_their_bytes() -> None:
    plan = ledger.split("r", 25, 10)
    manifest = ledger.assemble(plan, whole(plan))
    lease = Lease(unit="u", attempt="a", fence=3)
    assert ledger.decode_plan(ledger.encode(plan)) == plan
    assert ledger.decode_lease(ledger.encode(lease)) == lease
    assert ledger.decode_commit(ledger.encode(manifest.units[0])) == manifest.units[0]
    assert ledger.decode_manifest(ledger.encode(manifest)) == manifest


def test_a_manifest_is_named_by_its_content() -> None:
    plan = ledger.split("r", 20, 10)
    first = ledger.assemble(plan, whole(plan))
    reordered = dict(reversed(whole(plan).items()))
    assert ledger.manifest_path("r", ledger.assemble(plan, reordered)) == ledger.manifest_path("r", first)
    other = {**whole(plan), "u000000": commit(plan.units[0], attempt="a2")}
    assert ledger.manifest_path("r", ledger.assemble(plan, other)) != ledger.manifest_path("r", first)


def test_an_unfinished_run_has_no_manifest() -> None:
    plan = ledger.split("r", 30, 10)
    commits = whole(plan)
    del commits["u000001"]
    assert [unit.id for unit in ledger.open_units(plan, commits)] == ["u000001"]
    with pytest.raises(Incomplete, match="u000001"):
        ledger.assemble(plan, commits)


def test_a_commit_of_other_rows_spoils_the_manifest() -> None:
    plan = ledger.split("r", 30, 10)
    commits = whole(plan)
    commits["u000001"] = msgspec.structs.replace(commits["u000001"], stop=25)
    with pytest.raises(Incomplete, match="covers rows 10:25"):
        ledger.assemble(plan, commits)


def test_verify_names_what_is_wrong() -> None:
    plan = ledger.split("r", 30, 10)
    units = tuple(commit(unit) for unit in plan.units)

    def problems(*commits: Commit, run: str = "r") -> str:
        return " | ".join(ledger.verify(plan, Manifest(run=run, rows=30, units=commits)))

    assert problems(*units) == ""
    assert "u000002 is missing" in problems(*units[:2])
    assert "the ranges end at row 20" in problems(*units[:2])
    assert "u000000 is named twice" in problems(*units, units[0])
    assert "overlaps" in problems(*units, units[0])
    assert "rows 10:20 are missing" in problems(units[0], units[2])
    assert "is not in the plan" in problems(*units, commit(Unit("u9", 30, 40)))
    assert "the manifest is of q" in problems(*units, run="q")
    foreign = msgspec.structs.replace(units[0], attempt="a2")
    assert "not of its attempt a2" in problems(foreign, *units[1:])


@pytest.mark.parametrize("change", ["generation", "checksum", "gone"])
def test_verify_compares_with_the_bucket(change: str) -> None:
    plan = ledger.split("r", 20, 10)
    manifest = ledger.assemble(plan, whole(plan))
    stored = {data.path: (data.generation, data.checksum) for each in manifest.units for data in each.objects}
    assert ledger.verify(plan, manifest, stored) == ()
    path = manifest.units[0].objects[0].path
    match change:
        case "generation":
            stored[path] = (8, "c")
        case "checksum":
            stored[path] = (7, "d")
        case _:
            del stored[path]
    assert ledger.verify(plan, manifest, stored) == (f"{path} is not in the bucket as it was committed",)


@pytest.mark.parametrize("size", [1, ledger.BLOCK_BYTES, ledger.BLOCK_BYTES + 1, 2 * ledger.BLOCK_BYTES])
@pytest.mark.parametrize("kind", [ledger.BLOCKS_KIND, ledger.FAST_KIND])
def test_checksums_of_all_kinds_are_known(size: int, kind: str) -> None:
    data = bytes(range(251)) * (size // 251 + 1)
    data = data[:size]
    blocks = [data[at : at + ledger.BLOCK_BYTES] for at in range(0, size, ledger.BLOCK_BYTES)]
    make = hashlib.sha256 if kind == ledger.BLOCKS_KIND else blake3
    by_blocks = ledger.checksum_of_blocks([make(block).digest() for block in blocks], kind)
    assert by_blocks == kind + hashlib.sha256(b"".join(make(block).digest() for block in blocks)).hexdigest()
    assert ledger.matches(data, ledger.checksum(data))
    assert ledger.matches(data, by_blocks)
    assert not ledger.matches(data + b"x", ledger.checksum(data))
    assert not ledger.matches(data + b"x", by_blocks)
    assert not ledger.matches(data, by_blocks.removeprefix(kind))
