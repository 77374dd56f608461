"""What an extraction cost: the money of the chip-seconds that the jobs of a run held, as the server's ledger has them.

`tpu extract status` and `watch` show it. Jobs are found by the tag that `tpu extract --workers` gives them, workers by
the attempt their name begins with. A run knows its bucket only: where no server, or no job of it, is known, the cost is
a dash and the reason, never a guess; a price nobody knows is unknown, never nothing.
"""

from __future__ import annotations

import msgspec

from penstock.cli.cost import HOUR_S, usd
from penstock.cli.terminal import money

PATIENCE_S = 3.0  #: for the server's answer: the rest of the status must not wait for it


class Spent(msgspec.Struct, frozen=True):
    """`usd` is None where it is not known; `why` says so. `workers` has the dollars of each attempt."""

    usd: float | None = None
    chip_s: float = 0.0
    jobs: tuple[str, ...] = ()
    workers: dict[str, float | None] = {}
    why: str = ""

    def of_worker(self, attempt: str) -> str:
        return usd(self.workers[attempt]) if attempt in self.workers else "-"

    @property
    def facts(self) -> list[tuple[str, str]]:
        """For people: the sum, and what it leaves open."""
        if not self.jobs:
            return [("cost", f"- ({self.why})")]
        amount = "unknown" if self.usd is None else money(self.usd)
        whole = ("cost", f"{amount}; {self.chip_s / HOUR_S:,.2f} chip-hours of {', '.join(self.jobs)}")
        return [whole, ("", self.why)] if self.why else [whole]


def tag_of(run: str) -> str:
    """What a run's jobs are found by."""
    return f"extract:{run}"


def spent_on(run: str) -> Spent:
    """Asks the server that is configured here, if one is; starts none."""
    from penstock.client import settings
    from penstock.client.client import Client
    from penstock.client.errors import ApiError

    try:
        if settings.find() is None:
            return Spent(why="a bucket knows no prices, and no server is configured here")
        with Client(timeout_s=PATIENCE_S, patience_s=0) as client:
            ids = [job.id for job in client.jobs(tag=tag_of(run))]
            if not ids:
                return Spent(why="the server that is configured here has no job of this run")
            found = [client.job_cost(id) for id in ids]
    except ApiError as error:
        return Spent(why=f"the server does not say: {error}")
    amounts = [one.row.usd for one in found]
    known = sum(one.row.usd_known for one in found)
    unpriced = sum(one.row.unpriced_chip_s for one in found) / HOUR_S
    return Spent(
        usd=None if None in amounts else known,
        chip_s=sum(one.row.chip_s for one in found),
        jobs=tuple(ids),
        workers={row.key: row.usd for one in found for row in one.attempts},
        why=f"{unpriced:,.2f} chip-hours have no known price; the rest is {usd(known)}" if None in amounts else "",
    )
