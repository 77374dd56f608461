"""Every limit and interval of the control plane, with its unit and its reason.

Read by all folders. A number that bounds anything belongs here, not beside its use, so that an operator can find
and question it in one place (`tpu rules --limits` prints this table).
"""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec

N = TypeVar("N", int, float)


class Limit(msgspec.Struct, frozen=True):
    """One row of the table: a number, what it counts, and why it is what it is."""

    name: str
    value: int | float
    unit: str
    reason: str


_rows: list[Limit] = []


def _limit(name: str, value: N, unit: str, reason: str) -> N:
    """Put a number into the table and hand it back, so that code reads a plain constant."""
    _rows.append(Limit(name, value, unit, reason))
    return value


# --- the loop, in seconds ---
TICK_S: Final = _limit("TICK_S", 5.0, "s", "the longest a decision waits when no event wakes the loop earlier")
TICK_LEAST_S: Final = _limit(
    "TICK_LEAST_S", 0.001, "s", "between two ticks, however short they are: a stale read cannot spin the loop"
)
TICK_REST_S: Final = _limit(
    "TICK_REST_S", 0.005, "s", "between two ticks, however long they are: a burst is planned together"
)
LEADER_TTL_S: Final = _limit(
    "LEADER_TTL_S", 8.0, "s", "a dead leader is replaced within this plus one poll: at most 10 s"
)
LEADER_RENEW_S: Final = _limit(
    "LEADER_RENEW_S", 2.0, "s", "four renewals fit in one term, so one lost reply costs nothing"
)

# --- agents: silence and custody are two clocks ---
SYNC_S: Final = _limit("SYNC_S", 5.0, "s", "how often an agent syncs when nothing happens")
SILENCE_S: Final = _limit("SILENCE_S", 15.0, "s", "three missed syncs: the server suspects, and asks the provider")
CUSTODY_S: Final = _limit(
    "CUSTODY_S", 600.0, "s", "an agent that reaches neither server nor bucket this long stops its children"
)
FENCE_POLL_S: Final = _limit("FENCE_POLL_S", 5.0, "s", "how often an agent that lost the server reads its fence object")
FENCE_WAIT_S: Final = _limit(
    "FENCE_WAIT_S", 2 * FENCE_POLL_S + 1.0, "s", "two polls and a margin: then no zombie can still believe"
)
GRACE_S: Final = _limit("GRACE_S", 30.0, "s", "between SIGTERM and SIGKILL, the same as a spot VM's notice")
GANG_GRACE_S: Final = _limit(
    "GANG_GRACE_S",
    3.0,
    "s",
    "the same once a gang is broken: it can save nothing any more, and JAX ignores SIGTERM",
)
CANCEL_DEADLINE_S: Final = _limit(
    "CANCEL_DEADLINE_S", 50.0, "s", "after this a cancelled job ends even if nobody confirmed the kill (L3: 60 s)"
)

