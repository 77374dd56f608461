"""Where everything of one attempt lies on a host's disk, and the environment its payload sees.

`launch` makes a `Layout` for each attempt, `sandbox` reads from it what a payload may write. Environment variables are
built from nothing: only names on the list below pass from the agent's own environment, so that no token and no
credential of the agent can reach a payload by accident. It starts nothing and talks to nobody.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

import msgspec

from penstock.payload import entrance
from penstock.wire.agent import LaunchSpec
from penstock.wire.api import CommandRequest

#: What a payload inherits from the agent: how to find programs, speak the language, and use the accelerator.
PASSED_NAMES = frozenset(
    {
        "PATH", "LANG", "LANGUAGE", "TZ", "TERM", "LD_LIBRARY_PATH", "XLA_FLAGS", "LIBTPU_INIT_ARGS", "VIRTUAL_ENV",
        "PYTHONDONTWRITEBYTECODE", "SSL_CERT_FILE", "SSL_CERT_DIR", "CUDA_VISIBLE_DEVICES",
        "XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_MEM_FRACTION",
    }
)  # fmt: skip
PASSED_PREFIXES = ("JAX_", "TPU_", "LC_", "NVIDIA_")
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
MEGASCALE_PORT = 8080  #: where slices of one gang find each other, as libtpu expects it
STREAMS = ("out", "err", "log")
PROGRESS_BYTES_MAX = 1 << 16


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """The folders and files of one attempt on one host. `home` holds all of them but what must outlive the host."""

    home: Path
    checkpoint: str  #: where this attempt saves
    restore: str | None  #: where an earlier attempt saved, or what it saved was brought
    jax_cache: str

    @property
    def work(self) -> Path:
        return self.home / "work"

    @property
    def output(self) -> Path:
        return self.home / "output"

    @property
    def temporary(self) -> Path:
        return self.home / "tmp"

    @property
    def control(self) -> Path:
        """What agent and payload say to each other by files."""
        return self.home / "control"

    @property
    def progress(self) -> Path:
        return self.control / "progress"

    @property
    def stop(self) -> Path:
        """It exists once the payload is asked to stop, and says how many seconds it has."""
        return self.control / "stop"

    def tell_to_stop(self, grace_s: float) -> None:
        """By a rename: what the payload has put there itself, a link or a pipe, is not written to.

        On a full disk the file is empty, and there all the same; the error is told.
        """
        part = self.home / "stop.part"
        try:
            part.write_text(f"{grace_s:g}")
        finally:
            part.replace(self.stop)

    @property
    def result(self) -> Path:
        """Where a snippet leaves its `ResultReport`."""
        return self.control / "result.json"

    @property
    def restored(self) -> Path:
        """What was brought of an earlier attempt, where the root is out of reach."""
        return self.home / "restored"

    @property
    def pins(self) -> Path:
        """Links that hold checkpoints while they are sent; out of the payload's reach."""
        return self.home / "pins"

    @property
    def carried(self) -> bool:
        """Whether compiled code lies on this host's own disk, and is carried to the next one's."""
        return Path(self.jax_cache).is_relative_to(self.home.parents[1])

    @property
    def spool(self) -> Path:
        return self.home / "spool"

    @property
    def writable(self) -> tuple[Path, ...]:
        """What the payload may write; the spool is not among it, because bytes reach it through pipes."""
        return (self.work, self.output, self.temporary, self.control, Path(self.checkpoint), Path(self.jax_cache))

    def stream(self, name: str) -> Path:
        return self.spool / name

    def make(self, *, used: bool = False) -> None:
        """The folders of an attempt; a used home has its own already."""
        own = () if used else (self.work, self.output, self.temporary, self.control, self.spool)
        for folder in (*own, Path(self.checkpoint), Path(self.jax_cache)):
            folder.mkdir(parents=True, exist_ok=True)

    def remove(self) -> None:
        """Everything that need not outlive the attempt. What a payload made unremovable stays for the next try."""
        shutil.rmtree(self.home, ignore_errors=True)


def attempt_home(state: Path, attempt: str) -> Path:
    return state / "attempts" / attempt


def own_checkpoints(home: Path, fence: int) -> Path:
    """Where an attempt saves that reaches the root through the server only: the agent copies it from there."""
    return home / "checkpoints" / str(fence)


def own_jax_cache(state: Path, job: str) -> str:
    """The same for what JAX compiled; all attempts of a job on this host share it."""
    return str(state / "jobs" / job / "jax-cache")


def directory_of(root: str | None) -> Path | None:
    """The directory behind a `file://` root; None when hosts go through the server."""
    if root is None or urlsplit(root).scheme != "file":
        return None
    return Path(unquote(urlsplit(root).path))


def shared_checkpoints(root: str | None, job: str, fence: int) -> Path | None:
    """Where an attempt saves in the root itself; None when hosts go through the server."""
    directory = directory_of(root)
    return None if directory is None else directory / "jobs" / job / "checkpoints" / str(fence)


