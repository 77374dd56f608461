"""Judges a storm by what others saw: the emulator's own history, and the objects that payloads wrote themselves.

`tools.storm` gathers the evidence, a test plants faults in it. Nothing here comes from Penstock but the outputs that
users would fetch, and those are compared with what an undisturbed run gives. Pure: the same evidence, the same word.
It must not excuse anything: what is not as promised is a line in `Verdict.violations`.
"""

from __future__ import annotations

import hashlib
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What was to be done, and what the project may hold."""

    tasks: int
    units: int  #: of each task, one after another
    quota_chips: int  #: in each zone
    slices: int  #: so many at once


class Happened(msgspec.Struct, frozen=True):
    """One line of the history of Cloud TPU."""

    t: float  #: seconds since the emulator began
    what: str
    name: str
    zone: str
    detail: dict[str, Any] = {}


class Change(msgspec.Struct, frozen=True):
    """One line of the history of Cloud Storage, in the order in which things happened."""

    verb: str
    name: str


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """What a payload wrote into an object."""

    fence: int
    at: float  #: seconds since the epoch
    host: str
    state: str = ""
    step: int = 0


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """All that is judged."""

    began_at: float  #: when the emulator did, in seconds since the epoch
    happened: tuple[Happened, ...]
    changes: tuple[Change, ...]
    said: dict[str, Said]  #: by object
    outputs: dict[int, str | None]  #: task -> the output a user gets; None: the job did not succeed
    kills: int = 0


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What the storm was like. Nothing here is good or bad by itself."""

    slices_made: int
    taken: int  #: by the provider; one that was told so may have been given back before
    noticed: int  #: of them
    kills: int
    attempts: int
    lost_attempts: int  #: whose host went, so that another had to begin
    unexplained: int  #: attempts that were followed by another though their host stayed
    units: int
    redone: int  #: units worked on again, because the checkpoint after them was lost
    again_median_s: float | None  #: from the loss, or the notice of it, until the next attempt begins
    again_max_s: float | None
    held_chips_max: dict[str, int]
    quota_refusals: int


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    violations: tuple[str, ...]
    figures: Figures


def chain(task: int, unit: int) -> str:
    """The state after so many units of an undisturbed run; payloads compute the same."""
    state = "seed"
    for number in range(1, unit + 1):
        state = hashlib.sha256(f"{state}/{task}/{number}".encode()).hexdigest()
    return state


def judge(work: Work, evidence: Evidence) -> Verdict:
    violations = [
        *_lost(work, evidence),
        *_twice(work, evidence),
        *_zombies(evidence),
        *_outputs(work, evidence),
        *_left_behind(evidence),
        *_over_quota(work, evidence),
        *_greedy(work, evidence),
    ]
    return Verdict(violations=tuple(violations), figures=_figures(evidence))


# --- units ---
def _planned(work: Work) -> Iterator[tuple[int, int]]:
    return ((task, unit) for task in range(work.tasks) for unit in range(1, work.units + 1))


def _lost(work: Work, evidence: Evidence) -> Iterator[str]:
    """Every unit is there, and was computed from the one before it."""
    for task, unit in _planned(work):
        said = evidence.said.get(f"units/{task}/{unit}")
        if said is None:
            yield f"unit {unit} of task {task} is lost"
        elif said.state != chain(task, unit):
            yield f"unit {unit} of task {task} was not computed from the one before it (fence {said.fence})"


def _twice(work: Work, evidence: Evidence) -> Iterator[str]:
    """A unit is written once, never taken away, and only what was planned is written."""
    planned = {f"units/{task}/{unit}" for task, unit in _planned(work)}
    seen: Counter[str] = Counter()
    for change in evidence.changes:
        if not change.name.startswith("units/"):
            continue
        if change.verb != "put":
            yield f"{change.name} was taken away ({change.verb})"
            continue
        seen[change.name] += 1
        if seen[change.name] == 2:
            yield f"{change.name} was committed twice"
        if change.name not in planned:
            yield f"{change.name} is no unit of the plan"
    for name in sorted(evidence.said):
        if name.startswith("clash/"):
            yield f"{name}: the unit was there with other content, or by a later attempt"


def _zombies(evidence: Evidence) -> Iterator[str]:
    """No attempt works on once a later one of its task has begun."""
    latest: dict[str, int] = {}
    for change in evidence.changes:
        kind, _, rest = change.name.partition("/")
        if kind not in ("begin", "work", "done") or change.verb != "put":
            continue
        task, fence = rest.split("/")[0], int(rest.rpartition("/")[2])
        if fence < latest.get(task, 0):
            yield f"{change.name}: attempt {latest[task]} of task {task} had begun before"
        latest[task] = max(fence, latest.get(task, 0))


def _outputs(work: Work, evidence: Evidence) -> Iterator[str]:
    """Every job succeeded, and its output is that of an undisturbed run."""
    ended = {int(name.split("/")[1]) for name in evidence.said if name.startswith("done/")}
    for task in range(work.tasks):
        found = evidence.outputs.get(task)
        if found is None:
            yield f"task {task} did not succeed"
        elif found != chain(task, work.units):
            yield f"the output of task {task} is not that of an undisturbed run"
        if task not in ended:
            yield f"task {task} never said that it was done"


