"""Why an attempt ended: one cause, with the evidence for it, from everything that is known.

`classify` decides it; the controller calls it when an attempt closes, and `tpu classify` calls it for a user.
Typed facts decide first (the agent's report, the OOM kill, the host's state, the notice, signal, exit code);
the log only tells apart what those leave open, and never turns a success into a failure. The decision must
not depend on anything but `Signals`, and must not raise on any of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from penstock.domain.classify_log import Finding, printable, read_log
from penstock.domain.classify_patterns import ECHO_IDS, Confidence, Weight
from penstock.domain.lifecycle import Cause

#: Pieces of evidence in one verdict: enough to be convinced, few enough to be read.
EVIDENCE_MAX: Final = 8


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The cause of one process's end, and why we think so."""

    cause: Cause
    evidence: tuple[str, ...]
    confidence: Confidence
    advice: str
    #: The row of the table of log messages that explained it, if one did.
    pattern: str | None = None

    @property
    def is_echo(self) -> bool:
        """Whether it only says that others went away, so that the cause is to be sought there."""
        return self.pattern in ECHO_IDS


class Signals(msgspec.Struct, frozen=True, kw_only=True):
    """Everything known about the end of one process of an attempt."""

    exit_code: int | None = None
    signal: int | None = None
    #: The kernel's or the cgroup's own count of OOM kills rose; not a reading of exit code 137.
    oom_killed: bool = False
    #: The provider's word for the slice, in any case; see `SLICE_STATES`.
    slice_state: str | None = None
    #: A preemption or maintenance notice was seen on one of the hosts.
    notice: bool = False
    #: The agent's typed report; see `AGENT_REPORTS`.
    agent: str | None = None
    #: Verdicts on processes of the same gang that failed before this one, oldest first.
    siblings: tuple[Verdict, ...] = ()
    log_tail: str = ""


class _Fact(msgspec.Struct, frozen=True):
    cause: Cause
    confidence: Confidence
    advice: str


_RESUME = "The provider took the machine back: resume from the last checkpoint on new capacity."
_REPLACE = "The slice is not healthy: retry on another one."
_ASK_WHO = "Something outside the job stopped it: retry, and look for who sent the signal if it repeats."
_KILLED_OUTSIDE = (
    "Something outside the job sent SIGKILL, and nothing shows that memory ran out: retry; if it repeats, look in the "
    "host's kernel log, and for who sends it."
)
_CRASHED = "Native code crashed: retry once; if it crashes there again, look for the faulty extension."
_READ_LOG = "Read the end of the log: the program ended by itself and gave no reason that is known here."
_SMALLER = "The host ran out of memory: load less at once per host, or use a slice with more hosts."

_TAKEN: Final = _Fact(Cause.PREEMPTED, "certain", _RESUME)
_TAKEN_LIKELY: Final = _Fact(Cause.PREEMPTED, "likely", _RESUME)
_BROKEN: Final = _Fact(Cause.INFRA, "certain", _REPLACE)
_LEAVING: Final = _Fact(Cause.INFRA, "likely", "The slice was being stopped or deleted: retry on another one.")
_GONE: Final = _Fact(
    Cause.LOST,
    "likely",
    "The slice is gone: resume elsewhere; a vanished spot slice was most likely preempted.",
)

#: What each word for a slice says about a failed attempt on it; None: nothing. Words of Cloud TPU nodes,
#: queued resources, GKE node pools and our own life cycle.
SLICE_STATES: Final[dict[str, _Fact | None]] = {
    **dict.fromkeys(("PREEMPTED", "SUSPENDING", "SUSPENDED"), _TAKEN),
    "TERMINATED": _TAKEN_LIKELY,  # maintenance, or the end of a preemptible node's life: taken either way
    **dict.fromkeys(("NOT_FOUND", "GONE", "DELETED"), _GONE),
    **dict.fromkeys(("REPAIRING", "RESTARTING", "REIMAGING", "DEGRADED", "UNHEALTHY"), _BROKEN),
    **dict.fromkeys(("FAILED", "ERROR", "RUNNING_WITH_ERROR"), _BROKEN),
    **dict.fromkeys(
        ("STOPPING", "STOPPED", "DELETING", "DRAINING", "STARTING", "HIDING", "HIDDEN", "UNHIDING"), _LEAVING
    ),
    **dict.fromkeys(
        (
            "READY", "ACTIVE", "RUNNING", "RECONCILING", "CREATING", "INTENDED", "ACCEPTED", "PROVISIONING",
            "WAITING_FOR_RESOURCES", "UNKNOWN", "STATE_UNSPECIFIED",
        ),
        None,
    ),
}  # fmt: skip

