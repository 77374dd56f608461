"""Liveness of capacity: L1 (a free slice is used) and L4 (nothing leaks).

Called through `rules`. L1 speaks only of the clear case, so that it is never wrong: jobs of one slice and one replica
that name no pool, zone or spot wish, in queues without quota and not longer than the planner's window, that never
failed; and only while no other kind of job of the team waits, because a gang may have slices held for it.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import islice
from math import inf

from penstock.domain import limits
from penstock.domain.invariants.facts import JobFacts, blockers, text, texts
from penstock.domain.invariants.finding import Finding
from penstock.domain.invariants.history import Record
from penstock.domain.invariants.indexed import Indexed
from penstock.domain.invariants.liveness import MARGIN_S
from penstock.domain.nouns import Event

PLACED_S = 2 * limits.TICK_S + MARGIN_S
#: Two complete listings that far apart, the listing before them, and the calls.
_PROOF_S = limits.GONE_LISTINGS_APART_S + 2 * limits.LIST_EVERY_S + limits.CALL_TIMEOUT_S
ORPHAN_DELETED_S = limits.ORPHAN_S + _PROOF_S
INTENT_RESOLVED_S = limits.CREATE_TIMEOUT_S + limits.ORPHAN_S + _PROOF_S
#: How many partners of a pair are looked at; the oldest come first, and one late pair is enough to accuse.
_PARTNERS = 8

_JOB_KINDS = (
    "job.created", "job.unblocked", "job.released", "job.placed", "job.requeued", "job.cancel_requested",
    "job.succeeded", "job.failed", "job.cancelled",
)  # fmt: skip
_SLICE_KINDS = (
    "slice.intended", "slice.ready", "slice.bound", "slice.released", "slice.draining",
    "slice.preempted", "slice.failed", "slice.deleting", "slice.reserved", "slice.unreserved",
)  # fmt: skip
_SETTING_KINDS = (
    "queue.created", "queue.edited", "queue.deleted", "control.edited", "pool.reserved", "pool.unreserved",
)  # fmt: skip
_WORLD_KINDS = ("agent.silent", "agent.heard", "vm.preempted", "vm.deleted")
_WISHES = ("pool", "zones", "spot", "memory_bytes")


def queue_is_plain(body: dict[str, object]) -> bool:
    """Whether a queue neither owns nor limits chips, has no budget and is not paused."""
    return body.get("quota_chips") is None and not body.get("paused") and body.get("budget") is None


def accelerators_if_clear(job: JobFacts) -> tuple[str, ...]:
    """The accelerators a clear-case job takes; empty for every other job."""
    return texts(job.body, "accelerators") if job.single and has_no_wishes(job) else ()


def has_no_wishes(job: JobFacts) -> bool:
    """Whether any slice of the right accelerator will do."""
    return all(job.body.get(wish) in (None, [], (), "") for wish in _WISHES)


class _Floor:
    """Which slices are free and which jobs wait, replayed; told when a free slice or a waiting job goes."""

    def __init__(self, history: Indexed, finding: Finding) -> None:
        self._history = history
        self._finding = finding
        self._kinds: dict[str, tuple[str, str]] = {}  #: slice -> (team, accelerator)
        self._pools: dict[str, str] = {}
        self._reserved_pools: set[str] = set()
        self._spoilt: dict[str, set[str]] = defaultdict(set)  #: slice -> why it is not to be used
        self._free: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
        self._waiting: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
        self._blocked: dict[str, int] = {}  #: job -> jobs it waits for, and its array
        self._others: dict[str, set[str]] = defaultdict(set)  #: team -> waiting jobs that are not the clear case
        self._clear_since: dict[str, float] = defaultdict(lambda: -inf)
        self._queued: dict[str, set[str]] = defaultdict(set)
        self._short_since: dict[str, float] = defaultdict(lambda: -inf)
        self._plain: dict[str, bool] = {}
        self._working_since = -inf  #: not in maintenance since

    # --- settings ---
    def set(self, event: Event, t: float) -> None:
        if event.kind == "control.edited":
            self._working_since = inf if event.body.get("maintenance") else t
            return
        if event.entity == "pool":
            # Whose jobs may use it, and until when, only the controller knows: its slices are left out for good.
            self._reserved_pools.add(event.id)
            for id, pool in self._pools.items():
                if pool == event.id:
                    self._spoil(id)
            return
        if "quota_chips" in event.body:
            self._plain[event.id] = queue_is_plain(event.body)
        # A changed queue is given a fresh start: which of its jobs are clear may have changed with it.
        self._short_since[event.id] = t

    # --- jobs ---
    def job(self, event: Event, t: float) -> None:
        facts = self._history.jobs[event.id]
        if event.kind == "job.created":
            self._blocked[event.id] = blockers(event)
            self._wait(facts, t)
        elif event.kind in ("job.unblocked", "job.released"):
            self._blocked[event.id] = self._blocked.get(event.id, 0) - 1 + bool(event.body.get("held"))
            self._wait(facts, t)
        elif event.kind == "job.requeued":
            # After anything but a preemption the job sits out a back-off, whose end only the controller knows.
            # That end is stored as a time, which a bent clock may have set ahead even for a wait of nothing.
            # A gang keeps slices even then (ADR 0005), so it counts as waiting whatever the cause.
            if text(event.body, "cause") == "preempted" or not facts.single:
                self._wait(facts, max(t, event.at))
        else:
            self._leave(facts, t)

    def _wait(self, job: JobFacts, t: float) -> None:
        if self._blocked.get(job.id, 0) > 0:
            return
        team, queue = text(job.body, "team"), text(job.body, "queue")
        accelerators = accelerators_if_clear(job)
        self._queued[queue].add(job.id)
        if len(self._queued[queue]) > limits.WINDOW_JOBS:
            self._short_since[queue] = inf
        if accelerators and self._plain.get(queue, True):
            for accelerator in accelerators:
                self._waiting[team, accelerator][job.id] = t
        elif not job.single or not self._plain.get(queue, True):
            self._others[team].add(job.id)

    def _leave(self, job: JobFacts, t: float) -> None:
        team, queue = text(job.body, "team"), text(job.body, "queue")
        for accelerator in texts(job.body, "accelerators"):
            since = self._waiting[team, accelerator].pop(job.id, None)
            if since is not None:
                for slice, free in islice(self._free[team, accelerator].items(), _PARTNERS):
                    self._judge(slice, job.id, max(since, free), t)
        queued = self._queued[queue]
        queued.discard(job.id)
        if self._short_since[queue] == inf and len(queued) <= limits.WINDOW_JOBS:
            self._short_since[queue] = t
        others = self._others[team]
        if job.id in others:
            others.discard(job.id)
            self._clear_since[team] = t

    # --- slices ---
    def slice(self, event: Event, t: float) -> None:
        id, kind = event.id, event.kind
        if kind == "slice.intended":
            self._kinds[id] = (text(event.body, "team"), text(event.body, "accelerator"))
            self._pools[id] = text(event.body, "pool")
            if self._pools[id] in self._reserved_pools:
                self._spoil(id)
        elif kind in ("slice.reserved", "slice.unreserved"):
            self._spoil(id)
        elif kind in ("slice.ready", "slice.released"):
            if kind == "slice.released" and not event.body.get("clean"):
                self._spoilt[id].add("dirty")
            self._offer(id, t)
        else:
            if kind != "slice.bound":
                self._spoilt[id].add("leaving")
            self._withdraw(id, t)

    def world(self, record: Record) -> None:
        """What the world knows of a slice before the controller can."""
        id = record.subject
        if record.kind == "agent.heard":
            self._spoilt[id].discard("silent")
            return
        self._spoilt[id].add("silent" if record.kind == "agent.silent" else "lost")
        kind = self._kinds.get(id)
        if kind is not None:
            self._free[kind].pop(id, None)

    def _spoil(self, id: str) -> None:
        """Somebody reserved it: free or not, it is not there for everybody."""
        self._spoilt[id].add("reserved")
        kind = self._kinds.get(id)
        if kind is not None:
            self._free[kind].pop(id, None)

    def _offer(self, id: str, t: float) -> None:
        kind = self._kinds.get(id)
        if kind is not None and not self._spoilt[id]:
            self._free[kind][id] = t

    def _withdraw(self, id: str, t: float) -> None:
        kind = self._kinds.get(id)
        free = self._free[kind].pop(id, None) if kind is not None else None
        if kind is None or free is None:
            return
        for job, since in islice(self._waiting[kind].items(), _PARTNERS):
            self._judge(id, job, max(since, free), t)

    def finish(self, t: float) -> None:
        """The history ends: what is still free and still waits is judged as of now."""
        for kind, free in self._free.items():
            for id in list(free):
                for job, since in islice(self._waiting[kind].items(), _PARTNERS):
                    self._judge(id, job, max(since, free[id]), t)

    def _judge(self, slice: str, job: str, since: float, t: float) -> None:
        """A slice and a job that fits it stood side by side from `since` to `t`."""
        if t < self._history.settled_t:
            return
        body = self._history.jobs[job].body
        team, queue = text(body, "team"), text(body, "queue")
        if self._others[team]:
            return
        start = max(
            since,
            self._history.settled_t,
            self._clear_since[team],
            self._short_since[queue],
            self._working_since,
        )
        if start > t:
            return
        self._finding.premises += 1
        if t - start > PLACED_S:
            created = self._history.jobs[job].created
            self._finding.broken(
                "job",
                job,
                created.seq if created else 0,
                f"waited {t - start:.0f} s beside free slice {slice}",
            )


def l1_free_capacity_is_used(history: Indexed) -> Finding:
    """A clear-case job does not wait longer than two ticks beside a free slice of its team that fits."""
    finding = Finding(rule="L1")
    if history.heal is None:
        return finding
    floor = _Floor(history, finding)
    steps: list[tuple[int, int, Event | Record]] = [
        (event.seq, 0, event) for event in history.committed(*_JOB_KINDS, *_SLICE_KINDS, *_SETTING_KINDS)
    ]
    steps += [(record.seq, record.order, record) for record in history.witnessed(*_WORLD_KINDS)]
    steps.sort(key=lambda step: step[:2])
    for _, _, step in steps:
        if isinstance(step, Record):
            floor.world(step)
        elif step.entity == "job":
            floor.job(step, history.time(step))
        elif step.entity == "slice":
            floor.slice(step, history.time(step))
        else:
            floor.set(step, history.time(step))
    floor.finish(history.end_t)
    return finding


def l4_no_leak(history: Indexed) -> Finding:
    """What nobody owns is deleted, what is leaving goes, and every intent is settled, each in its time."""
    finding = Finding(rule="L4")
    if history.heal is None:
        return finding
    _check_machines(finding, history)
    for event in history.committed("slice.intended"):
        deadline = max(history.time(event), history.settled_t) + INTENT_RESOLVED_S
        later = [each for each in history.of["slice"][event.id] if each.seq > event.seq]
        settled = [each for each in later if each.kind not in ("slice.joined", "slice.observed", "slice.raced")]
        if settled and history.time(settled[0]) <= deadline:
            finding.premises += 1
        elif deadline <= history.end_t:
            finding.premises += 1
            finding.broken(
                "slice", event.id, event.seq, f"neither adopted nor given up after {INTENT_RESOLVED_S:.0f} s"
            )
    return finding


def _check_machines(finding: Finding, history: Indexed) -> None:
    """A machine of ours counts as unowned once its slice is leaving or gone, or if it never had one."""
    leaving = {event.id: event for event in reversed(history.committed("slice.deleting", "slice.gone"))}
    for name, machines in history.machines.items():
        for machine in machines:
            if not machine.label or machine.label != history.our_label:
                continue
            left = leaving.get(name)
            if left is None and name in history.of["slice"]:
                continue
            since = max(machine.created.t, history.time(left) if left is not None else -inf)
            deadline = max(since, history.settled_t) + ORPHAN_DELETED_S
            if machine.deleted is None and deadline > history.end_t:
                continue
            finding.premises += 1
            if machine.deleted is None or machine.deleted.t > deadline:
                finding.broken(
                    "slice",
                    name,
                    machine.created.seq,
                    f"{machine.provider_id} is nobody's and still there after {ORPHAN_DELETED_S:.0f} s",
                )
