"""Many jobs at once: the members of an array, the lines of a batch; submitted, counted and waited for.

`tpu run --array` and `tpu exec --batch` call it. How many of an array run at once is the server's business: all are
submitted, whatever the limit. It must not show logs: `tpu logs` does, by job.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import click

from penstock.cli.follow import INTERRUPTED

if TYPE_CHECKING:
    from penstock.cli.terminal import StatusLine
    from penstock.client.client import Client
    from penstock.wire.api import JobRequest, Outcome


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


def detached(ids: Sequence[str], how: str) -> click.exceptions.Exit:
    """What Ctrl-C means for many: they go on."""
    click.echo(f"\ndetached: {len(ids)} jobs go on; look with `{how}`", err=True)
    return click.exceptions.Exit(INTERRUPTED)
