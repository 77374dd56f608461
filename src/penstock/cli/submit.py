"""The options that every job can have, and the request they make.

`tpu run` and `tpu exec` share them, so that a job says the same thing the same way, whatever its payload. Values are
sent as given: their rules are the server's (`domain.admission`), which answers in one line. It must not submit.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click
import msgspec
from typing_extensions import override

from penstock.cli.words import SPAN, Copies, JobId, Pair, Size, grouped

if TYPE_CHECKING:
    from penstock.cli.targets import Target
    from penstock.wire.api import CommandRequest, JobRequest, SnippetRequest


class JobOptions(msgspec.Struct, kw_only=True):
    """What the shared options were given."""

    on: str | None
    name: str
    env: tuple[tuple[str, str], ...]
    secret: tuple[str, ...]
    after: tuple[str, ...]
    priority: int
    queue: str | None
    tag: tuple[str, ...]
    note: str
    timeout: float | None
    expected: float | None
    memory: int | None
    rule: str
    max_retries: int | None
    replicas: tuple[int, int]
    slices: int
    spot: bool | None
    zone: tuple[str, ...]
    idempotency_key: str | None


class _Variable(Pair):
    """K=V, or K alone for the value it has here."""

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        if isinstance(value, str) and "=" not in value:
            if value not in os.environ:
                self.fail(f"{value!r} has no value here; write {value}=VALUE", param, ctx)
            value = f"{value}={os.environ[value]}"
        return super().convert(value, param, ctx)


_OPTIONS = (
    click.option("--on", metavar="WHERE", help="Accelerator (v5e-8), list, pattern (v5e-*), pool:NAME or slice:ID."),
    click.option("-n", "--name", default="", metavar="NAME", help="A name for people; it need not be unique."),
    click.option(
        "--env", multiple=True, type=_Variable(), metavar="K=V", help="A variable for the job; K alone passes yours on."
    ),
    click.option("--secret", multiple=True, metavar="NAME", help="A secret the job sees as variable NAME."),
    click.option("--after", multiple=True, type=JobId(), metavar="JOB", help="Start when JOB has succeeded."),
    click.option("--priority", type=int, default=0, metavar="N", help="Higher goes first; -1000 to 1000."),
    click.option("--queue", metavar="NAME", help="The queue it waits in."),
    click.option("--tag", multiple=True, metavar="TAG", help="A word to find it by; may be repeated."),
    click.option("--note", default="", metavar="TEXT", help="A remark for people."),
    click.option("--timeout", type=SPAN, metavar="TIME", help="Stop it after this: 90, 30s, 15m, 2h, 7d."),
    click.option("--expected", type=SPAN, metavar="TIME", help="How long it should take; lets it fill gaps."),
    click.option("--memory", type=Size(), metavar="SIZE", help="Memory limit of each host's processes: 16G."),
    click.option("--rule", default="pre", metavar="RULE", help="How it goes on after a loss; `tpu rules` lists them."),
    click.option("--max-retries", type=int, metavar="N", help="Failures of its own that are tried again."),
    click.option("--replicas", type=Copies(), default="1", metavar="N|A-B", help="Copies that may run at once."),
    click.option("--slices", type=click.IntRange(1), default=1, metavar="N", help="Equal slices of one attempt."),
    click.option("--spot/--no-spot", default=None, help="Only spot capacity, or none of it."),
    click.option("--zone", "--zones", "zone", multiple=True, metavar="ZONES", help="Only these: us-a,us-b."),
    click.option("--idempotency-key", metavar="KEY", help="The same key gives the same job, however often it is sent."),
)
#: Gives a command the options above; it takes them as one `JobOptions` named `job`.
job_options = grouped(_OPTIONS, JobOptions, "job")


def job_request(
    payload: SnippetRequest | CommandRequest, job: JobOptions, target: Target, *, env: dict[str, str] | None = None
) -> JobRequest:
    """The request for `payload`; `env` is what the command itself needs, and gives way to --env."""
    from penstock.wire.api import JobRequest

    return JobRequest(
        payload=payload,
        on=target.on,
        pool=target.pool,
        slice=target.slice,
        zones=tuple(zone.strip() for each in job.zone for zone in each.split(",") if zone.strip()),
        spot=job.spot,
        slices=job.slices,
        memory_bytes=job.memory,
        queue=job.queue,
        name=job.name,
        replicas_min=job.replicas[0],
        replicas_max=job.replicas[1],
        rule=job.rule,
        max_retries=job.max_retries,
        priority=job.priority,
        timeout_s=job.timeout,
        expected_s=job.expected,
        after=job.after,
        tags=job.tag,
        note=job.note,
        env={**(env or {}), **dict(job.env)},
        secrets=job.secret,
        idempotency_key=job.idempotency_key,
    )
