"""`tpu adopt`: a TPU that exists becomes a slice, by a label on it and our agent on its hosts.

The server writes the label and says what hosts must run; this runs it over the user's own ssh, who made the TPU and may
enter it. It stays the user's: let go, it loses the label and nothing else, unless it was given away with `--own`.
"""

from __future__ import annotations

import click

from penstock.cli import terminal
from penstock.cli.fleet import looks
from penstock.cli.naming import meant
from penstock.cli.ssh import AS_ROOT, VARIABLE, places, run_everywhere
from penstock.cli.talk import Refused, talking
from penstock.cli.terminal import many, note, safe
from penstock.cli.words import SPAN, as_json

CHECK_FAILED = 1


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
        codes = run_everywhere(where, [AS_ROOT], ssh, user, script=reply.script)
        failed = [place.mark for place, code in codes.items() if code]
        if failed:
            advice = f"see /var/lib/penstock/startup.log there; `tpu pools rm {name}` lets it go"
            raise Refused(safe(f"set-up failed on hosts {', '.join(failed)}; {advice}"), CHECK_FAILED)
        for found in looks(wait, lambda: meant(client, reply.slice)):
            if found.state not in ("intended", "creating"):
                break
        if found.state != "ready":
            raise Refused(safe(f"{name} is {found.state}: {found.why or found.arriving}"), CHECK_FAILED)
    if as_json:
        terminal.echo_json(found)
    else:
        click.echo(safe(f"{name} is ready: `tpu run --on {name} …` uses it"))
