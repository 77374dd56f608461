"""Safety of slices: S9, S10, S11, S12 and S14.

Called through `rules`. The provider's own record of calls and machines and the process table are set against the
intents, bindings and limits that were committed. Chips are counted again from events, as `docs/reference/rules.md`
says, never read from the controller's counters.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from penstock.domain.invariants.facts import LOSSES, AttemptFacts, Process, maybe_whole, text, whole
from penstock.domain.invariants.finding import Finding
from penstock.domain.invariants.history import Record
from penstock.domain.invariants.indexed import Indexed, happened
from penstock.domain.nouns import Event

#: Outcomes of a call that the provider carried out, whether or not the caller heard of it.
EXECUTED = frozenset({"ok", "lost_reply"})
_LEAVING = ("slice.deleting", "slice.gone")


def s9_intent_before_create(history: Indexed) -> Finding:
    """Every create call follows a committed intent of the same name, and what it makes bears our label."""
    finding = Finding(rule="S9")
    intents = {event.id: event for event in reversed(history.committed("slice.intended"))}
    made: set[str] = set()
    for call in history.witnessed("provider.call"):
        if text(call.body, "verb") != "create":
            continue
        finding.premises += 1
        made.add(text(call.body, "provider_id"))
        if not happened(intents.get(call.subject), call):
            finding.broken("slice", call.subject, call.seq, "create was called before its intent was committed")
    for name, machines in history.machines.items():
        for machine in machines:
            # Somebody else may have taken the name; what our own call made must be known as ours.
            if machine.provider_id in made and (not machine.label or machine.label != history.our_label):
                finding.broken(
                    "slice", name, machine.created.seq, f"created with label {machine.label!r}, which is not ours"
                )
    return finding


def s10_one_user_per_slice(history: Indexed) -> Finding:
    """A slice's incarnation hosts one attempt at a time, and only attempts that hold it, by hosts that joined."""
    finding = Finding(rule="S10")
    holder: dict[str, str] = {}
    for event in history.committed("slice.bound", "slice.released", "slice.gone"):
        if event.kind == "slice.bound":
            finding.premises += 1
            attempt = text(event.body, "attempt")
            held_by = holder.get(event.id)
            if held_by is not None and held_by != attempt:
                finding.broken("slice", event.id, event.seq, f"bound to {attempt} while {held_by} holds it")
            holder[event.id] = attempt
        elif event.kind == "slice.gone" or holder.get(event.id) == text(event.body, "attempt"):
            holder.pop(event.id, None)
    _check_tenants(finding, history)
    return finding


def _check_tenants(finding: Finding, history: Indexed) -> None:
    joined: dict[tuple[str, object], list[Event]] = defaultdict(list)
    for event in history.committed("slice.joined"):
        host = event.body.get("host")
        joined[event.id, host if isinstance(host, int) else None].append(event)
    running: dict[str, list[Process]] = defaultdict(list)
    for process in history.processes:
        start, seq = process.started.order, process.started.seq
        tenants = running[process.provider_id]
        tenants[:] = [other for other in tenants if other.exited is None or other.exited.order > start]
        for other in tenants:
            if other.attempt != process.attempt:
                finding.broken(
                    "slice",
                    process.slice,
                    seq,
                    f"{process.attempt} started on {process.provider_id} while {other.attempt} runs there",
                )
        tenants.append(process)
        attempt = history.attempts.get(process.attempt)
        if attempt is None or not happened(attempt.created, process.started):
            finding.broken("slice", process.slice, seq, f"a process of unknown attempt {process.attempt} started")
        elif (process.slice, process.provider_id) not in attempt.slices:
            finding.broken(
                "slice",
                process.slice,
                seq,
                f"{process.attempt} started on {process.provider_id}, which it never held",
            )
        host = process.host if isinstance(process.host, int) else None
        known = [event for event in joined.get((process.slice, host), ()) if happened(event, process.started)]
        if known and process.incarnation not in {text(event.body, "incarnation") for event in known}:
            finding.broken(
                "slice",
                process.slice,
                seq,
                f"host {host} of incarnation {process.incarnation!r} never joined",
            )


def s11_gang_atomic(history: Indexed) -> Finding:
    """All hosts of an attempt run one fence and one world size, each once; it counts as started when all run."""
    finding = Finding(rule="S11")
    started = {event.id: event for event in history.committed("attempt.started")}
    for attempt in history.attempts.values():
        processes = history.processes_of.get(attempt.id, [])
        finding.premises += attempt.hosts > 1 and bool(processes)
        job = history.jobs.get(attempt.job)
        wanted = whole(job.body, "slices") if job is not None else 0
        if wanted and len(attempt.slices) != wanted:
            finding.broken(
                "attempt", attempt.id, attempt.created.seq, f"holds {len(attempt.slices)} slices of {wanted}"
            )
        _check_gang(finding, attempt, processes, started.get(attempt.id))
    return finding


