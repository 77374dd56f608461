"""A history sorted and grouped once, so that every rule reads only what concerns it.

`rules.check` builds one `Indexed` per history and hands it to all rules. It holds facts only: what was committed, what
the world did, which call got which answer. It must not judge, and it must not fail on a strange history: judging
strange histories is what the rules are for.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from functools import cached_property
from math import inf
from operator import attrgetter
from typing import TypeVar

from penstock.domain import limits
from penstock.domain.invariants.facts import (
    EVERY_REPLICA,
    AttemptFacts,
    Call,
    JobFacts,
    Machine,
    Process,
    text,
    whole,
)
from penstock.domain.invariants.history import History, Record
from penstock.domain.nouns import Event

T = TypeVar("T")

_seq_of = attrgetter("seq")
_place_of = attrgetter("seq", "order")

#: After the faults stop, a leader is elected (at most 10 s) and ticks once before any other clock starts.
SETTLE_S = limits.LEADER_TTL_S + limits.LEADER_RENEW_S + limits.TICK_S


def happened(event: Event | None, record: Record) -> bool:
    """Whether the event was committed before the record was made."""
    return event is not None and event.seq <= record.seq


class Indexed:
    """Everything the rules share. Parts that only some rules need are made when first asked for."""

    def __init__(self, history: History) -> None:
        self.events = sorted(history.events, key=_seq_of)
        self.world = sorted(history.world, key=_place_of)
        self.clients = sorted(history.clients, key=_place_of)
        self.kinds: dict[str, list[Event]] = defaultdict(list)
        self.of: dict[str, dict[str, list[Event]]] = defaultdict(lambda: defaultdict(list))
        for event in self.events:
            self.kinds[event.kind].append(event)
            self.of[event.entity][event.id].append(event)
        self.seen: dict[str, list[Record]] = defaultdict(list)
        for record in self.world:
            self.seen[record.kind].append(record)

    def committed(self, *kinds: str) -> list[Event]:
        """The events of these kinds in commit order."""
        if len(kinds) == 1:
            return self.kinds.get(kinds[0], [])
        return sorted((event for kind in kinds for event in self.kinds.get(kind, ())), key=_seq_of)

    def witnessed(self, *kinds: str) -> list[Record]:
        """The world's records of these kinds in the order they were made."""
        if len(kinds) == 1:
            return self.seen.get(kinds[0], [])
        return sorted((record for kind in kinds for record in self.seen.get(kind, ())), key=_place_of)

    # --- time ---
    @cached_property
    def records(self) -> list[Record]:
        return sorted([*self.world, *self.clients], key=_place_of)

    @cached_property
    def _times(self) -> dict[int, float]:
        times: dict[int, float] = {}
        upcoming = iter(self.records)
        earliest, following = -inf, next(upcoming, None)
        for event in self.events:
            seq, t = event.seq, event.at
            while following is not None and following.seq < seq:
                earliest, following = following.t, next(upcoming, None)
            if following is not None and t > following.t:
                t = following.t
            times[seq] = max(t, earliest)
        return times

    def time(self, event: Event) -> float:
        """When an event was committed, by the recorder's clock.

        The event's own `at` comes from a clock that faults may bend, so it only chooses the moment between the
        record made last before and the one made first after the commit.
        """
        return self._times[event.seq]

    @cached_property
    def end_t(self) -> float:
        """The last moment anything was recorded."""
        return max((record.t for record in self.records), default=-inf)

    @cached_property
    def heal(self) -> Record | None:
        """Where the faults stopped for good."""
        heals = self.seen.get("heal")
        return heals[-1] if heals else None

    @cached_property
    def settled_t(self) -> float:
        """From here on the liveness clocks run; infinite when the faults never stopped."""
        return inf if self.heal is None else self.heal.t + SETTLE_S

    # --- jobs and attempts ---
    @cached_property
    def jobs(self) -> dict[str, JobFacts]:
        jobs: dict[str, JobFacts] = {}
        for id, events in self.of["job"].items():
            facts = jobs[id] = JobFacts(id)
            for event in events:
                facts.take(event)
        return jobs

    @cached_property
    def attempts(self) -> dict[str, AttemptFacts]:
        attempts: dict[str, AttemptFacts] = {}
        for event in self.committed("attempt.created"):
            if event.id not in attempts:
                attempts[event.id] = AttemptFacts(event)
        for event in self.committed("attempt.closed"):
            facts = attempts.get(event.id)
            if facts is not None and facts.closed is None:
                facts.closed = event
        return attempts

    @cached_property
    def attempts_of(self) -> dict[str, list[AttemptFacts]]:
        """Per job, in the order they were made."""
        return _grouped(self.attempts.values(), lambda attempt: attempt.job)

    @cached_property
    def attempts_on(self) -> dict[str, list[AttemptFacts]]:
        """Per slice, in the order they were made."""
        grouped: dict[str, list[AttemptFacts]] = defaultdict(list)
        for attempt in self.attempts.values():
            for slice, _ in attempt.slices:
                grouped[slice].append(attempt)
        return grouped

    @cached_property
    def fences(self) -> dict[str, list[tuple[int, int, int]]]:
        """Per job the fences issued: (seq, fence, replica), in commit order."""
        issued: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
        kinds = ("attempt.created", "attempt.fencing", "job.fence_raised", "job.cancel_requested")
        for event in self.committed(*kinds):
            if event.kind == "attempt.created":
                issued[text(event.body, "job")].append((event.seq, event.fence, whole(event.body, "replica")))
            elif event.kind == "attempt.fencing":
                attempt = self.attempts.get(event.id)
                if attempt is not None:
                    issued[attempt.job].append((event.seq, event.fence, attempt.replica))
            elif event.kind == "job.fence_raised":
                issued[event.id].append((event.seq, event.fence, whole(event.body, "replica")))
            else:
                issued[event.id].append((event.seq, event.fence, EVERY_REPLICA))
        return issued

    def highest_fence(self, job: str, replica: int, before_seq: int) -> int:
        """The highest fence issued for a replica before that commit."""
        highest = 0
        for seq, fence, whose in self.fences.get(job, ()):
            if seq >= before_seq:
                break
            if whose in (replica, EVERY_REPLICA):
                highest = max(highest, fence)
        return highest

    # --- clients ---
    @cached_property
    def calls(self) -> list[Call]:
        """Every answered call, in the order of the answers."""
        open_calls: dict[tuple[str, str, object], Record] = {}
        calls = []
        for record in self.clients:
            verb, _, step = record.kind.partition(".")
            call = record.body.get("call")
            key = (record.subject, verb, call if isinstance(call, int | str) else None)
            if step == "invoke":
                open_calls[key] = record
            else:
                calls.append(Call(verb, step, open_calls.pop(key, None), record))
        return calls

    # --- the world ---
    @cached_property
    def machines(self) -> dict[str, list[Machine]]:
        """Per name what truly existed under it, oldest first."""
        machines: dict[str, list[Machine]] = defaultdict(list)
        by_id: dict[str, Machine] = {}
        for record in self.witnessed("vm.created", "vm.preempted", "vm.deleted"):
            id = text(record.body, "provider_id")
            if record.kind == "vm.created":
                by_id[id] = Machine(record)
                machines[record.subject].append(by_id[id])
                continue
            machine = by_id.get(id)
            if machine is None:
                continue
            if record.kind == "vm.deleted":
                machine.deleted = machine.deleted or record
            else:
                machine.preempted = machine.preempted or record
        return machines

    @cached_property
    def our_label(self) -> str | None:
        """The label of this installation: the one its own creates put on machines."""
        intended = {event.id: event for event in reversed(self.committed("slice.intended"))}
        labels = Counter(
            machine.label
            for name, machines in self.machines.items()
            for machine in machines
            if machine.label and happened(intended.get(name), machine.created)
        )
        return min(labels, key=lambda label: (-labels[label], label)) if labels else None

    @cached_property
    def processes(self) -> list[Process]:
        """Every process that truly ran, in the order they started. A process ends at the latest with its machine."""
        running: dict[tuple[str, str, object], Process] = {}
        processes = []
        for record in self.witnessed("proc.started", "proc.exited"):
            host = record.body.get("host")
            key = (record.subject, text(record.body, "slice"), host if isinstance(host, int | str) else None)
            if record.kind == "proc.started":
                running[key] = Process(record)
                processes.append(running[key])
            elif key in running:
                running.pop(key).exited = record
        ends = {
            machine.provider_id: machine.lost
            for machines in self.machines.values()
            for machine in machines
            if machine.lost is not None
        }
        for process in processes:
            lost = ends.get(process.provider_id)
            if lost is not None and (process.exited is None or lost.order < process.exited.order):
                process.exited = lost
        return processes

    @cached_property
    def processes_of(self) -> dict[str, list[Process]]:
        """Per attempt, in the order they started."""
        return _grouped(self.processes, lambda process: process.attempt)

    @cached_property
    def silences(self) -> dict[str, list[tuple[Record, Record | None]]]:
        """Per slice when an agent of it fell silent and when it was heard again."""
        silences: dict[str, list[tuple[Record, Record | None]]] = defaultdict(list)
        open_since: dict[tuple[str, object], Record] = {}
        for record in self.witnessed("agent.silent", "agent.heard"):
            host = record.body.get("host")
            key = (record.subject, host if isinstance(host, int | str) else None)
            if record.kind == "agent.silent":
                open_since.setdefault(key, record)
            elif key in open_since:
                silences[record.subject].append((open_since.pop(key), record))
        for (slice, _), since in open_since.items():
            silences[slice].append((since, None))
        return silences


def _grouped(items: Iterable[T], key: Callable[[T], str]) -> dict[str, list[T]]:
    grouped: dict[str, list[T]] = defaultdict(list)
    for item in items:
        grouped[key(item)].append(item)
    return grouped
