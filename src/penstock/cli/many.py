"""Many jobs at once: the members of an array, the lines of a batch; submitted, counted and waited for.

`tpu run --array` and `tpu exec --batch` call it. `keep_at_once` holds the number in flight down by submitting the next
member when one has ended; this command does that, so it has to stay. It must not show logs: `tpu logs` does, by job.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

import click

from penstock.cli.follow import ENDED, INTERRUPTED

if TYPE_CHECKING:
    from penstock.cli.terminal import StatusLine
    from penstock.client.client import Client
    from penstock.wire.api import JobRequest, Outcome

LOOK_EVERY_S = 0.5


def submit_all(client: Client, requests: Sequence[JobRequest]) -> list[str]:
    """Submit in batches as large as the server takes; each batch is taken whole or not at all."""
    return [accepted.id for accepted in client.submit_many(requests)]


def wait_all(client: Client, ids: Sequence[str], status: StatusLine) -> Iterator[Outcome]:
    """The outcomes, in the order of `ids`."""
    failed = 0
    for number, id in enumerate(ids):
        status.show(f"{number} of {len(ids)} ended, {failed} of them not well")
        outcome = client.wait(id)
        failed += outcome.state != "succeeded"
        yield outcome
    status.clear()


def keep_at_once(
    client: Client, requests: Sequence[JobRequest], at_once: int, status: StatusLine
) -> Iterator[tuple[int, Outcome]]:
    """Never more than `at_once` in flight. Gives (position, outcome) as members end."""
    waiting = iter(enumerate(requests))
    flying: dict[str, int] = {}
    ended = 0
    while True:
        batch = list(islice(waiting, at_once - len(flying)))
        if batch:
            ids = submit_all(client, [request for _, request in batch])
            flying.update(zip(ids, (position for position, _ in batch), strict=True))
        if not flying:
            break
        for id, position in list(flying.items()):
            if client.get(id).state in ENDED:
                del flying[id]
                ended += 1
                yield position, client.outcome(id)
        status.show(f"{ended} of {len(requests)} ended, {len(flying)} in flight")
        if len(flying) == at_once:
            time.sleep(LOOK_EVERY_S)
    status.clear()


def detached(ids: Sequence[str], left: int, how: str) -> click.exceptions.Exit:
    """What Ctrl-C means for many: what was submitted goes on, the rest was never sent."""
    rest = f"; {left} were not submitted" if left else ""
    click.echo(f"\ndetached: {len(ids)} jobs go on{rest}; look with `{how}`", err=True)
    return click.exceptions.Exit(INTERRUPTED)
