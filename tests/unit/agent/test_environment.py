"""Preparing attempts: the right bytes, one build per recipe, nothing left of failed ones. Real venvs, no network."""

from __future__ import annotations

import asyncio
import fcntl
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from penstock.agent import environment
from penstock.agent.blobs import BlobFolder, Fetched
from penstock.agent.environment import HostFault, Output, Prepared, SetupFailed, Step, prepare, run_step
from penstock.agent.processes import started_at
from penstock.objects.archive import verify
from penstock.objects.content import encode, name_of
from penstock.objects.manifest import BadSnapshot, parse, snapshot_id
from penstock.objects.snapshots import freeze
from penstock.wire.agent import LaunchSpec
from penstock.wire.api import CommandRequest, SnippetRequest

TRAIN = {"train.py": "print('trained')\n", "lib/model.py": "SIZE = 3\n"}


class Layout:
    def __init__(self, home: Path) -> None:
        self.work = home / "work"


class Host:
    """A bucket with snapshots in it, and a host with attempts on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cache = folder / "cache"
        self.blobs: dict[str, bytes] = {}
        self.snapshots: dict[str, bytes] = {}
        self.fetched: list[str] = []
        self.log = b""
        self.steps: list[Step] = []
        self.attempts = 0

    def submit(self, files: Mapping[str, str]) -> str:
        root = self.folder / f"tree{len(self.snapshots)}"
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        frozen = freeze(root)
        self.blobs |= {blob.id: frozen.blob(blob.id) for blob in frozen.manifest.blobs}
        self.snapshots[frozen.id] = frozen.data
        return frozen.id

    async def get_blob(self, id: str) -> bytes:
        self.fetched.append(id)
        return self.blobs[id]

    async def get_snapshot(self, id: str) -> bytes:
        self.fetched.append(id)
        return self.snapshots[id]

    def hear(self, data: bytes) -> None:
        self.log += data

    async def run(self, step: Step, output: Output) -> int:
        self.steps.append(step)
        return await run_step(step, output)

    def order(self, snapshot: str | None, setup: str = "", **changes: object) -> LaunchSpec:
        self.attempts += 1
        plain: dict[str, object] = {
            "attempt": f"a{self.attempts}", "job": "j", "name": "n", "team": "t", "replica": 0, "fence": 1, "stage": 0,
            "rank": 0, "world_size": 1, "timeout_s": 60.0, "accelerator": "v5e-8", "jax_devices": 8,
            "coordinator": None, "payload": CommandRequest(("python", "train.py"), snapshot, setup),
        }  # fmt: skip
        return LaunchSpec(**{**plain, **changes})  # type: ignore[arg-type]

    async def prepare(self, spec: LaunchSpec) -> Prepared:
        layout = Layout(self.folder / "attempts" / spec.attempt)
        return await prepare(
            spec, self.get_blob, self.get_snapshot, layout, cache=self.cache, output=self.hear, run=self.run
        )

    def prepared(self, snapshot: str | None, setup: str = "", **changes: object) -> Prepared:
        return asyncio.run(self.prepare(self.order(snapshot, setup, **changes)))

    @property
    def environments(self) -> list[str]:
        return sorted(path.name for path in (self.cache / "environments").glob("*") if path.is_dir())


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    """Its package index is a folder with one package in two versions."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for version in ("1.0", "2.0"):
        with zipfile.ZipFile(wheels / f"gauge-{version}-py3-none-any.whl", "w") as wheel:
            info = f"gauge-{version}.dist-info"
            wheel.writestr("gauge.py", f"VERSION = {version!r}\n")
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: gauge\nVersion: {version}\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", f"gauge.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(wheels)}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
        monkeypatch.setenv(f"UV_{name}", value)
    return Host(tmp_path)


