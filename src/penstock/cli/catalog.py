"""`tpu catalog`: the accelerator catalogue on the terminal and as JSON.

Decides only how the catalogue is shown; what is true comes from `domain.catalogue`. The command line loads it
when `catalog` is called. It contacts no server.
"""

import sys
from collections.abc import Sequence

import click
import msgspec

from penstock.cli import terminal
from penstock.domain import catalogue
from penstock.domain.catalogue import Accelerator, Gap, UnknownAccelerator
from penstock.domain.catalogue_egress import EGRESS_SOURCE

USAGE_ERROR = 2
"""The exit code of a wrong argument, as click uses it."""

_HEADER = (
    "NAME",
    "TOPOLOGY",
    "CHIPS",
    "CORES",
    "JAX DEVICES",
    "HOSTS",
    "CHIPS/HOST",
    "GKE MACHINE",
    "PROVIDERS",
    "USD/CHIP-H",
    "SPOT",
)
_NUMERIC = frozenset({"CHIPS", "CORES", "JAX DEVICES", "HOSTS", "CHIPS/HOST", "USD/CHIP-H", "SPOT", "NAMES"})


@click.command(name="catalog")
@click.argument("words", nargs=-1, metavar="[NAME|FAMILY]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: one object for a NAME, else a list.")
@click.option("--gaps", "only_gaps", is_flag=True, help="List the zones and prices that have no source.")
def catalog(words: tuple[str, ...], as_json: bool, only_gaps: bool) -> None:
    """Show TPU accelerators: shape, hosts, machine, zones, list price.

    NAME is any spelling: v4-32, v5litepod-16, v5e-16, v5p-2x2x4, or a GKE pair such as tpu-v5p-slice 2x2x4.
    FAMILY is v2, v3, v4, v5e, v5p, v6e or 7x. Without either, all are shown.
    """
    text = " ".join(words)
    try:
        if not text:
            chosen: tuple[Accelerator, ...] = catalogue.all_accelerators()
        elif catalogue.is_family(text):
            chosen = catalogue.family(text)
        else:
            chosen = (catalogue.find(text),)
    except UnknownAccelerator as error:
        click.echo(f"tpu catalog: {error}", err=True)
        sys.exit(USAGE_ERROR)
    if only_gaps:
        _show_gaps(chosen, as_json)
    elif text and not catalogue.is_family(text):
        _show_one(chosen[0], as_json)
    else:
        _show_many(chosen, as_json)


def _show_one(accelerator: Accelerator, as_json: bool) -> None:
    if as_json:
        _echo_json(accelerator)
        return
    facts = msgspec.structs.asdict(accelerator)
    width = max(len(field) for field in facts)
    for field, value in facts.items():
        click.echo(f"{field:<{width}}  {_plain(value)}")
    click.echo(f"{'also written':<{width}}  {', '.join(catalogue.aliases(accelerator))}")
    _echo_sources((accelerator,))


def _show_many(accelerators: Sequence[Accelerator], as_json: bool) -> None:
    if as_json:
        _echo_json(accelerators)
        return
    rows = [
        (
            accelerator.name,
            accelerator.topology,
            str(accelerator.chips),
            str(accelerator.cores),
            str(accelerator.jax_devices),
            str(accelerator.hosts),
            str(accelerator.chips_per_host),
            _plain(accelerator.gke_machine_type),
            _plain(accelerator.providers),
            _plain(accelerator.usd_per_chip_hour),
            _plain(accelerator.usd_per_chip_hour_spot),
        )
        for accelerator in accelerators
    ]
    terminal.echo_table(_HEADER, rows, right=_NUMERIC)
    _echo_sources(accelerators)


def _show_gaps(accelerators: Sequence[Accelerator], as_json: bool) -> None:
    """Show the gaps of the chosen accelerators."""
    chosen = {accelerator.name for accelerator in accelerators}
    narrowed: list[Gap] = []
    for gap in catalogue.gaps():
        names = tuple(name for name in gap.names if name in chosen)
        if names:
            narrowed.append(msgspec.structs.replace(gap, names=names))
    if as_json:
        _echo_json(narrowed)
    elif not narrowed:
        click.echo("no gaps: every zone list and price shown has a source")
    else:
        rows = [(gap.generation, gap.field, str(len(gap.names)), gap.reason) for gap in narrowed]
        terminal.echo_table(("FAMILY", "FIELD", "NAMES", "WHY"), rows, right=_NUMERIC)


def _plain(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, tuple):
        return ",".join(str(item) for item in value)
    return str(value)


def _echo_json(value: object) -> None:
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def _echo_sources(accelerators: Sequence[Accelerator]) -> None:
    """Print where zones and prices come from: a number without its day is a rumour."""
    lines: dict[str, list[str]] = {}
    for fact in dict.fromkeys(fact for row in accelerators for fact in catalogue.sources(row)):
        key = f"{fact.fact}: {fact.source.title}, read {fact.source.read_on}; {fact.source.note}"
        where = f"{fact.generation} in {fact.region}" if fact.region else fact.generation
        lines.setdefault(key, []).append(where)
    click.echo("")
    for key, covered in lines.items():
        click.echo(f"{key} ({', '.join(covered)})")
    moved = EGRESS_SOURCE
    click.echo(f"copies between regions: {moved.title}, read {moved.read_on}; {moved.note}")
