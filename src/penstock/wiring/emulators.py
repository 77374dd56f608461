"""Emulators as processes: which storage they have and which clock. `tpu emulator` calls it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from penstock.domain.admission import BadInput
from penstock.emulator.gcs import GcsEmulator
from penstock.emulator.http_words import Refused
from penstock.emulator.serving import serve
from penstock.wiring.clock import SystemClock


def run_gcs(buckets: Iterable[str], port: int, directory: Path | None, ready: Callable[[str], None]) -> None:
    """Emulate Cloud Storage until told to stop."""
    try:
        emulator = GcsEmulator(buckets, SystemClock().now, directory=directory)
    except Refused as error:
        rule = "3 to 63 of a-z, 0-9, '-', '_' and '.', with a letter or digit at both ends"
        raise BadInput("bucket", str(error), "cannot be made", f"a name is {rule}") from error
    serve(emulator, port, ready)
