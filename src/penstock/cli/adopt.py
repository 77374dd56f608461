"""`tpu adopt`: a TPU that exists becomes a slice, by a label on it and our agent on its hosts.

The server writes the label and says what hosts must run; this runs it over the user's own ssh, who made the TPU and may
enter it. It stays the user's: let go, it loses the label and nothing else, unless it was given away with `--own`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from penstock.cli import terminal
from penstock.cli.fleet import looks
from penstock.cli.naming import meant
from penstock.cli.ssh import AS_ROOT, VARIABLE, Place, places, run_everywhere
from penstock.cli.talk import Refused, talking
from penstock.cli.terminal import many, note, safe, span
from penstock.cli.words import SPAN, as_json
from penstock.domain import limits

if TYPE_CHECKING:
    from penstock.client.client import Client

CHECK_FAILED = 1
SSH_FAILED = 255  #: ssh's own word for "I could not", whatever ran there


def _complaint(code: int, said: str) -> str:
    if code == SSH_FAILED:
        return f"ssh could not enter it: {said or 'it did not say why'}"
    return f"exit code {code}: {said or 'see /var/lib/penstock/startup.log there'}"


def _tell(client: Client, slice: str, failed: dict[Place, str]) -> None:
    """Let others see it too, in `tpu slices`; that it failed counts more than that it could not be told."""
    from penstock.client.errors import ApiError
    from penstock.wire.capacity import HostTrouble

    try:
        client.unreached(slice, [HostTrouble(place.host, words) for place, words in failed.items()])
    except ApiError as error:
        note(safe(f"{slice}: the server was not told: {error}"))


@click.command()
@click.argument("name")
@click.option("--zone", required=True, metavar="ZONE", help="Where it is.")
@click.option("--own", is_flag=True, help="It is Penstock's from now on: deleted when its pool is removed.")
@click.option("--user", "-l", metavar="NAME", help="Log in as this user, who may use sudo.")
@click.option("--internal", is_flag=True, help="By addresses of the hosts' network, also where others exist.")
@click.option("--ssh", metavar="COMMAND", help=f"The ssh to use, such as 'ssh -F FILE'; also {VARIABLE}.")
@click.option("--wait", type=SPAN, default="5m", show_default=True, metavar="TIME", help="For it to be ready.")
@as_json
def adopt(
    *, name: str, zone: str, own: bool, user: str | None, internal: bool, ssh: str | None, wait: float, as_json: bool
) -> None:
    """Take over the TPU VM NAME that exists in ZONE.

    \b
    tpu adopt my-tpu --zone us-central1-a
    tpu run --on my-tpu train.py    it is a pool of one slice, under its name
    tpu pools rm my-tpu             let it go; with --own it is deleted then
    """
    with talking(stay=True) as client:
        reply = client.adopt(name, zone, own=own)
        where = places(client, meant(client, reply.slice), None, internal)
        note(safe(f"{name} is slice {reply.slice}; starting the agent on {many(len(where), 'host')}"))
        if not reply.returns:
            note(safe(f"{name} has a startup script of its own: after a reboot, adopt it again"))
        said: dict[Place, str] = {}
        codes = run_everywhere(where, [AS_ROOT], ssh, user, script=reply.script, last=said)
        failed = {place: _complaint(code, said.get(place, "")) for place, code in codes.items() if code}
        if failed:
            _tell(client, reply.slice, failed)
            which = ", ".join(f"{place.mark} ({words})" for place, words in failed.items())
            again = f"adopt it again within {span(limits.JOIN_TIMEOUT_S)}, or it is let go by itself"
            advice = f"{again}; `tpu pools rm {name}` lets it go now"
            raise Refused(safe(f"{name}, slice {reply.slice}: set-up failed on host {which}; {advice}"), CHECK_FAILED)
        for found in looks(wait, lambda: meant(client, reply.slice)):
            if found.state not in ("intended", "creating"):
                break
        if found.state != "ready":
            raise Refused(safe(f"{name} is {found.state}: {found.why or found.arriving}"), CHECK_FAILED)
    if as_json:
        terminal.echo_json(found)
    else:
        click.echo(safe(f"{name} is ready: `tpu run --on {name} …` uses it"))