# --- capacity, in seconds ---
CALL_TIMEOUT_S: Final = _limit("CALL_TIMEOUT_S", 30.0, "s", "no provider call is awaited longer")
LIST_EVERY_S: Final = _limit(
    "LIST_EVERY_S", 30.0, "s", "each zone is listed this often; four times as often while it settles"
)
GONE_LISTINGS_APART_S: Final = _limit(
    "GONE_LISTINGS_APART_S", 60.0, "s", "absence is believed after two complete listings this far apart and a get"
)
CREATE_TIMEOUT_S: Final = _limit(
    "CREATE_TIMEOUT_S", 1800.0, "s", "a slice not ready by then is given up, unless it was to wait longer in a line"
)
CREATE_TIMEOUT_TIMES: Final = _limit(
    "CREATE_TIMEOUT_TIMES", 10, "times", "what others took in its zone: a slice is given up then, if that is sooner"
)
CREATE_TIMEOUT_LEAST_S: Final = _limit(
    "CREATE_TIMEOUT_LEAST_S", 600.0, "s", "but not before this: a slow hour of a quick zone must not cost its slices"
)
SLOW_TIMES: Final = _limit(
    "SLOW_TIMES", 3, "times", "what others took in its zone: a creation is slow then, and another zone is asked too"
)
SLOW_LEAST_S: Final = _limit("SLOW_LEAST_S", 120.0, "s", "no creation is called slow sooner: TPUs take a minute or two")
SLOW_UNKNOWN_S: Final = _limit(
    "SLOW_UNKNOWN_S", 600.0, "s", "a creation is slow in a zone that never made one: most TPUs are ready by then"
)
JOIN_TIMEOUT_S: Final = _limit(
    "JOIN_TIMEOUT_S", 300.0, "s", "a READY slice whose agents have not all joined by then is broken"
)
TOMBSTONE_S: Final = _limit("TOMBSTONE_S", CREATE_TIMEOUT_S + 900.0, "s", "how long a deleted name stays under sweep")
ORPHAN_S: Final = _limit("ORPHAN_S", 900.0, "s", "an unowned slice with our label is deleted within this")
ZONE_MUTE_S: Final = _limit(
    "ZONE_MUTE_S", 15.0, "s", "a zone that was not listed for so long is told of, and nothing new is asked for there"
)
HOSTS_ASK_S: Final = _limit(
    "HOSTS_ASK_S", 3.0, "s", "a provider may take to say where hosts are: people wait for it, and we know most of it"
)
DELETE_RETRY_S: Final = _limit("DELETE_RETRY_S", 20.0, "s", "a delete that has not taken effect is asked for again")
QUOTA_FREED_S: Final = _limit(
    "QUOTA_FREED_S", 5.0, "s", "after a refusal for want of quota while something of ours leaves: it frees some soon"
)
ZONE_BACKOFF_FIRST_S: Final = _limit(
    "ZONE_BACKOFF_FIRST_S", 15.0, "s", "after one stockout: short, because one unlucky try proves little"
)
ZONE_BACKOFF_MAX_S: Final = _limit("ZONE_BACKOFF_MAX_S", 600.0, "s", "a dry zone is still tried six times an hour")
SETUP_FAILURES_MAX: Final = _limit(
    "SETUP_FAILURES_MAX", 3, "slices", "that could not be set up one after another: then their zone rests for long"
)
SETUP_REST_S: Final = _limit(
    "SETUP_REST_S", 3600.0, "s", "such a zone rests, or until its pool is changed: every further try costs money"
)
SOLVE_HEARD_S: Final = _limit(
    "SOLVE_HEARD_S", 6.0, "s", "a host syncs at once when it got an order; restarted now, it is back before SILENCE_S"
)
SOLVE_RESTART_S: Final = _limit("SOLVE_RESTART_S", 60.0, "s", "for an agent that was restarted to be heard again")
SOLVE_ANSWER_S: Final = _limit(
    "SOLVE_ANSWER_S", 300.0, "s", "for a host to look and mend: names that time out, mounts, gigabytes to remove"
)
SOLVE_FAILURES_MAX: Final = _limit(
    "SOLVE_FAILURES_MAX", 2, "runs", "in a row that could not mend a slice: then it is given up and replaced"
)
SLICE_HOSTS_MAX: Final = _limit("SLICE_HOSTS_MAX", 10_000, "hosts", "of one slice: more than the largest of any kind")
CREATES_PER_MINUTE: Final = _limit(
    "CREATES_PER_MINUTE", 75, "calls/min", "per provider, all zones; the Cloud TPU API allows about 91 per project"
)
CREATES_AT_ONCE: Final = _limit(
    "CREATES_AT_ONCE", 15, "calls", "of those may come together, the others one a second; all a restart can forget"
)
INTENTS_PER_ZONE: Final = _limit(
    "INTENTS_PER_ZONE", 60, "slices", "of fleets and minimums not asked for yet: what a minute of creates can serve"
)
RATE_REST_S: Final = _limit("RATE_REST_S", 10.0, "s", "a provider that says 'too often', and not for how long, rests")
RATE_REST_S_MAX: Final = _limit(
    "RATE_REST_S_MAX", 600.0, "s", "however long it asks to be left alone: what is not deleted is paid for"
)
CALLS_AT_ONCE: Final = _limit(
    "CALLS_AT_ONCE", 16, "calls", "concurrent provider calls per zone: one that hangs holds up itself alone"
)

