"""Which walls this host can put around a payload, and how to put them up.

`launch` wraps commands with `wrap`, `warm` its parents with `enclose`; `tpu doctor` prints what `probe` found. Behind
the walls the system is read-only, only the attempt's own directories can be written, the agent's state, Penstock's
tokens and the usual places of credentials are empty, other processes cannot be seen, and accelerators and the network
are there. Where bubblewrap or the kernel does not allow that, a payload still has its own session, limits and a clean
environment, and `Walls` says what is missing. It starts no payload itself.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

import msgspec

from penstock.agent import cgroups, devices
from penstock.agent.layout import Layout

logger = logging.getLogger(__name__)

PROBE_S = 10.0
TRIES, TRY_AGAIN_S = 4, 0.5
_TMP = Path("/tmp")
_PRODUCT = Path("/sys/class/dmi/id/product_name")  #: what kind of machine this is
#: Rights the warm parent needs to divide its own sandbox into rooms; they count only inside it.
ROOM_RIGHTS = ("CAP_SYS_ADMIN", "CAP_SYS_CHROOT")
#: Below a home directory: where people and their tools keep credentials.
_PRIVATE = (
    ".penstock", ".ssh", ".gnupg", ".aws", ".azure", ".config/gcloud", ".config/gh", ".config/penstock", ".docker",
    ".kube", ".netrc", ".git-credentials", ".pypirc", ".npmrc", ".huggingface/token", ".cache/huggingface/token",
    ".boto",
)  # fmt: skip
#: Variables that name files with credentials of a cloud: the server's, where its hosts are processes of its machine.
_KEY_FILES = ("GOOGLE_APPLICATION_CREDENTIALS", "AWS_SHARED_CREDENTIALS_FILE", "AWS_WEB_IDENTITY_TOKEN_FILE")
#: Sockets through which a process of this user could have another program act for it outside the walls.
_SOCKETS = (
    "/run/docker.sock", "/run/containerd", "/run/podman", "/run/crio", "/run/dbus", "/run/systemd/private",
    "/run/user", "/run/secrets", "/run/snapd.socket",
)  # fmt: skip


class Walls(msgspec.Struct, frozen=True, kw_only=True):
    """What stands on this host. `missing` has one line for each wall that does not, with the reason."""

    bubblewrap: str | None = None  #: where it is, if a sandbox of it works here
    rooms: bool = False  #: whether each snippet can have namespaces of its own
    groups: cgroups.Hierarchies = cgroups.Hierarchies()
    memory: bool = False  #: whether a limit of memory is kept
    tasks: bool = False  #: whether a limit of processes is kept
    root: bool = False
    missing: tuple[str, ...] = ()
    open: tuple[str, ...] = ()  #: what no wall here could close, and what to do instead

    def lines(self) -> list[str]:
        """For people: one line per wall."""
        stands = {
            "file system and processes (bubblewrap)": self.bubblewrap is not None,
            "namespaces of each snippet": self.rooms,
            "limit of memory (cgroup)": self.memory,
            "limit of processes (cgroup)": self.tasks,
        }
        told = [f"{name}: {'stands' if there else 'missing'}" for name, there in stands.items()]
        return [*told, *self.missing, *self.open]


class Inside(msgspec.Struct, frozen=True, kw_only=True):
    """What is different behind the walls: later entries lie over earlier ones, in the order of the fields."""

    temporary: Path | None = None  #: stands in for /tmp; None: an empty one in memory
    hidden: tuple[Path, ...] = ()
    readable: tuple[Path, ...] = ()
    writable: tuple[Path, ...] = ()


@cache
def probe() -> Walls:
    """What this host allows, for as long as this process lives.

    A wall that fell may have done so for want of processes or memory just then, and a payload must not go without it
    for ever: so it is tried a few times.
    """
    walls = try_walls()
    for _ in range(TRIES - 1):
        if walls.rooms or shutil.which("bwrap") is None:
            break
        time.sleep(TRY_AGAIN_S)
        walls = try_walls()
    for line in walls.missing:
        logger.warning("%s", line)
    return walls


def try_walls() -> Walls:
    """A wall counts only if it was seen to stand."""
    groups = cgroups.find()
    memory, tasks = _try_limits(groups)
    missing = []
    found, why = _try_bubblewrap()
    if found is None:
        missing.append(f"payloads can read and write what the agent's user can: {why}")
    if not memory:
        missing.append("a payload can use up the memory: no writable cgroup with the memory controller")
    if not tasks:
        missing.append("a payload can use up the process numbers: no writable cgroup with the pids controller")
    has_rooms = found is not None and _try_rooms(found)
    if found is not None and not has_rooms:
        missing.append("snippets run outside bubblewrap: this kernel does not let a sandbox divide itself")
    return Walls(
        bubblewrap=found,
        rooms=has_rooms,
        groups=groups,
        memory=memory,
        tasks=tasks,
        root=os.geteuid() == 0,
        missing=tuple(missing),
        open=_left_open(),
    )


def _left_open(product: Path = _PRODUCT) -> tuple[str, ...]:
    """What a payload can reach on this kind of machine whatever stands (ADR 0030)."""
    try:
        of_google = product.read_text().startswith("Google")
    except OSError:
        of_google = False
    if not of_google:
        return ()
    who = "payloads can get a token of this machine's service account from the metadata server, which TPUs need"
    return (f"{who}: give hosts an account that may do little (service_account of [tpu_vm], or of a pool)",)


def wrap(argv: Sequence[str], env: Mapping[str, str], layout: Layout, walls: Walls) -> tuple[list[str], dict[str, str]]:
    """A command, and its environment, behind the walls of this host; as it is where there are none."""
    if walls.bubblewrap is None:
        return list(argv), dict(env)
    hidden = hidden_places(layout.home.parents[1])
    inside = Inside(
        temporary=layout.temporary,
        hidden=hidden,
        readable=(*restored(layout), *needed(hidden, argv[0], env)),
        writable=layout.writable,
    )
    # TMPDIR and /tmp are one directory then, so that programs that insist on /tmp stay apart, too.
    return [*enclose(walls.bubblewrap, inside), "--chdir", str(layout.work), "--", *argv], dict(env)


def enclose(bubblewrap: str, inside: Inside, *, rights: Sequence[str] = ()) -> list[str]:
    """The beginning of a command line that runs its rest behind walls."""
    words = [bubblewrap, "--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    words += ["--cap-drop", "ALL"]
    for right in rights:
        words += ["--cap-add", right]
    words += ["--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/dev/shm"]
    for file in devices.device_files():
        words += ["--dev-bind", str(file), str(file)]
    words += ["--remount-ro", "/dev"]
    if inside.temporary is None:
        words += ["--tmpfs", "/tmp"]
    else:
        words += ["--bind", str(inside.temporary), "/tmp"]
    folders = [path for path in _outermost(inside.hidden) if path.is_dir()]
    for path in _outermost(inside.hidden):
        words += ["--tmpfs", str(path)] if path.is_dir() else ["--ro-bind", "/dev/null", str(path)]
    for path in inside.readable:
        words += ["--ro-bind", str(path), str(path)]
    for path in inside.writable:
        words += ["--bind", str(path), str(path)]
    for path in folders:
        words += ["--remount-ro", str(path)]
    return words


def hidden_places(state: Path) -> tuple[Path, ...]:
    """What no payload may see: the agent's state, Penstock's home, people's keys, sockets to more powerful programs."""
    places = [state, *(Path(name) for name in _SOCKETS)]
    if state.parent.parent.name == "slices":  # on this machine the agent lives in the home of Penstock itself
        places.append(state.parents[2])
    if "PENSTOCK_HOME" in os.environ:
        places.append(Path(os.environ["PENSTOCK_HOME"]))
    places += [Path(os.environ[name]) for name in _KEY_FILES if Path(os.environ.get(name, "")).is_absolute()]
    home = os.environ.get("HOME")
    if home and Path(home).is_absolute():
        places += [Path(home) / name for name in _PRIVATE]
    return tuple(_outermost(_existing(places)))


