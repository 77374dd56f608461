"""`tpu bridge`: other ways in and out of Penstock, as processes of their own. Decides only what is said."""

from __future__ import annotations

import click

LEVELS = ("debug", "info", "warning", "error")


@click.group()
def bridge() -> None:
    """Other ways in and out: documents of a Firestore collection become jobs."""


@bridge.command()
@click.option("--project", required=True, metavar="ID", help="Google Cloud project of the database.")
@click.option("--collection", metavar="NAME", help="The collection to watch.  [default: tpu_jobs]")
@click.option("--database", metavar="ID", help="The database.  [default: (default)]")
@click.option("--public-url", metavar="URL", help="Penstock's address in `log_url` and `result_url`.")
@click.option("--sweep-s", type=float, metavar="S", help="Between looks at unfinished documents.  [default: 10]")
@click.option("--log-level", type=click.Choice(LEVELS), default="info", help="How much is told on standard error.")
def firestore(log_level: str, **given: object) -> None:
    """Watch a Firestore collection: pending documents become jobs, their state and results are written back.

    \b
    tpu bridge firestore --project my-project
    FIRESTORE_EMULATOR_HOST=127.0.0.1:8080 tpu bridge firestore --project demo

    Needs an administrator's token, and Google credentials that may write the collection. Run as many as you
    like; each document becomes one job. Ctrl-C stops it; jobs go on, and the next bridge catches up.
    """
    from penstock.cli.talk import Refused
    from penstock.client.errors import ApiError
    from penstock.domain.admission import BadInput
    from penstock.wiring.bridges import firestore_settings, run_firestore

    try:
        settings = firestore_settings(given)
    except BadInput as error:
        raise click.UsageError(str(error)) from error
    try:
        run_firestore(settings, lambda line: click.echo(f"listening: {line}"), log_level=log_level)
    except ApiError as error:
        raise Refused(str(error), error.exit_code) from error