# --- jobs ---
BATCH_JOBS_MAX: Final = _limit(
    "BATCH_JOBS_MAX", 10_000, "jobs", "one batch submit; larger ones are split by the client"
)
ARRAY_MEMBERS_MAX: Final = _limit("ARRAY_MEMBERS_MAX", 100_000, "jobs", "of one array; `at_most` cannot be more either")
CODE_BYTES_MAX: Final = _limit("CODE_BYTES_MAX", 1 << 20, "bytes", "a snippet; larger programs belong in a snapshot")
REPLICAS_MAX: Final = _limit(
    "REPLICAS_MAX", 1_000, "replicas", "of one job: beyond this the work wants more jobs, not more copies"
)
GANG_SLICES_MAX: Final = _limit(
    "GANG_SLICES_MAX", 256, "slices", "of one attempt: more than the largest multislice in use"
)
PRIORITY_MAX: Final = _limit("PRIORITY_MAX", 1_000, "steps", "priorities run from minus this to this")
NAME_CHARACTERS_MAX: Final = _limit(
    "NAME_CHARACTERS_MAX",
    128,
    "characters",
    "of names, tags and keys: long enough for people, short enough for an index and a table",
)
TAGS_MAX: Final = _limit("TAGS_MAX", 64, "tags", "of one job: tags are for filters, not for storage")
NOTE_CHARACTERS_MAX: Final = _limit(
    "NOTE_CHARACTERS_MAX", 4_096, "characters", "of a job's note: a paragraph; longer text belongs in a file"
)
ENV_BYTES_MAX: Final = _limit(
    "ENV_BYTES_MAX", 64 << 10, "bytes", "of a job's own environment, names and values: Linux allows little more"
)
ARGV_BYTES_MAX: Final = _limit(
    "ARGV_BYTES_MAX", 256 << 10, "bytes", "of a command's words: Linux allows 2 MiB with the environment"
)
SETUP_CHARACTERS_MAX: Final = _limit(
    "SETUP_CHARACTERS_MAX", 64 << 10, "characters", "of a set-up command; a longer one belongs in the snapshot"
)
CHOICES_MAX: Final = _limit(
    "CHOICES_MAX", 64, "names", "of accelerators, zones or secrets that one job names: nobody has more to say"
)
AFTER_MAX: Final = _limit("AFTER_MAX", 1_000, "jobs", "that one job waits for: each is a row read when it is submitted")
OUTPUTS_MAX: Final = _limit("OUTPUTS_MAX", 1_000, "outputs", "of one job: more belong in one archive or a dataset")
MEMORY_BYTES_MAX: Final = _limit(
    "MEMORY_BYTES_MAX", 1 << 44, "bytes", "of one host: 16 TiB is more than any machine of the catalogue"
)
POOL_SLICES_MAX: Final = _limit(
    "POOL_SLICES_MAX", 100_000, "slices", "of one pool: ten times what the planner is measured with"
)
PAGE_JOBS_MAX: Final = _limit("PAGE_JOBS_MAX", 1_000, "jobs", "in one page of a list: some hundred kilobytes")
PAGE_JOBS_SCANNED: Final = _limit(
    "PAGE_JOBS_SCANNED", 20_000, "jobs", "looked at for one page of a filtered list; then it ends and says where"
)
PAGE_EVENTS_MAX: Final = _limit("PAGE_EVENTS_MAX", 1_000, "events", "in one page of events")
TIMEOUT_S_MAX: Final = _limit(
    "TIMEOUT_S_MAX", 30 * 24 * 3600.0, "s", "no job may hold a slice longer without being asked again"
)
TIMEOUT_S_DEFAULT: Final = _limit(
    "TIMEOUT_S_DEFAULT",
    7 * 24 * 3600.0,
    "s",
    "longer than most training runs; a forgotten job still ends within a week",
)
FAILURE_BUDGET_DEFAULT: Final = _limit(
    "FAILURE_BUDGET_DEFAULT", 0, "retries", "user failures are not retried unless the user says so"
)
INFRA_BUDGET_DEFAULT: Final = _limit(
    "INFRA_BUDGET_DEFAULT", 100, "retries", "spot jobs are lost often; the breaker, not the budget, stops a poison job"
)
BACKOFF_FIRST_S: Final = _limit(
    "BACKOFF_FIRST_S", 2.0, "s", "the first retry is quick: most losses are not the job's fault"
)
BACKOFF_MAX_S: Final = _limit("BACKOFF_MAX_S", 300.0, "s", "waiting longer than this saves nobody anything")
POISON_LOSSES: Final = _limit(
    "POISON_LOSSES", 8, "losses", "infrastructure losses in a row within their first minute: the job is the cause"
)
POISON_RUN_S: Final = _limit(
    "POISON_RUN_S", 60.0, "s", "a loss within this time of the start is a quick one: the poison breaker counts those"
)
INFEASIBLE_S: Final = _limit(
    "INFEASIBLE_S", 600.0, "s", "a job no pool can ever hold fails after this, so that a pool can still be made"
)
RETENTION_S: Final = _limit(
    "RETENTION_S",
    30 * 24 * 3600.0,
    "s",
    "terminal jobs may be purged after this; `tpu clean` takes their logs, results and checkpoints then, unless told",
)
UNUSED_S: Final = _limit(
    "UNUSED_S",
    24 * 3600.0,
    "s",
    "snapshots, blobs and host caches that nothing refers to stay so long: no submit is under way for a day",
)
CLEAN_JOBS: Final = _limit("CLEAN_JOBS", 200, "jobs", "cleaned by one call: seconds of work, then its caller hears")
CLEAN_OBJECTS: Final = _limit(
    "CLEAN_OBJECTS",
    2_000,
    "objects",
    "by hash that one call removes: within SWEEP_S on any bucket",
)
CLEAN_READ_BYTES: Final = _limit(
    "CLEAN_READ_BYTES", 64 << 20, "bytes", "of snapshots read by one call for the blobs they name"
)
RETENTION_EVERY_S: Final = _limit(
    "RETENTION_EVERY_S", 3600.0, "s", "between two passes of the retention policy, unless it says otherwise"
)
RETENTION_FIRST_S: Final = _limit("RETENTION_FIRST_S", 60.0, "s", "after its start a server makes the first pass")
RETENTION_PARTS: Final = _limit("RETENTION_PARTS", 20, "parts", "of cleaning in one pass; the next pass goes on there")
SWEEP_S: Final = _limit(
    "SWEEP_S", 60.0, "s", "a list of what is about to go holds so long; then whoever wrote it removes nothing more"
)

