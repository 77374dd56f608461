"""The selftest's own rules: where probes go, what they may cost, when it waits, and that others lose nothing."""

from __future__ import annotations

import re

import msgspec
import pytest

from penstock.emulator.fact_places import LABEL, Place, moved
from penstock.emulator.facts import Expected, Fact, Step, body_of, known_facts
from penstock.emulator.http_words import Answer
from penstock.emulator.selftest import Selftest, Stuck
from penstock.emulator.selftest_plan import Costs, settled_before, unsuited

FACTS = known_facts()
PLACE = Place("my-project", "europe-west4-b", "ab12cd")


@pytest.mark.parametrize("name", [name for name in FACTS if name.startswith("tpu.")])
def test_a_moved_row_names_nothing_of_its_old_place(name: str) -> None:
    here = moved(FACTS[name], PLACE)
    for step in (*here.before, here.probe):
        text = f"{step.call} {msgspec.json.encode(body_of(step)).decode()}"
        assert "projects/p1" not in text
        assert re.search(r"nodes/(?!penstock-selftest-)\w|nodeId=(?!penstock-selftest-|a%2F)", text) is None, text
        if '"acceleratorType":' in text and name != "tpu.nodes.update":
            assert f'"{LABEL}":"ab12cd"' in text
    said = msgspec.json.encode(here.expect).decode()
    assert "projects/p1" not in said
    assert not re.search(r"nodes/(n1|n2|qn|np)", said)
    if here.zone == PLACE.zone:
        assert "us-central1-a" not in said


def test_costs_are_the_most_there_can_be() -> None:
    costs = Costs(60.0)
    one = costs.most(FACTS["tpu.nodes.created"])
    assert one == pytest.approx(8 * 1.2)  # v5e in the catalogue
    assert costs.most(FACTS["tpu.nodes.exists"]) == pytest.approx(2 * one), "a refusal may fail to come"
    assert costs.most(FACTS["tpu.queued.multislice"]) == pytest.approx(3 * one)
    assert costs.most(FACTS["tpu.queued.active"]) < one, "spot"
    assert costs.most(FACTS["tpu.types"]) == 0
    assert Costs(30.0).most(FACTS["tpu.nodes.created"]) == pytest.approx(one / 2)
    strange = msgspec.structs.replace(
        FACTS["tpu.nodes.create"], probe=Step("POST nodes?nodeId=n1", {"acceleratorType": "x"})
    )
    assert unsuited("tpu.x", strange, 10.0, True, costs) == "the catalogue has no price for what it makes"


@pytest.mark.parametrize(
    ("name", "waits"),
    [
        ("tpu.nodes.create", [True]),
        ("tpu.nodes.created", [True, True]),
        ("tpu.nodes.creating", [True, False]),
        ("tpu.nodes.deleting", [True, True, False]),
        ("tpu.nodes.maintenance", [True, True, False]),
        ("tpu.queued.provisioning", [True, False]),
        ("tpu.operations.cancel", [True, False, True]),
    ],
)
def test_where_reality_is_waited_for(name: str, waits: list[bool]) -> None:
    assert settled_before(FACTS[name]) == waits


class Cloud:
    """A service with one node of somebody's, that accepts everything and deletes what it wants."""

    def __init__(self, *, deletes: bool = True) -> None:
        self.asked: list[str] = []
        self.nodes = {"projects/my-project/locations/z/nodes/theirs": {"env": "prod"}}
        self.deletes = deletes
        self.time = 0.0

    def send(self, method: str, target: str, body: bytes, headers: dict[str, str]) -> Answer | None:
        assert isinstance(headers, dict)
        self.asked.append(f"{method} {target}")
        if method == "POST" and "nodeId=" in target:
            path, _, query = target.partition("?nodeId=")
            self.nodes[f"{path.split('/', 2)[2]}/{query}"] = msgspec.json.decode(body).get("labels", {})
        if method == "DELETE" and self.deletes:
            self.nodes.pop(target.removeprefix("/v2/"), None)
        if method == "GET" and target.endswith("/-/nodes"):
            return Answer(
                200, msgspec.json.encode({"nodes": [{"name": n, "labels": t} for n, t in self.nodes.items()]})
            )
        if method == "GET" and "/nodes/" in target:
            return Answer(200 if target.removeprefix("/v2/") in self.nodes else 404, b"{}")
        return Answer(200, b"{}")

    def sleep(self, seconds: float) -> None:
        self.time += seconds

    def test(self, budget: float = 100.0) -> Selftest:
        return Selftest(
            self.send, PLACE, now=lambda: self.time, sleep=self.sleep, budget_usd=budget, minutes=10.0, every_s=5.0
        )


def row(*calls: str, status: int = 200) -> Fact:
    steps = [Step(call, {"acceleratorType": "v5litepod-8"} if call.startswith("POST") else None) for call in calls]
    return Fact("x", "unknown", False, steps[-1], Expected(status=status), before=tuple(steps[:-1]))


def test_what_is_not_ours_is_never_changed() -> None:
    for call in ("DELETE nodes/theirs", "PATCH nodes/theirs?updateMask=labels", "POST nodes/theirs:stop"):
        cloud = Cloud()
        with pytest.raises(Stuck, match="'theirs', which is not ours"):
            cloud.test().check("tpu.x", row(call))
        assert {each.split(" ")[0] for each in cloud.asked} == {"GET"}
    cloud = Cloud()
    assert cloud.test().tidy() == []
    assert list(cloud.nodes) == ["projects/my-project/locations/z/nodes/theirs"]


def test_the_budget_is_counted_down() -> None:
    cloud = Cloud()
    fact = row("POST nodes?nodeId=n1", "GET nodes/n1", status=404)  # which it is not: it is asked until time is up
    test = cloud.test(budget=5.0)
    assert test.check("tpu.x", fact).verdict == "differs"
    assert cloud.time == pytest.approx(10 * 60, abs=15)
    assert test.spent_usd == pytest.approx(8 * 1.2 / 6, rel=0.05)
    assert test.check("tpu.x", fact).verdict == "differs"
    skipped = test.check("tpu.x", fact)
    assert (skipped.verdict, "may cost $2.40" in skipped.why) == ("skipped", True)
    assert len(cloud.nodes) == 1


def test_what_will_not_go_ends_the_run_and_is_named() -> None:
    cloud = Cloud(deletes=False)
    test = cloud.test()
    with pytest.raises(Stuck, match=r"not deleted within 5 minutes: .*penstock-selftest-ab12cd-n1"):
        test.check("tpu.x", row("POST nodes?nodeId=n1"))
    assert [name.rpartition("/")[2] for name in test.undeleted] == ["penstock-selftest-ab12cd-n1"]


def test_a_lost_answer_or_a_refused_beginning_is_no_difference() -> None:
    cloud = Cloud()
    real = cloud.send

    def refuse(method: str, target: str, body: bytes, headers: dict[str, str]) -> Answer | None:
        return Answer(429, b"quota of me@example.org") if method == "POST" else real(method, target, body, headers)

    cloud.send = refuse  # type: ignore[method-assign]
    fact = row("POST nodes?nodeId=n1", "GET nodes/n1")
    done = cloud.test().check("tpu.x", fact)
    assert (done.verdict, "429" in done.why, "me@example.org" in done.why) == ("blocked", True, False)
