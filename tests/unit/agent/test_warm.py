"""Warm parents: forks apart from each other, exits that are told right, parents that are replaced, inline runs."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.agent import cgroups, forks, processes, sandbox
from penstock.agent.tree import StartError
from penstock.agent.warm import Warm, _remove_empty
from tests.process.snippets import Bench, standing_walls

pytestmark = pytest.mark.slow
KINDS = ("rooms", "plain", "inline")


class Story:
    """Runs coroutines on one bench; stopped with everything it started."""

    def __init__(self, home: Path, walls: sandbox.Walls) -> None:
        self._runner = asyncio.Runner()
        self.bench = self._runner.run(self._make(home, walls))

    async def _make(self, home: Path, walls: sandbox.Walls) -> Bench:
        return Bench(home, walls)

    def run(self, code: str, **given: Any) -> Any:
        return self._runner.run(self.bench.run(code, **given))

    def tell(self, story: Callable[[Bench], Awaitable[Any]]) -> Any:
        async def told() -> Any:
            return await story(self.bench)

        return self._runner.run(told())

    def end(self) -> None:
        self._runner.run(self.bench.close())
        self._runner.close()
        self.bench.assert_clean()


@pytest.fixture(scope="module")
def walled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    story = Story(tmp_path_factory.mktemp("walled"), standing_walls())
    yield story
    story.end()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    """As on a host without bubblewrap, namespaces and control groups."""
    story = Story(tmp_path_factory.mktemp("plain"), sandbox.Walls(root=os.geteuid() == 0))
    yield story
    story.end()


@pytest.fixture(params=KINDS)
def each(request: pytest.FixtureRequest, walled: Story, plain: Story) -> Callable[..., Any]:
    """Runs a snippet in each of the three ways."""
    story = plain if request.param == "plain" else walled
    isolation = "inline" if request.param == "inline" else "fork"

    def run(code: str, **given: Any) -> Any:
        return story.run(code, isolation=isolation, **given)

    return run


def test_streams_are_kept_apart_and_the_result_comes_back(each: Callable[..., Any]) -> None:
    code = "import sys\nprint('o', x)\nprint('e', file=sys.stderr)\nlogger.warning('l')\nresult = [x, 2]"
    left = each(code, x=1)
    assert left.ended.code == 0
    assert (left.out, left.err) == (b"o 1\n", b"e\n")
    assert left.log.endswith(b" WARNING l\n")
    assert left.report["result"] == [1, 2]


def test_jax_is_there_with_the_devices_that_were_promised(each: Callable[..., Any]) -> None:
    left = each("result = [float(jnp.ones((10, 10)).sum()), jax.device_count(), jax.default_backend()]", devices=2)
    assert left.report.get("result") == [100.0, 2, "cpu"], left.err


def test_arrays_become_artifacts(each: Callable[..., Any]) -> None:
    import numpy as np

    left = each("result = jnp.arange(4)")
    assert left.report["artifacts"] == ["result.npy"]
    assert np.load(left.layout.output / "result.npy", allow_pickle=False).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("code", "exit_code", "number"),
    [
        ("import sys; sys.exit(3)", 3, None),
        ("1/0", 1, None),
        ("import os; os._exit(9)", 9, None),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", None, signal.SIGKILL),
        ("import ctypes; ctypes.string_at(0)", None, signal.SIGSEGV),
        ("import os; os.abort()", None, signal.SIGABRT),
    ],
)
def test_every_end_is_told_as_it_was(
    each: Callable[..., Any], code: str, exit_code: int | None, number: int | None
) -> None:
    left = each(code)
    assert (left.ended.code, left.ended.signal, left.ended.lost) == (exit_code, number, False)
    assert each("result = 'still here'").report["result"] == "still here"


def test_a_crash_leaves_its_stack_on_standard_error(walled: Story) -> None:
    left = walled.run("import ctypes\nctypes.string_at(0)\n")
    assert b"Fatal Python error: Segmentation fault" in left.err
    assert b'File "<snippet>", line 2 in <module>' in left.err


def test_exit_functions_and_threads_come_to_their_end(walled: Story) -> None:
    code = (
        "import atexit, threading, time\n"
        "atexit.register(print, 'at exit')\n"
        "said = threading.Event()\n"
        "threading.Thread(target=lambda: (said.wait(), time.sleep(0.05), print('thread'))).start()\n"
        "print('main')\nsaid.set()\n"
    )
    assert walled.run(code).out == b"main\nthread\nat exit\n"


def test_snippets_do_not_see_each_other(walled: Story) -> None:
    walled.run(
        "import builtins, sys, os\nbuiltins.left = 1\nsys.left = 1\nopen('/tmp/left', 'w')\nopen('/dev/shm/left', 'w')"
    )
    code = (
        "import builtins, sys, os\n"
        "result = [hasattr(builtins, 'left'), hasattr(sys, 'left'), os.listdir('/tmp'), os.listdir('/dev/shm'),"
        " os.getpid(), [p for p in os.listdir('/proc') if p.isdigit()], os.listdir('/proc/self/fd')]"
    )
    builtin, module, temporary, shared, pid, seen, fds = walled.run(code).report["result"]
    assert (builtin, module, shared) == (False, False, [])
    assert "left" not in temporary
    assert (pid, seen) == (2, ["1", "2"]), "its own numbers, and nobody else's"
    # 0, 1, 2, the log twice (the agent's and the logger's), and the listing itself.
    assert len(fds) <= 6, "nothing of the parent's is open"


def test_chance_is_not_inherited(walled: Story) -> None:
    code = "import random, numpy, uuid\nresult = [random.random(), float(numpy.random.rand()), uuid.uuid4().hex]"
    first, second = (walled.run(code).report["result"] for _ in range(2))
    assert not set(first) & set(second)


def test_the_parent_has_started_no_backend_and_runs_no_thread(walled: Story) -> None:
    walled.run("import jax")  # forks only begin once the parent is warm; what its imports start must be over by then
    process = next(parent for (_, _, mode), parent in walled.bench.warm._parents.items() if mode == "rooms").process
    sizes = {}
    for pid in processes.descendants(process.pid):
        try:
            threads = len(list(Path(f"/proc/{pid}/task").iterdir()))
            status = Path(f"/proc/{pid}/status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue  # the snippet's own fork, collected meanwhile
        assert threads == 1, f"{pid} has threads: a fork of it may hang"
        if "VmRSS:" in status:  # what has ended and waits to be collected holds no memory
            sizes[pid] = int(status.partition("VmRSS:")[2].split()[0]) // 1024
    assert max(sizes.values()) < 300, sizes
    left = walled.run("import sys\nresult = sys.modules['jax._src.xla_bridge'].backends_are_initialized()")
    assert left.report["result"] is False


def test_the_environment_is_the_jobs_own(walled: Story) -> None:
    code = "import os, jax\nresult = [os.environ.get('MINE'), jax.config.jax_enable_x64, sorted(os.environ)]"
    mine, wide, names = walled.run(code, env={"MINE": "x", "JAX_ENABLE_X64": "1"}).report["result"]
    assert (mine, wide) == ("x", True)
    assert not [name for name in names if "TOKEN" in name or "SECRET" in name]
    assert walled.run(code).report["result"][:2] == [None, False]


def test_penstocks_payload_module_is_there_and_the_agent_is_not(each: Callable[..., Any]) -> None:
    code = (
        "import sys\nmodules = [name for name in sys.modules if name.startswith('penstock')]\n"
        "import penstock.payload\nresult = modules"
    )
    left = each(code)
    assert left.report.get("result") == [], left.report


@pytest.mark.parametrize("each", [kind for kind in KINDS if kind != "inline"], indirect=True)
def test_children_that_detached_end_with_the_snippet(each: Callable[..., Any]) -> None:
    """Inline snippets are trusted: what they start is theirs to end."""
    code = (
        "import fcntl, os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        for fd in (0, 1, 2): os.close(fd)\n"
        "        held = open('held', 'w')\n"
        "        fcntl.flock(held, fcntl.LOCK_EX)\n"
        "        os.rename('held', 'locked')\n"
        "        while True: time.sleep(0.01)\n"
        "    os._exit(0)\n"
        "while not os.path.exists('locked'): time.sleep(0.01)\n"
    )
    left = each(code)
    assert left.ended.code == 0, left.report
    with (left.layout.work / "locked").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while the one that detached is alive


LOOP = "print('up')\nwhile True: pass"


async def _until(seen: Callable[[], bool]) -> None:
    async with asyncio.timeout(30.0):
        while not seen():  # noqa: ASYNC110 (another process does it)
            await asyncio.sleep(0.01)


async def _until_up(layout: Any) -> None:
    await _until(lambda: b"up\n" in layout.stream("out").read_bytes())


@pytest.mark.parametrize("isolation", ["fork", "inline"])
def test_kill_ends_an_endless_loop(walled: Story, isolation: str) -> None:
    async def story(bench: Bench) -> None:
        started = await bench.start(LOOP, isolation=isolation)
        await _until_up(started.layout)
        assert await started.tree.kill()
        async with asyncio.timeout(10.0):
            left = await started.left()
        assert left.ended.signal == signal.SIGKILL
        assert processes.started_at(started.tree.handle.main) is None
        assert (await bench.run("result = 1", isolation=isolation)).report["result"] == 1

    walled.tell(story)


def test_terminate_reaches_everybody_in_the_room(walled: Story) -> None:
    code = (
        "import os, signal, sys, time\n"
        "def bye(*_):\n    print('asked', flush=True); sys.exit(7)\n"
        "signal.signal(signal.SIGTERM, bye)\n"
        "if os.fork() == 0:\n    os.setsid()\n"
        "print('up', flush=True)\n"
        "while True: time.sleep(0.01)\n"
    )

    async def story(bench: Bench) -> None:
        started = await bench.start(code)
        await _until(lambda: started.layout.stream("out").read_bytes().count(b"up\n") == 2)
        async with asyncio.timeout(30.0):
            started.tree.terminate()
            left = await started.left()
        assert left.ended.code == 7
        assert b"asked" in left.out

    walled.tell(story)


def test_stacks_are_shown_on_request(walled: Story) -> None:
    async def story(bench: Bench) -> bytes:
        started = await bench.start(LOOP)
        await _until_up(started.layout)
        assert started.tree.dump() == [started.tree.pid]
        await _until(lambda: b"<snippet>" in started.layout.stream("err").read_bytes())
        await started.tree.kill()
        return (await started.left()).err

    assert b'File "<snippet>", line 2 in <module>' in walled.tell(story)


def test_a_successor_of_the_agent_adopts_a_running_snippet(walled: Story) -> None:
    code = "import os, time\nprint('up')\nwhile not os.path.exists('go'): time.sleep(0.01)\nimport sys; sys.exit(5)"

    async def story(bench: Bench) -> None:
        started = await bench.start(code)
        await _until_up(started.layout)
        adopted = forks.adopt(started.tree.handle)
        assert adopted is not None
        (started.layout.work / "go").touch()
        async with asyncio.timeout(10.0):
            assert (await adopted.wait()).code == 5
        again = forks.adopt(started.tree.handle)
        assert again is not None
        assert (await again.wait()).code == 5, "and one that looks later still finds it"
        await started.left()

    walled.tell(story)


def test_a_snippet_outlives_its_agents_end_and_its_parent_goes_after_it(tmp_path: Path) -> None:
    async def story() -> None:
        bench = Bench(tmp_path, standing_walls())
        started = await bench.start("import os, time\nprint('up')\nwhile not os.path.exists('go'): time.sleep(0.01)")
        await _until_up(started.layout)
        (parent,) = bench.warm._parents.values()
        await bench.close()
        assert parent.alive
        (started.layout.work / "go").touch()
        async with asyncio.timeout(10.0):
            assert (await started.left()).ended.code == 0
            await asyncio.to_thread(parent.process.wait)

    asyncio.run(story())


def test_a_parent_that_died_is_replaced_and_its_snippets_are_lost(walled: Story) -> None:
    async def story(bench: Bench) -> None:
        started = await bench.start(f"import jax\n{LOOP}")
        await _until_up(started.layout)
        parent = next(parent for (_, _, mode), parent in bench.warm._parents.items() if mode == "rooms")
        victims = processes.descendants(parent.process.pid)
        largest = max(
            victims - {started.tree.pid}, key=lambda pid: int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        )
        os.kill(largest, signal.SIGKILL)
        async with asyncio.timeout(20.0):
            left = await started.left()
            assert left.ended.lost
            await asyncio.to_thread(parent.process.wait)
        assert processes.started_at(started.tree.pid) is None, "nothing of it goes on unseen"
        assert (await bench.run("result = 2")).report["result"] == 2

    walled.tell(story)


def test_a_spare_fork_that_died_is_no_loss(walled: Story) -> None:
    async def story(bench: Bench) -> None:
        await bench.run("pass")
        parent = next(parent for (_, _, mode), parent in bench.warm._parents.items() if mode == "rooms")
        fork = await parent.spares["light"]
        os.kill(fork.shim, signal.SIGKILL)
        await _until(lambda: processes.started_at(fork.main) is None)
        assert (await bench.run("result = 3")).report["result"] == 3

    walled.tell(story)


def test_many_at_once_stay_apart(walled: Story) -> None:
    async def story(bench: Bench) -> list[Any]:
        codes = [f"import os\nopen('f', 'w').write('{n}')\nresult = [{n}, os.listdir('.')]" for n in range(12)]
        return await asyncio.gather(*(bench.run(code) for code in codes))

    assert [left.report["result"] for left in walled.tell(story)] == [[n, ["f"]] for n in range(12)]


def test_an_interpreter_that_cannot_start_is_the_hosts_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        bench = Bench(tmp_path, sandbox.Walls())
        monkeypatch.setattr("sys.executable", "/bin/false")
        with pytest.raises(StartError, match="died twice"):
            await bench.run("pass")
        await bench.close()

    asyncio.run(story())


def test_groups_are_removed_with_the_parent(tmp_path: Path) -> None:
    walls = standing_walls()

    async def story() -> Bench:
        bench = Bench(tmp_path, walls)
        await bench.run("pass")
        await bench.run("import jax")
        await bench.close()
        return bench

    asyncio.run(story()).assert_clean()


def test_groups_left_by_a_killed_agent_are_removed(tmp_path: Path) -> None:
    walls = standing_walls()

    async def story() -> cgroups.Group:
        bench = Bench(tmp_path, walls)
        left = cgroups.make(walls.groups, f"{bench.warm._kind}1-1")
        assert left is not None
        await bench.run("pass")
        await bench.close()
        return left

    left = asyncio.run(story())
    assert not any(Path(folder).exists() for folder in left.folders.values())


def test_copies_of_one_installation_clear_away_nothing_of_each_others(tmp_path: Path) -> None:
    walls = standing_walls()
    hosts = [Bench(tmp_path / name, walls).host for name in ("one", "two")]
    hosts[1].place = hosts[0].place
    first, second = (Warm(host, walls) for host in hosts)
    kept = cgroups.make(walls.groups, f"{first._kind}1-1")
    assert kept is not None
    _remove_empty(walls, second._kind)
    assert all(Path(folder).exists() for folder in kept.folders.values())
    _remove_empty(walls, first._kind)
    assert not any(Path(folder).exists() for folder in kept.folders.values())


def test_a_group_kept_for_the_next_snippet_may_be_gone_by_then(tmp_path: Path) -> None:
    walls = standing_walls()

    async def story() -> None:
        bench = Bench(tmp_path, walls)
        kept = cgroups.make(walls.groups, f"{bench.warm._kind}1-1")
        assert kept is not None
        assert kept.remove()
        bench.warm._groups.append(kept)
        assert (await bench.run("result = 1")).report["result"] == 1
        await bench.close()

    asyncio.run(story())


def test_an_end_that_no_disk_takes_ends_nobody_else(tmp_path: Path) -> None:
    code = "import sys\nfrom penstock.agent.nursery import write_end\nsys.exit(write_end(sys.argv[1], 0, clean=True))"
    with Path("/dev/full").open("wb") as full:  # the log lies on the same disk
        for path, taken in ((tmp_path / "missing" / "exit.json", False), (tmp_path / "exit.json", True)):
            done = subprocess.run([sys.executable, "-c", code, str(path)], stderr=full, check=False)
            assert done.returncode == taken
    assert json.loads((tmp_path / "exit.json").read_bytes())["code"] == 0


def test_a_snippet_of_a_megabyte_is_taken(walled: Story) -> None:
    began = time.monotonic()
    left = walled.run("# " + "x" * (1 << 20) + "\nresult = len(big)", big="y" * (1 << 20))
    assert left.report["result"] == 1 << 20
    assert time.monotonic() - began < 30.0