# --- planning ---
WINDOW_JOBS: Final = _limit("WINDOW_JOBS", 64, "jobs", "jobs at the head of each queue the planner looks at")
SHARE_HALF_LIFE_S: Final = _limit("SHARE_HALF_LIFE_S", 24 * 3600.0, "s", "what a queue used a day ago counts half")
SHARE_CHARGE_S: Final = _limit(
    "SHARE_CHARGE_S", 300.0, "s", "chip-seconds charged at once per chip started, so that one round alternates"
)
ELASTIC_STEP: Final = _limit("ELASTIC_STEP", 64, "replicas", "replicas added to one job in one tick")
RACE_ZONES_MAX: Final = _limit("RACE_ZONES_MAX", 4, "zones", "intents of one racing set")
EVENTS_PER_READ: Final = _limit("EVENTS_PER_READ", 20_000, "events", "the projection catches up in pages of this size")

# --- snapshots ---
BLOB_BYTES_MAX: Final = _limit(
    "BLOB_BYTES_MAX", 64 << 20, "bytes", "one blob as stored and as decoded: what a host must hold in memory at once"
)
SNAPSHOT_CHUNK_BYTES: Final = _limit(
    "SNAPSHOT_CHUNK_BYTES", 16 << 20, "bytes", "a larger file is cut: an appended one sends its last piece only"
)
SNAPSHOT_SMALL_BYTES: Final = _limit(
    "SNAPSHOT_SMALL_BYTES", 32 << 10, "bytes", "files below this share packs, so that 10,000 of them are few objects"
)
SNAPSHOT_PACK_BYTES: Final = _limit(
    "SNAPSHOT_PACK_BYTES", 1 << 20, "bytes", "of one pack: what a change of one small file can send at most"
)
SNAPSHOT_FILES_MAX: Final = _limit(
    "SNAPSHOT_FILES_MAX", 100_000, "files", "of one snapshot: more is a data set, which belongs in a bucket"
)
SNAPSHOT_BYTES_MAX: Final = _limit(
    "SNAPSHOT_BYTES_MAX", 16 << 30, "bytes", "of one snapshot unpacked: more is data, which belongs in a bucket"
)
SNAPSHOT_MANIFEST_BYTES_MAX: Final = _limit(
    "SNAPSHOT_MANIFEST_BYTES_MAX", 64 << 20, "bytes", "the list of the most files a snapshot may have, and then some"
)
HOST_FREE_BYTES: Final = _limit(
    "HOST_FREE_BYTES", 256 << 20, "bytes", "left free on a host's disk by unpacking, for logs and the agent itself"
)
HOST_CACHE_BYTES_MAX: Final = _limit(
    "HOST_CACHE_BYTES_MAX", 32 << 30, "bytes", "of blobs kept on a host; the longest unused go first"
)
HOST_ENVIRONMENTS_BYTES_MAX: Final = _limit(
    "HOST_ENVIRONMENTS_BYTES_MAX", 32 << 30, "bytes", "of environments kept on a host: some ten with a jax of their own"
)
HOST_ENVIRONMENTS_PERCENT: Final = _limit(
    "HOST_ENVIRONMENTS_PERCENT", 25, "percent", "of the disk, at most, are environments: some hosts have a small one"
)

