"""One plan for one tick: recovery, then admission, then growth, then settling; and why jobs are not running.

`controller.loop` calls `plan` with the snapshot its projection keeps and the time. Pure: the same snapshot gives the
same plan, in whatever order it was filled. It costs what is live, idle or at the head of a queue, not what waits.
"""

from __future__ import annotations

from penstock.planner.actions import Action, Plan
from penstock.planner.admission import admit
from penstock.planner.recovery import recover
from penstock.planner.scaling import grow, settle
from penstock.planner.snapshot import Snapshot


def plan(snapshot: Snapshot, now: float) -> Plan:
    """What to do now, in the order it should be tried.

    `reasons` holds the jobs this round looked at and did not start; `reasons.explain` answers for all others from the
    same snapshot, so that a tick does not write a sentence for every job that waits.
    """
    actions: list[Action] = list(recover(snapshot, now))
    admission = admit(snapshot, now, actions)
    intents, lacking = grow(snapshot, now, admission.wants)
    actions.extend(admission.actions)
    actions.extend(intents)
    actions.extend(settle(snapshot, now, set(admission.keep)))
    reasons = dict(admission.reasons)
    for job, why in lacking.items():
        # Admission knows how much of a gang stands ready; growth knows why the rest is not being made.
        if job in reasons and why.code != "creating_slices":
            reasons[job] = why
    return Plan(actions=tuple(actions), reasons=reasons)