# --- slices ---
def _left_behind(evidence: Evidence) -> Iterator[str]:
    """Every node that was made is gone, none was made twice under one name, and no host is up."""
    last: dict[str, str] = {}
    hosts: dict[tuple[str, str], str] = {}
    for each in evidence.happened:
        if each.what == "node.CREATING" and each.detail.get("chips"):
            if each.name in last:
                yield f"{each.name} was made twice"
            last[each.name] = each.what
        elif each.what.startswith("node.") and each.name in last:
            last[each.name] = each.what
        elif each.what in ("host.up", "host.down"):
            hosts[each.name, str(each.detail.get("incarnation"))] = each.what
    for name, what in sorted(last.items()):
        if what != "node.gone":
            yield f"{name} is left behind: {what}"
    for (name, incarnation), what in sorted(hosts.items()):
        if what == "host.up":
            yield f"host {incarnation} of {name} is left running"


def _holding(evidence: Evidence) -> Iterator[tuple[Happened, Mapping[str, int]]]:
    """Chips that the project held in each zone after every change of it: from the create until it is gone."""
    chips: dict[str, int] = {}
    held: dict[str, int] = defaultdict(int)
    for each in evidence.happened:
        if each.what == "node.CREATING" and each.detail.get("chips") and each.name not in chips:
            chips[each.name] = int(each.detail["chips"])
            held[each.zone] += chips[each.name]
        elif each.what == "node.gone" and each.name in chips:
            held[each.zone] -= chips.pop(each.name)
        else:
            continue
        yield each, held


def _over_quota(work: Work, evidence: Evidence) -> Iterator[str]:
    for each, held in _holding(evidence):
        if held[each.zone] > work.quota_chips:
            yield (
                f"quota of {each.zone}: {held[each.zone]} chips held at {each.t:.1f} s, {work.quota_chips} allowed "
                f"({each.name.rpartition('/')[2]})"
            )


def _greedy(work: Work, evidence: Evidence) -> Iterator[str]:
    """Nobody asks for more than the quota, what is on its way out not even counted. The provider would refuse it; but
    whoever asks has lost count."""
    serving: dict[str, tuple[str, int]] = {}
    for each in evidence.happened:
        if each.what == "node.CREATING" and each.detail.get("chips"):
            serving[each.name] = (each.zone, int(each.detail["chips"]))
        elif each.what in ("notice.preempted", "node.preempted", "node.DELETING", "node.gone"):
            serving.pop(each.name, None)
        elif each.what == "quota.refused":
            held = sum(chips for zone, chips in serving.values() if zone == each.zone)
            if held + int(each.detail["asked"]) > work.quota_chips:
                yield (
                    f"quota of {each.zone}: {each.detail['asked']} chips asked for at {each.t:.1f} s beside {held} "
                    f"that nobody gives back, {work.quota_chips} allowed"
                )


# --- what it was like ---
def _figures(evidence: Evidence) -> Figures:
    counts = Counter(each.what for each in evidence.happened)
    most: dict[str, int] = {}
    for each, held in _holding(evidence):
        most[each.zone] = max(most.get(each.zone, 0), held[each.zone])
    begins = _begins(evidence)
    gone_at = _gone_at(evidence)
    again: list[float] = []
    unexplained = 0
    for attempts in begins.values():
        for one, following in pairwise(attempts):
            lost_at = gone_at.get(one.host)
            if lost_at is not None and lost_at <= following.at:
                again.append(following.at - max(lost_at, one.at))
            else:
                unexplained += 1
    worked = Counter(name.rpartition("/")[0] for name in evidence.said if name.startswith("work/"))
    return Figures(
        slices_made=sum(each.what == "node.CREATING" and "chips" in each.detail for each in evidence.happened),
        taken=len({each.name for each in evidence.happened if each.what in ("node.preempted", "notice.preempted")}),
        noticed=counts["notice.preempted"],
        kills=evidence.kills,
        attempts=sum(map(len, begins.values())),
        lost_attempts=len(again),
        unexplained=unexplained,
        units=len(worked),
        redone=sum(worked.values()) - len(worked),
        again_median_s=statistics.median(again) if again else None,
        again_max_s=max(again, default=None),
        held_chips_max=most,
        quota_refusals=counts["quota.refused"],
    )


def _begins(evidence: Evidence) -> Mapping[str, Sequence[Said]]:
    """Of each task the attempts, as they said themselves, in the order of their fences."""
    found: dict[str, list[Said]] = defaultdict(list)
    for name, said in evidence.said.items():
        if name.startswith("begin/"):
            found[name.split("/")[1]].append(said)
    return {task: sorted(attempts, key=lambda each: each.fence) for task, attempts in found.items()}


def _gone_at(evidence: Evidence) -> dict[str, float]:
    """Host -> when it was taken away or told so, in seconds since the epoch."""
    names: dict[str, list[str]] = defaultdict(list)
    found: dict[str, float] = {}
    for each in evidence.happened:
        if each.what == "host.up":
            names[each.name].append(host_name(str(each.detail["incarnation"])))
        elif each.what in ("host.down", "notice.preempted"):
            for name in names[each.name]:
                found.setdefault(name, evidence.began_at + each.t)
    return found


def host_name(incarnation: str) -> str:
    """What a host calls itself, by the emulator's name of the machine."""
    number, index, _ = incarnation.split("-")
    return f"t1v-n-{int(number) & 0xFFFFFFFF:08x}-w-{index}"