def says(prepared: Prepared, code: str) -> str:
    """What Python says in the prepared environment, found as the payload would find it."""
    env = prepared.onto({"PATH": os.defpath, "VIRTUAL_ENV": "/of/the/agent"})
    done = subprocess.run(
        ["/usr/bin/env", "python", "-c", code], cwd=prepared.work, env=env, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


# --- the tree ---
def test_without_a_recipe_nothing_is_built(host: Host) -> None:
    snapshot = host.submit(TRAIN)
    prepared = host.prepared(snapshot)
    assert prepared.environment == ""
    assert not host.steps
    verify(parse(host.snapshots[snapshot], snapshot), prepared.work)
    assert Path(says(prepared, "import sys; print(sys.executable)")).samefile(sys.executable)
    assert "VIRTUAL_ENV" not in prepared.onto({"VIRTUAL_ENV": "/x"})


def test_snippets_and_bare_commands_get_an_empty_directory(host: Host) -> None:
    for spec in (host.order(None), host.order(None, payload=SnippetRequest("result = 1"))):
        prepared = asyncio.run(host.prepare(spec))
        assert list(prepared.work.iterdir()) == []
    assert not host.fetched


def test_the_second_attempt_fetches_nothing_and_has_a_tree_of_its_own(host: Host) -> None:
    snapshot = host.submit(TRAIN)
    first = host.prepared(snapshot)
    count = len(host.fetched)
    (first.work / "train.py").write_text("spoilt")
    second = host.prepared(snapshot)
    assert len(host.fetched) == count
    assert (second.work / "train.py").read_text() == TRAIN["train.py"]


def test_a_changed_file_is_all_that_is_fetched(host: Host) -> None:
    big = {f"part{number}.txt": str(number) * 50_000 for number in range(4)}
    host.prepared(host.submit(TRAIN | big))
    host.fetched.clear()
    host.prepared(host.submit(TRAIN | big | {"part2.txt": "new" * 20_000}))
    assert len(host.fetched) == 2  # the manifest and one blob


def test_a_try_that_was_cut_off_is_done_again(host: Host) -> None:
    spec = host.order(host.submit(TRAIN))
    home = host.folder / "attempts" / spec.attempt
    for leftover in ("work", "work.part"):
        (home / leftover).mkdir(parents=True)
        (home / leftover / "half").write_text("written")
    prepared = asyncio.run(host.prepare(spec))
    assert sorted(path.name for path in prepared.work.iterdir()) == ["lib", "train.py"]
    assert not (home / "work.part").exists()


def test_a_blob_that_went_bad_on_disk_is_fetched_again(host: Host) -> None:
    snapshot = host.submit(TRAIN)
    host.prepared(snapshot)
    for path in (host.cache / "blobs").glob("*/*"):
        path.chmod(0o600)
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    (manifest,) = (host.cache / "snapshots").glob("*/*")
    manifest.chmod(0o600)
    manifest.write_bytes(b"{}")
    host.fetched.clear()
    prepared = host.prepared(snapshot)
    assert (prepared.work / "train.py").read_text() == TRAIN["train.py"]
    assert len(host.fetched) == 2


def test_a_bucket_that_lies_is_the_hosts_fault_and_a_bad_manifest_the_users(host: Host) -> None:
    snapshot = host.submit(TRAIN)
    (blob,) = host.blobs
    host.blobs[blob] = b"something else"
    with pytest.raises(HostFault, match="its SHA-256 was another"):
        host.prepared(snapshot)
    bad = b'{"blobs":[],"entries":[{"kind":"link","path":"l","target":"/etc"}],"version":1}'
    host.snapshots[snapshot_id(bad)] = bad
    with pytest.raises(BadSnapshot, match="leads out"):
        host.prepared(snapshot_id(bad))
    assert not list((host.folder / "attempts").glob("*/work"))


def test_a_full_disk_is_the_hosts_fault(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.domain.limits.HOST_FREE_BYTES", 1 << 60)
    with pytest.raises(HostFault, match="unpacking needs"):
        host.prepared(host.submit(TRAIN))


# --- environments ---
def test_requirements_are_installed_once_and_seen_in_front_of_the_hosts(host: Host) -> None:
    snapshot = host.submit(TRAIN | {"requirements.txt": "-r more.txt\n", "more.txt": "gauge==1.0\n"})
    prepared = host.prepared(snapshot)
    assert says(prepared, "import gauge; print(gauge.VERSION)") == "1.0"
    # What the host has is there, too: its own packages, and the helper for payloads.
    assert says(prepared, "import penstock.payload, msgspec; print('yes')") == "yes"
    assert b"penstock: setting up an environment from requirements.txt" in host.log
    assert b"gauge-1.0" in host.log
    steps = len(host.steps)
    other = host.prepared(
        host.submit(TRAIN | {"requirements.txt": "-r more.txt\n", "more.txt": "gauge==1.0\n", "n": ""})
    )
    assert other.environment == prepared.environment
    assert len(host.steps) == steps
    newer = host.prepared(host.submit(TRAIN | {"requirements.txt": "-r more.txt\n", "more.txt": "gauge==2.0\n"}))
    assert newer.environment != prepared.environment
    assert says(newer, "import gauge; print(gauge.VERSION)") == "2.0"
    left = sorted(path.name for path in newer.readable[0].iterdir())
    assert left == ["ready", "venv"]


def test_dependencies_of_a_project_are_installed_and_its_code_is_what_was_sent(host: Host) -> None:
    project = '[project]\nname = "mine"\nversion = "1"\ndependencies = ["gauge<2"]\n'
    first = host.prepared(host.submit({"pyproject.toml": project, "src/mine.py": "V = 'one'\n"}))
    assert says(first, "import gauge, mine; print(gauge.VERSION, mine.V)") == "1.0 one"
    steps = len(host.steps)
    second = host.prepared(host.submit({"pyproject.toml": project + "# later\n", "src/mine.py": "V = 'two'\n"}))
    assert says(second, "import mine; print(mine.V)") == "two"
    assert (second.environment, len(host.steps)) == (first.environment, steps)


def test_a_project_without_dependencies_builds_nothing(host: Host) -> None:
    assert host.prepared(host.submit({"pyproject.toml": "[tool.ruff]\nline-length = 100\n"})).environment == ""
    assert not host.steps


def test_a_lock_is_installed_with_uv(host: Host) -> None:
    wheel = host.folder / "wheels" / "gauge-1.0-py3-none-any.whl"
    project = '[project]\nname = "mine"\nversion = "1"\nrequires-python = ">=3.11"\ndependencies = ["gauge==1.0"]\n'
    root = host.folder / "lock"
    root.mkdir()
    (root / "pyproject.toml").write_text(project)
    uv = environment._uv()
    assert uv is not None
    env = {name: value for name, value in os.environ.items() if name.startswith(("PATH", "HOME", "UV_"))}
    subprocess.run([uv, "lock", "--offline", "-q", "--python", sys.executable], cwd=root, env=env, check=True)
    assert wheel.name in (root / "uv.lock").read_text()
    prepared = host.prepared(host.submit({"pyproject.toml": project, "uv.lock": (root / "uv.lock").read_text()}))
    assert says(prepared, "import gauge, penstock.payload; print(gauge.VERSION)") == "1.0"


def test_a_setup_command_runs_once_in_its_own_copy(host: Host) -> None:
    snapshot = host.submit(TRAIN)
    setup = "test -f train.py; pip install gauge==1.0\ntouch made-by-setup; echo $GREETING"
    first = host.prepared(snapshot, setup, env={"GREETING": "hello from setup"})
    assert says(first, "import gauge; print(gauge.VERSION)") == "1.0"
    assert b"hello from setup" in host.log
    assert not (first.work / "made-by-setup").exists()
    steps = len(host.steps)
    second = host.prepared(snapshot, setup, env={"GREETING": "hello from setup"})
    assert (second.environment, len(host.steps)) == (first.environment, steps)
    assert says(second, "import gauge; print(gauge.VERSION)") == "1.0"


def test_a_setup_without_a_snapshot_works_too(host: Host) -> None:
    assert says(host.prepared(None, "pip install gauge"), "import gauge; print(gauge.VERSION)") == "2.0"


def test_a_failed_setup_is_the_users_and_leaves_nothing(host: Host) -> None:
    snapshot = host.submit(TRAIN)
    with pytest.raises(SetupFailed, match="exit code 7: /bin/sh -ec echo") as caught:
        host.prepared(snapshot, "echo the reason is $TOKEN; exit 7", secrets={"TOKEN": "s3cret"})
    assert (caught.value.exit_code, caught.value.tail.splitlines()[-1]) == (7, "the reason is ***")
    assert b"the reason is" in host.log
    assert host.environments == []
    with pytest.raises(SetupFailed, match="exit code 1") as caught:
        host.prepared(host.submit({"requirements.txt": "no-such-package==9\n"}))
    assert "no-such-package" in caught.value.tail
    assert host.environments == []


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"pyproject.toml": "[project\n"}, r"pyproject\.toml: is not TOML"),
        ({"pyproject.toml": '[project]\ndependencies = "jax"\n'}, "not a list of strings"),
        ({"uv.lock": "package = 3\n"}, r"uv\.lock: `package` is not a list"),
    ],
)
def test_files_that_cannot_be_understood_are_named(host: Host, files: dict[str, str], why: str) -> None:
    with pytest.raises(SetupFailed, match=why):
        host.prepared(host.submit(files))


