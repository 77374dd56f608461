"""`tpu ssh`, `tpu scp`: onto the hosts of a slice with the system's own ssh, which knows the user's keys and settings.

Where hosts are is asked of the server each time. Without a command one host is entered; with one it runs on all hosts
at once, and each line says which host wrote it. Host keys are kept under the slice's id, which is never used twice, so
that a new machine at an old address is no reason for alarm. It must not touch keys or settings of ssh.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import PurePath
from typing import IO, TYPE_CHECKING, NamedTuple

import click

from penstock.cli.naming import meant
from penstock.cli.talk import Refused, talking
from penstock.cli.terminal import many, note, safe

if TYPE_CHECKING:
    from penstock.client.client import Client
    from penstock.wire.api import SliceView

#: Runs what it reads as root, by sudo where that is not who one is already.
AS_ROOT = 'if [ "$(id -u)" = 0 ]; then exec sh -s; else exec sudo -n sh -s; fi'
AT_ONCE = 32  #: hosts that are talked to at the same time
NOT_AVAILABLE, NOT_FOUND = 3, 5
#: The ssh to use and its options, as `GIT_SSH_COMMAND` is for git.
VARIABLE = "PENSTOCK_SSH"


class Place(NamedTuple):
    """One host, as ssh finds it."""

    slice: str
    host: int
    address: str
    mark: str  #: before each line it writes, where several write


def places(client: Client, slice: SliceView, host: int | None, inside: bool) -> list[Place]:
    """The hosts of a slice, or one of them."""
    found = client.hosts(slice.id)
    if host is not None and host >= slice.hosts:
        raise Refused(f"host: slice {slice.id} has {many(slice.hosts, 'host')}, 0 to {slice.hosts - 1}", NOT_FOUND)
    if slice.provider == "local":
        advice = f"`tpu run --on slice:{slice.id} -- COMMAND` runs there"
        raise Refused(f"slice {slice.id} has no machine of its own: it is on the server's; {advice}", NOT_AVAILABLE)
    chosen = [
        Place(slice.id, one.index, one.inside if inside or not one.outside else one.outside, str(one.index))
        for one in found
        if host in (None, one.index)
    ]
    trouble = next((one.trouble for one in found if one.trouble), "")
    if trouble and not all(place.address for place in chosen):
        raise Refused(safe(f"slice {slice.id}: where its hosts are is not known: {trouble}"), NOT_AVAILABLE)
    if trouble:
        note(safe(f"slice {slice.id}: by the last known addresses: {trouble}"))
    if not chosen or not all(place.address for place in chosen):
        raise Refused(f"slice {slice.id} is {slice.state}: its hosts have no addresses yet", NOT_AVAILABLE)
    return chosen


def all_places(client: Client, slices: Sequence[SliceView], inside: bool) -> list[Place]:
    """The hosts of several slices, marked with the slice's name too."""
    return [
        place._replace(mark=f"{each.title}/{place.host}")
        for each in slices
        for place in places(client, each, None, inside)
    ]


def program(name: str, given: str | None) -> list[str]:
    """`ssh` or `scp`, with the options of the user's own ssh command."""
    words = shlex.split(given or os.environ.get(VARIABLE, "") or "ssh")
    for index, word in enumerate(words):
        if PurePath(word).name == "ssh":
            words[index] = str(PurePath(word).with_name(name))
            return words
    raise click.UsageError(f"{VARIABLE}: {given or os.environ.get(VARIABLE)!r} runs no ssh; such as 'ssh -F FILE'")


def options(place: Place) -> list[str]:
    """What ssh and scp are told of a host: its key belongs to the slice, not to the address."""
    alias = f"penstock-{place.slice}-{place.host}"
    pairs = (f"HostKeyAlias={alias}", "CheckHostIP=no", "StrictHostKeyChecking=accept-new", "ConnectTimeout=20")
    return [word for pair in pairs for word in ("-o", pair)]


def run_everywhere(
    where: Sequence[Place],
    words: Sequence[str],
    ssh: str | None,
    user: str | None,
    *,
    script: str | None = None,
    last: dict[Place, str] | None = None,
) -> dict[Place, int]:
    """Run a command on hosts, many at once; their output with the host before each line. Answers exit codes.

    `script` is what the command reads, the same everywhere; `last` is given the last line that each complained with.
    """
    lock = threading.Lock()

    def one(place: Place) -> int:
        argv = [*program("ssh", ssh), *options(place), "-o", "BatchMode=yes", "-T", *_login(place, user), *words]
        with subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL if script is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as process:
            mark = f"[{place.mark}] ".encode() if len(where) > 1 else b""
            complaint = None if last is None else partial(last.__setitem__, place)
            pumps = [
                threading.Thread(target=_pump, args=(source, target, mark, lock, noted))
                for source, target, noted in (
                    (process.stdout, sys.stdout.buffer, None),
                    (process.stderr, sys.stderr.buffer, complaint),
                )
            ]
            for pump in pumps:
                pump.start()
            if process.stdin is not None and script is not None:
                try:
                    process.stdin.write(script.encode())
                    process.stdin.close()
                except BrokenPipeError:
                    pass  # it ended before it had read all: its exit code says why
            for pump in pumps:
                pump.join()
            return process.wait()

    with ThreadPoolExecutor(AT_ONCE) as hands:
        codes = list(hands.map(one, where))
    return dict(zip(where, codes, strict=True))


def _login(place: Place, user: str | None) -> list[str]:
    return [*(["-l", user] if user else []), place.address, "--"]


