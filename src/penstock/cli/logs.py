"""`tpu logs`: what a job wrote, byte for byte, now or as it comes.

`out` goes to standard output, `err` and `log` to standard error, as the program meant it; with one stream named, that
one goes to standard output, so that `tpu logs JOB --stream err > file` is exactly what was written. Nothing is decoded
or cut. Bytes the server does not have are told on standard error, with their number. `Writer` is also what `tpu run`
and `exec` print through.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import click

from penstock.cli import terminal
from penstock.cli.talk import talking
from penstock.cli.words import JOB

if TYPE_CHECKING:
    from penstock.client.client import Client
    from penstock.wire.api import LogChunk


class Writer:
    """Puts chunks of logs where they belong and counts what is missing between them.

    Lines begin with their host's number while `prefixed`: of a gang, where several hosts speak.
    """

    def __init__(self, *, one_stream: bool = False, prefixed: bool = False, silent: bool = False) -> None:
        self._one_stream = one_stream
        self.prefixed = prefixed
        self._silent = silent
        self._ends: dict[tuple[str, int, str], int] = {}
        self._open_line: tuple[str, int, str] | None = None

    @property
    def at_line_start(self) -> bool:
        """Whether something else may be printed without breaking a line of the job's."""
        return self._open_line is None

    def write(self, chunk: LogChunk) -> None:
        from penstock.client.results import log_bytes

        source = (chunk.attempt, chunk.rank, chunk.stream)
        whole = log_bytes(chunk)
        expected = self._ends.get(source, 0)
        data = whole[max(0, expected - chunk.offset) :]  # a resumed stream may repeat what was shown
        if chunk.offset > expected:
            self._mark(source, chunk.offset - expected)
        self._ends[source] = max(expected, chunk.offset + len(whole))
        if data and not self._silent:
            self._put(source, data)

    def _mark(self, source: tuple[str, int, str], missing: int) -> None:
        _, host, stream = source
        terminal.note(f"tpu: {missing} bytes of {stream} of host {host} are missing here: over the cap, or lost")

    def _put(self, source: tuple[str, int, str], data: bytes) -> None:
        _, host, stream = source
        plain = self._one_stream or stream == "out"
        target = (sys.stdout if plain else sys.stderr).buffer
        if self.prefixed:
            data = self._with_prefix(source, data, f"[host {host}] ".encode())
        self._open_line = None if data.endswith(b"\n") else source
        target.write(data)
        target.flush()

    def _with_prefix(self, source: tuple[str, int, str], data: bytes, prefix: bytes) -> bytes:
        """`data` with every line that starts in it marked; another host's open line is ended first."""
        going_on = self._open_line == source
        before = b"" if self._open_line is None or going_on else b"\n"
        body, newline, rest = data.rpartition(b"\n")
        marked = (body.replace(b"\n", b"\n" + prefix) + newline) + (prefix + rest if newline and rest else rest)
        return before + (b"" if going_on else prefix) + marked


def from_hosts(client: Client, id: str, chunks: Iterable[LogChunk], writer: Writer) -> Iterator[LogChunk]:
    """The chunks; the writer is told whether several hosts may speak, as soon as an attempt does.

    Before an attempt's first bytes nobody knows how many hosts it has.
    """
    known: set[str] = set()
    for chunk in chunks:
        if chunk.attempt not in known:
            known.add(chunk.attempt)
            writer.prefixed = any(each.hosts > 1 for each in client.get(id).attempts)
        yield chunk


@click.command()
@click.argument("job", type=JOB)
@click.option("-f", "--follow", is_flag=True, help="Go on until the job has ended.")
@click.option("--host", type=click.IntRange(0), metavar="N", help="Only this host of a gang.")
@click.option("--stream", type=click.Choice(["out", "err", "log"]), help="Only this stream, on standard output.")
@click.option("--attempt", metavar="ID", help="Only this attempt; `tpu show JOB` lists them. Default: all.")
def logs(job: str, follow: bool, host: int | None, stream: str | None, attempt: str | None) -> None:
    """Show what a job wrote.

    \b
    tpu logs j01                    all of it, each stream as its own
    tpu logs -f j01                 and what comes, until the job has ended
    tpu logs j01 --stream out > x   exactly the bytes of its standard output

    Lines of a job on several hosts begin with `[host N]`, unless --host chooses one.
    """
    with talking(stay=follow) as client:
        view = client.get(job)
        writer = Writer(one_stream=stream is not None)
        chunks = client.logs(view.id, follow=follow, host=host, stream=stream, attempt=attempt)
        try:
            for chunk in chunks if host is not None else from_hosts(client, view.id, chunks, writer):
                writer.write(chunk)
        except KeyboardInterrupt:
            if not follow:
                raise
            raise click.exceptions.Exit(130) from None
