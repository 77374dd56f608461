"""Fetch Google's web client for Firestore, which `examples/firestore_web` loads; the Makefile and people run it.

`python3 tools/fetch_firebase.py [FOLDER]` takes the pinned package with npm, compares its digest and lays the files
that the page imports into FOLDER (`examples/firestore_web/firebase`). Done already: it does nothing. It runs no code of
the package, installs nothing else, and needs only the standard library and npm. Exit code 3: it could not be fetched;
1: what came is not what was pinned, and nothing was kept.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

VERSION = "12.19.0"  #: also in index.html, whose import map says where the files lie
SHA256 = "e48742de0b655887eca893b1292932563b80aaf1ebf184b6fdb2b4c5290da3ce"
FILES = ("firebase-app.js", "firebase-auth.js", "firebase-firestore.js")
FOLDER = Path(__file__).parent.parent / "examples" / "firestore_web" / "firebase"
FETCH_S_MAX = 300


def main(folder: Path) -> int:
    mark = folder / f".{VERSION}"
    if mark.exists() and all((folder / name).is_file() for name in FILES):
        return 0
    if not shutil.which("npm"):
        print("fetch_firebase: npm is not installed; it comes with Node.js", file=sys.stderr)
        return 3
    with tempfile.TemporaryDirectory() as place:
        argv = ["npm", "pack", "--silent", f"firebase@{VERSION}"]
        done = subprocess.run(argv, cwd=place, capture_output=True, text=True, check=False, timeout=FETCH_S_MAX)
        package = Path(place) / f"firebase-{VERSION}.tgz"
        if done.returncode or not package.is_file():
            said = " ".join(done.stderr.split())
            print(f"fetch_firebase: npm could not fetch firebase {VERSION}: {said}", file=sys.stderr)
            return 3
        digest = hashlib.sha256(package.read_bytes()).hexdigest()
        if digest != SHA256:
            print(f"fetch_firebase: sha256 of firebase {VERSION}: {digest} is not the pinned {SHA256}", file=sys.stderr)
            return 1
        folder.mkdir(parents=True, exist_ok=True)
        with tarfile.open(package) as files:
            for name in FILES:
                member = files.extractfile(f"package/{name}")
                if member is None:
                    print(f"fetch_firebase: firebase {VERSION} has no {name}", file=sys.stderr)
                    return 1
                ready = folder / f".{name}.part"
                ready.write_bytes(member.read())
                ready.replace(folder / name)  # whole or not at all: a page may be served from here
    mark.touch()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER))
