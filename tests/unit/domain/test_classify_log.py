"""Reading a log: which part counts, which lines are noise, which line wins, and what hostile text costs."""

import time

import pytest

from penstock.domain.classify import Signals, classify
from penstock.domain.classify_log import EVIDENCE_CHARS, NEAR_LINES, SCAN_CHARS, read_log
from penstock.domain.classify_patterns import PATTERNS

TRACE = 'Traceback (most recent call last):\n  File "main.py", line 1, in <module>\nValueError: bad shape\n'
ECHO = "F1102 client.h:77] Terminating process because the JAX distributed service detected fatal errors.\n"
HBM = "XlaRuntimeError: RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm\n"


@pytest.mark.parametrize(
    "line",
    [
        "2026-11-02 08:00:00 INFO ckpt: DEADLINE_EXCEEDED once, went on",
        "WARNING:root:No module named 'tensorboard', plots are off",
        "I1102 08:00:00.000001 7 agent.cc:1] coordination service is ready",
        "GRPC error, retrying in 5 s",
        "E1102 cuda_driver.cc:1] failed call to cuInit: UNKNOWN ERROR (303)",
        "wandb: ERROR api.wandb.ai: Temporary failure in name resolution; network error",
    ],
)
def test_noise_explains_nothing(line: str) -> None:
    assert read_log(line) is None


def test_only_the_end_of_the_log_is_read() -> None:
    long = HBM + "x" * SCAN_CHARS
    assert classify(Signals(exit_code=1, log_tail=long)).pattern is None
    assert classify(Signals(exit_code=1, log_tail=long + "\n" + HBM)).pattern == "hbm_oom"


@pytest.mark.parametrize(("between", "pattern"), [(NEAR_LINES - 1, "python_exception"), (NEAR_LINES, "coordination")])
def test_an_exception_causes_only_the_echo_close_behind_it(between: int, pattern: str) -> None:
    text = TRACE + "going on\n" * between + ECHO
    assert classify(Signals(exit_code=134, log_tail=text)).pattern == pattern


def test_an_exception_after_the_echo_is_its_aftermath() -> None:
    assert classify(Signals(exit_code=1, log_tail=ECHO + TRACE)).pattern == "coordination"


def test_a_cause_in_the_log_beats_the_echo_that_was_raised() -> None:
    text = "E1102 open(/dev/vfio/0): Device or resource busy\n" + TRACE.replace(
        "ValueError: bad shape", "jax.errors.JaxRuntimeError: UNAVAILABLE: failed to connect"
    )
    assert classify(Signals(exit_code=1, log_tail=text)).pattern == "device_busy"


def test_an_echo_beats_a_guess_at_the_runtime() -> None:
    text = TRACE.replace("ValueError: bad shape", "jax.errors.JaxRuntimeError: INTERNAL: stream ended") + ECHO
    assert classify(Signals(exit_code=134, log_tail=text)).pattern == "coordination"


def test_a_chain_of_exceptions_is_read_from_its_start() -> None:
    frames = '  File "deep.py", line 1, in call\n' * NEAR_LINES
    links = [f"Traceback (most recent call last):\n{frames}{end}" for end in (HBM, "StepError\n", "RunError: x\n")]
    text = "\nThe above exception was the direct cause of the following exception:\n\n".join(links)
    assert classify(Signals(exit_code=1, log_tail=text)).pattern == "hbm_oom"


def test_a_traceback_that_ends_in_noise_is_passed_over() -> None:
    noise = TRACE.replace("ValueError: bad shape", "wandb.errors.CommError: Network error")
    assert read_log(noise) is None
    found = read_log(TRACE + noise)
    assert found is not None
    assert found.line == "ValueError: bad shape"


def test_colours_inside_a_message_do_not_hide_it() -> None:
    assert classify(Signals(exit_code=1, log_tail="No sp\x1b[31mace left\x1b[0m on device")).pattern == "disk_full"


def test_an_exception_long_before_the_end_is_a_guess() -> None:
    text = TRACE + "going on\n" * (NEAR_LINES + 1)
    verdict = classify(Signals(exit_code=1, log_tail=text))
    assert (verdict.pattern, verdict.confidence) == ("python_exception", "guess")


def test_a_match_long_before_the_last_exception_is_over() -> None:
    text = "E1102 DEADLINE_EXCEEDED\n" + "going on\n" * (NEAR_LINES + 1) + TRACE
    assert classify(Signals(exit_code=1, log_tail=text)).pattern == "python_exception"


def test_evidence_is_one_clean_bounded_line() -> None:
    text = "\x1b[31mNo space left on device \x1b]0;owned\x07\x08\u202e" + "z" * 9000
    line = classify(Signals(exit_code=1, log_tail=text)).evidence[-1]
    assert line.isprintable()
    assert line.startswith("log: No space left on device")
    assert len(line) == len("log: ") + EVIDENCE_CHARS
    assert line.endswith("…")


ALL_WORDS = " ".join(word for row in PATTERNS for group in row.words for word in group)
HOSTILE = {
    "one letter": "a" * 2**20,
    "line ends": "\n" * 2**20,
    "short lines": ALL_WORDS + "\n" + "12345678\n" * (2**20 // 9),
    "escape starts": "\x1b[" * 2**19,
    "endless escape": "\x1b[" + "0" * 2**20,
    "endless title": "\x1b]" + "t" * 2**20,
    "title starts": "\x1b]t" * (2**20 // 3),
    "headers": "Traceback (most recent call last):\n" * (2**20 // 35),
    "chained headers": "Traceback (most recent call last):\nA: b\nDuring handling of the above exception\n" * 14_000,
    "frames": "Traceback (most recent call last):\n" + "  x\n" * 2**18,
    "near misses": "resource_exhauste " * (2**20 // 18),
    "halves of pairs": "resource_exhausted megascale grpc wandb unavailable: \n" * (2**20 // 54),
    "carriage returns": "100%\r" * (2**20 // 5),
    "every word at once": (ALL_WORDS + "\n") * (2**20 // len(ALL_WORDS)),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_logs_cost_little(kind: str) -> None:
    text = HOSTILE[kind]
    start = time.process_time()
    classify(Signals(exit_code=1, log_tail=text))
    spent = time.process_time() - start
    # Typically 1-30 ms; a pattern that backtracks takes minutes on these.
    assert spent < 1.0
