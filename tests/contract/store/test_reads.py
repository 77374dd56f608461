"""Every read of the port, on every store."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from penstock.domain.lifecycle import JobState, SliceState
from penstock.domain.nouns import Command, Control, Job, Member, Quota, Snippet, Task
from penstock.ports.store import Reader, Transaction
from tests.contract.store.examples import (
    a_job,
    a_pool,
    a_queue,
    a_slice,
    a_team,
    a_zone,
    an_attempt,
    close,
    fail,
    light,
    place,
    submit,
    walk_slice,
)
from tests.contract.store.harness import Harness


def test_an_empty_store_answers_nothing(on: Harness) -> None:
    def look(r: Reader) -> list[object]:
        return [
            r.job("j"), r.jobs(["j"]), r.jobs([]), r.job_by_key("red", "k"), r.dependants("j"),
            r.jobs_page(team=None, states=(), after=None, limit=5), r.jobs_with_prefix("j", 5),
            r.snapshots_page("", 5), r.resumed_by_live(),
            r.under_way("red/a"), r.first_held("red/a"), r.queue_in_use("main"),
            r.heads(["main"], 5), r.heads([], 5), r.waiting_counts(), r.live_jobs(),
            r.attempt("a"), r.attempts(["a"]), r.live_attempts(), r.attempts_of("j"),
            r.slice("s"), r.slices(["s"]), r.live_slices(), r.race("r"), r.tombstones(0.0),
            r.pool("p"), r.pools(), r.queue("q"), r.queues(), r.team("t"), r.teams(),
            r.zone("z"), r.zones(), r.quota("team", "t"), r.quotas(), r.control(), r.leader(),
            r.events(0, 5), r.events_of("job", "j"), r.last_seq(),
        ]  # fmt: skip

    assert on.read(look) == [
        None, [], [], None, [],
        [], [],
        [], [], 0, None, None,
        {"main": []}, {}, {}, [],
        None, [], [], [],
        None, [], [], [], [],
        None, [], None, [], None, [],
        None, [], None, [], Control(), None,
        [], [], 0,
    ]  # fmt: skip


def test_snapshots_are_told_in_order_and_by_page(on: Harness) -> None:
    payloads = [Snippet('result = {"snapshot":"x"}'), Command(("echo", '"snapshot":"y"')), Command(("a",), "s" * 64)]
    payloads += [Task("extract", {"snapshot": "z"}), Command(("b",), "t" * 64, "make")]
    jobs = [a_job(number) for number in range(1, 6)]
    on.transact(
        submit,
        *(replace(job, spec=replace(job.spec, payload=one)) for job, one in zip(jobs, payloads, strict=True)),
    )
    found = [("j0001", None), ("j0002", None), ("j0003", "s" * 64), ("j0004", None), ("j0005", "t" * 64)]
    assert on.read(lambda r: r.snapshots_page("", 9)) == found
    assert on.read(lambda r: r.snapshots_page("j0002", 2)) == found[2:4]
    assert on.read(lambda r: r.snapshots_page("j0005", 2)) == []


def test_parents_of_unfinished_jobs_are_told(on: Harness) -> None:
    def story(tx: Transaction) -> None:
        first, _, third = submit(tx, a_job(1), a_job(2, parent="j0001"), a_job(3, parent="j0002"))
        submit(tx, a_job(4, parent="j0002"), a_job(5, tags=('"parent":"j0009"',)))
        fail(tx, third)
        fail(tx, first)

    on.transact(story)
    assert on.read(lambda r: r.resumed_by_live()) == ["j0001", "j0002"]


def test_a_job_comes_back_whole_or_light(on: Harness) -> None:
    (added,) = on.transact(submit, a_job(1, key="k1", body_hash="h"))
    assert added == replace(a_job(1, key="k1", body_hash="h"), version=1)
    assert on.read(lambda r: r.job("j0001")) == added
    assert on.read(lambda r: r.jobs(["j0001"])) == [light(added)]
    assert on.read(lambda r: r.job_by_key("red", "k1")) == light(added)
    assert on.read(lambda r: r.job_by_key("blue", "k1")) is None


def test_payload_kinds_are_told_without_the_payloads(on: Harness) -> None:
    one, two, three = a_job(1), a_job(2), a_job(3)
    snippet = replace(one, spec=replace(one.spec, payload=Snippet('print("type")', {"x": '"'})))
    command = replace(two, spec=replace(two.spec, payload=Command(("echo", '"task"'))))
    task = replace(three, spec=replace(three.spec, payload=Task("extract")))
    on.transact(submit, snippet, command, task)
    kinds = on.read(lambda r: r.payload_kinds(["j0003", "j0001", "nope", "j0002"]))
    assert kinds == {"j0001": "snippet", "j0002": "command", "j0003": "task"}
    assert on.read(lambda r: r.payload_kinds([])) == {}


def test_saving_a_light_job_keeps_its_payload(on: Harness) -> None:
    def edit(tx: Transaction) -> None:
        (job,) = tx.jobs(["j0001"])
        tx.save(replace(job, tags=("new",)), "job.edited")

    (added,) = on.transact(submit, a_job(1))
    on.transact(edit)
    assert on.read(lambda r: r.job("j0001")) == replace(added, version=2, tags=("new",))


def test_jobs_answer_in_the_order_asked_and_leave_out_the_missing(on: Harness) -> None:
    on.transact(submit, *(a_job(n) for n in range(5)))
    found = on.read(lambda r: r.jobs(["j0003", "nope", "j0001", "j0003"]))
    assert [job.id for job in found] == ["j0003", "j0001"]


def test_pages_go_from_new_to_old_by_team_and_state(on: Harness) -> None:
    def prepare(tx: Transaction) -> None:
        jobs = submit(tx, *(a_job(n, team="red" if n % 2 else "blue") for n in range(10)))
        for job in jobs[4:8]:
            fail(tx, job)

    def page(r: Reader, team: str | None, states: tuple[str, ...], after: str | None, limit: int) -> str:
        return "".join(job.id[-1] for job in r.jobs_page(team=team, states=states, after=after, limit=limit))

    on.transact(prepare)
    assert on.read(page, None, (), None, 4) == "9876"
    assert on.read(page, None, (), "j0006", 3) == "543"
    assert on.read(page, "red", (), None, 3) == "975"
    assert on.read(page, "red", (), "j0005", 3) == "31"
    assert on.read(page, None, ("failed",), None, 9) == "7654"
    assert on.read(page, None, (JobState.FAILED, JobState.QUEUED), None, 5) == "98765"
    assert on.read(page, "blue", ("queued",), None, 9) == "820"
    assert on.read(page, "blue", ("running",), None, 9) == ""


def test_a_shortened_id_lists_what_it_may_mean(on: Harness) -> None:
    on.transact(submit, *(a_job(n) for n in (1, 10, 11, 12, 20)))
    assert on.read(lambda r: r.jobs_with_prefix("j001", 9)) == ["j0010", "j0011", "j0012"]
    assert on.read(lambda r: r.jobs_with_prefix("j001", 2)) == ["j0010", "j0011"]
    assert on.read(lambda r: r.jobs_with_prefix("j0001", 9)) == ["j0001"]
    assert on.read(lambda r: r.jobs_with_prefix("%", 9)) == []
    assert len(on.read(lambda r: r.jobs_with_prefix("", 9))) == 5


def test_dependants_are_the_unfinished_jobs_that_wait(on: Harness) -> None:
    def prepare(tx: Transaction) -> None:
        needy = ("j0001", "j0002")
        jobs = submit(tx, a_job(1), a_job(2), *(a_job(n, after=needy, blocked=2) for n in (3, 4, 5)))
        fail(tx, jobs[3])
        submit(tx, a_job(6, after=("j0002", "j0002"), blocked=1))

    on.transact(prepare)
    assert on.read(lambda r: r.dependants("j0001")) == ["j0003", "j0005"]
    assert on.read(lambda r: r.dependants("j0002")) == ["j0003", "j0005", "j0006"]
    assert on.read(lambda r: r.dependants("j0003")) == []


def test_heads_are_best_first_and_only_those_that_can_start(on: Harness) -> None:
    def prepare(tx: Transaction) -> None:
        jobs = submit(
            tx,
            a_job(1), a_job(2, priority=5), a_job(3), a_job(4, priority=-1), a_job(5, priority=5),
            a_job(6, blocked=1), a_job(7), a_job(8), a_job(9), a_job(10, queue="other"),
        )  # fmt: skip
        tx.save(replace(jobs[6], cancel_at=tx.at), "job.cancel_requested")
        place(tx, jobs[7], an_attempt(1, job="j0008"))
        fail(tx, jobs[8])

    on.transact(prepare)
    heads = on.read(lambda r: r.heads(["other", "main", "empty"], 3))
    assert {queue: [job.id for job in jobs] for queue, jobs in heads.items()} == {
        "other": ["j0010"],
        "main": ["j0002", "j0005", "j0001"],
        "empty": [],
    }
    assert heads["other"] == [light(replace(a_job(10, queue="other"), version=1))]
    everything = on.read(lambda r: r.heads(["main"], 99))["main"]
    assert [job.id for job in everything] == ["j0002", "j0005", "j0001", "j0003", "j0004"]
    assert on.read(lambda r: r.waiting_counts()) == {"main": 5, "other": 1}
    assert [on.read(lambda r, job=job: r.waiting_ahead(job)) for job in everything] == [0, 1, 2, 3, 4]
    assert on.read(lambda r: r.waiting_ahead(a_job(6, blocked=1))) == 4


def test_a_job_joins_the_heads_when_it_is_unblocked_and_leaves_when_it_was_placed(on: Harness) -> None:
    def heads(r: Reader) -> list[str]:
        return [job.id for job in r.heads(["main"], 9)["main"]]

    (job,) = on.transact(submit, a_job(1, blocked=1))
    assert on.read(heads) == []
    job = on.transact(lambda tx: tx.save(replace(job, blocked=0), "job.unblocked"))
    assert on.read(heads) == ["j0001"]
    job, _ = on.transact(place, job, an_attempt(1))
    assert on.read(heads) == []
    back = replace(job, state=JobState.QUEUED, chains=(replace(job.chains[0], live=False),))
    on.transact(lambda tx: tx.save(back, "job.requeued"))
    assert on.read(heads) == []
    assert [job.id for job in on.read(lambda r: r.live_jobs())] == ["j0001"]


def test_an_array_knows_who_is_under_way_and_who_is_next(on: Harness) -> None:
    def member(number: int, array: str = "sweep", **changes: Any) -> Job:
        job = a_job(number, **changes)
        return replace(job, spec=replace(job.spec, member=Member(array=array, index=number, at_most=2)))

    def count(r: Reader) -> tuple[int, str | None]:
        held = r.first_held("red/sweep")
        return r.under_way("red/sweep"), None if held is None else held.id

    jobs = on.transact(
        submit, member(1), member(2, blocked=1), member(3, held=True), member(4, held=True, priority=5),
        member(5, "other"), member(6, team="blue"), a_job(7),
    )  # fmt: skip
    assert on.read(count) == (1, "j0004")
    assert [job.id for job in on.read(lambda r: r.heads(["main"], 9))["main"]] == ["j0001", "j0005", "j0006", "j0007"]
    on.transact(lambda tx: tx.save(replace(jobs[3], held=False), "job.released"))
    assert on.read(count) == (2, "j0003")
    placed, _ = on.transact(place, jobs[0], an_attempt(1))
    assert on.read(count) == (2, "j0003"), "one that runs keeps its place"
    on.transact(lambda tx: tx.save(replace(placed, state=JobState.CANCELLED, finished_at=9.0), "job.cancelled"))
    assert on.read(count) == (1, "j0003")
    assert on.read(lambda r: r.queue_in_use("main")) == "j0002"
    assert on.read(lambda r: r.queue_in_use("other")) is None


def test_live_jobs_were_placed_and_are_not_finished(on: Harness) -> None:
    def prepare(tx: Transaction) -> None:
        jobs = submit(tx, *(a_job(n) for n in range(1, 5)))
        for n in (1, 2, 3):
            jobs[n], _ = place(tx, jobs[n], an_attempt(n, job=jobs[n].id))
        fail(tx, jobs[2])
        tx.save(replace(jobs[3], state=JobState.RUNNING), "job.started")

    on.transact(prepare)
    live = on.read(lambda r: r.live_jobs())
    assert [(job.id, job.state) for job in live] == [("j0002", "provisioning"), ("j0004", "running")]
    assert live[0].chains[0].live


def test_attempts(on: Harness) -> None:
    def prepare(tx: Transaction) -> None:
        first = tx.add(an_attempt(9, fence=1), "attempt.created")
        close(tx, first)
        tx.add(an_attempt(3, fence=2), "attempt.created")
        tx.add(an_attempt(4, job="j0002"), "attempt.created")

    on.transact(prepare)
    third = replace(an_attempt(3, fence=2), version=1)
    assert on.read(lambda r: r.attempt("a0003")) == third
    assert [one.id for one in on.read(lambda r: r.attempts(["a0009", "x", "a0003"]))] == ["a0009", "a0003"]
    assert [one.id for one in on.read(lambda r: r.live_attempts())] == ["a0003", "a0004"]
    assert [one.id for one in on.read(lambda r: r.attempts_of("j0001"))] == ["a0009", "a0003"]


def test_slices(on: Harness) -> None:
    def prepare(tx: Transaction) -> None:
        for n in range(1, 5):
            tx.add(a_slice(n, race="r1" if n < 3 else None), "slice.intended")
        for n, when in ((1, 50.0), (4, 60.0)):
            one = tx.slice(f"s{n:04}")
            assert one is not None
            walk_slice(tx, one, SliceState.DELETING, SliceState.GONE, gone_at=when)

    on.transact(prepare)
    assert on.read(lambda r: r.slice("s0003")) == replace(a_slice(3), version=1)
    assert [one.id for one in on.read(lambda r: r.slices(["s0002", "s0001"]))] == ["s0002", "s0001"]
    assert [one.id for one in on.read(lambda r: r.live_slices())] == ["s0002", "s0003"]
    assert [one.id for one in on.read(lambda r: r.race("r1"))] == ["s0002"]
    assert [one.id for one in on.read(lambda r: r.tombstones(50.0))] == ["s0001", "s0004"]
    assert [one.id for one in on.read(lambda r: r.tombstones(50.5))] == ["s0004"]


def test_pools_queues_teams_zones_and_the_switch(on: Harness) -> None:
    def prepare(tx: Transaction) -> None:
        for name in ("b", "a"):
            tx.add(a_pool(name), "pool.created")
            tx.add(a_queue(name), "queue.created")
            tx.add(a_team(name), "team.created")
            tx.add(a_zone(name), "zone.seen")
        tx.save(replace(tx.control(), maintenance=True), "control.changed")
        tx.save(replace(a_pool("a"), version=1, deleted=True), "pool.deleted")

    on.transact(prepare)
    assert on.read(lambda r: r.pools()) == [
        replace(a_pool("a"), version=2, deleted=True),
        replace(a_pool("b"), version=1),
    ]
    assert on.read(lambda r: r.pool("b")) == replace(a_pool("b"), version=1)
    assert on.read(lambda r: r.queues()) == [replace(a_queue(n), version=1) for n in "ab"]
    assert on.read(lambda r: r.queue("a")) == replace(a_queue("a"), version=1)
    assert on.read(lambda r: r.teams()) == [replace(a_team(n), version=1) for n in "ab"]
    assert on.read(lambda r: r.team("a")) == replace(a_team("a"), version=1)
    assert on.read(lambda r: r.zones()) == [replace(a_zone(n), version=1) for n in "ab"]
    assert on.read(lambda r: r.zone(a_zone("b").id)) == replace(a_zone("b"), version=1)
    assert on.read(lambda r: r.control()) == Control(version=1, maintenance=True)


def test_a_transaction_reads_what_it_wrote(on: Harness) -> None:
    def verb(tx: Transaction) -> list[object]:
        (job,) = submit(tx, a_job(1, key="k"))
        seen: list[object] = [tx.job("j0001") == job, tx.jobs(["j0001"]) == [light(job)]]
        seen.append(tx.job_by_key("red", "k") == light(job))
        job = tx.save(replace(job, priority=3), "job.edited")
        seen.append(tx.jobs_page(team=None, states=(), after=None, limit=9) == [light(job)])
        job, attempt = place(tx, job, an_attempt(1))
        seen += [tx.live_jobs() == [light(job)], tx.heads(["main"], 9)["main"] == []]
        seen += [tx.live_attempts() == [attempt], tx.attempts_of(job.id) == [attempt]]
        seen.append(
            [event.kind for event in tx.events_of("job", job.id)] == ["job.created", "job.edited", "job.placed"]
        )
        seen.append(tx.last_seq() == 4 == len(tx.events(0, 99)))
        tx.reserve("team", "red", 8)
        seen.append(tx.quota("team", "red") == Quota(scope="team", name="red", used_chips=8))
        tx.reserve("team", "red", -3)
        seen.append([quota.used_chips for quota in tx.quotas()] == [5])
        return seen

    assert on.transact(verb) == [True] * 12