def needed(hidden: Iterable[Path], program: str, env: Mapping[str, str]) -> tuple[Path, ...]:
    """Of the hidden places and /tmp, what a payload cannot run without: interpreter, programs, this package."""
    wanted = [Path(__file__).parents[1]]
    if Path(program).is_absolute():
        wanted += [Path(program).parent, Path(program).resolve().parent]
    for name in ("PATH", "PYTHONPATH", "VIRTUAL_ENV"):
        wanted += [Path(each) for each in env.get(name, "").split(os.pathsep) if each.startswith("/")]
    # The directory `bin` of an environment is of no use without what lies beside it.
    wanted = [path.parent if path.name == "bin" else path for path in wanted]
    emptied = (*hidden, _TMP)
    found = [path for path in _existing(wanted) if any(path.is_relative_to(place) for place in emptied)]
    return tuple(_outermost(found))  # one mounted over another would hide it


def restored(layout: Layout) -> tuple[Path, ...]:
    """The directory with an earlier attempt's checkpoints, if it is one on this machine."""
    if layout.restore is None:
        return ()
    return tuple(_existing([Path(layout.restore)]))


def _existing(paths: Iterable[Path]) -> list[Path]:
    """Each once, by its real name: a link would be followed by who mounts over it."""
    return list(dict.fromkeys(path.resolve() for path in paths if path.exists()))


def _outermost(paths: Iterable[Path]) -> list[Path]:
    """Without those that lie in another one of them."""
    every = list(paths)
    return [path for path in every if not any(path != other and path.is_relative_to(other) for other in every)]


def _try_limits(groups: cgroups.Hierarchies) -> tuple[bool, bool]:
    """Whether a group that is made here has limits of memory and of processes: the right to make one is not enough."""
    group = cgroups.make(groups, f"probe-{os.getpid()}")
    if group is None:
        return False, False
    try:
        files = {name for folder in group.folders.values() for name in os.listdir(folder)}  # noqa: PTH208
    finally:
        group.remove()
    return bool(files & {"memory.limit_in_bytes", "memory.max"}), "pids.max" in files


def _try_bubblewrap() -> tuple[str | None, str]:
    """Where it is if it works; else why not."""
    found = shutil.which("bwrap")
    if found is None:
        return None, "bubblewrap is not installed (package bubblewrap)"
    tried = _run([*enclose(found, Inside()), "--", "/bin/true"])
    return (found, "") if tried == "" else (None, f"bubblewrap does not work here: {tried}")


def _try_rooms(bubblewrap: str) -> bool:
    """Whether, behind the walls, a process may make namespaces of its own: done with the tool everybody has."""
    inside = [*enclose(bubblewrap, Inside(), rights=ROOM_RIGHTS), "--"]
    unshare = shutil.which("unshare")
    if unshare is None:
        return False
    return _run([*inside, unshare, "--mount", "--pid", "--ipc", "--fork", "--mount-proc", "/bin/true"]) == ""


def _run(argv: list[str]) -> str:
    """Empty when it went well, else what it said."""
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PROBE_S, check=False, env={}
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if done.returncode == 0 else (done.stderr.strip() or f"exit code {done.returncode}")
