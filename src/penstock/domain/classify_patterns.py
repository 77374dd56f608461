"""The table of log messages that explain why an attempt failed.

It decides which words in a log line point to which cause, how far to trust them, and what to tell the user.
`classify_log` reads it; nobody else should match text. It must not hold regular expressions: a row is a set
of plain substrings, so that matching is linear in the log however hostile the log is. A row never makes a
failure: it only explains one that typed facts have already established.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, Literal

import msgspec

from penstock.domain.lifecycle import Cause

Confidence = Literal["certain", "likely", "guess"]


class Weight(StrEnum):
    """How a matching line counts against other matching lines of the same log."""

    ROOT = "root"  # names what went wrong on this host
    ECHO = "echo"  # says that some other host or service stopped answering; the cause is elsewhere
    TRACEBACK = "traceback"  # an exception of the program that no other row knows


class Pattern(msgspec.Struct, frozen=True, kw_only=True):
    """One row. A line matches when it holds every word of at least one group in `words` (lower case)."""

    id: str
    cause: Cause
    words: tuple[tuple[str, ...], ...]
    advice: str
    weight: Weight = Weight.ROOT
    confidence: Confidence = "likely"


_CLEAN_HOST = "Retry on another slice; this host needs its old process ended or the slice replaced."
_FIX_PROGRAM = "Fix the program and submit again; a retry would fail the same way."
_FIND_FIRST = "Look for the host of the gang that failed first; retrying on a whole slice is safe."
_RETRY_LATER = "Retry after a pause; the service the program depends on did not answer."

#: Most telling first: where one log matches several rows of the same weight, the first row wins.
PATTERNS: Final[tuple[Pattern, ...]] = (
    # Memory.
    Pattern(
        id="vmem_oom",
        cause=Cause.OOM,
        words=(("memory space vmem",), ("exceeded scoped vmem limit",)),
        advice="Make the kernel's blocks smaller or raise the scoped vmem limit; more chips do not help.",
    ),
    Pattern(
        id="hbm_oom",
        cause=Cause.OOM,
        words=(
            ("allocation type:",),
            ("memory space hbm",),
            ("exceeded hbm capacity",),
            ("resource_exhausted", "out of memory"),
            ("resource_exhausted", "hbm"),
            ("resource_exhausted", "allocat"),
            ("resource_exhausted", "attempting to reserve"),
            ("attempting to reserve", "that was not possible"),
            ("attempting to allocate", "that was not possible"),
        ),
        advice="Device memory is too small: use a smaller batch, more sharding or a larger slice.",
    ),
    Pattern(
        id="host_oom",
        cause=Cause.OOM,
        words=(
            ("out of memory: killed process",),
            ("memory cgroup out of memory",),
            ("oom-kill:",),
            ("oomkilled",),
            ("memoryerror",),
            ("std::bad_alloc",),
            ("cannot allocate memory",),
        ),
        advice="The host ran out of memory: load less at once per host, or use a slice with more hosts.",
    ),
    # Devices held by somebody else.
    Pattern(
        id="libtpu_in_use",
        cause=Cause.INFRA,
        words=(
            ("tpu is already in use",),
            ("libtpu", "already in use"),
            ("tpu", "already in use by"),
            ("libtpu_lockfile",),
            ("libtpu", "lockfile"),
        ),
        advice=_CLEAN_HOST,
    ),
    Pattern(
        id="device_busy",
        cause=Cause.INFRA,
        words=(
            ("/dev/vfio", "resource busy"),
            ("/dev/vfio", "ebusy"),
            ("/dev/accel", "resource busy"),
            ("/dev/accel", "ebusy"),
            ("open iommu group",),
        ),
        advice=_CLEAN_HOST,
    ),
    Pattern(
        id="libtpu_log_locked",
        cause=Cause.INFRA,
        words=(("could not open any log file",), ("/tmp/tpu_logs", "permission denied")),
        advice="Files of another user's libtpu block this host: retry on another slice, clear /tmp/tpu_logs.",
    ),
    # The host's disks and mounts.
    Pattern(
        id="disk_full",
        cause=Cause.INFRA,
        words=(("no space left on device",), ("errno 28",), ("disk quota exceeded",)),
        advice="The host's disk is full: write less to local disk, or retry on a fresh slice.",
    ),
    Pattern(
        id="mount_missing",
        cause=Cause.INFRA,
        words=(
            ("python: no such file or directory",),
            ("python3: no such file or directory",),
            ("stale file handle",),
            ("transport endpoint is not connected",),
            ("mount.nfs", "fail"),
            ("nfs", "not responding"),
        ),
        advice="A shared file system is not mounted on the host: retry on another slice and check the mount.",
    ),
    # The accelerator itself.
    Pattern(
        id="tpu_halted",
        cause=Cause.INFRA,
        words=(
            ("halted unexpectedly",),
            ("device halted prematurely",),
            ("slice health", "fail"),
            ("uncorrectable", "ecc"),
        ),
        advice="A chip stopped: retry on another slice; if it halts at the same step, suspect the program.",
    ),
    Pattern(
        id="cuda_wanted",
        cause=Cause.USER_ERROR,
        words=(
            ("error: unable to initialize backend 'cuda'",),
            ("torch not compiled with cuda",),
            ("found no nvidia driver",),
        ),
        advice="The program asks for a GPU on a TPU host: install the TPU build of its framework.",
    ),
    Pattern(
        id="libtpu_missing",
        cause=Cause.USER_ERROR,
        words=(("failed to open libtpu.so",), ("libtpu.so: cannot open shared object",)),
        advice="libtpu is not installed where the program looks: install the TPU build of its framework.",
    ),
    Pattern(
        id="tpu_init_failed",
        cause=Cause.INFRA,
        words=(
            ("unable to initialize backend 'tpu'",),
            ("tpu initialization failed",),
            ("failed to initialize tpu system",),
            ("failed to get tpu metadata",),
            ("no accelerator found",),
            ("no tpu devices",),
        ),
        advice="The chips did not come up: retry on another slice; if it repeats, check the runtime version.",
    ),
    # The program.
    Pattern(
        id="python_import",
        cause=Cause.USER_ERROR,
        words=(("modulenotfounderror:",), ("importerror:",), ("no module named",)),
        advice="A Python package is missing or does not fit: fix the environment and submit again.",
    ),
    Pattern(
        id="python_syntax",
        cause=Cause.USER_ERROR,
        words=(("syntaxerror:",), ("indentationerror:",), ("python", "can't open file")),
        advice=_FIX_PROGRAM,
    ),
    Pattern(
        id="bad_arguments",
        cause=Cause.USER_ERROR,
        words=(
            ("error: unrecognized arguments",),
            ("error: the following arguments are required",),
            ("error: argument ", "invalid"),
            ("unknown command line flag",),
        ),
        advice="Correct the command line of the job and submit again.",
    ),
    Pattern(
        id="command_missing",
        cause=Cause.USER_ERROR,
        words=((": command not found",), ("exec format error",), (": not found", "sh: ")),
        advice="The job's command does not exist or cannot run on the host: correct it and submit again.",
    ),
    Pattern(
        id="xla_compile",
        cause=Cause.USER_ERROR,
        words=(
            ("mosaic failed to compile",),
            ("compilation failure",),
            ("xla compilation", "fail"),
            ("xla:tpu compile permanent error",),
            ("runtimeerror: invalid_argument",),
            ("runtimeerror: unimplemented",),
        ),
        advice="XLA refused the program: fix shapes, sharding or kernel; a retry would fail the same way.",
    ),
    # Buckets and names.
    Pattern(
        id="rate_limited",
        cause=Cause.INFRA,
        words=(
            ("ratelimitexceeded",),
            ("429 too many requests",),
            ("http 429",),
            ("resource_exhausted", "quota"),
            ("quota exceeded",),
            ("quotaexceeded",),
        ),
        advice="A service limits requests: retry after a pause, and ask for more quota if it repeats.",
    ),
    Pattern(
        id="bucket_denied",
        cause=Cause.USER_ERROR,
        words=(
            ("does not have storage.",),
            ("403 forbidden",),
            ("403", "storage.googleapis.com"),
            ("403", "permission", "denied"),
            ("http", "error 403"),
            ("permission_denied",),
            ("accessdenied",),
        ),
        advice="Give the job's service account access to the bucket or service named in the line.",
    ),
    Pattern(
        id="credentials_missing",
        cause=Cause.USER_ERROR,
        words=(("defaultcredentialserror",), ("401 unauthorized",), ("refresherror",)),
        advice="Give the job credentials: its service account or secret is missing or has expired.",
    ),
    Pattern(
        id="dns_failed",
        cause=Cause.INFRA,
        words=(
            ("temporary failure in name resolution",),
            ("name or service not known",),
            ("could not resolve host",),
            ("dns resolution failed",),
            ("failed to resolve",),
        ),
        advice="The host could not resolve a name: retry on another slice; if it repeats, check the name.",
    ),
    # JAX asks the coordinator for notices, and says in these words that there is none to ask: nobody was preempted.
    Pattern(
        id="preemption_unasked",
        cause=Cause.INFRA,
        words=(("retrieve preemption notice",),),
        advice=_FIND_FIRST,
        weight=Weight.ECHO,
    ),
    Pattern(
        id="preemption_in_log",
        cause=Cause.PREEMPTED,
        words=(
            ("preemption notice",),
            ("instance is being preempted",),
            ("terminate_on_host_maintenance",),
            ("unavailable", "tpu", "has been preempted"),
        ),
        advice="The provider took the machine back: resume from the last checkpoint on new capacity.",
    ),
    Pattern(
        id="invalid_free",
        cause=Cause.INFRA,
        words=(("attempt to free invalid pointer",),),
        advice="libtpu or tcmalloc crashed: retry; if it repeats, remove LD_PRELOAD or change the image.",
    ),
    # A peer of a collective on CPUs went away: said inside of an INTERNAL error, which the next row would guess at.
    Pattern(
        id="gloo_peer",
        cause=Cause.INFRA,
        words=(
            ("gloo", "closed by peer"),
            ("gloo", "reset by peer"),
            ("gloo", "broken pipe"),
            ("gloo", "timed out"),
        ),
        advice=_FIND_FIRST,
        weight=Weight.ECHO,
    ),
    Pattern(
        id="xla_internal",
        cause=Cause.INFRA,
        words=(("runtimeerror: internal:",), ("runtimeerror: data_loss",), ("runtimeerror: aborted",)),
        advice="The runtime failed inside: retry on another slice; if it repeats, report it with the line.",
        confidence="guess",
    ),
    # Others went away.
    Pattern(
        id="coordination",
        cause=Cause.INFRA,
        words=(
            ("coordination service",),
            ("coordination_service",),
            ("coordinationservice",),
            ("jax distributed service detected",),
            ("heartbeat", "timeout"),
            ("heartbeat", "timed out"),
            ("missing heartbeat",),
            ("peer task",),
            ("shutdown barrier",),
            ("barrier timed out",),
            ("barrier", "deadline_exceeded"),
            ("another task died",),
        ),
        advice=_FIND_FIRST,
        weight=Weight.ECHO,
    ),
    Pattern(
        id="megascale_hang",
        cause=Cause.INFRA,
        words=(
            ("megascale", "hang"),
            ("megascale", "timed out"),
            ("megascale", "timeout"),
            ("megascale", "unreachable"),
            ("megascale", "error"),
        ),
        advice="Slices stopped hearing each other: retry the gang without the slice that the message names.",
        weight=Weight.ECHO,
    ),
    Pattern(
        id="deadline_exceeded",
        cause=Cause.INFRA,
        words=(("deadline_exceeded",), ("deadline exceeded",)),
        advice=_RETRY_LATER,
        weight=Weight.ECHO,
    ),
    Pattern(
        id="grpc_error",
        cause=Cause.INFRA,
        words=(
            ("grpc error",),
            ("grpc_status",),
            ("grpc", "unavailable"),
            ("runtimeerror: unavailable",),
            ("unavailable: ", "connect"),
            ("socket closed",),
            ("connection reset by peer",),
        ),
        advice=_FIND_FIRST,
        weight=Weight.ECHO,
    ),
)

#: What an uncaught exception means when no row above knows it. It has no words: `classify_log` finds it.
PYTHON_EXCEPTION: Final = Pattern(
    id="python_exception",
    cause=Cause.USER_ERROR,
    words=(),
    advice=_FIX_PROGRAM,
    weight=Weight.TRACEBACK,
)

ECHO_IDS: Final = frozenset(row.id for row in PATTERNS if row.weight is Weight.ECHO)

#: Lines that look like trouble in logs of healthy runs. A line that matches a group here is not read at all.
NOISE: Final[tuple[tuple[str, ...], ...]] = (
    ("wandb", "network error"),
    ("wandb", "connectionerror"),
    ("wandb", "commerror"),
    ("wandb", "readtimeout"),
    ("wandb", "timed out"),
    ("wandb", "timeout"),
    ("wandb", "retry"),
    ("wandb", "error while calling"),
    ("wandb", "http"),
    ("retrying",),
    ("will retry",),
    ("will be retried",),
    ("failed call to cuinit",),
    ("could not find cuda drivers",),
    ("unable to register cudnn factory",),
    ("unable to register cublas factory",),
    ("unable to register cufft factory",),
)
