"""The walls around a payload: what bubblewrap is told, and, where it works, what a real process behind it can do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.agent import sandbox
from penstock.agent.layout import Layout
from penstock.agent.sandbox import Inside, Walls
from tests.process.snippets import standing_walls


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Penstock's home with its secrets, and a person's home with keys."""
    penstock = tmp_path / "penstock"
    (penstock / "secrets" / "team").mkdir(parents=True)
    (penstock / "token").write_text("canary-token")
    (penstock / "secrets" / "team" / "key").write_text("canary-secret")
    person = tmp_path / "person"
    (person / ".ssh").mkdir(parents=True)
    (person / ".ssh" / "id").write_text("canary-key")
    (person / ".netrc").write_text("canary-netrc")
    (person / "data.txt").write_text("public")
    monkeypatch.setenv("HOME", str(person))
    monkeypatch.setenv("PENSTOCK_HOME", str(penstock))
    return penstock


@pytest.fixture
def layout(home: Path) -> Layout:
    state = home / "slices" / "s" / "host-0"
    old = home / "root" / "jobs" / "j" / "checkpoints" / "1"
    old.mkdir(parents=True)
    (old / "step").write_text("5")
    made = Layout(
        home=state / "attempts" / "a",
        checkpoint=str(home / "root/jobs/j/checkpoints/2"),
        restore=str(old),
        jax_cache=str(home / "root/jobs/j/jax-cache"),
    )
    made.make()
    (state / "credential").write_text("canary-credential")
    return made


def behind(layout: Layout, program: str, walls: Walls, *given: str) -> subprocess.CompletedProcess[str]:
    argv, env = sandbox.wrap([sys.executable, "-c", program, *given], {"PATH": os.environ["PATH"]}, layout, walls)
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=False)


def test_without_bubblewrap_a_command_stays_as_it_is(layout: Layout) -> None:
    assert sandbox.wrap(["true"], {"A": "b"}, layout, Walls()) == (["true"], {"A": "b"})


def test_later_mounts_lie_over_earlier_ones(tmp_path: Path) -> None:
    folder, file = tmp_path / "hidden", tmp_path / "key"
    folder.mkdir()
    file.touch()
    inside = Inside(hidden=(folder, file), readable=(folder / "r",), writable=(folder / "w",), temporary=tmp_path)
    words = sandbox.enclose("bwrap", inside)
    order = [words.index(each) for each in ("/tmp", str(folder), str(folder / "r"), str(folder / "w"))]
    assert order == sorted(order)
    assert words[-2:] == ["--remount-ro", str(folder)], "nothing can be written into what is hidden"
    assert words[words.index(str(file)) - 2 : words.index(str(file))] == ["--ro-bind", "/dev/null"]
    assert "--cap-drop" in words
    assert "--unshare-net" not in words


def test_hidden_are_state_home_and_keys(layout: Layout, home: Path) -> None:
    hidden = sandbox.hidden_places(home / "slices" / "s" / "host-0")
    assert home in hidden
    assert {home.parent / "person" / name for name in (".ssh", ".netrc")} <= set(hidden)
    assert not any(path != home and path.is_relative_to(home) for path in hidden), "the outermost is enough"


def test_what_a_program_needs_is_shown_again(tmp_path: Path) -> None:
    venv = tmp_path / "cache" / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(sys.executable)
    needed = sandbox.needed([tmp_path], str(venv / "bin" / "python"), {"PATH": f"{venv}/bin:/usr/bin"})
    assert venv in needed
    assert Path("/usr") not in needed
    inner = {"PATH": f"{venv}/bin", "PYTHONPATH": f"{venv}/bin/deeper"}
    (venv / "bin" / "deeper").mkdir()
    assert sandbox.needed([tmp_path], str(venv / "bin" / "python"), inner).count(venv) == 1
    assert not any(path != venv and path.is_relative_to(venv) for path in sandbox.needed([tmp_path], "python", inner))


def test_the_probe_says_which_walls_stand() -> None:
    walls = sandbox.probe()
    assert sandbox.probe() is walls, "tried once"
    lines = walls.lines()
    assert len(lines) == 4 + len(walls.missing)
    assert sum("missing" in line for line in lines[:4]) <= len(walls.missing)