#: What the agent itself did or saw, and what follows. Cancel and timeout are its own acts: they come first.
AGENT_REPORTS: Final[dict[str, _Fact]] = {
    "cancelled": _Fact(Cause.CANCELLED, "certain", "Nothing to do: somebody cancelled it; submit again to run it."),
    "timeout": _Fact(Cause.TIMEOUT, "certain", "Raise the job's time limit, or make the job resume and do less."),
    "oom": _Fact(Cause.OOM, "certain", _SMALLER),
    "preempted": _TAKEN,
    "launch_failed": _Fact(Cause.INFRA, "certain", "The agent could not start the process: retry on another slice."),
    "device_busy": _Fact(
        Cause.INFRA, "certain", "Another process holds the chips: retry on another slice and clean this one."
    ),
    "disk_full": _Fact(
        Cause.INFRA,
        "certain",
        "The host's disk is full: write less to local disk, or retry on a fresh slice.",
    ),
    "process_lost": _Fact(Cause.LOST, "certain", "The process vanished without an exit status: resume elsewhere."),
}
_AGENT_ACTS: Final = frozenset({"cancelled", "timeout"})

#: Numbers on Linux, where every agent runs, whatever machine classifies.
SIGNAL_NAMES: Final[dict[int, str]] = {
    1: "SIGHUP", 2: "SIGINT", 3: "SIGQUIT", 4: "SIGILL", 5: "SIGTRAP", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE",
    9: "SIGKILL", 10: "SIGUSR1", 11: "SIGSEGV", 12: "SIGUSR2", 13: "SIGPIPE", 14: "SIGALRM", 15: "SIGTERM",
    16: "SIGSTKFLT", 17: "SIGCHLD", 18: "SIGCONT", 19: "SIGSTOP", 20: "SIGTSTP", 21: "SIGTTIN", 22: "SIGTTOU",
    23: "SIGURG", 24: "SIGXCPU", 25: "SIGXFSZ", 26: "SIGVTALRM", 27: "SIGPROF", 28: "SIGWINCH", 29: "SIGIO",
    30: "SIGPWR", 31: "SIGSYS",
}  # fmt: skip
SIGNAL_MAX: Final = 64

_STOPPED: Final = _Fact(Cause.INFRA, "guess", _ASK_WHO)
_CRASH: Final = _Fact(Cause.USER_ERROR, "guess", _CRASHED)
_KILLED: Final = _Fact(Cause.INFRA, "likely", _KILLED_OUTSIDE)

_SIGNAL_FACTS: Final[dict[int, _Fact]] = {
    **dict.fromkeys((1, 2, 3, 15, 30), _STOPPED),
    **dict.fromkeys((4, 5, 6, 7, 8, 11, 31), _CRASH),
    # Agents that kill say so in their report, and the kernel counts whom it kills for memory: 9 alone is neither.
    9: _KILLED,
    24: _Fact(Cause.TIMEOUT, "likely", "The process used up its CPU time limit: raise the limit."),
}
_EXIT_FACTS: Final[dict[int, _Fact]] = {
    124: _Fact(Cause.TIMEOUT, "likely", "A `timeout` inside the command ended it: give it more time."),
    126: _Fact(Cause.USER_ERROR, "likely", "The command is not executable: correct it and submit again."),
    127: _Fact(Cause.USER_ERROR, "likely", "The command was not found: correct it and submit again."),
}
_UNEXPLAINED: Final = _Fact(Cause.USER_ERROR, "guess", _READ_LOG)
_SILENT: Final = _Fact(
    Cause.LOST,
    "guess",
    "No exit status and no host state is known: ask the agent and the provider, then retry.",
)


def slice_word(text: str) -> str:
    """A provider's word for a slice's state as `SLICE_STATES` writes it."""
    return text.strip().upper().replace(" ", "_").replace("-", "_")


def classify(signals: Signals) -> Verdict:
    """One cause for the end of one process. Never raises; equal signals give equal verdicts."""
    facts = _typed_facts(signals)
    agent = _agent(signals)
    if agent in _AGENT_ACTS:
        return _verdict(AGENT_REPORTS[agent], facts)
    if _ended_well(signals, agent):
        return _success(signals, facts)
    host = _host(signals, agent)
    # A host that goes away does not make the kernel kill for memory, so the kill came first.
    if host is not None and not signals.oom_killed and agent != "oom":
        return _verdict(host, facts)
    return _after_siblings(_own(signals, agent, facts), signals.siblings)


def first_failure(verdicts: Iterable[Verdict]) -> Verdict | None:
    """The verdict that explains a gang: the oldest that is neither echo nor guess, else the oldest guess."""
    causes = [v for v in verdicts if v.cause is not Cause.SUCCEEDED and not v.is_echo]
    return next((v for v in causes if v.confidence != "guess"), causes[0] if causes else None)


def _ended_well(signals: Signals, agent: str) -> bool:
    return signals.exit_code == 0 and not _signal(signals) and agent not in AGENT_REPORTS


def _success(signals: Signals, facts: tuple[str, ...]) -> Verdict:
    """Exit 0 is the program's word that it is done, whatever else happened near its end."""
    if signals.notice:
        # A program that saves and leaves on a notice must not look finished; only it can tell the two apart.
        advice = "If the program left because of the notice, let it exit with 143, so that it is resumed."
        return Verdict(cause=Cause.SUCCEEDED, evidence=facts, confidence="likely", advice=advice)
    confidence: Confidence = "likely" if signals.oom_killed else "certain"
    return Verdict(cause=Cause.SUCCEEDED, evidence=facts, confidence=confidence, advice="Nothing to do.")


