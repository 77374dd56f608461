"""`make demo`: a JAX training job loses its machine half-way, goes on from its checkpoint, ends with equal weights.

Run by `make demo` after set-up; needs no network and no account. It uses what any user has, the `tpu` command and the
SDK, in a state directory of its own that is removed at the end, also after Ctrl-C and after a failure. It judges as it
goes: what is not as it should be is told in one line, and the exit code is 1. On a terminal one line moves; elsewhere
every line is plain and stays.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

import click

from penstock.client import ApiError, Client
from penstock.wire.api import AttemptView, JobView

TPU: Final = Path(sys.executable).with_name("tpu")
EXAMPLE: Final = Path(__file__).parents[1] / "examples" / "train_mlp"
ON: Final = "v5e-8"
#: Two epochs of 100 steps, saved every 50. The rests give the reader time: the counter moves once a second.
TRAIN: Final = ("train.py", "ep=2", "ckpt=2", "pause=0.04")
STEPS: Final = 200
TAKEN_AT: Final = 105  #: the step at which its slice goes: well after one checkpoint, well before the next
TOLD_EVERY: Final = 50  #: steps, where no line moves
LOOK_S: Final = 0.1
CALL_S: Final = 60.0  #: for one command; the first also starts the server
DOWN_S: Final = 90.0
WIDTH: Final = 80


class Unexpected(Exception):
    """Something is not as it should be; the text is the line that is shown."""


class Screen:
    """What the reader sees: commands, lines that stay, and one that moves where that is possible."""

    def __init__(self, *, hidden: bool = False) -> None:
        self.live = sys.stdout.isatty() and not hidden
        self._hidden = hidden
        self._began = time.monotonic()
        self._open = False

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began

    def command(self, line: str, remark: str = "") -> None:
        """A command, as the reader could type it."""
        self._close()
        click.echo(click.style(f"$ {line}", bold=True) + (f"   # {remark}" if remark else ""))

    def say(self, word: str, text: str) -> None:
        if not self._hidden:
            self._close()
            click.echo(self._line(word, text))

    def show(self, word: str, text: str) -> None:
        """How it stands now: written over by what comes next. Where nothing moves, nothing is shown."""
        if self.live:
            line = self._line(word, text)[: min(WIDTH, shutil.get_terminal_size().columns - 1)]
            click.echo(f"\r\x1b[K{line}", nl=False)
            self._open = True

    def _line(self, word: str, text: str) -> str:
        return f"{self.elapsed_s:5.1f} s  {word:<8}  {text}"

    def _close(self) -> None:
        if self._open:
            click.echo("\r\x1b[K", nl=False)
            self._open = False


class Watch:
    """Looks at one job until something is so, and tells what becomes of it meanwhile."""

    def __init__(self, client: Client, id: str, screen: Screen, deadline: float) -> None:
        self.id = id
        self.step = 0  #: the last one seen
        self._client, self._screen, self._deadline = client, screen, deadline
        self._told: set[str] = set()  #: attempts that were seen to run

    def until(self, what: str, done: Callable[[JobView], bool]) -> JobView:
        """The job once `done` says so. Raises `Unexpected` when it ended badly or time is up before."""
        while True:
            job = self._client.get(self.id)
            self._tell(job)
            if done(job):
                return job
            if job.state in ("failed", "cancelled"):
                error = f": {job.error.type}: {job.error.message}" if job.error is not None else ""
                raise Unexpected(f"{self.id} {job.state} ({job.cause}) before {what}{error}")
            if job.state == "succeeded":
                raise Unexpected(f"{self.id} succeeded before {what}")
            if time.monotonic() > self._deadline:
                raise Unexpected(f"time is up, and {what} was not seen; {self.id} is {job.state}")
            time.sleep(LOOK_S)

    def _tell(self, job: JobView) -> None:
        now = running(job)
        if now is None:
            if job.state in ("queued", "provisioning"):
                self._screen.show("waiting", self._client.why(self.id).sentence)
            return
        if now.id not in self._told:
            self._told.add(now.id)
            self._screen.say("running", f"on slice {now.slices[0]} (attempt {len(job.attempts)})")
        said = job.progress
        if said is None or now.started_at is None or said.at < now.started_at:  # said by an attempt before
            self._screen.show("starting", "python imports jax")
            return
        before, self.step = self.step, int(said.done)
        line = f"{said.done:.0f} of {said.total or 0:.0f}, loss {said.metrics.get('loss', 0):.4f}"
        self._screen.show("step", line)
        if not self._screen.live and before // TOLD_EVERY != self.step // TOLD_EVERY:
            self._screen.say("step", line)


def running(job: JobView) -> AttemptView | None:
    """The attempt that runs now."""
    last = job.attempts[-1] if job.attempts else None
    return last if last is not None and last.state == "running" else None


def tpu(*words: str, within_s: float = CALL_S) -> str:
    """What a `tpu` command prints, called as a user calls it."""
    try:
        done = subprocess.run(
            [str(TPU), *words], cwd=EXAMPLE, capture_output=True, text=True, timeout=within_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise Unexpected(f"`tpu {' '.join(words)}` did not come back within {within_s:.0f} s") from None
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        raise Unexpected(f"`tpu {' '.join(words)}` exited with {done.returncode}: {last}")
    return done.stdout.strip()


def demo(screen: Screen, within_s: float) -> None:
    """The story, from the first command to the comparison."""
    deadline = time.monotonic() + within_s
    run = ("run", "--detach", "--on", ON)
    screen.command(f"tpu {' '.join((*run, *TRAIN))}")
    id = tpu(*run, *TRAIN)
    with Client() as client:
        screen.say("accepted", f"job {id}; a server was started for it")
        quiet = Watch(client, tpu(*run, "--name", "undisturbed", *TRAIN), Screen(hidden=True), deadline)
        screen.say("accepted", f"job {quiet.id}: the same, to be left in peace")
        watch = Watch(client, id, screen, deadline)
        job = watch.until("its middle", lambda job: running(job) is not None and watch.step >= TAKEN_AT)
        lose(client, watch, screen, job.attempts[-1])
        job = watch.until("its end", lambda job: job.state == "succeeded")
        found = judge(client, screen, job)
        screen.show("waiting", f"for {quiet.id} to end as well")
        other = quiet.until("its end", lambda job: job.state == "succeeded")
        if any(attempt.cause == "preempted" for attempt in other.attempts):
            raise Unexpected(f"the job to be left in peace, {quiet.id}, lost its slice too")
        expected = weights(client, quiet.id)
        if found != expected:
            raise Unexpected(f"weights differ: {found[:16]} interrupted, {expected[:16]} undisturbed")
        screen.say("equal", f"weights {found[:8]} are those of {quiet.id}, bit for bit")
        costs = [view.cost_usd for view in (job, other) if view.cost_usd]
        screen.say("cost", f"${sum(costs):.2f}" if costs else "free: this machine")


def lose(client: Client, watch: Watch, screen: Screen, first: AttemptView) -> None:
    """Take the slice away without a word, and see the job go on elsewhere from a checkpoint."""
    slice = first.slices[0]
    number = sum(attempt.fence <= first.fence for attempt in client.get(watch.id).attempts)
    screen.command(f"tpu local preempt {slice}", "no notice: all on it is killed")
    tpu("local", "preempt", slice)
    at = time.monotonic()
    lost = watch.step
    closed = watch.until("the loss", lambda job: job.attempts[number - 1].state == "closed").attempts[number - 1]
    if closed.cause != "preempted":
        raise Unexpected(f"the attempt on the lost slice ended by {closed.cause}, not by preemption")
    screen.say("lost", f"slice lost at step {lost} ({closed.cause})")
    job = watch.until("the next attempt", lambda job: len(job.attempts) > number and running(job) is not None)
    gap_s = time.monotonic() - at
    second = job.attempts[-1]
    watch.until("its first step", lambda job: job.progress is not None and job.progress.at > (second.started_at or 0))
    found = re.search(
        rb"^resumed at step (\d+)", client.log_bytes(watch.id, stream="out", attempt=second.id), re.MULTILINE
    )
    if found is None:
        raise Unexpected(f"attempt {len(job.attempts)} began from nothing, not from the checkpoint of the one before")
    step = int(found[1])
    if not 0 < step < STEPS or second.slices[0] == slice:
        raise Unexpected(f"it went on at step {step} on {second.slices[0]}, after step {lost} on {slice}")
    screen.say("resumed", f"at step {step} on {second.slices[0]}, {gap_s:.1f} s after the loss")


def judge(client: Client, screen: Screen, job: JobView) -> str:
    """Whether it ended as a training run should; the hash of its weights."""
    metrics = json.loads(client.artifact(job.id, "metrics.json"))
    if metrics["steps"] != STEPS or metrics["stage"] < 1:
        raise Unexpected(f"it ended at step {metrics['steps']}, stage {metrics['stage']}; {STEPS} and 1 were due")
    loss = f"loss {metrics['eval_loss']:.4f}"
    screen.say("result", f"{job.state}: {metrics['steps']} steps in {len(job.attempts)} attempts, {loss}")
    return weights(client, job.id)


def weights(client: Client, id: str) -> str:
    return client.artifact(id, "weights.sha256").decode().strip()


@contextmanager
def own_home(keep: bool) -> Iterator[Path]:
    """A state directory that no other server knows; nothing of it is left at the end."""
    for name in [name for name in os.environ if name.startswith("PENSTOCK_")]:
        del os.environ[name]
    home = Path(tempfile.mkdtemp(prefix="penstock-demo-"))
    os.environ["PENSTOCK_HOME"] = str(home)
    try:
        yield home
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C must not leave half of it behind
        tpu("down", "--slices", "--force", within_s=DOWN_S)
        if not keep:
            shutil.rmtree(home)


def interrupted(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise KeyboardInterrupt


def main() -> int:
    parser = argparse.ArgumentParser(
        description="A training job loses its machine half-way and ends as if nothing was."
    )
    parser.add_argument("--within", type=float, default=150.0, metavar="S", help="give up after this many seconds")
    parser.add_argument("--keep", action="store_true", help="leave the state directory, to look into it")
    options = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupted)
    screen = Screen()
    try:
        with own_home(options.keep) as home:
            click.echo("A JAX training job loses its machine half-way, and ends as if it had not.")
            demo(screen, options.within)
    except (Unexpected, ApiError, OSError) as error:
        return ended(screen, 1, f"demo: {error} (once more with `tools/demo.py --keep` to look into it)")
    except KeyboardInterrupt:
        return ended(screen, 130, "demo: interrupted; what it had started was stopped")
    kept = f"the state directory is {home}" if options.keep else "nothing left behind"
    screen.say("over", f"server and slices stopped, {kept}")
    click.echo("Next: docs/tutorial/first-job.md (ten minutes) · `tpu tldr` · ARCHITECTURE.md")
    return 0


def ended(screen: Screen, code: int, line: str) -> int:
    """Say the one line about a bad end."""
    screen.say("failed" if code == 1 else "stopped", "not as it should be" if code == 1 else "by you")
    click.echo(line, err=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
