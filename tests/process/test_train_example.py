"""`examples/train_mlp`: killed, asked to stop, cut off while it saves, it ends with the weights of a quiet run.

Real processes with the environment an agent gives them. Equal means every bit: the hash is over all weights.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.tidy.tracked import ROOT

SCRIPT = ROOT / "examples" / "train_mlp" / "train.py"
STEPS = 120
OPTIONS = ("--config.training.steps_per_epoch=40", "--config.training.checkpoint_per_epoch=4")  # saves every 10 steps
RUN_S = 120.0  #: several agents may share two cores


class Lab:
    """One job's directories, and a way to start an attempt of it."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder = folder
        self._cache = cache
        self.progress = folder / "progress"
        self.stop = folder / "stop"
        self.output = folder / "output"

    def checkpoints(self, fence: int) -> Path:
        return self.folder / "checkpoints" / str(fence)

    def start(self, fence: int, restore: int | None = None, pause: float = 0.0) -> subprocess.Popen[str]:
        self.progress.unlink(missing_ok=True)
        self.stop.unlink(missing_ok=True)
        env = {name: value for name, value in os.environ.items() if not name.startswith(("PENSTOCK_", "JAX_", "XLA_"))}
        env |= {
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(self._cache),
            "PENSTOCK_JOB_ID": "j1",
            "PENSTOCK_STAGE": str(fence - 1),
            "PENSTOCK_CHECKPOINT_DIR": str(self.checkpoints(fence)),
            "PENSTOCK_OUTPUT_DIR": str(self.output),
            "PENSTOCK_PROGRESS_FILE": str(self.progress),
            "PENSTOCK_STOP_FILE": str(self.stop),
        }
        if restore is not None:
            env["PENSTOCK_RESTORE_DIR"] = str(self.checkpoints(restore))
        return subprocess.Popen(
            [sys.executable, str(SCRIPT), *OPTIONS, f"--pause={pause}"], env=env, stdout=subprocess.PIPE, text=True
        )

    def finish(self, process: subprocess.Popen[str]) -> tuple[int, str]:
        """Exit code and output of an attempt."""
        with process:
            try:
                output, _ = process.communicate(timeout=RUN_S)
            finally:
                process.kill()
        return process.returncode, output

    def wait_for_step(self, process: subprocess.Popen[str], step: int) -> int:
        """The step it is at, once it is at least `step`."""
        ends = time.monotonic() + RUN_S
        while time.monotonic() < ends:
            assert process.poll() is None, f"it ended with {process.returncode} before step {step}"
            if self.progress.exists():
                said = json.loads(self.progress.read_text())
                assert said["total"] == STEPS
                assert said["metrics"]["loss"] > 0
                if said["done"] >= step:
                    return int(said["done"])
            time.sleep(0.005)
        process.kill()
        pytest.fail(f"step {step} was not reached in {RUN_S:g} s")

    @property
    def metrics(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.output / "metrics.json").read_text())
        return found


@pytest.mark.long
def test_an_interrupted_run_ends_with_the_weights_of_a_quiet_one(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    quiet = Lab(tmp_path / "quiet", cache)
    code, output = quiet.finish(quiet.start(1))
    assert code == 0, output
    assert quiet.metrics["steps"] == STEPS

    lab = Lab(tmp_path / "disturbed", cache)
    first = lab.start(1, pause=0.2)
    lab.wait_for_step(first, 15)
    first.send_signal(signal.SIGKILL)  # a slice taken away without a word
    code, _ = lab.finish(first)
    assert code == -signal.SIGKILL
    assert not (lab.output / "metrics.json").exists()

    second = lab.start(2, restore=1, pause=0.2)
    at = lab.wait_for_step(second, 35)
    lab.stop.touch()  # a notice: the agent asks first
    code, output = lab.finish(second)
    assert code == 143
    assert int(output.split("resumed at step ")[1].split()[0]) in range(10, STEPS, 10)
    left = int(output.split("leaving at step ")[1].split()[0])
    assert left >= at

    # The third attempt was killed while it wrote its first checkpoint: nothing of it can be used.
    unfinished = lab.checkpoints(3) / f"{left + 10}.orbax-checkpoint-tmp" / "default"
    unfinished.mkdir(parents=True)

    fourth = lab.start(4, restore=3, pause=0.2)
    lab.wait_for_step(fourth, left + 5)
    fourth.send_signal(signal.SIGTERM)  # the signal says the same as the file
    code, output = lab.finish(fourth)
    assert code == 143
    assert f"resumed at step {left} from {lab.checkpoints(2)}" in output

    code, output = lab.finish(lab.start(5, restore=4))
    assert code == 0, output
    assert lab.metrics["stage"] == 4
    assert lab.metrics["weights_sha256"] == quiet.metrics["weights_sha256"]
    assert lab.metrics["eval_loss"] == quiet.metrics["eval_loss"]
    assert (lab.output / "weights.sha256").read_text().strip() == quiet.metrics["weights_sha256"]
