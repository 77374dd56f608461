"""What is refused before it becomes a noun: each refusal in one line with field, value, rule and what to do."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.domain import limits
from penstock.domain.admission import BadInput, body_hash, check_queue, normal_pool, normal_spec
from penstock.domain.nouns import JobSpec, Pool, Queue, Replicas, Resources, Rule, Snippet


def spec(accelerators: tuple[str, ...] = ("v5e-8",), slices: int = 1, **changes: Any) -> JobSpec:
    wanted: dict[str, Any] = {"team": "lab", "queue": "main", **changes}
    return JobSpec(resources=Resources(accelerators=accelerators, chips=0, slices=slices), **wanted)


def pool(**changes: Any) -> Pool:
    wanted: dict[str, Any] = {
        "name": "p", "team": "lab", "provider": "fake", "accelerator": "v5e-8", "zones": ("z1",), **changes,
    }  # fmt: skip
    return Pool(chips=0, hosts=0, **wanted)


def test_names_of_accelerators_become_canonical_and_bring_their_chips() -> None:
    checked = normal_spec(spec(("v5litepod-16", "v4-32")))
    assert checked.resources.accelerators == ("v5e-16", "v4-32")
    assert checked.resources.chips == 16
    assert normal_spec(checked) == checked


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (spec(team=""), "team: '' is empty; give a name"),
        (spec(queue="a\x00b"), r"queue: 'a\x00b' has control or invisible characters; remove them"),
        (spec(name="x" * 129), f"name: '{'x' * 56}… is longer than 128 characters; shorten it"),
        (spec(user="a\u202eb"), r"user: 'a\u202eb' has control or invisible characters; remove them"),
        (spec(priority=1001), "priority: 1001 is not between -1000 and 1000"),
        (spec(timeout_s=float("nan")), "timeout_s: nan is not between 1 and 2.592e+06"),
        (spec(timeout_s=float("inf")), "timeout_s: inf is not between 1 and 2.592e+06"),
        (spec(timeout_s=0), "timeout_s: 0 is not between 1 and 2.592e+06"),
        (spec(timeout_s=60, expected_s=61), "expected_s: 61 is not between 0 and 60"),
        (spec(slices=0), "resources.slices: 0 is not between 1 and 256"),
        (spec(replicas=Replicas(1, 1001)), "replicas.max: 1001 is not between 1 and 1000"),
        (spec(replicas=Replicas(3, 2)), "replicas.min: 3 is not between 1 and 2"),
        (spec(rule=Rule(failure_budget=-1)), "rule.failure_budget: -1 is not between 0 and 10000"),
        (spec(rule=Rule(infra_budget=10_001)), "rule.infra_budget: 10001 is not between 0 and 10000"),
        (
            spec(rule=Rule(preset="always")),
            "rule.preset: 'always' is not one of pass, pre, reapply, rerun, resume",
        ),
        (spec(tags=("t",) * 65), "tags: 65 tags are more than 64"),
        (spec(tags=("",)), "tags: '' is empty; give a name"),
        (spec(outputs=("a", "a")), "outputs: ('a', 'a') names an output twice"),
        (
            spec(payload=Snippet("x" * (limits.CODE_BYTES_MAX + 1))),
            "payload.code: '1048577 characters' is over 1 MiB; use a snapshot",
        ),
        (spec(()), "resources.accelerators: () is empty; name one, such as v5e-8"),
    ],
)
def test_a_bad_spec_is_refused_with_field_value_and_rule(wanted: JobSpec, message: str) -> None:
    with pytest.raises(BadInput) as caught:
        normal_spec(wanted)
    assert str(caught.value) == message
    assert message.startswith(f"{caught.value.field}: ")


def test_an_unknown_accelerator_names_the_nearest() -> None:
    with pytest.raises(BadInput, match=r"resources\.accelerators: 'v5e-9' is not a known accelerator: .*v5e-8"):
        normal_spec(spec(("v5e-9",)))


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (pool(name=""), "name: '' is empty; give a name"),
        (pool(max=-1), "max: -1 is not between 0 and 100000"),
        (pool(min=2, max=1), "min: 2 is not between 0 and 1"),
        (pool(idle_s=-1.0), "idle_s: -1.0 is not between 0 and 3.1536e+07"),
        (pool(race=5), "race: 5 is not between 1 and 4"),
        (pool(zones=()), "zones: () is empty; name at least one zone"),
        (pool(zones=("a", "a")), "zones: ('a', 'a') names a zone twice"),
        (pool(zones=("a", "b"), max=3, per_zone=2), "per_zone: 2 in 2 zones is more than max 3"),
    ],
)
def test_a_bad_pool_is_refused(wanted: Pool, message: str) -> None:
    with pytest.raises(BadInput) as caught:
        normal_pool(wanted)
    assert str(caught.value) == message


def test_a_pool_gets_shape_and_price_of_its_accelerator() -> None:
    dear, cheap = normal_pool(pool()), normal_pool(pool(spot=True))
    assert (dear.chips, dear.hosts) == (8, 1)
    assert dear.usd_per_chip_hour is not None
    assert cheap.usd_per_chip_hour is not None
    assert cheap.usd_per_chip_hour < dear.usd_per_chip_hour


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight": 0.0}, "weight: 0.0 is not between 0.001 and 1e+06"),
        ({"weight": float("nan")}, "weight: nan is not between 0.001 and 1e+06"),
        ({"band": 101}, "band: 101 is not between -100 and 100"),
        ({"quota_chips": -1}, "quota_chips: -1 is not between 0 and 1e+07"),
        ({"borrow_chips": 10_000_001}, "borrow_chips: 10000001 is not between 0 and 1e+07"),
        ({"name": ""}, "name: '' is empty; give a name"),
    ],
)
def test_a_bad_queue_is_refused(changes: dict[str, Any], message: str) -> None:
    wanted: dict[str, Any] = {"name": "q", "team": "lab", **changes}
    with pytest.raises(BadInput) as caught:
        check_queue(Queue(**wanted))
    assert str(caught.value) == message


@given(st.text(max_size=300))
def test_any_name_is_taken_as_it_is_or_refused_in_one_line(name: str) -> None:
    if name.isprintable() and len(name) <= limits.NAME_CHARACTERS_MAX:
        assert normal_spec(spec(name=name)).name == name
        return
    with pytest.raises(BadInput) as caught:
        normal_spec(spec(name=name))
    assert caught.value.field == "name"
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


def test_the_hash_tells_requests_apart_and_not_their_order_of_keys() -> None:
    first = spec(env={"a": "1", "b": "2"})
    assert body_hash(first) == body_hash(spec(env={"b": "2", "a": "1"}))
    others = [spec(env={"a": "1"}), spec(priority=1), spec(payload=Snippet("x")), spec(after=("j1",)), spec(("v4-8",))]
    assert len({body_hash(each) for each in (first, *others)}) == 6
