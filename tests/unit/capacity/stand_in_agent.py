"""A stand-in for `penstock.agent`: takes its arguments and misbehaves as the variable STAND_IN says.

`test_local.py` starts it through `LocalCapacity`. It writes the pids of all it started into its state directory, so
that tests can see whether anything survived.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

SLEEP = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def note(state: Path, pid: int) -> None:
    with (state / "pids").open("a") as file:
        file.write(f"{pid}\n")


def daemonise(state: Path, env: dict[str, str]) -> None:
    """A grandchild in a session of its own whose parent is gone."""
    script = (
        "import os, subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {SLEEP!r}], start_new_session=True, "
        "stdout=subprocess.DEVNULL)\n"
        "print(child.pid, flush=True)\n"
        "os._exit(0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], env=env, stdout=subprocess.PIPE, check=True)
    note(state, int(done.stdout))


def main() -> None:
    parser = argparse.ArgumentParser()
    for option in ("--server", "--slice", "--host", "--provider-id", "--state", "--token-file"):
        parser.add_argument(option, required=True)
    given = parser.parse_args()
    state = Path(given.state)
    (state / "seen").write_text(f"{given.server} {given.slice} {given.host} {given.provider_id}\n")
    (state / "token").write_text(Path(given.token_file).read_text())
    (state / "environment").write_text("\n".join(sorted(os.environ)))
    with (state / "starts").open("a") as file:
        file.write(f"{os.getpid()}\n")
    manner = os.environ.get("STAND_IN", "steady")
    if manner == "quick":
        sys.stderr.write("the stand-in will not run\n")
        sys.exit(3)
    if manner == "family":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-c", SLEEP])
        note(state, child.pid)
        marked = {**os.environ, "PENSTOCK_PROGRESS_FILE": str(state / "attempts/a/progress")}
        daemonise(state, marked)
    (state / "ready").touch()
    time.sleep(600)


if __name__ == "__main__":
    main()
