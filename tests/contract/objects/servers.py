"""Object servers in processes of their own: the emulated Cloud Storage, and moto as an S3 with conditional writes.

Fixtures of this folder and of the process tests start them. Each answers on a port of its own and is ended with the
block that started it.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from penstock.emulator.gcs_buckets import Change
from penstock.emulator.gcs_faults import Fault, Planted

BUCKET = "test-bucket"
ROOT = Path(__file__).parents[3]
S3_ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}
_TPU = "from penstock.cli.main import main; main()"


class Emulator:
    """The emulator of Cloud Storage at an address, with its control calls."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.environment = {"STORAGE_EMULATOR_HOST": url}

    def plant(self, *faults: Fault) -> None:
        self._control("POST", "faults", msgspec.json.encode(faults))

    def planted(self) -> list[Planted]:
        return msgspec.json.decode(self._control("GET", "faults"), type=list[Planted])

    def struck(self) -> list[int]:
        return [each.struck for each in self.planted()]

    def heal(self) -> None:
        self._control("DELETE", "faults")

    def history(self) -> list[Change]:
        return msgspec.json.decode(self._control("GET", "history"), type=list[Change])

    def _control(self, method: str, what: str, body: bytes | None = None) -> bytes:
        request = urllib.request.Request(f"{self.url}/_emulator/{what}", body, method=method)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return bytes(answer.read())


@contextlib.contextmanager
def gcs_emulator(*words: str) -> Iterator[Emulator]:
    with _running([sys.executable, "-c", _TPU, "emulator", "gcs", BUCKET, *words]) as url:
        yield Emulator(url)


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    with _running([sys.executable, "-m", "tests.contract.objects.s3_server"]) as url:
        make = urllib.request.Request(f"{url}/{BUCKET}", method="PUT")
        with urllib.request.urlopen(make, timeout=60):
            pass
        yield url


@contextlib.contextmanager
def _running(argv: Sequence[str]) -> Iterator[str]:
    """Start a server that prints its address; end it afterwards."""
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            url = process.stdout.readline().strip()
            assert url.startswith("http://127.0.0.1:"), f"{argv} did not start"
            yield url
        finally:
            process.terminate()
            process.wait(30)