def _check_gang(finding: Finding, attempt: AttemptFacts, processes: list[Process], started: Event | None) -> None:
    places: set[tuple[str, str]] = set()
    for process in processes:
        seq = process.started.seq
        if process.fence != attempt.fence:
            finding.broken(
                "attempt",
                attempt.id,
                seq,
                f"host {process.host} runs fence {process.fence}, not {attempt.fence}",
            )
        if process.world_size != attempt.hosts:
            finding.broken(
                "attempt", attempt.id, seq, f"host {process.host} runs in a world of {process.world_size}, "
                f"not {attempt.hosts}"
            )  # fmt: skip
        place = (process.slice, str(process.host))
        if place in places:
            finding.broken("attempt", attempt.id, seq, f"launched twice on host {process.host} of {process.slice}")
        places.add(place)
    if started is None:
        return
    there = {(each.slice, str(each.host)) for each in processes if each.started.seq < started.seq}
    if len(there) != attempt.hosts:
        finding.broken("attempt", attempt.id, started.seq, f"said to run with {len(there)} of {attempt.hosts} hosts up")


class _Chips:
    """Chips in use and limits in force, replayed from events."""

    def __init__(self) -> None:
        self.limits: dict[tuple[str, str], int | None] = {}
        self.used: dict[tuple[str, str], int] = defaultdict(int)
        self._slices: dict[str, tuple[str, str, str, int, str]] = {}  #: team, pool, provider, chips, race
        self._counted: set[str] = set()
        self._races: dict[str, dict[str, int]] = defaultdict(dict)
        self._attempts: dict[str, tuple[str, int]] = {}

    def intend(self, event: Event) -> list[tuple[str, str]]:
        """Count a new slice; answers the scopes it counts in."""
        body = event.body
        facts = (text(body, "team"), text(body, "pool"), text(body, "provider"), whole(body, "chips"))
        if event.id not in self._slices:
            self._slices[event.id] = (*facts, text(body, "race"))
            self._counted.add(event.id)
            self._count(event.id, 1)
            self.used["provider", facts[2]] += facts[3]
        return [("team", facts[0]), ("pool", facts[1]), ("provider", facts[2])]

    def race(self, event: Event) -> None:
        """A slice that was alone races from now on: with the others of its race it counts once."""
        if event.id in self._counted:
            self._count(event.id, -1)
            self._slices[event.id] = (*self._slices[event.id][:4], text(event.body, "race"))
            self._count(event.id, 1)

    def leave(self, event: Event) -> None:
        """Seen broken or leaving: team and pool are free at once, the provider when it is gone."""
        if event.id in self._counted:
            self._counted.discard(event.id)
            self._count(event.id, -1)
        if event.kind == "slice.gone" and event.id in self._slices:
            _, _, provider, chips, _ = self._slices.pop(event.id)
            self.used["provider", provider] -= chips

    def _count(self, id: str, sign: int) -> None:
        team, pool, _, chips, race = self._slices[id]
        change = sign * chips
        if race:
            # A racing set counts once, its largest: what changes is the largest of those still counted.
            members = self._races[race]
            before = max(members.values(), default=0)
            if sign > 0:
                members[id] = chips
            else:
                members.pop(id, None)
            change = max(members.values(), default=0) - before
        self.used["team", team] += change
        self.used["pool", pool] += change

    def place(self, event: Event) -> list[tuple[str, str]]:
        queue, chips = text(event.body, "queue"), whole(event.body, "chips")
        if event.id not in self._attempts:
            self._attempts[event.id] = (queue, chips)
            self.used["queue", queue] += chips
        return [("queue", queue)]

    def close(self, event: Event) -> None:
        queue, chips = self._attempts.pop(event.id, ("", 0))
        self.used["queue", queue] -= chips

    def set_limit(self, event: Event) -> None:
        body = event.body
        if event.kind == "quota.limit_set":
            self.limits[text(body, "scope"), text(body, "name")] = maybe_whole(body, "limit_chips")
        elif event.entity == "queue":
            quota, borrow = maybe_whole(body, "quota_chips"), maybe_whole(body, "borrow_chips")
            self.limits["queue", event.id] = None if quota is None or borrow is None else quota + borrow
        elif "limit_chips" in body:
            self.limits[event.entity, event.id] = maybe_whole(body, "limit_chips")


_LIMITS = ("team.created", "team.edited", "pool.created", "pool.edited", "queue.created", "queue.edited",
           "queue.deleted", "quota.limit_set")  # fmt: skip
_LOST = ("slice.preempted", "slice.failed", *_LEAVING)