def test_a_host_that_cannot_make_a_venv_is_at_fault(host: Host) -> None:
    async def run(step: Step, output: Output) -> int:
        output(b"ensurepip is not available\n")
        return 1

    host.run = run  # type: ignore[method-assign]
    with pytest.raises(HostFault, match="ensurepip is not available"):
        host.prepared(host.submit({"requirements.txt": "gauge\n"}))
    assert host.environments == []


def test_builders_wait_for_each_other(host: Host) -> None:
    """Four attempts at once: one builds, the others find it built."""
    specs = [host.order(host.submit(TRAIN), "pip install gauge==1.0; sleep 0.3") for _ in range(4)]

    async def story() -> list[Prepared]:
        return await asyncio.gather(*(host.prepare(spec) for spec in specs))

    made = asyncio.run(story())
    assert len({one.environment for one in made}) == 1
    assert sum("/bin/sh" in step.argv for step in host.steps) == 1


def test_a_builder_that_was_killed_leaves_a_lock_and_debris_that_hold_nobody_up(host: Host) -> None:
    snapshot = host.submit(TRAIN)
    first = host.prepared(snapshot, "pip install gauge==1.0")
    (home,) = first.readable
    (home / "ready").unlink()
    (home / "venv" / "bin" / "python").unlink()
    prepared = host.prepared(snapshot, "pip install gauge==1.0")
    assert prepared.environment == first.environment
    assert says(prepared, "import gauge; print(gauge.VERSION)") == "1.0"