def _host(signals: Signals, agent: str) -> _Fact | None:
    """What the provider says about the machine; a notice makes every trouble of the machine a preemption."""
    if agent == "preempted":
        return _TAKEN
    fact = SLICE_STATES.get(slice_word(signals.slice_state or ""))
    if not signals.notice:
        return fact
    return _TAKEN if fact is not None and fact.cause is Cause.PREEMPTED else _TAKEN_LIKELY


def _own(signals: Signals, agent: str, facts: tuple[str, ...]) -> Verdict:
    """The verdict on a process whose machine is not known to be at fault, looking at this process alone."""
    if signals.oom_killed:
        return _verdict(AGENT_REPORTS["oom"], facts)
    if agent in AGENT_REPORTS:
        return _verdict(AGENT_REPORTS[agent], facts)
    finding = read_log(signals.log_tail)
    number = _signal(signals)
    if number:
        fact = _SIGNAL_FACTS.get(number, _UNEXPLAINED)
        return _explained(fact, facts, finding) if _may_refine(number, finding) else _verdict(fact, facts)
    if signals.exit_code:
        fact = _EXIT_FACTS.get(signals.exit_code, _UNEXPLAINED)
        if fact.cause is Cause.TIMEOUT:
            return _verdict(fact, facts)
        return _explained(fact, facts, finding)
    if finding is None:
        return _verdict(_SILENT, facts)
    # No exit status at all: the log is all there is, and it cannot be sure.
    return msgspec.structs.replace(_explained(_SILENT, facts, finding), confidence="guess")


def _may_refine(number: int, finding: Finding | None) -> bool:
    """Whether the log may say more than the signal does."""
    if finding is None:
        return False
    fact = _SIGNAL_FACTS.get(number, _UNEXPLAINED)
    if fact is _KILLED:  # nothing in a log explains a SIGKILL but memory, or others that went first
        return finding.row.cause is Cause.OOM or finding.row.weight is Weight.ECHO
    if fact is _STOPPED:  # programs raise exceptions of their own when they are told to stop
        return finding.row.weight is not Weight.TRACEBACK
    return fact.cause is not Cause.TIMEOUT


def _explained(fact: _Fact, facts: tuple[str, ...], finding: Finding | None) -> Verdict:
    if finding is None:
        return _verdict(fact, facts)
    return Verdict(
        cause=finding.row.cause,
        evidence=(*facts, f"log: {finding.line}")[-EVIDENCE_MAX:],
        confidence=finding.confidence,
        advice=finding.row.advice,
        pattern=finding.row.id,
    )


def _after_siblings(own: Verdict, siblings: tuple[Verdict, ...]) -> Verdict:
    """In a gang the first failure takes the others down, so theirs are echoes of it."""
    first = first_failure(siblings)
    if first is None or (first.confidence == "guess" and own.confidence != "guess" and not own.is_echo):
        return own
    said = f"first failure of the gang, on another host: {first.cause}"
    return Verdict(
        cause=first.cause,
        evidence=(said, *first.evidence[:2], *own.evidence)[:EVIDENCE_MAX],
        confidence="guess" if first.confidence == "guess" else "likely",
        advice=first.advice,
        pattern=first.pattern,
    )


def _verdict(fact: _Fact, facts: tuple[str, ...]) -> Verdict:
    return Verdict(cause=fact.cause, evidence=facts, confidence=fact.confidence, advice=fact.advice)


def _agent(signals: Signals) -> str:
    return (signals.agent or "").strip().lower()


def _signal(signals: Signals) -> int | None:
    """The signal that ended the process: told, or read from the exit code (shells: 128 + n; Python: -n)."""
    code = signals.exit_code
    if signals.signal:
        return signals.signal
    if code is not None and 128 < code <= 128 + SIGNAL_MAX:
        return code - 128
    if code is not None and -SIGNAL_MAX <= code < 0:
        return -code
    return None


def _typed_facts(signals: Signals) -> tuple[str, ...]:
    """The facts in words, the most telling first."""
    facts: list[str] = []
    if signals.agent:
        unknown = "" if _agent(signals) in AGENT_REPORTS else " (not a known report)"
        facts.append(f"agent reported {printable(signals.agent)}{unknown}")
    if signals.oom_killed:
        facts.append("the kernel killed the process for lack of memory")
    if signals.slice_state:
        word = slice_word(signals.slice_state)
        unknown = "" if word in SLICE_STATES else " (not a known state)"
        facts.append(f"slice state {printable(word)}{unknown}")
    if signals.notice:
        facts.append("a preemption or maintenance notice was seen")
    number = _signal(signals)
    name = SIGNAL_NAMES.get(number, "") if number else ""
    if number:
        facts.append(f"ended by signal {number}" + (f" ({name})" if name else ""))
    if signals.exit_code is not None:
        facts.append(f"exit code {signals.exit_code}")
    return tuple(facts) or ("no exit status and no host state",)
