"""Writes small histories by hand: lawful ones by the `…ed` verbs, broken ones by single lines.

Used by the tests of the rules only. Each verb writes what a healthy controller, cloud and agent would leave behind for
one step of a job's or a slice's life; a test of a broken history then writes the one line too many, or leaves one out.
"""

from __future__ import annotations

from collections import Counter

from penstock.domain.custody import staging_path
from penstock.domain.invariants.history import History, Recorder
from penstock.domain.invariants.rules import Report, check
from penstock.domain.nouns import Event

LABEL = "penstock-test"


class Scribe:
    """A history in the making, with a clock that only tests move."""

    def __init__(self) -> None:
        self.history = History()
        self.t = 0.0
        self._versions: Counter[tuple[str, str]] = Counter()
        self._fences: Counter[str] = Counter()
        self._calls = 0
        self._recorder = Recorder(self.history, lambda: len(self.history.events), lambda: self.t)
        self.jobs: dict[str, dict[str, object]] = {}
        self.attempts: dict[str, dict[str, object]] = {}
        self.hosts: dict[str, int] = {}

    # --- single lines ---
    def commit(self, kind: str, id: str, *, fence: int = 0, epoch: int = 1, **body: object) -> Event:
        return self.write(kind, id, body, fence=fence, epoch=epoch)

    def write(self, kind: str, id: str, body: dict[str, object], *, fence: int = 0, epoch: int = 1) -> Event:
        entity = kind.partition(".")[0]
        self._versions[entity, id] += 1
        event = Event(
            seq=len(self.history.events) + 1,
            at=self.t,
            kind=kind,
            entity=entity,
            id=id,
            version=self._versions[entity, id],
            actor="test",
            epoch=epoch,
            fence=fence,
            body=body,
        )
        self.history.events.append(event)
        return event

    def world(self, kind: str, subject: str = "", **body: object) -> None:
        self._recorder.world(kind, subject, **body)

    def client(self, kind: str, subject: str, **body: object) -> None:
        self._recorder.client(kind, subject, **body)

    def call(self, verb: str, outcome: str, client: str = "ann", *, answer: dict[str, object], **sent: object) -> None:
        """A call that is answered at once."""
        self._calls += 1
        self.client(f"{verb}.invoke", client, call=self._calls, **sent)
        self.client(f"{verb}.{outcome}", client, call=self._calls, **sent, **answer)

    def wait(self, seconds: float) -> None:
        self.t += seconds

    def heal(self) -> None:
        """The faults stop, and a leader has settled."""
        self.world("heal")
        self.wait(20.0)

    def ticks(self, count: int, actions: int = 0) -> None:
        for _ in range(count):
            self.wait(5.0)
            self.world("tick", "c1", actions=actions, epoch=1)

    def read(self, job: str, client: str = "ann", found: bool = True, version: int | None = None) -> None:
        version = self._versions["job", job] if version is None else version
        state = "queued" if found else ""
        self.call("read", "ok", client, job=job, answer={"found": found, "version": version, "state": state})

    # --- lawful lives ---
    def queue_created(
        self, name: str = "default", team: str = "red", weight: float = 1.0, quota: int | None = None,
        borrow: int | None = None, band: int = 0,
    ) -> None:  # fmt: skip
        self.commit("queue.created", name, team=team, weight=weight, quota_chips=quota, borrow_chips=borrow, band=band)

    def slice_intended(
        self, id: str, *, team: str = "red", pool: str = "p", chips: int = 8, hosts: int = 1, race: str | None = None,
        zone: str = "z1",
    ) -> None:  # fmt: skip
        self.hosts[id] = hosts
        self.commit(
            "slice.intended", id, pool=pool, team=team, provider="fake", zone=zone, accelerator="v5e-8", chips=chips,
            hosts=hosts, race=race, spot=True,
        )  # fmt: skip

    def slice_created(self, id: str, label: str = LABEL) -> None:
        self.world("provider.call", id, verb="create", outcome="ok", zone="z1", provider="fake", provider_id=f"vm-{id}")
        self.world("vm.created", id, provider_id=f"vm-{id}", zone="z1", label=label, chips=8, provider="fake")

    def slice_readied(self, id: str) -> None:
        self.commit("slice.creating", id, provider_id=f"vm-{id}")
        for host in range(self.hosts[id]):
            self.commit("slice.joined", id, host=host, incarnation=f"i-{id}-{host}")
        self.world("vm.ready", id, provider_id=f"vm-{id}")
        self.commit("slice.ready", id)

    def slice(
        self, id: str, *, team: str = "red", hosts: int = 1, zone: str = "z1", chips: int = 8, pool: str = "p"
    ) -> None:
        self.slice_intended(id, team=team, hosts=hosts, zone=zone, chips=chips, pool=pool)
        self.slice_created(id)
        self.slice_readied(id)

    def slice_deleted(self, id: str) -> None:
        self.commit("slice.deleting", id, why="idle")
        self.world("provider.call", id, verb="delete", outcome="ok", zone="z1", provider="fake")
        self.world("vm.deleted", id, provider_id=f"vm-{id}")
        self.commit("slice.gone", id, evidence=["absent"])

    def job(
        self, id: str, *, team: str = "red", queue: str = "default", key: str | None = None, body_hash: str = "h",
        outputs: tuple[str, ...] = (), failures: int = 0, losses: int = 100, replicas: int = 1, slices: int = 1,
        priority: int = 0, after: tuple[str, ...] = (), **more: object,
    ) -> None:  # fmt: skip
        self.jobs[id] = {
            "team": team, "queue": queue, "key": key, "body_hash": body_hash, "outputs": list(outputs),
            "failure_budget": failures, "infra_budget": losses, "replicas_max": replicas, "chips": 8,
            "slices": slices, "accelerators": ["v5e-8"], "after": list(after), "parent": None, "priority": priority,
            **more,
        }  # fmt: skip
        self.write("job.created", id, self.jobs[id])
        self.call("submit", "ok", key=key, body_hash=body_hash, team=team, answer={"job": id})

    def placed(self, job: str, attempt: str, *slices: str, replica: int = 0, **more: object) -> int:
        """Bind slices and create an attempt with the job's next fence, which is answered."""
        fence = self.next_fence(job)
        facts = self.jobs[job]
        self.attempts[attempt] = {
            "job": job, "replica": replica, "slices": [[slice, f"vm-{slice}"] for slice in slices],
            "hosts": sum(self.hosts[slice] for slice in slices), "chips": 8 * len(slices), "queue": facts["queue"],
            "team": facts["team"], "stage": 0, "borrowed": False, "backfilled": False, **more,
        }  # fmt: skip
        self.write("attempt.created", attempt, self.attempts[attempt], fence=fence)
        for slice in slices:
            self.commit("slice.bound", slice, attempt=attempt)
        self.commit("job.placed", job, fence=fence, replica=replica, attempt=attempt)
        return fence

    def next_fence(self, job: str) -> int:
        self._fences[job] += 1
        return self._fences[job]

    def fence_of(self, attempt: str) -> int:
        return next(e.fence for e in self.history.events if e.kind == "attempt.created" and e.id == attempt)

    def process(self, attempt: str, slice: str, host: int = 0, **changed: object) -> None:
        facts = self.attempts[attempt]
        body = {
            "job": facts["job"], "replica": facts["replica"], "fence": self.fence_of(attempt), "host": host,
            "slice": slice, "provider_id": f"vm-{slice}", "world_size": facts["hosts"],
            "incarnation": f"i-{slice}-{host}",
        }  # fmt: skip
        self.world("proc.started", attempt, **{**body, **changed})

    def slices_of(self, attempt: str) -> list[str]:
        pairs = self.attempts[attempt]["slices"]
        assert isinstance(pairs, list)
        return [pair[0] for pair in pairs]

    def started(self, attempt: str) -> None:
        facts = self.attempts[attempt]
        for slice in self.slices_of(attempt):
            for host in range(self.hosts[slice]):
                self.process(attempt, slice, host)
                self.commit("attempt.launched", attempt, host=host, incarnation=f"i-{slice}-{host}")
        self.commit("attempt.started", attempt)
        self.commit("job.started", str(facts["job"]), replica=facts["replica"])

    def exited(self, attempt: str, how: object = 0) -> None:
        for slice in self.slices_of(attempt):
            for host in range(self.hosts[slice]):
                self.world("proc.exited", attempt, job=self.attempts[attempt]["job"], host=host, how=how, slice=slice)

    def closed(self, attempt: str, cause: str, clean: bool = True) -> None:
        facts = self.attempts[attempt]
        self.commit(
            "attempt.closed", attempt, fence=self.fence_of(attempt), job=facts["job"], replica=facts["replica"],
            cause=cause, evidence=[], clean=clean,
        )  # fmt: skip
        for slice in self.slices_of(attempt):
            self.commit("slice.released", slice, attempt=attempt, clean=clean)

    def stored(self, attempt: str, name: str) -> None:
        job, fence = str(self.attempts[attempt]["job"]), self.fence_of(attempt)
        self.world("object.put", staging_path(job, fence, name), generation=1, checksum="c", writer=attempt)

    def output(self, attempt: str, name: str) -> None:
        job = str(self.attempts[attempt]["job"])
        self.commit("job.output_committed", job, fence=self.fence_of(attempt), name=name, attempt=attempt)

    def succeeded(self, attempt: str) -> None:
        """A process ends well, its outputs are committed, the attempt closes and the job succeeds."""
        job = str(self.attempts[attempt]["job"])
        outputs = self.jobs[job]["outputs"]
        assert isinstance(outputs, list)
        for name in outputs:
            self.stored(attempt, name)
        self.exited(attempt)
        for name in outputs:
            self.output(attempt, name)
        self.closed(attempt, "succeeded")
        self.commit("job.succeeded", job, cause="succeeded", reason="")

    def requeued(self, attempt: str, cause: str) -> None:
        """An attempt ends badly and the job goes on."""
        self.exited(attempt, "vm_gone" if cause == "preempted" else 1)
        self.closed(attempt, cause, clean=cause != "preempted")
        job = str(self.attempts[attempt]["job"])
        self.commit("job.requeued", job, replica=self.attempts[attempt]["replica"], cause=cause, reason="")

    def cancelled(self, job: str, client: str = "ann") -> None:
        """A cancel is committed and acknowledged."""
        self.commit("job.cancel_requested", job, fence=self.next_fence(job))
        self.call("cancel", "ok", client, job=job, answer={"answer": "cancelled"})

    # --- verdicts ---
    def check(self, *rules: str) -> Report:
        return check(self.history, rules=rules or None)

    def broken(self, rule: str) -> list[str]:
        """The messages of one rule's violations."""
        return [violation.message for violation in self.check(rule).violations]

    def premises(self, rule: str) -> int:
        """How often the rule was put to the test; the history must keep it."""
        report = self.check(rule)
        assert report.violations == []
        return report.premises[rule]