# --- payloads on a host ---
LOG_BYTES_MAX: Final = _limit(
    "LOG_BYTES_MAX", 2 << 30, "bytes", "of one stream of one attempt on one host; what follows is dropped and marked"
)
LOG_CHUNK_BYTES: Final = _limit("LOG_CHUNK_BYTES", 1 << 20, "bytes", "of output in one call to the server")
LOG_POLL_S: Final = _limit("LOG_POLL_S", 0.05, "s", "how often an agent looks for new output: it is sent within 100 ms")
LOG_TAIL_BYTES: Final = _limit("LOG_TAIL_BYTES", 32 << 10, "bytes", "of the end of a log that goes with an exit")
PIDS_MAX: Final = _limit("PIDS_MAX", 4_096, "tasks", "of one payload: many threads fit, a fork bomb does not")
HOST_SPARE_MEMORY_BYTES: Final = _limit(
    "HOST_SPARE_MEMORY_BYTES", 512 << 20, "bytes", "kept from payloads, so that the agent and the kernel live on"
)
KILL_S: Final = _limit("KILL_S", 5.0, "s", "from SIGKILL until nothing of a payload is left")

# --- clients ---
CLIENT_CALL_S: Final = _limit("CLIENT_CALL_S", 30.0, "s", "one call with all its tries, unless it moves many bytes")
CLIENT_BATCH_S: Final = _limit("CLIENT_BATCH_S", 120.0, "s", "a batch of jobs: one large commit, on a slow disk too")
CLIENT_BYTES_S: Final = _limit("CLIENT_BYTES_S", 900.0, "s", "one blob or artifact over a slow line")
CLIENT_CONNECT_S: Final = _limit("CLIENT_CONNECT_S", 10.0, "s", "a host that is up takes a connection sooner")
CLIENT_PATIENCE_S: Final = _limit(
    "CLIENT_PATIENCE_S", 15.0, "s", "while a server refuses connections or answers 503: longer than its restart"
)
CLIENT_STREAM_PATIENCE_S: Final = _limit(
    "CLIENT_STREAM_PATIENCE_S", 600.0, "s", "a follower outlives a server's upgrade, as jobs do (CUSTODY_S)"
)
CLIENT_STREAM_SILENCE_S: Final = _limit(
    "CLIENT_STREAM_SILENCE_S", 60.0, "s", "live streams send heartbeats; a connection silent this long is made anew"
)
CLIENT_REST_FIRST_S: Final = _limit(
    "CLIENT_REST_FIRST_S", 0.05, "s", "before the first retry: most failures are one stale connection"
)
CLIENT_REST_MAX_S: Final = _limit(
    "CLIENT_REST_MAX_S", 3.0, "s", "between retries: longer would only delay the first answer of a server that is back"
)
CLIENT_CONNECTIONS_AT_REST: Final = _limit(
    "CLIENT_CONNECTIONS_AT_REST", 8, "connections", "kept open by one client, for as many threads that call at once"
)
CLIENT_BATCH_BYTES: Final = _limit(
    "CLIENT_BATCH_BYTES", 16 << 20, "bytes", "of one batch submit; what is larger is sent as several"
)
RESULT_WAIT_S: Final = _limit(
    "RESULT_WAIT_S", 10.0, "s", "a result is waited for in one call; what takes longer is followed by its events"
)

