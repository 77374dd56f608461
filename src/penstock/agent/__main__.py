"""`python -m penstock.agent`: the agent of one host, as its provider starts it.

Reads its arguments, makes the state directory and its incarnation, and runs the loop until the server no longer wants
the host. SIGTERM ends the agent, not its payloads: the next one adopts them. `--power-off` ends what a state directory
holds as a lost machine would, for providers whose machines are processes. It must not decide anything about jobs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import gc
import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

EXIT_USAGE = 2
EXIT_REFUSED = 4
EXIT_TAKEN = 5
TAKEN_S = 30.0  #: an agent waits so long for the one before it to end
_LOOK_S = 0.05


class Taken(Exception):
    """Another agent lives on this state directory."""


class SystemClock:
    """The clocks of this machine."""

    def now(self) -> float:
        return time.time()  # noqa: TID251 (a process is where time comes from)

    def steady(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="penstock.agent", description=__doc__.partition("\n")[0])
    parser.add_argument("--state", type=Path, required=True, help="this host's own directory")
    parser.add_argument("--power-off", action="store_true", help="kill everything this directory holds, and end")
    parser.add_argument("--server", default="", help="address of the server")
    parser.add_argument("--slice", default="")
    parser.add_argument("--host", type=int, default=0, help="index of this host in its slice")
    parser.add_argument("--provider-id", default="", help="which incarnation of the slice this machine belongs to")
    parser.add_argument("--token-file", type=Path, help="holds the join token of the slice")
    parser.add_argument("--metadata", default="", help="address of the machine's metadata server, up to /instance")
    given = parser.parse_args(argv)
    if not given.power_off:
        for name in ("server", "slice", "provider_id", "token_file"):
            if not getattr(given, name):
                parser.error(f"--{name.replace('_', '-')}: is missing")
        if given.host < 0:
            parser.error(f"--host: {given.host} is negative; hosts are counted from 0")
    return given


def _token(given: argparse.Namespace) -> str:
    """The join token; none on a host that has joined before, and has thrown it away."""
    try:
        return str(given.token_file.read_text().strip())
    except FileNotFoundError:
        if (given.state / "credential.json").is_file():
            return ""
        raise


@contextlib.contextmanager
def _alone(state: Path) -> Iterator[None]:
    """Two agents must never share one journal: what restarts agents may die and leave one that it forgot.

    No child inherits the lock, so that the kernel frees it with the agent, however that ends.
    """
    lock = state / "agent.lock"
    handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        until = time.monotonic() + TAKEN_S
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise Taken(f"{lock}: another agent runs on this state directory; stop that one first") from None
            time.sleep(_LOOK_S)
        yield
    finally:
        os.close(handle)


async def _run(given: argparse.Namespace, token: str) -> None:
    from penstock.agent import record
    from penstock.agent.host import Host, Place
    from penstock.agent.link import Link
    from penstock.agent.loop import Agent

    # What was imported lives as long as the agent: the collector need not look at it, nor come every moment.
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    state = given.state.resolve()
    kept = record.load(state / "record.json") or record.Record(incarnation=secrets.token_hex(8))
    place = Place(slice=given.slice, host=given.host, provider_id=given.provider_id)
    host = Host(place, state, Link(given.server), SystemClock(), kept)
    host.metadata = given.metadata
    if given.metadata:  # a machine of a cloud: its startup script wrote the file, and writes it anew at each boot
        host.token_file = given.token_file
    agent = Agent(host, token)
    running = asyncio.ensure_future(agent.run())
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, running.cancel)
    await asyncio.wait((running,))
    if not running.cancelled():
        running.result()


def main(argv: list[str]) -> int:
    given = _arguments(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    if given.power_off:
        from penstock.agent.tree import power_off

        power_off(given.state.resolve())
        return 0
    from penstock.agent.loop import Unjoined

    try:
        given.state.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _alone(given.state):
            asyncio.run(_run(given, _token(given)))
    except Taken as taken:
        sys.stderr.write(f"{taken}\n")
        return EXIT_TAKEN
    except Unjoined as refused:
        sys.stderr.write(f"the server will not have this host: {refused}\n")
        return EXIT_REFUSED
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_USAGE
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
