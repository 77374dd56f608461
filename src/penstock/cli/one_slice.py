"""One slice: `tpu describe` shows all that is known of it, `tpu restart` puts another in its place.

Slices are made by pools, so none is made here: what is let go is replaced by its pool, if that still wants as many.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from penstock.cli import terminal
from penstock.cli.naming import confirm, meant
from penstock.cli.talk import talking
from penstock.cli.terminal import many, moment, now_s, safe, span
from penstock.cli.words import as_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.wire.api import SliceView
    from penstock.wire.capacity import HostView


@click.command()
@click.argument("slice")
@as_json
def describe(slice: str, as_json: bool) -> None:
    """All that is known of SLICE: its id, enough of it, or its place in a fleet.

    \b
    tpu describe tpu-us-central1-a-0
    tpu describe s01m7 --json
    """
    import msgspec

    with talking() as client:
        found = meant(client, slice)
        hosts = client.hosts(found.id)
    if as_json:
        terminal.echo_json({**msgspec.to_builtins(found), "addresses": msgspec.to_builtins(hosts)})
        return
    terminal.echo_facts([(name, value) for name, value in _facts(found, hosts) if value])


def _facts(each: SliceView, hosts: Sequence[HostView]) -> list[tuple[str, str]]:
    facts = [
        ("slice", each.id),
        ("name", safe(each.title) if each.title != each.id else ""),
        ("state", terminal.state(each.state)),
        ("why", safe(each.why)),
        ("hosts now", safe(each.arriving)),
        ("accelerator", f"{each.accelerator}, {many(each.chips, 'chip')} on {many(each.hosts, 'host')}"),
        ("bought", "spot" if each.spot else ""),
        ("pool", safe(each.pool)),
        ("zone", safe(f"{each.zone} ({each.provider})")),
        ("job", f"{each.job} of {safe(each.user or '?')}" if each.job else "none"),
        ("asked for", f"{moment(each.made_at)}, {span(now_s() - each.made_at)} ago"),
        ("ready", "" if each.ready_at is None else moment(each.ready_at)),
        ("idle for", "" if each.idle_since is None else span(now_s() - each.idle_since)),
    ]
    for host in hosts:
        where = ", ".join(dict.fromkeys(word for word in (host.outside, host.inside) if word))
        facts.append((f"host {host.index}", safe(where)))
    trouble = next((host.trouble for host in hosts if host.trouble), "")
    if trouble:
        known = "addresses are the last known ones" if any(host.inside for host in hosts) else "addresses are not known"
        facts.append(("zone's API", safe(f"{trouble}; {known}")))
    return facts


@click.command()
@click.argument("slice")
@click.option("--now", is_flag=True, help="Do not wait for the job on it: it goes on elsewhere from its checkpoint.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@as_json
def restart(slice: str, now: bool, yes: bool, as_json: bool) -> None:
    """Put another slice in the place of SLICE, which is deleted.

    \b
    tpu restart tpu-us-central1-a-0           when its job has ended
    tpu restart s01m7 --now --yes             at once; its job goes on elsewhere

    A job on it ends first; with --now it is stopped, as with a notice of preemption, and goes on on another slice. What
    is broken is replaced by itself: this is for what only you know to be wrong.
    """
    with talking() as client:
        found = meant(client, slice)
        if found.job is not None:
            then = "is stopped and goes on elsewhere" if now else "ends first"
            confirm(f"Job {found.job} is on {found.title}; it {then}. Replace the slice?", yes)
        else:
            confirm(f"Delete {found.title} ({found.id}), so that its pool makes another?", yes)
        reply = client.replace_slice(found.id, now=now)
    if as_json:
        terminal.echo_json(reply)
    else:
        click.echo(safe(f"{found.title} ({reply.id}) is {reply.state}; `tpu slices` shows what comes"))