def test_cancelling_stops_a_setup_and_its_children(host: Host) -> None:
    spec = host.order(host.submit(TRAIN), "sleep 987654 & echo $! > child.pid; wait")

    async def story() -> int:
        task = asyncio.create_task(host.prepare(spec))
        deadline = asyncio.get_running_loop().time() + 30
        while True:
            found = list((host.cache / "environments").glob("*/project/child.pid"))
            if found and found[0].read_text().strip():
                break
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.02)
        pid = int(found[0].read_text())
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return pid

    pid = asyncio.run(story())
    until = time.monotonic() + 30
    while started_at(pid) is not None:  # killed, and perhaps not yet gone
        assert time.monotonic() < until
        time.sleep(0.01)
    assert host.environments == []
    (lock,) = (host.cache / "environments").glob("*.lock")
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_setup_ends_though_a_child_keeps_its_output_open(host: Host) -> None:
    step = Step(
        argv=("/bin/sh", "-c", "setsid sleep 30 & echo done"), env={"PATH": os.defpath}, cwd=host.folder, writable=()
    )

    async def story() -> float:
        loop = asyncio.get_running_loop()
        start = loop.time()
        assert await run_step(step, host.hear) == 0
        return loop.time() - start

    assert asyncio.run(story()) < 25
    assert host.log == b"done\n"


def test_a_build_sees_no_variable_of_the_agents_but_those_for_packages(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_TOKEN", "of-the-agent")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.invalid:3128")
    host.prepared(host.submit(TRAIN), "env", env={"MINE": "1"}, secrets={"KEY": "value"})
    seen = host.log.decode()
    assert "of-the-agent" not in seen
    assert "MINE=1" in seen
    assert "HTTPS_PROXY=http://proxy.invalid:3128" in seen
    assert f"HOME={host.cache}" in seen


# --- the folder of blobs ---
def test_the_longest_unused_blobs_go_first_and_young_ones_stay(tmp_path: Path) -> None:
    stored = {name_of(encode(bytes([number]))): encode(bytes([number])) * 100 for number in range(6)}
    stored = {name_of(data): data for data in stored.values()}
    ids = sorted(stored)

    async def fetch(id: str) -> bytes:
        return stored[id]

    folder = BlobFolder(tmp_path, size_max=3 * 500)
    assert asyncio.run(folder.fill(ids, fetch)) == 6 * 500
    assert folder.sweep() == 0  # all are in use, as far as anyone knows
    for number, id in enumerate(ids[:5]):
        os.utime(tmp_path / id[:2] / id, (1_000_000 + number, 1_000_000 + number))
    assert folder.sweep() == 3 * 500
    left = sorted(path.name for path in tmp_path.glob("*/*"))
    assert left == sorted(ids[3:])
    assert asyncio.run(folder.fill(ids, fetch)) == 3 * 500


def test_what_is_fetched_wrong_twice_is_not_kept(tmp_path: Path) -> None:
    answers = [b"wrong", b"right", b"wrong", b"wrong"]

    async def fetch(_: str) -> bytes:
        return answers.pop(0)

    folder = BlobFolder(tmp_path)
    assert asyncio.run(folder.get(name_of(b"right"), fetch)) == b"right"
    with pytest.raises(Fetched):
        asyncio.run(folder.get(name_of(b"other"), fetch))
    assert [path.name for path in tmp_path.glob("*/*")] == [name_of(b"right")]
