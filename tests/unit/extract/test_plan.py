"""A run's id is its plan's hash: another plan is another run, and a plan that somebody changed is refused."""

from __future__ import annotations

import msgspec
import pytest

from penstock.domain import ledger
from penstock.domain.admission import BadInput
from penstock.extract import plan as plans
from penstock.extract.plan import load, make_plan, only_run, parse_address, publish, run_id
from tests.process.extraction import SITES, cheap_plan
from tests.unit.extract.cheap import calls_to, memory, run

WORK = {"model": "m", "b": 1, "a": (1, 2)}
PLAN = make_plan(rows=10, unit_rows=4, sites=SITES, dtype="bfloat16", work=WORK)


def test_the_id_follows_from_the_content_and_not_from_its_order() -> None:
    again = make_plan(rows=10, unit_rows=4, sites=SITES, dtype="bfloat16", work=dict(reversed(WORK.items())))
    assert again.run == PLAN.run
    others = [
        make_plan(rows=11, unit_rows=4, sites=SITES, dtype="bfloat16", work=WORK),
        make_plan(rows=10, unit_rows=5, sites=SITES, dtype="bfloat16", work=WORK),
        make_plan(rows=10, unit_rows=4, sites=SITES[:1], dtype="bfloat16", work=WORK),
        make_plan(rows=10, unit_rows=4, sites=SITES, dtype="float32", work=WORK),
        make_plan(rows=10, unit_rows=4, sites=SITES, dtype="bfloat16", work={**WORK, "model": "n"}),
    ]
    assert len({PLAN.run, *(other.run for other in others)}) == 6


def test_a_plan_is_published_once_and_read_back() -> None:
    calls = calls_to(memory())
    run(lambda: publish(calls, PLAN))
    run(lambda: publish(calls, PLAN))
    assert run(lambda: load(calls, PLAN.run)) == PLAN


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rows": 9}, "somebody changed it"),
        ({"run": "0" * 32}, "somebody changed it"),
        ({"format": 99}, "is of format 99"),
    ],
)
def test_a_changed_plan_is_refused(change: dict[str, object], said: str) -> None:
    calls = calls_to(memory())
    changed = msgspec.structs.replace(PLAN, **change)
    run(lambda: calls.put(ledger.plan_path(PLAN.run), plans.to_bytes(changed)))
    with pytest.raises(BadInput, match=said):
        run(lambda: load(calls, PLAN.run))
    with pytest.raises(BadInput, match=said):
        run(lambda: publish(calls, PLAN))


def test_sites_must_be_named_once() -> None:
    with pytest.raises(BadInput, match="one twice"):
        make_plan(rows=1, unit_rows=1, sites=("a", "a"), dtype="float32", work={})


def test_addresses() -> None:
    assert parse_address(f"gs://b/p/runs/{PLAN.run}/") == ("gs://b/p", PLAN.run)
    assert parse_address(f"/data/runs/{PLAN.run}") == ("/data", PLAN.run)
    assert parse_address("gs://b/p/") == ("gs://b/p", None)
    assert parse_address("/data/runs/mine") == ("/data/runs/mine", None)


def test_the_only_run_of_a_root() -> None:
    calls = calls_to(memory())
    with pytest.raises(BadInput, match="holds 0 runs"):
        run(lambda: only_run(calls, "gs://b"))
    run(lambda: publish(calls, PLAN))
    assert run(lambda: only_run(calls, "gs://b")) == PLAN.run == run_id(PLAN)
    run(lambda: publish(calls, cheap_plan()))
    with pytest.raises(BadInput, match="holds 2 runs; give one: gs://b/runs/"):
        run(lambda: only_run(calls, "gs://b"))
