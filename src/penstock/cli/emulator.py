"""`tpu emulator`: a cloud's API on this machine, for tests and for trying things. Decides only what is printed."""

from __future__ import annotations

from pathlib import Path

import click


@click.group()
def emulator() -> None:
    """A cloud's API on 127.0.0.1, for tests and for trying things without an account."""


@emulator.command()
@click.argument("buckets", nargs=-1, required=True, metavar="BUCKET...")
@click.option("--port", type=click.IntRange(0, 65_535), default=0, metavar="N", help="Port; 0: any that is free.")
@click.option(
    "--directory",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep objects here, to be found again at the next start; without it they are in memory.",
)
def gcs(buckets: tuple[str, ...], port: int, directory: Path | None) -> None:
    """Cloud Storage with the buckets named: both of its dialects, generations, preconditions.

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
