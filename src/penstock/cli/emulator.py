"""`tpu emulator`: a cloud's API on this machine, for tests and for trying things. Decides only what is printed."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import click

_PORT = click.IntRange(0, 65_535)
_DIRECTORY = click.Path(file_okay=False, path_type=Path)
#: gcloud's settings for an API's address, and where that API is here.
_OVERRIDES = (("TPU", ""), ("CONTAINER", ""), ("STORAGE", "storage/v1/"), ("COMPUTE", "compute/v1/"))


@click.group(invoke_without_command=True)
@click.option("--port", type=_PORT, default=0, metavar="N", help="Port; 0: any that is free.")
@click.option(
    "--world",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="TOML: capacity, delays, preemptions, faults; see docs/reference/emulator.md.",
)
@click.option("--no-vms", is_flag=True, help="Only the API: nodes are states and addresses, nothing runs on them.")
@click.option("--bucket", "buckets", multiple=True, metavar="NAME", help="Make a bucket; may be repeated.")
@click.option("--directory", type=_DIRECTORY, help="Keep objects here; without it they are in memory.")
@click.option(
    "--ssh-key",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Public keys that may log in to hosts, as root and ubuntu.",
)
@click.option("--ssh-port", type=click.IntRange(1, 65_535), default=2222, show_default=True, help="Of the hosts.")
@click.option(
    "--disk", "disks", multiple=True, metavar="NAME=FILE", help="An image that nodes attach by this name; read-only."
)
@click.option("--name", "names", multiple=True, metavar="NAME=ADDRESS", help="What hosts look up; may be repeated.")
@click.pass_context
def emulator(
    context: click.Context,
    *,
    port: int,
    world: Path | None,
    no_vms: bool,
    buckets: tuple[str, ...],
    directory: Path | None,
    ssh_key: Path | None,
    ssh_port: int,
    disks: tuple[str, ...],
    names: tuple[str, ...],
) -> None:
    """A cloud on 127.0.0.1, for tests and for trying things without an account.

    Without a command: the Cloud TPU API (v2 and v2alpha1), Kubernetes Engine's node pools and Cloud Storage at one
    address. It prints the address, then what to export so that gcloud and the clients of Cloud Storage find it.

    \b
    tpu emulator --no-vms --port 9090 --bucket my-bucket
    export CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU=http://127.0.0.1:9090/
    export CLOUDSDK_API_ENDPOINT_OVERRIDES_CONTAINER=http://127.0.0.1:9090/
    gcloud compute tpus tpu-vm list --zone=-

    It asks for no credential. /_emulator/tpu/ has history, calls, nodes, faults, happen, capacity, ways and advance.
    With VMs (root and bubblewrap) each host of a node runs its startup script in a root and a network of its own.
    """
    if context.invoked_subcommand is not None:
        return
    from penstock.domain.admission import BadInput
    from penstock.wiring.emulators import run_google

    try:
        logins = None if ssh_key is None else (ssh_key, ssh_port)
        outside = {"disks": _pairs("--disk", disks), "names": _pairs("--name", names)}
        run_google(buckets, port, directory, world, machines=not no_vms, ready=_announce, logins=logins, **outside)
    except BadInput as error:
        raise click.UsageError(str(error)) from error


def _pairs(option: str, words: tuple[str, ...]) -> dict[str, str]:
    pairs = [word.partition("=") for word in words]
    for name, _, value in pairs:
        if not (name and value):
            raise click.UsageError(f"{option}: {name!r} lacks its other half; write NAME=VALUE")
    return {name: value for name, _, value in pairs}


def _announce(url: str) -> None:
    """The address alone first, because scripts read one line; then what points clients at it."""
    lines = [f"export CLOUDSDK_API_ENDPOINT_OVERRIDES_{api}={url}/{path}" for api, path in _OVERRIDES]
    click.echo("\n".join([url, *lines, f"export STORAGE_EMULATOR_HOST={url}"]))


@emulator.command()
@click.argument("buckets", nargs=-1, required=True, metavar="BUCKET...")
@click.option("--port", type=_PORT, default=0, metavar="N", help="Port; 0: any that is free.")
@click.option(
    "--directory",
    type=_DIRECTORY,
    help="Keep objects here, to be found again at the next start; without it they are in memory.",
)
def gcs(buckets: tuple[str, ...], port: int, directory: Path | None) -> None:
    """Cloud Storage alone, with the buckets named: both of its dialects, generations, preconditions.

    \b
    tpu emulator gcs my-bucket --port 9023
    STORAGE_EMULATOR_HOST=http://127.0.0.1:9023 tpu serve --root gs://my-bucket

    It asks for no credential. POST /_emulator/faults plants faults, GET /_emulator/history tells every change.
    """
    from penstock.domain.admission import BadInput
    from penstock.wiring.emulators import run_gcs

    try:
        run_gcs(buckets, port, directory, click.echo)
    except BadInput as error:
        raise click.UsageError(str(error)) from error


@emulator.command()
@click.argument("words", nargs=-1, metavar="[WORD]...")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--check", is_flag=True, help="Send every probe to an emulator; exit 1 if one differs.")
def facts(words: tuple[str, ...], as_json: bool, check: bool) -> None:
    """What the emulators do, where each behaviour is known from, and whether the real service was seen to do it.

    With WORDs only rows whose name or text has all of them.

    \b
    tpu emulator facts quota
    tpu emulator facts --check
    """
    import msgspec

    from penstock.wiring.emulators import check_fact
    from penstock.wiring.emulators import facts as all_facts

    rows = all_facts()
    chosen = {
        name: fact for name, fact in rows.items() if all(word.lower() in _text(name, fact.what) for word in words)
    }
    if not chosen:
        raise click.UsageError(_no_such(words, [_text(name, fact.what) for name, fact in rows.items()]))
    differing = {name: found for name, fact in chosen.items() if check and (found := check_fact(fact))}
    if as_json:
        shown = {
            name: {**msgspec.to_builtins(fact), **({"differs": differing.get(name, [])} if check else {})}
            for name, fact in chosen.items()
        }
        click.echo(msgspec.json.format(msgspec.json.encode(shown), indent=2))
    else:
        for name, fact in chosen.items():
            click.echo(f"{name}  {fact.what}")
            click.echo(f"    source {fact.source} · seen on the service: {'yes' if fact.seen else 'no'}")
            if fact.seen_by:
                click.echo(f"    accepted by {', '.join(fact.seen_by)}")
            if fact.note:
                click.echo(f"    {fact.note}")
            for line in differing.get(name, []):
                click.echo(f"    DIFFERS {line}")
        seen = sum(fact.seen for fact in chosen.values())
        known = sum(fact.source.startswith("https://") for fact in chosen.values())
        click.echo(f"{len(chosen)} behaviours: {known} with a public source, {seen} seen on the real service")
    if differing:
        click.echo(f"{len(differing)} of {len(chosen)} differ: {', '.join(differing)}", err=True)
        sys.exit(1)


def _text(name: str, what: str) -> str:
    return f"{name} {what}".lower()


def _no_such(words: tuple[str, ...], rows: list[str]) -> str:
    """What is said of words that no row has all of, with words that rows do have and that look like them."""
    from difflib import get_close_matches

    there = sorted({word for row in rows for word in re.findall(r"[a-z0-9][a-z0-9_-]*", row)})
    unknown = [word for word in words if not any(word.lower() in row for row in rows)]
    near = [each for word in unknown for each in get_close_matches(word.lower(), there, n=3)]
    quoted = " and ".join(repr(word) for word in unknown or words)
    said = f"no behaviour has {quoted} in its name or text"
    cure = f"did you mean {', '.join(dict.fromkeys(near))}?" if near else "`tpu emulator facts` lists all"
    return f"WORD: {said}; {cure}"
