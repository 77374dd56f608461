"""An emulated Google cloud as a process, and the real gcloud pointed at it.

Fixtures of the conformance tests use it. gcloud gets a configuration, a home and a token of its own, and no address
but the emulator's; it never sees this machine's settings.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tests.missing import missing

ROOT = Path(__file__).parents[2]
BUCKET = "test-bucket"
_TPU = "from penstock.cli.main import main; main()"
_GCLOUD_S_MAX = 120


class GoogleCloud:
    """The emulator at an address, with its control calls."""

    def __init__(self, url: str, process: subprocess.Popen[str] | None = None) -> None:
        self.url = url
        self.process = process

    def control(self, method: str, what: str, content: object = None) -> Any:
        body = None if content is None else msgspec.json.encode(content)
        request = urllib.request.Request(f"{self.url}/_emulator/tpu/{what}", body, method=method)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return msgspec.json.decode(answer.read() or b"null")

    def happened(self, name: str) -> list[str]:
        """What truly became of a resource, in order."""
        return [each["what"] for each in self.control("GET", "history") if each["name"].endswith(f"/{name}")]


@contextlib.contextmanager
def google_cloud(*words: str, machines: bool = False) -> Iterator[GoogleCloud]:
    kind = [] if machines else ["--no-vms"]
    argv = [sys.executable, "-c", _TPU, "emulator", *kind, "--bucket", BUCKET, *words]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            url = process.stdout.readline().strip()
            assert url.startswith("http://127.0.0.1:"), f"{argv} did not start"
            yield GoogleCloud(url, process)
        finally:
            process.terminate()
            process.wait(30)


class Said(NamedTuple):
    """How a command ended."""

    rc: int
    out: str
    err: str

    def json(self) -> Any:
        return msgspec.json.decode(self.out)


class Gcloud:
    """The real gcloud, talking to the emulator."""

    def __init__(self, cloud: GoogleCloud, folder: Path, zone: str = "us-central1-a") -> None:
        (folder / "home").mkdir()
        (folder / "token").write_text("not-a-real-token")
        self._folder = folder
        self._environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder / "home"),
            "CLOUDSDK_CONFIG": str(folder / "config"),
            "CLOUDSDK_CORE_PROJECT": "p1",
            "CLOUDSDK_COMPUTE_ZONE": zone,
            "CLOUDSDK_CORE_DISABLE_PROMPTS": "1",
            "CLOUDSDK_CORE_DISABLE_USAGE_REPORTING": "1",
            "CLOUDSDK_COMPONENT_MANAGER_DISABLE_UPDATE_CHECK": "1",
            "CLOUDSDK_SURVEY_DISABLE_PROMPTS": "1",
            "CLOUDSDK_CORE_CHECK_GCE_METADATA": "false",
            "CLOUDSDK_CORE_DISABLE_FILE_LOGGING": "1",
            "CLOUDSDK_AUTH_ACCESS_TOKEN_FILE": str(folder / "token"),
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU": f"{cloud.url}/",
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_CONTAINER": f"{cloud.url}/",
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_STORAGE": f"{cloud.url}/storage/v1/",
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE": f"{cloud.url}/compute/v1/",
        }

    def __call__(self, *words: str) -> Said:
        done = subprocess.run(
            ["gcloud", *words],
            env=self._environment,
            cwd=self._folder,
            capture_output=True,
            text=True,
            timeout=_GCLOUD_S_MAX,
            check=False,
        )
        return Said(done.returncode, done.stdout, done.stderr)

    def tpus(self, text: str) -> Said:
        """`gcloud [alpha] compute tpus …` with words that hold no spaces, answered as JSON."""
        head, *rest = text.split()
        track = ["alpha"] if head == "alpha" else []
        words = rest if track else [head, *rest]
        return self(*track, "compute", "tpus", *words, "--format=json")

    def container(self, text: str) -> Said:
        """`gcloud container …`, likewise."""
        return self("container", *text.split(), "--format=json")


def need_gcloud() -> None:
    """Skip where there is no gcloud; in CI that is a failure, because nothing else proves what these tests prove."""
    if shutil.which("gcloud") is not None:
        return
    missing("gcloud: the emulator's conformance is not checked (install the Google Cloud CLI)")