def s12_quota(history: Indexed) -> Finding:
    """Whenever chips are reserved, the sum with those in use stays within every limit then in force."""
    finding = Finding(rule="S12")
    chips = _Chips()
    kinds = ("slice.intended", "slice.raced", "attempt.created", "attempt.closed", *_LIMITS, *_LOST)
    for event in history.committed(*kinds):
        if event.kind == "slice.intended":
            scopes = chips.intend(event)
        elif event.kind == "attempt.created":
            scopes = chips.place(event)
        else:
            if event.kind == "attempt.closed":
                chips.close(event)
            elif event.kind == "slice.raced":
                chips.race(event)
            elif event.kind in _LIMITS:
                chips.set_limit(event)
            else:
                chips.leave(event)
            continue
        limited = [scope for scope in scopes if chips.limits.get(scope) is not None]
        finding.premises += bool(limited)
        for scope in limited:
            used, limit = chips.used[scope], chips.limits[scope]
            if limit is not None and used > limit:
                finding.broken(event.entity, event.id, event.seq, f"{scope[0]} {scope[1]} uses {used} chips of {limit}")
    _check_arrays(history, finding)
    return finding


def _check_arrays(history: Indexed, finding: Finding) -> None:
    """Of an array with a limit, no more jobs have live attempts than the one that is placed last allows."""
    live: dict[str, Counter[str]] = defaultdict(Counter)  #: array -> live attempts of each of its jobs
    for event in history.committed("attempt.created", "attempt.closed"):
        job = history.jobs.get(text(event.body, "job"))
        if job is None:
            continue
        array, at_most = text(job.body, "array"), maybe_whole(job.body, "at_most")
        if not array or at_most is None:
            continue
        if event.kind == "attempt.closed":
            live[array][job.id] -= 1
            continue
        live[array][job.id] += 1
        finding.premises += 1
        running = sum(1 for count in live[array].values() if count > 0)
        if running > at_most:
            finding.broken("attempt", event.id, event.seq, f"array {array} has {running} jobs running, {at_most} may")


def s14_safe_delete(history: Indexed) -> Finding:
    """Only slices of ours are deleted, only after their leaving is committed, and none that serves a live attempt."""
    finding = Finding(rule="S14")
    leaving: dict[str, Event] = {}
    for event in reversed(history.committed(*_LEAVING)):
        leaving[event.id] = event
    for call in history.witnessed("provider.call"):
        if text(call.body, "verb") == "delete" and text(call.body, "outcome") in EXECUTED:
            finding.premises += 1
            _check_delete(finding, history, call, leaving.get(call.subject))
    for event in history.committed("slice.gone"):
        finding.premises += 1
        for machine in history.machines.get(event.id, ()):
            # A create that lands after the delete is found by the sweep (L4); what stood there before is not excused.
            if machine.label != history.our_label:
                continue
            if machine.created.seq < leaving[event.id].seq and machine.exists_before(event.seq):
                finding.broken("slice", event.id, event.seq, f"said to be gone while {machine.provider_id} exists")
    for attempt in history.attempts.values():
        if attempt.closed is not None and attempt.cause in LOSSES:
            finding.premises += 1
            if not _has_grounds(history, attempt):
                finding.broken(
                    "attempt",
                    attempt.id,
                    attempt.closed.seq,
                    f"given up as {attempt.cause} while its machines and processes were well and nobody had fenced it",
                )
    return finding


#: What must have been committed about an attempt, or about one of its slices, before it may be given up while it runs.
_GROUNDS_OF_ATTEMPT = frozenset({"attempt.stopping", "attempt.fencing", "attempt.reported"})
_GROUNDS_OF_SLICE = frozenset({"slice.preempted", "slice.failed", "slice.draining"})


def _has_grounds(history: Indexed, attempt: AttemptFacts) -> bool:
    """Whether something besides the controller's belief speaks for the loss; absence from a listing does not."""
    assert attempt.closed is not None
    seq = attempt.closed.seq
    processes = history.processes_of.get(attempt.id, [])
    if not processes or any(each.exited is not None and each.exited.seq < seq for each in processes):
        return True
    if any(event.kind in _GROUNDS_OF_ATTEMPT and event.seq < seq for event in history.of["attempt"][attempt.id]):
        return True
    return any(
        event.kind in _GROUNDS_OF_SLICE and event.seq < seq
        for slice, _ in attempt.slices
        for event in history.of["slice"].get(slice, ())
    )


def _check_delete(finding: Finding, history: Indexed, call: Record, leaving: Event | None) -> None:
    name = call.subject
    machines = [machine for machine in history.machines.get(name, ()) if machine.created.order < call.order]
    if machines and (not machines[-1].label or machines[-1].label != history.our_label):
        finding.broken("slice", name, call.seq, f"deleted, but its label {machines[-1].label!r} is not ours")
    if name in history.of["slice"] and not happened(leaving, call):
        finding.broken("slice", name, call.seq, "delete was called before its leaving was committed")
    for attempt in history.attempts_on.get(name, ()):
        if attempt.live_at(call.seq):
            finding.broken("slice", name, call.seq, f"deleted under live attempt {attempt.id}")
