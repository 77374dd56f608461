"""`tpu mount`: something that every host of a pool shall see, on the hosts that are there and on all that come.

The pool remembers the mount, and the startup script of each new host makes it; on hosts that are there it is made by
ssh. Both use the same words (`domain.mounts`). It must not restart anything.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import click
import msgspec

from penstock.cli import terminal
from penstock.cli.cloud_options import MOUNT
from penstock.cli.cloud_options import mount as parsed
from penstock.cli.ssh import AS_ROOT, VARIABLE, all_places, run_everywhere
from penstock.cli.talk import Refused, talking
from penstock.cli.terminal import many, note, safe

if TYPE_CHECKING:
    from penstock.client.client import Client
    from penstock.domain.cloud import Mount
    from penstock.wire.api import PoolView

CHECK_FAILED, CONFLICT = 1, 6


@click.command()
@click.argument("pool")
@click.argument("mounts", nargs=-1, metavar=f"[{MOUNT}]...")
@click.option("--rm", "removed", multiple=True, metavar="PATH", help="Take the mount at this path from the pool.")
@click.option("--later", is_flag=True, help="Leave hosts alone that are there; new ones have it.")
@click.option("--user", "-l", metavar="NAME", help="Log in as this user, who may use sudo.")
@click.option("--ssh", metavar="COMMAND", help=f"The ssh to use, such as 'ssh -F FILE'; also {VARIABLE}.")
def mount(
    *, pool: str, mounts: tuple[str, ...], removed: tuple[str, ...], later: bool, user: str | None, ssh: str | None
) -> None:
    """Mount something on all hosts of POOL, now and on every host that comes; without one, list its mounts.

    \b
    tpu mount big nfs:10.0.0.2:/export:/mnt/data
    tpu mount big gcs:my-bucket:/mnt/bucket          the image must have gcsfuse
    tpu mount big disk:my-data:/mnt/data             read-only, one of --disk
    tpu mount big --rm /mnt/data                     new hosts no longer have it
    """
    wanted = [parsed(word) for word in mounts]
    with talking() as client:
        found = client.pool(pool)
        if found.cloud is None:
            raise Refused(safe(f"pool: {pool!r} makes no machines of its own; mounts are for those"), CONFLICT)
        if not wanted and not removed:
            _show(found.cloud.mounts)
            return
        kept = [each for each in found.cloud.mounts if each.path not in {*removed, *(one.path for one in wanted)}]
        _save(client, found, (*kept, *wanted))
        failed = [] if later else _mount_now(client, found, wanted, ssh, user)
    click.echo(safe(f"{pool}: {', '.join(each.path for each in (*kept, *wanted)) or 'no mounts'}"))
    if failed:
        raise Refused(f"not mounted now on {', '.join(failed)}; hosts that come have it all the same", CHECK_FAILED)


def _show(mounts: tuple[Mount, ...]) -> None:
    if not mounts:
        click.echo("no mounts")
        return
    terminal.echo_table(("KIND", "SOURCE", "PATH"), [(one.kind, safe(one.source), safe(one.path)) for one in mounts])


def _save(client: Client, pool: PoolView, mounts: tuple[Mount, ...]) -> None:
    from penstock.wire.api import PoolRequest

    assert pool.cloud is not None
    cloud = msgspec.structs.replace(pool.cloud, mounts=mounts)
    same = {name: getattr(pool, name) for name in PoolRequest.__struct_fields__}
    client.put_pool(pool.name, PoolRequest(**{**same, "cloud": cloud}))


def _mount_now(client: Client, pool: PoolView, mounts: list[Mount], ssh: str | None, user: str | None) -> list[str]:
    """Make mounts on the hosts that are ready; answers those where it did not work."""
    from penstock.domain.mounts import as_attached, mount_words

    assert pool.cloud is not None
    script = "set -eu\n"
    for each in as_attached(mounts, pool.cloud.disks):
        path = shlex.quote(each.path)
        script += f"mkdir -p {path}\nmountpoint -q {path} || {shlex.join(mount_words(each))}\n"
    ready = [each for each in client.slices() if each.pool == pool.name and each.state == "ready"]
    if not mounts or not ready:
        return []
    where = all_places(client, ready, inside=False)
    note(f"mounting on {many(len(where), 'host')} of {many(len(ready), 'slice')}")
    codes = run_everywhere(where, [AS_ROOT], ssh, user, script=script)
    return [place.mark for place, code in codes.items() if code]
