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


#: A coordinator that writes down what it is told, and waits for nobody who has said it already.
STATE = """
import os, sys
class Client:
    def key_value_set(self, key, value): print('told', key, flush=True)
    def blocking_key_value_get(self, key, left_ms):
        print('waits for', key, 5000 < left_ms <= 10000, flush=True)
        if os.environ.get('LOST'): raise RuntimeError('DEADLINE_EXCEEDED')
class global_state:
    client, num_processes, process_id = Client(), 3, int(os.environ['RANK'])
    service = None if process_id else object()
"""


@pytest.mark.parametrize(
    ("leave", "grace_s", "rank", "said"),
    [
        ("sys.exit(143)", "30", 0, "waits for penstock/left/1 True\nwaits for penstock/left/2 True\n"),
        ("sys.exit(143)", "30", 2, "told penstock/left/2\n"),
        ("sys.exit(143)", f"{limits.GANG_GRACE_S:g}", 0, ""),  # the gang is broken
        ("sys.exit(143)", None, 0, ""),  # nobody asked
        ("sys.exit(3)", "30", 0, ""),
        ("raise ValueError", "30", 0, ""),
    ],
)
def test_the_coordinators_host_goes_last_of_those_who_were_asked_to_stop_and_have_saved(
    folder: Path, leave: str, grace_s: str | None, rank: int, said: str
) -> None:
    stop = folder / "stop"
    if grace_s is not None:
        stop.write_text(grace_s)
    for name, text in (("__init__.py", ""), ("distributed.py", STATE)):
        (folder / "jax/_src").mkdir(exist_ok=True)
        (folder / "jax/_src" / name).write_text(text)
    leave = f"import jax._src.distributed\n{leave}"
    left, out, _ = run(folder, JOIN + leave, PENSTOCK_STOP_FILE=str(stop), RANK=str(rank))
    code = 143 if "143" in leave else 3 if "3" in leave else 1
    assert (left, out) == (code, "my own end\n" + said)
    lost = run(folder, JOIN + leave, PENSTOCK_STOP_FILE=str(stop), RANK=str(rank), LOST="1")
    assert (lost[0], lost[1]) == (code, "my own end\n" + "".join(said.splitlines(keepends=True)[:1]))


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
