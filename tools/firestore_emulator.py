"""Google's own Firestore emulator of the Cloud SDK on a loopback port, as one process: tests and benches start it.

`tools/firestore_emulator.py --port 8080` becomes the emulator (exec, so that its pid is this one; SIGTERM stops it);
`--check` only says whether it could. It looks for the jar inside the SDK that `gcloud` belongs to, and needs nothing
but the standard library. Everything it holds is in memory; `--data` begins with what an export wrote. Exit code 69
when there is no SDK, no emulator in it, or no Java, with the reason.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

UNAVAILABLE = 69
JAR = Path("platform/cloud-firestore-emulator/cloud-firestore-emulator.jar")
MAIN = "com.google.cloud.datastore.emulator.firestore.CloudFirestore"
#: It starts a third faster with the first compiler only, and a test load needs no more memory than this.
JAVA = ("-Duser.language=en", "-Xmx512m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")


class Missing(Exception):
    """The emulator cannot be had here; the text says why."""


def command(port: int, rules: Path | None = None, data: Path | None = None) -> list[str]:
    """The command line of the emulator; Missing when something it needs is not there."""
    gcloud = shutil.which("gcloud")
    if gcloud is None:
        raise Missing("the Google Cloud SDK is not installed (no gcloud on the PATH)")
    jar = Path(gcloud).resolve().parent.parent / JAR
    if not jar.is_file():
        raise Missing(f"{jar} is not there (gcloud components install cloud-firestore-emulator)")
    java = shutil.which("java")
    if java is None:
        raise Missing("there is no java on the PATH; the emulator needs 11 or later")
    words = [java, *JAVA, "-cp", str(jar), MAIN, "start", "--host=127.0.0.1", f"--port={port}"]
    if rules is not None:
        words.append(f"--rules={rules}")
    if data is not None:
        words.append(f"--import-data={data}")
    return words


def main() -> None:
    parser = argparse.ArgumentParser(description="Google's Firestore emulator on 127.0.0.1.")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--rules", type=Path, help="security rules that clients are subject to")
    parser.add_argument("--data", type=Path, help="the .overall_export_metadata file of an export to begin with")
    parser.add_argument("--check", action="store_true", help="only say whether it could start")
    given = parser.parse_args()
    try:
        words = command(given.port, given.rules, given.data)
    except Missing as reason:
        print(f"firestore_emulator: {reason}", file=sys.stderr)
        sys.exit(UNAVAILABLE)
    if not given.check:
        os.execv(words[0], words)


if __name__ == "__main__":
    main()
