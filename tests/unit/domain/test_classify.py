"""The failure classifier: typed facts first, the log only as evidence, echoes traced to the first failure."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.domain.classify import (
    AGENT_REPORTS,
    EVIDENCE_MAX,
    SLICE_STATES,
    Signals,
    Verdict,
    classify,
    first_failure,
)
from penstock.domain.classify_patterns import ECHO_IDS, NOISE, PATTERNS, Weight
from penstock.domain.lifecycle import Cause

LOGS = Path(__file__).parent / "logs"

TRACE = 'Traceback (most recent call last):\n  File "main.py", line 1, in <module>\nValueError: bad shape\n'
ECHO = "F1102 client.h:77] Terminating process because the JAX distributed service detected fatal errors.\n"
HBM = "XlaRuntimeError: RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm\n"


def log(name: str) -> str:
    return (LOGS / name).read_bytes().decode(errors="replace")


# facts, cause, confidence
TYPED: list[tuple[dict[str, Any], str, str]] = [
    # Ended well.
    ({"exit_code": 0}, "succeeded", "certain"),
    ({"exit_code": 0, "log_tail": "ERROR: Job failed\n" + TRACE}, "succeeded", "certain"),
    ({"exit_code": 0, "log_tail": HBM}, "succeeded", "certain"),
    ({"exit_code": 0, "slice_state": "READY"}, "succeeded", "certain"),
    ({"exit_code": 0, "slice_state": "PREEMPTED"}, "succeeded", "certain"),
    ({"exit_code": 0, "slice_state": "NOT_FOUND"}, "succeeded", "certain"),
    ({"exit_code": 0, "notice": True}, "succeeded", "likely"),
    ({"exit_code": 0, "oom_killed": True}, "succeeded", "likely"),
    ({"exit_code": 0, "agent": "exited"}, "succeeded", "certain"),
    # The agent's own acts.
    ({"agent": "cancelled"}, "cancelled", "certain"),
    ({"agent": "cancelled", "exit_code": 143}, "cancelled", "certain"),
    ({"agent": "cancelled", "exit_code": 0}, "cancelled", "certain"),
    ({"agent": "cancelled", "slice_state": "PREEMPTED", "notice": True}, "cancelled", "certain"),
    ({"agent": "timeout", "signal": 9}, "timeout", "certain"),
    ({"agent": "TIMEOUT", "exit_code": 0}, "timeout", "certain"),
    ({"agent": "timeout", "exit_code": 1, "log_tail": HBM}, "timeout", "certain"),
    # Memory of the host.
    ({"oom_killed": True, "exit_code": 137}, "oom", "certain"),
    ({"oom_killed": True, "signal": 9, "slice_state": "PREEMPTED"}, "oom", "certain"),
    ({"oom_killed": True, "exit_code": 1, "log_tail": TRACE}, "oom", "certain"),
    ({"agent": "oom", "exit_code": 1, "notice": True}, "oom", "certain"),
    ({"exit_code": 137, "log_tail": HBM}, "oom", "likely"),
    ({"signal": 9, "log_tail": "MemoryError"}, "oom", "likely"),
    # SIGKILL without a word about memory came from outside.
    ({"exit_code": 137}, "infra", "likely"),
    ({"signal": 9}, "infra", "likely"),
    ({"exit_code": -9}, "infra", "likely"),
    ({"exit_code": 137, "log_tail": TRACE}, "infra", "likely"),
    ({"exit_code": 137, "slice_state": "PREEMPTED"}, "preempted", "certain"),
    ({"exit_code": 137, "notice": True}, "preempted", "likely"),
    # The machine.
    ({"slice_state": "PREEMPTED"}, "preempted", "certain"),
    ({"slice_state": "preempted", "exit_code": 1, "log_tail": TRACE}, "preempted", "certain"),
    ({"slice_state": " Preempted ", "signal": 11}, "preempted", "certain"),
    ({"slice_state": "SUSPENDED", "exit_code": 143}, "preempted", "certain"),
    ({"slice_state": "TERMINATED", "exit_code": 1}, "preempted", "likely"),
    ({"slice_state": "TERMINATED", "notice": True}, "preempted", "certain"),
    ({"slice_state": "NOT_FOUND"}, "lost", "likely"),
    ({"slice_state": "not found", "exit_code": 1, "log_tail": HBM}, "lost", "likely"),
    ({"slice_state": "NOT_FOUND", "notice": True}, "preempted", "likely"),
    ({"slice_state": "REPAIRING", "exit_code": 1, "log_tail": TRACE}, "infra", "certain"),
    ({"slice_state": "RESTARTING"}, "infra", "certain"),
    ({"slice_state": "REIMAGING", "signal": 15}, "infra", "certain"),
    ({"slice_state": "FAILED"}, "infra", "certain"),
    ({"slice_state": "STOPPING", "signal": 15}, "infra", "likely"),
    ({"slice_state": "deleting", "exit_code": 143}, "infra", "likely"),
    ({"slice_state": "REPAIRING", "notice": True}, "preempted", "likely"),
    ({"slice_state": "READY", "exit_code": 1}, "user_error", "guess"),
    ({"slice_state": "A NEW WORD", "exit_code": 1}, "user_error", "guess"),
    # Notices.
    ({"notice": True, "exit_code": 143}, "preempted", "likely"),
    ({"notice": True, "signal": 15, "slice_state": "READY"}, "preempted", "likely"),
    ({"notice": True, "exit_code": 1, "log_tail": ECHO}, "preempted", "likely"),
    ({"notice": True, "exit_code": 1, "log_tail": TRACE}, "preempted", "likely"),
    ({"notice": True, "exit_code": 139}, "preempted", "likely"),
    ({"agent": "preempted", "exit_code": 1, "slice_state": "READY"}, "preempted", "certain"),
    # What the agent saw.
    ({"agent": "launch_failed"}, "infra", "certain"),
    ({"agent": "device_busy", "exit_code": 1}, "infra", "certain"),
    ({"agent": "disk_full", "exit_code": 1, "log_tail": TRACE}, "infra", "certain"),
    ({"agent": "disk_full", "exit_code": 0}, "infra", "certain"),
    ({"agent": "process_lost"}, "lost", "certain"),
    ({"agent": "process_lost", "log_tail": HBM}, "lost", "certain"),
    ({"agent": "process_lost", "slice_state": "PREEMPTED"}, "preempted", "certain"),
    ({"agent": "a new word", "exit_code": 1}, "user_error", "guess"),
    # Signals and exit codes alone.
    ({"exit_code": 143}, "infra", "guess"),
    ({"signal": 15}, "infra", "guess"),
    ({"exit_code": 143, "log_tail": TRACE}, "infra", "guess"),
    ({"exit_code": 143, "log_tail": HBM}, "oom", "likely"),
    ({"exit_code": 130}, "infra", "guess"),
    ({"signal": 1}, "infra", "guess"),
    ({"exit_code": 139}, "user_error", "guess"),
    ({"signal": 11}, "user_error", "guess"),
    ({"exit_code": 134}, "user_error", "guess"),
    ({"exit_code": 134, "log_tail": ECHO}, "infra", "likely"),
    ({"exit_code": 139, "log_tail": ECHO}, "infra", "likely"),
    ({"exit_code": 137, "log_tail": ECHO}, "infra", "likely"),
    ({"exit_code": 134, "log_tail": TRACE}, "user_error", "likely"),
    ({"signal": 24, "log_tail": HBM}, "timeout", "likely"),
    ({"signal": 10}, "user_error", "guess"),
    ({"exit_code": 124}, "timeout", "likely"),
    ({"exit_code": 124, "log_tail": TRACE}, "timeout", "likely"),
    ({"exit_code": 126}, "user_error", "likely"),
    ({"exit_code": 127}, "user_error", "likely"),
    ({"exit_code": 127, "log_tail": "bash: /nfs/env/python: No such file or directory"}, "infra", "likely"),
    ({"exit_code": 1}, "user_error", "guess"),
    ({"exit_code": 2, "log_tail": "main.py: error: unrecognized arguments: --lr"}, "user_error", "likely"),
    ({"exit_code": 255}, "user_error", "guess"),
    ({"exit_code": 1, "log_tail": "the word error and FAIL and Job failed"}, "user_error", "guess"),
    # Nothing typed at all.
    ({}, "lost", "guess"),
    ({"slice_state": "READY"}, "lost", "guess"),
    ({"log_tail": "step 5 error 0.1"}, "lost", "guess"),
    ({"log_tail": HBM}, "oom", "guess"),
    ({"log_tail": TRACE}, "user_error", "guess"),
]


@pytest.mark.parametrize(("facts", "cause", "confidence"), TYPED)
def test_typed_facts(facts: dict[str, Any], cause: str, confidence: str) -> None:
    verdict = classify(Signals(**facts))
    assert (verdict.cause, verdict.confidence) == (cause, confidence), verdict
    assert verdict.evidence
    assert verdict.advice.endswith(".")


# log, exit code, cause, pattern
CORPUS: list[tuple[str, int, str, str | None]] = [
    ("healthy_with_error_words", 0, "succeeded", None),
    ("hbm_oom_compile", 1, "oom", "hbm_oom"),
    ("hbm_oom_wrapped", 1, "oom", "hbm_oom"),
    ("vmem_oom", 1, "oom", "vmem_oom"),
    ("host_oom_kernel", 137, "oom", "host_oom"),
    ("grpc_error", 1, "infra", "grpc_error"),
    ("nfs_not_mounted", 127, "infra", "mount_missing"),
    ("invalid_pointer", 134, "infra", "invalid_free"),
    ("deadline", 1, "infra", "deadline_exceeded"),
    ("libtpu_log_locked", 1, "infra", "libtpu_log_locked"),
    ("libtpu_in_use", 1, "infra", "libtpu_in_use"),
    ("vfio_busy", 1, "infra", "device_busy"),
    ("coordination_echo", 134, "infra", "coordination"),
    ("own_exception_then_barrier", 134, "user_error", "python_exception"),
    ("caught_exception_then_echo", 134, "infra", "coordination"),
    ("megascale_hang", 134, "infra", "megascale_hang"),
    ("segfault", 139, "user_error", None),
    ("disk_full", 1, "infra", "disk_full"),
    ("import_error", 1, "user_error", "python_import"),
    ("python_exception_prefixed", 1, "user_error", "python_exception"),
    ("xla_compile", 1, "user_error", "xla_compile"),
    ("tpu_init", 1, "infra", "tpu_init_failed"),
    ("cuda_wanted", 1, "user_error", "cuda_wanted"),
    ("dns", 1, "infra", "dns_failed"),
    ("bucket_403", 1, "user_error", "bucket_denied"),
    ("wandb_noise_then_key_error", 1, "user_error", "python_exception"),
    ("wandb_noise_only", 1, "user_error", None),
    ("preemption_in_log", 143, "preempted", "preemption_in_log"),
    ("tpu_halted", 1, "infra", "tpu_halted"),
    ("colours_and_bad_bytes", 1, "infra", "disk_full"),
]


@pytest.mark.parametrize(("name", "code", "cause", "pattern"), CORPUS)
def test_corpus(name: str, code: int, cause: str, pattern: str | None) -> None:
    verdict = classify(Signals(exit_code=code, log_tail=log(f"{name}.log")))
    assert (verdict.cause, verdict.pattern) == (cause, pattern), verdict
    assert any(line.startswith("log: ") for line in verdict.evidence) == (pattern is not None)


def test_every_log_of_the_corpus_is_used() -> None:
    assert {path.stem for path in LOGS.iterdir()} == {name for name, *_ in CORPUS}


@pytest.mark.parametrize("name", [name for name, *_ in CORPUS])
def test_no_log_turns_a_success_into_a_failure(name: str) -> None:
    assert classify(Signals(exit_code=0, log_tail=log(f"{name}.log"))).cause is Cause.SUCCEEDED


@pytest.mark.parametrize("name", [name for name, *_ in CORPUS])
def test_no_log_beats_a_preempted_slice(name: str) -> None:
    verdict = classify(Signals(exit_code=1, slice_state="PREEMPTED", log_tail=log(f"{name}.log")))
    assert (verdict.cause, verdict.confidence) == (Cause.PREEMPTED, "certain")


# A line that each row was written for, besides those of the corpus.
LINES = [
    ("Out of memory: Killed process 88 (python3)", "host_oom"),
    ("numpy.core._exceptions._ArrayMemoryError: Unable to allocate 9 GiB", "host_oom"),
    ("terminate called after throwing an instance of 'std::bad_alloc'", "host_oom"),
    ('accessing libtpu multi-process lockfile. Run "$ sudo rm /tmp/libtpu_lockfile".', "libtpu_in_use"),
    ("open(/dev/accel0): Device or resource busy", "device_busy"),
    ("OSError: [Errno 116] Stale file handle: '/nfs/data'", "mount_missing"),
    ("ls: cannot access '/gcs': Transport endpoint is not connected", "mount_missing"),
    ("RuntimeError: Unable to initialize backend 'cuda': no device", "cuda_wanted"),
    ("RuntimeError: INTERNAL: Failed to open libtpu.so", "libtpu_missing"),
    ("RuntimeError: No accelerator found. Please run on a TPU or GPU.", "tpu_init_failed"),
    ("SyntaxError: invalid syntax", "python_syntax"),
    ("python: can't open file '/srv/main.py': [Errno 2] No such file or directory", "python_syntax"),
    ("bash: line 1: trian: command not found", "command_missing"),
    ("XlaRuntimeError: INVALID_ARGUMENT: shapes do not match", "xla_compile"),
    ("google.api_core.exceptions.TooManyRequests: 429 Too Many Requests", "rate_limited"),
    ("403 GET storage: rateLimitExceeded", "rate_limited"),
    ("RESOURCE_EXHAUSTED: Quota exceeded for quota metric 'reads'", "rate_limited"),
    ("urllib.error.HTTPError: HTTP Error 403: Forbidden", "bucket_denied"),
    ("grpc: PERMISSION_DENIED: missing role", "bucket_denied"),
    ("google.auth.exceptions.DefaultCredentialsError: no credentials", "credentials_missing"),
    ("curl: (6) Could not resolve host: data.example", "dns_failed"),
    ("JaxRuntimeError: INTERNAL: something broke", "xla_internal"),
    ("UNAVAILABLE: The following tasks are missing heartbeats", "coordination"),
    ("E1102 agent] heartbeat timeout of task 4", "coordination"),
    ("An error was seen by a peer task", "coordination"),
    ("MegaScale transport timed out after 60s", "megascale_hang"),
    ("XlaRuntimeError: UNAVAILABLE: failed to connect to all addresses", "grpc_error"),
    (
        "W1116 sync.cc:147] Failed to retrieve preemption notice from coordination service: UNAVAILABLE",
        "preemption_unasked",
    ),
    (
        "W1116 03:01:36 9 preemption_sync_manager.cc:290] Received preemption notice with death_time 3",
        "preemption_in_log",
    ),
    ("JaxRuntimeError: INTERNAL: Gloo all-reduce failed: pair.cc:547] Connection closed by peer", "gloo_peer"),
]


@pytest.mark.parametrize(("line", "pattern"), LINES)
def test_lines(line: str, pattern: str) -> None:
    verdict = classify(Signals(exit_code=1, log_tail=f"step 1\n{line}\n"))
    assert verdict.pattern == pattern
    assert verdict.evidence[-1] == f"log: {line}"


def test_every_row_has_a_case() -> None:
    covered = {pattern for *_, pattern in CORPUS} | {pattern for _, pattern in LINES}
    assert {row.id for row in PATTERNS} - {"bad_arguments"} <= covered
    assert classify(Signals(exit_code=2, log_tail="error: unrecognized arguments: -x")).pattern == "bad_arguments"


def test_the_table_is_well_formed() -> None:
    ids = [row.id for row in PATTERNS]
    assert len(ids) == len(set(ids))
    for words in [*NOISE, *(group for row in PATTERNS for group in row.words)]:
        assert words
        assert all(word and word == word.lower() for word in words)
    for row in PATTERNS:
        assert row.advice.endswith(".")
        assert row.words
        assert row.cause is not Cause.SUCCEEDED
        assert row.confidence != "certain"  # text is never certain
        assert row.weight is not Weight.ECHO or row.cause is Cause.INFRA


# Gangs: an echo takes the cause of the first failure.


def verdict_on(**facts: Any) -> Verdict:
    return classify(Signals(**facts))


PREEMPTED_FIRST = verdict_on(slice_state="PREEMPTED", exit_code=1)
USER_FIRST = verdict_on(exit_code=1, log_tail=TRACE)
OOM_FIRST = verdict_on(exit_code=137, oom_killed=True)
ECHO_FIRST = verdict_on(exit_code=134, log_tail=ECHO)
GUESS_FIRST = verdict_on(exit_code=139)


@pytest.mark.parametrize(
    ("siblings", "facts", "cause", "confidence"),
    [
        ((), {"exit_code": 134, "log_tail": ECHO}, "infra", "likely"),
        ((ECHO_FIRST,), {"exit_code": 134, "log_tail": ECHO}, "infra", "likely"),
        ((PREEMPTED_FIRST,), {"exit_code": 134, "log_tail": ECHO}, "preempted", "likely"),
        ((PREEMPTED_FIRST,), {"exit_code": 139}, "preempted", "likely"),
        ((PREEMPTED_FIRST,), {"exit_code": 137, "oom_killed": True}, "preempted", "likely"),
        ((USER_FIRST,), {"exit_code": 134, "log_tail": ECHO}, "user_error", "likely"),
        ((USER_FIRST,), {"exit_code": 143}, "user_error", "likely"),
        ((OOM_FIRST,), {"signal": 9}, "oom", "likely"),
        ((OOM_FIRST, USER_FIRST), {"exit_code": 1, "log_tail": ECHO}, "oom", "likely"),
        ((ECHO_FIRST, USER_FIRST), {"exit_code": 1, "log_tail": ECHO}, "user_error", "likely"),
        ((ECHO_FIRST,), {"exit_code": 1, "log_tail": TRACE}, "user_error", "likely"),
        ((ECHO_FIRST,), {"exit_code": 1, "log_tail": HBM}, "oom", "likely"),
        # A guess gives way to what is known, but not to an echo.
        ((GUESS_FIRST,), {"exit_code": 1, "log_tail": HBM}, "oom", "likely"),
        ((GUESS_FIRST,), {"agent": "device_busy"}, "infra", "certain"),
        ((GUESS_FIRST,), {"exit_code": 134, "log_tail": ECHO}, "user_error", "guess"),
        ((GUESS_FIRST, OOM_FIRST), {"exit_code": 134, "log_tail": ECHO}, "oom", "likely"),
        # What is known of this machine, or was done by this agent, needs no sibling.
        ((USER_FIRST,), {"exit_code": 1, "slice_state": "PREEMPTED"}, "preempted", "certain"),
        ((USER_FIRST,), {"exit_code": 143, "notice": True}, "preempted", "likely"),
        ((USER_FIRST,), {"agent": "cancelled", "exit_code": 143}, "cancelled", "certain"),
        ((USER_FIRST,), {"exit_code": 0}, "succeeded", "certain"),
        ((verdict_on(exit_code=0),), {"exit_code": 1, "log_tail": HBM}, "oom", "likely"),
    ],
)
def test_siblings(siblings: tuple[Verdict, ...], facts: dict[str, Any], cause: str, confidence: str) -> None:
    verdict = classify(Signals(siblings=siblings, **facts))
    assert (verdict.cause, verdict.confidence) == (cause, confidence), verdict


def test_a_verdict_taken_from_a_sibling_is_no_echo_itself() -> None:
    second = classify(Signals(exit_code=134, log_tail=ECHO, siblings=(USER_FIRST,)))
    assert not second.is_echo
    assert second.evidence[0] == "first failure of the gang, on another host: user_error"
    assert classify(Signals(signal=9, siblings=(second,))).cause is Cause.USER_ERROR


def test_the_order_in_which_a_gang_is_read_does_not_hide_the_cause() -> None:
    for gang in ((ECHO_FIRST, PREEMPTED_FIRST), (PREEMPTED_FIRST, ECHO_FIRST)):
        found = first_failure(gang)
        assert found is not None
        assert found.cause is Cause.PREEMPTED
    assert first_failure((ECHO_FIRST, ECHO_FIRST)) is None
    assert first_failure(()) is None
    assert ECHO_FIRST.pattern in ECHO_IDS


# Properties.

words = st.sampled_from(
    [word for row in PATTERNS for group in row.words for word in group]
    + [
        "Traceback (most recent call last):",
        "ValueError: x",
        "  File",
        "\n",
        "\n",
        "\r",
        "\x1b[31m",
        " INFO ",
        "wandb",
    ]
)
texts = st.one_of(
    st.text(max_size=300),
    st.lists(words | st.text(max_size=12), max_size=60).map(" ".join),
    st.lists(words, max_size=60).map("\n".join),
    st.binary(max_size=300).map(lambda raw: raw.decode(errors="surrogateescape")),
)
optional_words = st.one_of(
    st.none(),
    st.sampled_from(sorted(SLICE_STATES)),
    st.sampled_from(sorted(AGENT_REPORTS)),
    st.text(max_size=20),
)
verdicts = st.builds(
    Verdict,
    cause=st.sampled_from(Cause),
    evidence=st.lists(st.text(max_size=20), max_size=9).map(tuple),
    confidence=st.sampled_from(["certain", "likely", "guess"]),
    advice=st.just("Do it."),
    pattern=st.none() | st.sampled_from([row.id for row in PATTERNS]),
)
signals = st.builds(
    Signals,
    exit_code=st.none() | st.integers() | st.sampled_from([0, 1, 124, 127, 134, 137, 139, 143]),
    signal=st.none() | st.integers(),
    oom_killed=st.booleans(),
    slice_state=optional_words,
    notice=st.booleans(),
    agent=optional_words,
    siblings=st.lists(verdicts, max_size=3).map(tuple),
    log_tail=texts,
)


@settings(max_examples=400, deadline=None)
@given(signals)
def test_never_raises_and_always_answers_the_same(facts: Signals) -> None:
    verdict = classify(facts)
    assert verdict == classify(facts)
    assert 1 <= len(verdict.evidence) <= EVIDENCE_MAX
    assert verdict.advice
    if verdict.cause is Cause.SUCCEEDED:
        assert facts.exit_code == 0


@settings(max_examples=300, deadline=None)
@given(signals, texts)
def test_typed_facts_beat_text(facts: Signals, other: str) -> None:
    """Where the verdict is certain, no log could have changed it; and success never depends on the log."""
    verdict = classify(facts)
    changed = classify(replace(facts, log_tail=other))
    if verdict.confidence == "certain":
        assert changed == verdict
    assert (changed.cause is Cause.SUCCEEDED) == (verdict.cause is Cause.SUCCEEDED)
