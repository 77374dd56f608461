"""`tpu clean`: asks the server, part by part, to remove what jobs left that ended long ago, and tells what went.

What may go and what must stay is decided by the server. It can be stopped at any point and called again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from penstock.cli import terminal
from penstock.cli.follow import INTERRUPTED
from penstock.cli.talk import talking
from penstock.cli.words import SPAN, as_json

if TYPE_CHECKING:
    from penstock.wire.api import CleanedView, CleanReply


@click.command()
@click.option(
    "--older-than", type=SPAN, metavar="TIME", help="Of jobs that ended so long ago, such as 7d; else by the policy."
)
@click.option("--keep-results", is_flag=True, help="Leave results and artifacts, and the jobs they belong to.")
@click.option("--dry-run", is_flag=True, help="Only count what would go.")
@as_json
def clean(older_than: float | None, keep_results: bool, dry_run: bool, as_json: bool) -> None:
    """Remove logs, results, artifacts and checkpoints of jobs that ended long ago.

    Also snapshots and blobs that no job names, and environments that no slice of this machine uses, when nothing used
    them for a day. Jobs themselves are forgotten after 30 days. Jobs that have not ended lose nothing. How long each
    kind is kept says [retention] of the server's penstock.toml (`tpu config show`): 30 days, unless somebody changed
    it. The server does the same by itself once an hour.

    \b
    tpu clean --dry-run           what would go, and how much that is
    tpu clean                     what the policy lets go, now
    tpu clean --older-than 7d     all of a week ago, last checkpoints too

    Jobs that lost their last checkpoint can be rerun, not resumed.
    """
    from penstock.domain.limits import LATE_S

    if older_than is not None and older_than < LATE_S:
        rule = f"is less than {LATE_S / 60:g}m: until then hosts may still send what such a job left"
        raise click.BadParameter(f"{terminal.span(older_than)} {rule}", param_hint="--older-than")
    parts: list[CleanReply] = []
    status = terminal.StatusLine(silent=as_json)
    try:
        with talking() as client:
            cursor: str | None = None
            while cursor is not None or not parts:
                reply = client.clean(older_than_s=older_than, keep_results=keep_results, dry_run=dry_run, cursor=cursor)
                parts.append(reply)
                cursor = reply.next
                status.show(f"{_size(_summed(parts))} {'counted' if dry_run else 'removed'} …")
    except KeyboardInterrupt:
        status.say(f"stopped; {_size(_summed(parts))} {'counted' if dry_run else 'removed'}; `tpu clean` goes on")
        raise click.exceptions.Exit(INTERRUPTED) from None
    finally:
        status.clear()
    _tell(parts, dry_run, as_json)


def _tell(parts: list[CleanReply], dry_run: bool, as_json: bool) -> None:
    import msgspec

    removed = _summed(parts)
    notes = tuple(dict.fromkeys(note for part in parts for note in part.notes))
    whole = msgspec.structs.replace(
        parts[0], jobs=sum(part.jobs for part in parts), removed=removed, notes=notes, next=None
    )
    if as_json:
        terminal.echo_json(whole)
        return
    if removed:
        rows = [(view.kind, str(view.count), terminal.size(view.bytes)) for view in removed]
        terminal.echo_table(("WHAT", "COUNT", "SIZE"), rows, right=("COUNT", "SIZE"))
    before = terminal.moment(whole.ended_before)
    doing = "would go; nothing was removed (--dry-run)" if dry_run else "removed"
    click.echo(f"{_size(removed)} {doing}: {whole.jobs} jobs that ended before {before}, and what nothing uses")
    for note in notes:
        terminal.note(terminal.safe(note))


def _summed(parts: list[CleanReply]) -> tuple[CleanedView, ...]:
    from penstock.wire.api import CleanedView

    kinds = dict.fromkeys(view.kind for part in parts for view in part.removed)
    return tuple(
        CleanedView(
            kind=kind,
            count=sum(view.count for part in parts for view in part.removed if view.kind == kind),
            bytes=sum(view.bytes for part in parts for view in part.removed if view.kind == kind),
        )
        for kind in kinds
    )


def _size(views: tuple[CleanedView, ...]) -> str:
    return terminal.size(sum(view.bytes for view in views))