# --- what hosts send ---
SYNC_REPEAT_S: Final = _limit(
    "SYNC_REPEAT_S", 0.5, "s", "the same orders are not given faster: a host that is stopping something does not spin"
)
LATE_S: Final = _limit(
    "LATE_S",
    CUSTODY_S + 300.0,
    "s",
    "a closed attempt's logs and artifacts are taken so long: custody, then the upload",
)
LOG_OBJECT_BYTES: Final = _limit(
    "LOG_OBJECT_BYTES", 1 << 20, "bytes", "so much of one stream is written as one object without waiting longer"
)
LOG_FLUSH_S: Final = _limit(
    "LOG_FLUSH_S", 2.0, "s", "the longest a log line waits to be durable; hosts keep it until then"
)
LOG_SETTLE_S: Final = _limit("LOG_SETTLE_S", 5.0, "s", "the end of a log is answered when it is durable, or after this")
LOG_MARK_BYTES_MAX: Final = _limit(
    "LOG_MARK_BYTES_MAX", 2 << 20, "bytes", "above a stream's cap: room for the marker and the end of the stream"
)
LOG_PENDING_BYTES_MAX: Final = _limit(
    "LOG_PENDING_BYTES_MAX", 8 << 20, "bytes", "of one stream not yet durable: then its agent waits, not our memory"
)
LOG_KEPT_BYTES: Final = _limit(
    "LOG_KEPT_BYTES", 1 << 20, "bytes", "of one stream kept in memory for followers once it is durable"
)
LOG_MEMORY_BYTES_MAX: Final = _limit(
    "LOG_MEMORY_BYTES_MAX", 48 << 20, "bytes", "of all durable log bytes kept in memory: the server stays under 100 MB"
)
LOG_PIECE_BYTES: Final = _limit(
    "LOG_PIECE_BYTES", 128 << 10, "bytes", "of one event of a log stream: a page a browser takes without a pause"
)
ARTIFACT_BYTES_MAX: Final = _limit(
    "ARTIFACT_BYTES_MAX", 256 << 20, "bytes", "one artifact sent through the server; larger ones go to the bucket"
)
RESULT_BYTES_MAX: Final = _limit(
    "RESULT_BYTES_MAX", 16 << 20, "bytes", "a result as JSON: arrays are artifacts, and this is read whole"
)

# --- checkpoints that go through the server ---
CHECKPOINT_PIECE_BYTES: Final = _limit(
    "CHECKPOINT_PIECE_BYTES", 8 << 20, "bytes", "of a checkpoint in one call: what a lost answer costs to send again"
)
CHECKPOINT_FILES_MAX: Final = _limit(
    "CHECKPOINT_FILES_MAX", 100_000, "files", "of one checkpoint directory: more belong in fewer, larger ones"
)
CHECKPOINT_LIST_BYTES_MAX: Final = _limit(
    "CHECKPOINT_LIST_BYTES_MAX", 64 << 20, "bytes", "of the list of a copy: the most files, and pieces of 5 TB"
)
CHECKPOINT_LOOK_S: Final = _limit(
    "CHECKPOINT_LOOK_S", 0.5, "s", "how often an agent looks for finished checkpoints: the step after is at risk"
)
CHECKPOINT_SETTLE_S: Final = _limit(
    "CHECKPOINT_SETTLE_S", 2.0, "s", "what is neither renamed nor marked as finished counts once it rests so long"
)
FENCE_WAY_S: Final = _limit(
    "FENCE_WAY_S", 7 * 24 * 3600.0, "s", "a signed address of one fence object lasts so long: the most clouds allow"
)

#: The whole table, in the order above.
LIMITS: Final = tuple(_rows)