def _pump(
    source: IO[bytes], target: IO[bytes], mark: bytes, lock: threading.Lock, noted: Callable[[str], None] | None
) -> None:
    for line in source:
        if noted is not None and line.strip():
            noted(line.decode("utf-8", "replace").strip())
        with lock:
            target.write(mark + line if line.endswith(b"\n") or not mark else mark + line + b"\n")
            target.flush()


def verdict(codes: dict[Place, int]) -> int:
    """The exit code of the first host that failed; what failed where is told."""
    failed = {place: code for place, code in codes.items() if code}
    if failed and len(codes) > 1:
        each = ", ".join(f"{place.mark} with {code}" for place, code in failed.items())
        note(f"{len(failed)} of {len(codes)} hosts failed: {each}")
    return next(iter(failed.values()), 0)


def command_line(words: Sequence[str]) -> list[str]:
    """What the host's shell is given: one word as it is, several as they were meant."""
    return [words[0] if len(words) == 1 else shlex.join(words)]


_HOST = click.option("--host", type=click.IntRange(min=0), metavar="N", help="Only this host; the first is 0.")
_USER = click.option("--user", "-l", metavar="NAME", help="Log in as this user.")
_INSIDE = click.option("--internal", is_flag=True, help="By addresses of the hosts' network, also where others exist.")
_SSH = click.option("--ssh", metavar="COMMAND", help=f"The ssh to use, such as 'ssh -F FILE'; also {VARIABLE}.")


@click.command()
@click.argument("slice")
@_HOST
@_USER
@_INSIDE
@_SSH
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def ssh(
    *, slice: str, host: int | None, user: str | None, internal: bool, ssh: str | None, command: tuple[str, ...]
) -> None:
    """Enter a host of SLICE, or run a command on all of its hosts.

    \b
    tpu ssh tpu-us-central1-a-0                    a shell on host 0
    tpu ssh s0abc -- uptime                        on every host at once
    tpu ssh fleet-v3-8 -- uptime                   of a whole fleet or pool
    tpu ssh s0abc --host 3 -- 'df -h | tail -1'    a line for the host's shell

    Your own ssh is used: your key must be known to the project (`gcloud compute config-ssh`) or to the hosts.
    """
    with talking() as client:
        if command and any(pool.name == slice for pool in client.pools()):
            ready = [each for each in client.slices() if each.pool == slice and each.state == "ready"]
            where = [place for place in all_places(client, ready, internal) if host in (None, place.host)]
            raise click.exceptions.Exit(verdict(run_everywhere(where, command_line(command), ssh, user)))
        found = meant(client, slice)
        where = places(client, found, 0 if host is None and not command else host, internal)
    if command:
        raise click.exceptions.Exit(verdict(run_everywhere(where, command_line(command), ssh, user)))
    (place,) = where
    if found.hosts > 1 and host is None:
        note(f"host 0 of {found.hosts}; --host N enters another")
    done = subprocess.run([*program("ssh", ssh), *options(place), *_login(place, user)[:-1]], check=False)
    raise click.exceptions.Exit(done.returncode)


@click.command()
@click.option("--recursive", "-r", is_flag=True, help="Directories with all that is in them.")
@_HOST
@_USER
@_INSIDE
@_SSH
@click.argument("paths", nargs=-1, required=True, metavar="SOURCE... TARGET")
def scp(
    *,
    recursive: bool,
    host: int | None,
    user: str | None,
    internal: bool,
    ssh: str | None,
    paths: tuple[str, ...],
) -> None:
    """Copy files to all hosts of a slice, or from one of them; a path there is SLICE:PATH.

    \b
    tpu scp data.bin tpu-us-central1-a-0:/tmp/            to every host
    tpu scp --host 2 s0abc:/var/lib/penstock/startup.log .
    """
    if len(paths) < 2:
        raise click.UsageError("give what to copy, and where to; a path on a slice is SLICE:PATH")
    *sources, target = paths
    there = _remote(target)
    froms = [_remote(source) for source in sources]
    if (there is None) == all(one is None for one in froms) or (there is not None and any(froms)):
        raise click.UsageError("copy either to a slice or from one: SOURCE... SLICE:PATH, or SLICE:PATH TARGET")
    if there is None and (len(froms) > 1 or froms[0] is None):
        raise click.UsageError("copy one path from a slice at a time")
    name, path = there or froms[0] or ("", "")
    with talking() as client:
        found = meant(client, name)
        where = places(client, found, 0 if host is None and there is None else host, internal)
    flags = ["-r"] if recursive else []

    def one(place: Place) -> int:
        far = f"{f'{user}@' if user else ''}{_bracketed(place.address)}:{path}"
        ends = [*map(_plain, sources), far] if there is not None else [far, _plain(target)]
        argv = [*program("scp", ssh), *options(place), "-o", "BatchMode=yes", *flags, "--", *ends]
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=False)
        for line in done.stderr.decode("utf-8", "replace").splitlines():
            note(f"[{place.mark}] {safe(line)}")
        return done.returncode

    with ThreadPoolExecutor(AT_ONCE) as hands:
        codes = dict(zip(where, hands.map(one, where), strict=True))
    raise click.exceptions.Exit(verdict(codes))


def _remote(word: str) -> tuple[str, str] | None:
    """(slice, path) of SLICE:PATH; None for a path here. As with scp, a slash before the colon means here."""
    name, colon, path = word.partition(":")
    return (name, path) if colon and name and "/" not in name else None


def _plain(path: str) -> str:
    """A path here as scp cannot take it for another machine's."""
    return path if path.startswith("/") else f"./{path}"


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address