def test_walls_that_fell_once_are_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [Walls(missing=("no processes left",)), Walls(bubblewrap="/usr/bin/bwrap", rooms=True)]
    monkeypatch.setattr(sandbox, "try_walls", lambda: answers.pop(0))
    monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/bwrap")
    monkeypatch.setattr(sandbox, "TRY_AGAIN_S", 0.0)
    assert sandbox.probe.__wrapped__().rooms
    assert answers == []


def test_a_missing_bubblewrap_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    walls = sandbox.try_walls()
    assert walls.bubblewrap is None
    assert any("bubblewrap is not installed" in line for line in walls.missing)


READS = """
import sys
for name in sys.argv[1:]:
    try:
        print(open(name).read())
    except OSError as error:
        print(type(error).__name__)
"""


def test_no_credential_can_be_read(layout: Layout, home: Path) -> None:
    secret = [
        home / "slices/s/host-0/credential",
        home / "token",
        home / "secrets/team/key",
        home.parent / "person/.ssh/id",
        home.parent / "person/.netrc",
    ]
    done = behind(layout, READS, standing_walls(), *map(str, secret))
    assert "canary" not in done.stdout + done.stderr
    assert done.stdout.split() == ["FileNotFoundError"] * 4 + ["PermissionError"]


def test_what_a_payload_needs_is_there(layout: Layout, home: Path) -> None:
    shown = [str(home / "root/jobs/j/checkpoints/1/step"), str(home.parent / "person/data.txt")]
    if home.is_relative_to("/tmp"):
        shown.pop()  # /tmp is the payload's own
    done = behind(layout, READS, standing_walls(), *shown)
    assert done.stdout.split() == ["5", "public"][: len(shown)], done.stderr


WRITES = """
import sys
for name in sys.argv[1:]:
    try:
        open(name + '/probe', 'w').write('x')
        print('written')
    except OSError as error:
        print(type(error).__name__)
"""


def test_only_the_attempts_own_directories_can_be_written(layout: Layout, home: Path) -> None:
    own = [str(path) for path in layout.writable] + ["/tmp", "/dev/shm"]
    done = behind(layout, WRITES, standing_walls(), *own)
    assert done.stdout.split() == ["written"] * len(own), done.stderr
    assert (layout.temporary / "probe").read_text() == "x", "/tmp is the attempt's own"
    others = [layout.home, home, layout.restore, "/", "/etc", "/usr/lib", "/dev", "/proc/sys/kernel", "/sys/kernel"]
    done = behind(layout, WRITES, standing_walls(), *map(str, others))
    assert "written" not in done.stdout
    assert len(done.stdout.split()) == len(others)


def test_no_right_no_other_process_but_network_and_exit_code(layout: Layout) -> None:
    program = """
import os, socket, sys
status = open('/proc/self/status').read()
numbers = [name for name in os.listdir('/proc') if name.isdigit()]
caps = [line.split()[1] for line in status.splitlines() if line.startswith(('CapEff', 'CapPrm', 'CapBnd'))]
with socket.create_server(('127.0.0.1', 0)) as server:
    socket.create_connection(server.getsockname()).close()
print(len(numbers), set(caps), os.getcwd())
sys.exit(7)
"""
    done = behind(layout, program, standing_walls())
    assert done.returncode == 7, done.stderr
    assert done.stdout == f"2 {{'0000000000000000'}} {layout.work}\n"


def test_mounts_cannot_be_undone(layout: Layout, home: Path) -> None:
    program = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
print(libc.umount2(sys.argv[1].encode(), 2))
print(libc.unshare(0x10000000 | 0x00020000))  # a user namespace of its own, and mounts
print(libc.umount2(sys.argv[1].encode(), 2), libc.mount(b'none', b'/', None, 32, None))
print(os.path.exists(sys.argv[1] + '/token'))
"""
    done = behind(layout, program, standing_walls(), str(home))
    first, _, second, seen = done.stdout.splitlines()
    assert first == "-1"
    assert second == "-1 -1"
    assert seen == "False"


@pytest.mark.parametrize(
    ("product", "told"), [("Google Compute Engine\n", True), ("Standard PC (Q35)\n", False), (None, False)]
)
def test_on_a_google_machine_it_is_said_what_no_wall_closes(tmp_path: Path, product: str | None, told: bool) -> None:
    file = tmp_path / "product_name"
    if product is not None:
        file.write_text(product)
    found = sandbox._left_open(file)
    assert bool(found) is told
    walls = sandbox.Walls(bubblewrap="/usr/bin/bwrap", rooms=True, memory=True, tasks=True, open=found)
    assert any("service account" in line for line in walls.lines()) is told
