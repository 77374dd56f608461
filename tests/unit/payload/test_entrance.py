"""What every Python process of a gang starts with: a failure does not wait for JAX, and SIGTERM keeps its effect.

A small stand-in for JAX shows the order of things within milliseconds: it waits at exit, and takes SIGTERM behind
Python's back. `tests/process/test_whole_gangs.py` does the same with JAX itself.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.domain import limits
from penstock.payload import entrance

JAX = {
    "jax/__init__.py": "import atexit\nfrom jax import distributed\n"
    "def clean_up(): print('jax waits', flush=True)\natexit.register(clean_up)\n",
    "jax/distributed.py": "import ctypes\ndef initialize(): ctypes.CDLL(None).signal(15, ctypes.c_void_p(1))\n",
    "jax/experimental/__init__.py": "",
    "jax/experimental/multihost_utils.py": "def reached_preemption_sync_point(step_id): return step_id > 5\n",
}
JOIN = "import jax, os, sys, atexit\njax.distributed.initialize()\natexit.register(print, 'my own end')\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in JAX.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def run(folder: Path, code: str, **more: str) -> tuple[int, str, str]:
    path = os.pathsep.join([*entrance.__path__, str(folder)])
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": path, **more}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("leave", "code"),
    [
        ("sys.exit(3)", 3),
        ("sys.exit(259)", 3),
        ("sys.exit('no data')", 1),
        ("raise ValueError('no data')", 1),
        ("try: sys.exit(4)\nexcept SystemExit as first: sys.exit(first.code)", 4),
    ],
)
def test_a_failure_leaves_without_jax_and_with_its_own_code(folder: Path, leave: str, code: int) -> None:
    left, out, err = run(folder, JOIN + leave)
    assert (left, out) == (code, "my own end\n")
    assert ("no data" in err) == ("no data" in leave)


@pytest.mark.parametrize(
    "leave",
    [
        "pass",
        "sys.exit()",
        "sys.exit(0)",
        "try: sys.exit(3)\nexcept SystemExit as left: assert left.code == 3 and isinstance(left.code, int)",
        "kept = []\ntry: sys.exit(3)\nexcept SystemExit as left: kept.append(left)",
        "import threading\nother = threading.Thread(target=sys.exit, args=(3,))\nother.start()\nother.join()",
        "import _thread, time\n_thread.start_new_thread(sys.exit, (3,))\ntime.sleep(0.2)",
    ],
)
def test_whoever_ends_well_ends_as_jax_wants(folder: Path, leave: str) -> None:
    left, out, err = run(folder, JOIN + leave)
    assert (left, out) == (0, "my own end\njax waits\n"), err


@pytest.mark.parametrize(
    ("leave", "grace_s", "waits"),
    [
        ("sys.exit(143)", "30", True),
        ("sys.exit(143)", f"{limits.GANG_GRACE_S:g}", False),  # the gang is broken
        ("sys.exit(143)", None, False),  # nobody asked
        ("sys.exit(3)", "30", False),
        ("raise ValueError", "30", False),
    ],
)
def test_who_was_asked_to_stop_and_has_saved_waits_for_the_others(
    folder: Path, leave: str, grace_s: str | None, waits: bool
) -> None:
    """Else the coordinator would go while they save."""
    stop = folder / "stop"
    if grace_s is not None:
        stop.write_text(grace_s)
    left, out, _ = run(folder, JOIN + leave, PENSTOCK_STOP_FILE=str(stop))
    assert (left, out) == (143 if "143" in leave else 3 if "3" in leave else 1, "my own end\n" + "jax waits\n" * waits)


def test_without_a_world_nothing_is_different(folder: Path) -> None:
    assert run(folder, "import jax, sys\nsys.exit(3)")[:2] == (3, "jax waits\n")
    assert run(folder, "import sys\nsys.exit(3)")[:2] == (3, "")


def test_sigterm_ends_who_does_not_ask_and_is_jaxs_for_who_does(folder: Path) -> None:
    assert run(folder, JOIN + "os.kill(os.getpid(), 15)\nprint('deaf')")[:2] == (-15, "")
    ask = "from jax.experimental import multihost_utils as m\nassert not m.reached_preemption_sync_point(1)\n"
    left, out, _ = run(folder, JOIN + ask + "os.kill(os.getpid(), 15)\nprint(m.reached_preemption_sync_point(9))")
    assert (left, out.splitlines()[0]) == (0, "True")


def test_a_handler_of_the_programs_own_stays(folder: Path) -> None:
    own = "import signal\nsignal.signal(15, lambda *_: print('heard', flush=True))\n"
    assert (
        run(folder, own + JOIN + "signal.signal(15, signal.getsignal(15))\nos.kill(os.getpid(), 15)")[1][:6]
        == "heard\n"
    )


def test_another_sitecustomize_is_run_too(folder: Path) -> None:
    (folder / "sitecustomize.py").write_text("import builtins\nbuiltins.mine = 41")
    assert run(folder, "print(mine)")[:2] == (0, "41\n")