def lay_out(state: Path, root: str | None, spec: LaunchSpec) -> Layout:
    """Where an attempt's things are. Checkpoints and compiled code lie under the root: the next host needs them.

    Without a way to the root they lie here: `checkpoints` copies them, `restoring` brings them.
    """
    home, directory = attempt_home(state, spec.attempt), directory_of(root)
    if directory is None:
        jax_cache = own_jax_cache(state, spec.job)
        return Layout(home=home, checkpoint=str(own_checkpoints(home, spec.fence)), restore=None, jax_cache=jax_cache)
    jobs = directory / "jobs"
    return Layout(
        home=home,
        checkpoint=str(jobs / spec.job / "checkpoints" / str(spec.fence)),
        restore=_restore(jobs, spec),
        jax_cache=str(jobs / spec.job / "jax-cache"),
    )


def _restore(jobs: Path, spec: LaunchSpec) -> str | None:
    """The newest earlier attempt that saved anything: one that died before its first checkpoint leaves none."""
    folders = [jobs / job / "checkpoints" / str(fence) for job, fence in spec.restore]
    return next((str(each) for each in folders if each.is_dir() and any(each.iterdir())), None)


def environment(
    spec: LaunchSpec, layout: Layout, own: Mapping[str, str], *, devices: bool, deadline: float, cloud: bool = False
) -> dict[str, str]:
    """The payload's environment. What the user gave wins over what passes; what the contract names wins over all.

    `own` is the agent's environment, `devices` whether real accelerators are here, `deadline` seconds since the epoch,
    `cloud` whether this is a machine of a cloud (or of its emulator).
    """
    env = {name: value for name, value in own.items() if name in PASSED_NAMES or name.startswith(PASSED_PREFIXES)}
    env.setdefault("PATH", DEFAULT_PATH)
    env.setdefault("LANG", "C.UTF-8")
    env |= {"HOME": str(layout.work), "TMPDIR": str(layout.temporary), "PYTHONUNBUFFERED": "1", "USER": "payload"}
    if not devices:
        env["JAX_PLATFORMS"] = "cpu"
        count = "--xla_force_host_platform_device_count"
        kept = [flag for flag in env.get("XLA_FLAGS", "").split() if not flag.startswith(count)]
        env["XLA_FLAGS"] = " ".join([*kept, f"{count}={spec.jax_devices}"])
    env |= {**spec.env, **spec.secrets}
    env |= {
        "PENSTOCK_JOB_ID": spec.job,
        "PENSTOCK_TEAM": spec.team,
        "PENSTOCK_ATTEMPT": spec.attempt,
        "PENSTOCK_FENCE": str(spec.fence),
        "PENSTOCK_STAGE": str(spec.stage),
        "PENSTOCK_RANK": str(spec.rank),
        "PENSTOCK_WORLD_SIZE": str(spec.world_size),
        "PENSTOCK_DEADLINE": f"{deadline:.3f}",
        "PENSTOCK_CHECKPOINT_DIR": layout.checkpoint,
        "PENSTOCK_OUTPUT_DIR": str(layout.output),
        "PENSTOCK_PROGRESS_FILE": str(layout.progress),
        "PENSTOCK_STOP_FILE": str(layout.stop),
    }
    env.setdefault("JAX_COMPILATION_CACHE_DIR", layout.jax_cache)
    if layout.carried:
        # With caches of XLA's own the cache's path is part of each key: then nothing would be found on another host.
        env.setdefault("JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES", "none")
    if spec.wandb_run_id:
        env.setdefault("WANDB_RUN_ID", spec.wandb_run_id)
    if layout.restore is not None:
        env["PENSTOCK_RESTORE_DIR"] = layout.restore
    if spec.slices > 1 and cloud and spec.coordinator is not None:
        env |= {
            "MEGASCALE_COORDINATOR_ADDRESS": f"{spec.coordinator.rpartition(':')[0]}:{MEGASCALE_PORT}",
            "MEGASCALE_NUM_SLICES": str(spec.slices),
            "MEGASCALE_SLICE_ID": str(spec.slice_index),
        }
    if spec.coordinator is not None and not (devices and cloud):
        # On a cloud's TPUs JAX finds the hosts by itself, by the machine's metadata and what is said above.
        env |= {
            "PENSTOCK_COORDINATOR": spec.coordinator,
            "JAX_COORDINATOR_ADDRESS": spec.coordinator,
            "JAX_NUM_PROCESSES": str(spec.world_size),
            "JAX_PROCESS_ID": str(spec.rank),
        }
    if spec.world_size > 1 and isinstance(spec.payload, CommandRequest):
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [*entrance.__path__, env.get("PYTHONPATH")]))
    return env


def open_plain(path: Path) -> BinaryIO:
    """A plain file of the payload's: neither a link out, nor a pipe that would hang; ValueError if it is none."""
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise ValueError(f"{path.name}: is not a plain file")


def read_progress(path: Path) -> dict[str, object] | None:
    """What the payload last said about itself; None while it said nothing, or nothing that can be read.

    It is the payload's file: anything may be in it, and a bad line is the payload's loss, never the agent's.
    """
    try:
        with open_plain(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - PROGRESS_BYTES_MAX))
            lines = file.read(PROGRESS_BYTES_MAX).strip().splitlines()
        said = json.loads(lines[-1]) if lines else None
    except (OSError, ValueError, RecursionError):
        return None
    return said if isinstance(said, dict) else None
