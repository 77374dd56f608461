"""The storm, made short, and the proof that its judge can say no: each promise is broken once in the evidence.

The long form is `python -m tools.storm`, in `make soak` and `.ci/run`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tests.missing import need_machines
from tools.storm import Storm, Weather, forecast, no_storm, table
from tools.storm_judge import Change, Evidence, Happened, Said, Work, chain, judge

ZONE = "us-central1-a"
WORK = Work(tasks=2, units=3, quota_chips=8, slices=2)


def node(number: int) -> str:
    return f"projects/p1/locations/{ZONE}/nodes/s{number}"


def life(number: int, begin: float, end: float, *, preempted: bool = False) -> list[Happened]:
    """A node of four chips with one host, from its making until it is gone."""
    host = {"host": 0, "incarnation": f"{number}-0-abc"}
    states = [
        Happened(begin, "node.CREATING", node(number), ZONE, {"chips": 4, "spot": True}),
        Happened(begin + 1, "host.up", node(number), ZONE, host),
        Happened(begin + 1, "node.READY", node(number), ZONE),
        Happened(end - 2, "host.down", node(number), ZONE, host),
    ]
    if preempted:
        states += [
            Happened(end - 2, "node.preempted", node(number), ZONE, {"was": "READY"}),
            Happened(end - 2, "node.PREEMPTED", node(number), ZONE),
        ]
    return [
        *states,
        Happened(end - 1, "node.DELETING", node(number), ZONE),
        Happened(end, "node.gone", node(number), ZONE),
    ]


def good() -> Evidence:
    """Two tasks on two slices; one slice is lost after the second unit, whose checkpoint is lost with it."""
    happened = sorted(
        [*life(1, 0.0, 20.0, preempted=True), *life(2, 0.0, 60.0), *life(3, 21.0, 60.0)], key=lambda each: each.t
    )
    written: list[tuple[str, Said]] = []

    def says(name: str, fence: int, at: float, host: int, state: str = "") -> None:
        said = Said(fence=fence, at=1000.0 + at, host=f"t1v-n-{host:08x}-w-0", state=state)
        written.append((name, said))

    for task, fence, at, host, units in ((0, 1, 5.0, 1, (1, 2)), (1, 1, 5.0, 2, (1, 2, 3)), (0, 2, 25.0, 3, (2, 3))):
        says(f"begin/{task}/{fence}", fence, at, host)
        for unit in units:
            says(f"work/{task}/{unit}/{fence}", fence, at + unit, host)
            if (task, unit, fence) != (0, 2, 2):  # it was there: found with the same content, and left
                says(f"units/{task}/{unit}", fence, at + unit, host, chain(task, unit))
        if 3 in units:
            says(f"done/{task}/{fence}", fence, at + 4, host, chain(task, 3))
    return Evidence(
        began_at=1000.0,
        happened=tuple(happened),
        changes=tuple(Change("put", name) for name, _ in written),
        said=dict(written),
        outputs={task: chain(task, 3) for task in range(2)},
        kills=1,
    )


def test_what_went_well_is_called_so() -> None:
    verdict = judge(WORK, good())
    assert verdict.violations == ()
    seen = verdict.figures
    assert (seen.slices_made, seen.taken, seen.noticed, seen.kills) == (3, 1, 0, 1)
    assert (seen.attempts, seen.lost_attempts, seen.unexplained) == (3, 1, 0)
    assert (seen.units, seen.redone) == (6, 1)
    assert (seen.again_median_s, seen.held_chips_max) == (7.0, {ZONE: 8})
    assert "violations  0" in table(verdict)


def test_to_ask_while_something_is_on_its_way_out_is_no_violation() -> None:
    asked = Happened(19.5, "quota.refused", "projects/p1", ZONE, {"held": 8, "asked": 4})
    verdict = judge(WORK, with_happening(good(), asked))
    assert verdict.violations == ()
    assert verdict.figures.quota_refusals == 1


def without(evidence: Evidence, name: str) -> Evidence:
    said = {each: value for each, value in evidence.said.items() if each != name}
    changes = tuple(change for change in evidence.changes if change.name != name)
    return msgspec.structs.replace(evidence, said=said, changes=changes)


def with_change(evidence: Evidence, verb: str, name: str) -> Evidence:
    return msgspec.structs.replace(evidence, changes=(*evidence.changes, Change(verb, name)))


def saying(evidence: Evidence, name: str, said: Said) -> Evidence:
    return msgspec.structs.replace(evidence, said={**evidence.said, name: said})


def without_happening(evidence: Evidence, what: str, name: str) -> Evidence:
    left = tuple(each for each in evidence.happened if (each.what, each.name) != (what, name))
    return msgspec.structs.replace(evidence, happened=left)


def with_happening(evidence: Evidence, *more: Happened) -> Evidence:
    happened = sorted([*evidence.happened, *more], key=lambda each: each.t)
    return msgspec.structs.replace(evidence, happened=tuple(happened))


OTHER = Said(fence=1, at=1006.0, host="t1v-n-00000001-w-0", state=chain(0, 3))
FAULTS: dict[str, tuple[Callable[[Evidence], Evidence], str]] = {
    "a unit is lost": (lambda it: without(it, "units/0/2"), "unit 2 of task 0 is lost"),
    "a unit comes from nothing": (lambda it: saying(it, "units/0/2", OTHER), "was not computed from the one before"),
    "a unit is committed twice": (lambda it: with_change(it, "put", "units/1/3"), "units/1/3 was committed twice"),
    "a unit is taken away": (lambda it: with_change(it, "delete", "units/1/3"), "units/1/3 was taken away"),
    "a unit is invented": (lambda it: with_change(it, "put", "units/1/4"), "units/1/4 is no unit of the plan"),
    "a payload found another's unit": (lambda it: saying(it, "clash/0/2/1", OTHER), "clash/0/2/1"),
    "a zombie works on": (lambda it: with_change(it, "put", "work/0/3/1"), "attempt 2 of task 0 had begun before"),
    "a job fails": (
        lambda it: msgspec.structs.replace(it, outputs={**it.outputs, 1: None}),
        "task 1 did not succeed",
    ),
    "an output is wrong": (
        lambda it: msgspec.structs.replace(it, outputs={**it.outputs, 1: chain(1, 2)}),
        "the output of task 1",
    ),
    "a job ends before its work": (lambda it: without(it, "done/1/1"), "task 1 never said that it was done"),
    "a slice is left behind": (lambda it: without_happening(it, "node.gone", node(3)), "s3 is left behind"),
    "a host is left running": (lambda it: without_happening(it, "host.down", node(2)), "of " + node(2)),
    "a name is used again": (lambda it: with_happening(it, *life(1, 70.0, 80.0)), "s1 was made twice"),
    "the quota is exceeded": (lambda it: with_happening(it, *life(4, 15.0, 40.0)), "12 chips held at 15.0 s"),
    "more is asked for than the quota": (
        lambda it: with_happening(it, Happened(10.0, "quota.refused", "projects/p1", ZONE, {"held": 8, "asked": 4})),
        "4 chips asked for at 10.0 s beside 8",
    ),
    "a deleted slice counts until it is gone": (
        lambda it: with_happening(it, *life(4, 19.5, 40.0)),
        "12 chips held at 19.5 s",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_promise_is_seen(fault: str) -> None:
    plant, told = FAULTS[fault]
    assert any(told in line for line in judge(WORK, plant(good())).violations), judge(WORK, plant(good())).violations


def test_the_weather_comes_from_its_seed_and_is_as_hard_as_it_should_be() -> None:
    assert forecast(Weather()) == forecast(Weather())
    assert forecast(Weather(seed=2)) != forecast(Weather())
    several = [forecast(Weather(seed=seed)) for seed in range(100)]
    blows = [gust for gusts in several for gust in gusts if gust.what == "preempt"]
    assert 14 < len(blows) / len(several) < 16, "one in 20 s for 300 s"
    assert 0.4 < sum(gust.notice_s > 0 for gust in blows) / len(blows) < 0.6
    for gusts in several:
        assert [gust.what for gust in gusts if gust.what != "preempt"] == ["kill", "serve"] * 3


def test_a_calm_is_not_taken_for_a_storm() -> None:
    calm = Weather(seconds=1.0, kills=1)
    assert no_storm(calm, judge(WORK, good())) == ""
    assert "killed 1 times, not 3" in no_storm(Weather(), judge(WORK, good()))
    assert "preemptions struck" in no_storm(Weather(kills=1), judge(WORK, good()))


@pytest.mark.long
def test_a_short_storm_loses_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    need_machines()
    weather = Weather(seconds=45.0, every_s=9.0, kills=1, seed=17, units=10, unit_s=1.0)
    lines: list[str] = []
    verdict = Storm(weather, tmp_path / "storm", lines.append).run()
    assert verdict.violations == (), "\n".join([*lines, table(verdict)])
    assert no_storm(weather, verdict) == "", "\n".join([*lines, table(verdict)])
