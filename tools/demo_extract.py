"""`make demo-extract`: a tiny model's activations, by workers one of which is killed half-way; each row once, verified.

Run by `make demo-extract` after set-up; needs no network, no account and no accelerator. It uses what any user has, the
`tpu` command and `penstock.extract`, in a folder of its own that is removed at the end (or in `--folder`, which stays).
It judges as it goes: what is not as it should be is told in one line, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import numpy as np

from penstock.extract.iterators import batches
from penstock.extract.reader import open as open_run

TPU: Final = Path(sys.executable).with_name("tpu")
EXAMPLE: Final = Path(__file__).parents[1] / "examples" / "extract_tiny"
LEASE: Final = "5s"
LOOK_S: Final = 0.3
WHOLE_S: Final = 600.0  #: for a machine ten times slower than ours


class Unexpected(Exception):
    """Something is not as it should be; the text is the line that is shown."""


def say(text: str) -> None:
    print(text, flush=True)


def tpu(*words: str, shown: bool = True) -> str:
    if shown:
        say(f"$ tpu {' '.join(words)}")
    done = subprocess.run([TPU, *words], capture_output=True, text=True, timeout=WHOLE_S, check=False)
    if done.returncode:
        raise Unexpected(f"tpu {words[0]} {words[1]} ended with {done.returncode}: {done.stderr.strip()[-400:]}")
    return done.stdout


@contextlib.contextmanager
def worker(address: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A worker process with a log of its own; it does not outlive the demo."""
    with (folder / "workers.log").open("ab") as log:
        argv = [str(TPU), "extract", "worker", "--run", address, "--lease", LEASE]
        process = subprocess.Popen(argv, stdout=log, stderr=log)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()


def until(what: str, look: Callable[[], bool]) -> None:
    ends = time.monotonic() + WHOLE_S
    while not look():
        if time.monotonic() > ends:
            raise Unexpected(f"{what}: not after {WHOLE_S:.0f} s")
        time.sleep(LOOK_S)


def committed(folder: Path) -> int:
    """A directory is a bucket that can be looked into."""
    return len(list(folder.glob("acts/runs/*/commits/*")))


def demo(folder: Path) -> None:
    began = time.monotonic()
    say("A tiny model with random weights, its tokenizer, 400 documents:")
    subprocess.run([sys.executable, EXAMPLE / "make.py", folder], check=True, timeout=WHOLE_S)
    words = ["--model", f"{folder}/model", "--data", f"{folder}/docs.jsonl", "--id", "id"]
    words += ["--sites", "resid_post:1,3;mlp_out:2", "--width", "256", "--unit-rows", "10", "--out", f"{folder}/acts"]
    address = tpu("extract", *words).strip()
    say(f"The plan is in {address}\nTwo workers; the first is killed as soon as something is committed.")
    with worker(address, folder) as first, worker(address, folder) as second:
        until("the first commits", lambda: committed(folder) >= 3)
        first.kill()
        say(f"killed -9, with {committed(folder)} units committed; another takes its place")
        with worker(address, folder) as third:
            codes = [process.wait(WHOLE_S) for process in (second, third)]
    if codes != [0, 0]:
        raise Unexpected(f"the workers ended with {codes}; see {folder}/workers.log")
    say(tpu("extract", "status", "--run", address))
    say(tpu("extract", "verify", "--run", address))
    judge(address, folder)
    say(f"Every row once, though a worker was killed. {time.monotonic() - began:.0f} s")


def judge(address: str, folder: Path) -> None:
    """Read the run as a trainer would, and compare it with the input."""
    documents = [json.loads(line) for line in (folder / "docs.jsonl").read_text().splitlines()]
    with open_run(address) as run:
        if run.manifest.facts.documents != len(documents) or len(run.documents) != len(documents):
            raise Unexpected(f"{run.manifest.facts.documents} documents came out of {len(documents)}")
        text = documents[7]["id"]
        if not np.array_equal(run.vector(text, 0, "resid_post:3"), run.values(text, "resid_post:3")[0]):
            raise Unexpected("a vector differs when it is read in another way")
        seen = hashlib.sha256()
        rows = 0
        for batch in batches(run, "resid_post:3", 1024, seed=1, keep_rest=True):
            rows += len(batch)
            seen.update(batch.tobytes())
        if rows != len(run):
            raise Unexpected(f"an epoch has {rows} rows, and the run {len(run)}")
        say(f"one shuffled epoch: {rows} vectors of {run.width('resid_post:3')}, sha256 {seen.hexdigest()[:16]}…")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="keep everything here")
    given = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    with contextlib.ExitStack() as stack:
        folder = given.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="demo-extract-")))
        folder.mkdir(parents=True, exist_ok=True)
        try:
            demo(folder)
        except Unexpected as error:
            sys.exit(f"demo-extract: {error}")


if __name__ == "__main__":
    main()
