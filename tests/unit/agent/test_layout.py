"""Layout: where an attempt's things lie, what it may restore, and exactly what its environment holds."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from penstock.agent.layout import directory_of, environment, lay_out, read_progress
from penstock.payload import entrance
from penstock.wire.agent import LaunchSpec
from penstock.wire.api import CommandRequest, SnippetRequest


def a_spec(**changed: Any) -> LaunchSpec:
    given: dict[str, Any] = {
        "attempt": "a1", "job": "j1", "name": "", "team": "red", "replica": 0, "fence": 3, "stage": 1, "rank": 1,
        "world_size": 4, "payload": CommandRequest(("true",)), "timeout_s": 60.0, "accelerator": "v5e-8",
        "jax_devices": 8, "coordinator": None, "wandb_run_id": "j0",
    }  # fmt: skip
    return LaunchSpec(**{**given, **changed})


def test_what_must_outlive_the_host_lies_under_the_root(tmp_path: Path) -> None:
    layout = lay_out(tmp_path / "state", (tmp_path / "a root").as_uri(), a_spec())
    assert layout.checkpoint == str(tmp_path / "a root/jobs/j1/checkpoints/3")
    assert layout.work == tmp_path / "state/attempts/a1/work"
    layout.make()
    assert Path(layout.checkpoint).is_dir()
    layout.remove()
    assert Path(layout.checkpoint).is_dir()
    assert not layout.home.exists()


def test_the_newest_attempt_that_saved_anything_is_restored(tmp_path: Path) -> None:
    folder = tmp_path / "jobs"
    (folder / "j1/checkpoints/2").mkdir(parents=True)
    (folder / "j0/checkpoints/7/step").mkdir(parents=True)
    spec = a_spec(restore=(("j1", 2), ("j1", 1), ("j0", 7)))
    assert lay_out(tmp_path, tmp_path.as_uri(), spec).restore == str(folder / "j0/checkpoints/7")
    assert lay_out(tmp_path, tmp_path.as_uri(), a_spec()).restore is None


def test_without_a_way_to_the_root_all_of_an_attempt_lies_here(tmp_path: Path) -> None:
    layout = lay_out(tmp_path, None, a_spec(restore=(("j0", 7),)))
    assert layout.checkpoint == str(tmp_path / "attempts/a1/checkpoints/3")
    assert layout.restore is None, "it has to be brought first"
    layout.make()
    assert not any(layout.pins.is_relative_to(path) or path.is_relative_to(layout.pins) for path in layout.writable)
    assert not any(layout.restored.is_relative_to(path) for path in layout.writable)
    layout.remove()
    assert not Path(layout.checkpoint).exists()
    assert directory_of(None) is None


OWN = {
    "PATH": "/bin", "HOME": "/root", "AWS_SECRET_ACCESS_KEY": "canary", "GOOGLE_APPLICATION_CREDENTIALS": "canary",
    "PENSTOCK_TOKEN": "canary", "PENSTOCK_HOME": "canary", "JAX_ENABLE_X64": "1", "TPU_TOPOLOGY": "2x2",
    "LIBTPU_INIT_ARGS": "--a", "XLA_FLAGS": "--b --xla_force_host_platform_device_count=3", "SSH_AUTH_SOCK": "canary",
}  # fmt: skip


def env_of(spec: LaunchSpec, *, devices: bool = False) -> dict[str, str]:
    layout = lay_out(Path("/state"), "file:///root", spec)
    return environment(spec, layout, OWN, devices=devices, deadline=1234.5)


def test_nothing_of_the_agents_own_secrets_passes_and_what_jax_needs_does() -> None:
    env = env_of(a_spec(env={"MINE": "1", "PENSTOCK_RANK": "99"}, secrets={"KEY": "value"}))
    assert "canary" not in env.values()
    assert (env["JAX_ENABLE_X64"], env["TPU_TOPOLOGY"], env["LIBTPU_INIT_ARGS"]) == ("1", "2x2", "--a")
    assert env["XLA_FLAGS"] == "--b --xla_force_host_platform_device_count=8"
    assert (env["MINE"], env["KEY"], env["JAX_PLATFORMS"], env["WANDB_RUN_ID"]) == ("1", "value", "cpu", "j0")
    assert env["PENSTOCK_RANK"] == "1", "the contract wins"
    assert env["PENSTOCK_DEADLINE"] == "1234.500"
    assert "PENSTOCK_COORDINATOR" not in env
    assert "PENSTOCK_RESTORE_DIR" not in env


def test_keys_of_compiled_code_hold_on_another_host_where_it_is_carried_there(tmp_path: Path) -> None:
    name = "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES"
    for root, found in ((None, "none"), ((tmp_path / "root").as_uri(), None)):
        spec = a_spec()
        env = environment(spec, lay_out(tmp_path / "state", root, spec), {}, devices=False, deadline=0.0)
        assert env.get(name) == found
    spec = a_spec(env={name: "all"})
    assert environment(spec, lay_out(tmp_path, None, spec), {}, devices=False, deadline=0.0)[name] == "all"


def test_with_real_devices_jax_finds_them_itself() -> None:
    env = env_of(a_spec(), devices=True)
    assert "JAX_PLATFORMS" not in env
    assert env["XLA_FLAGS"] == OWN["XLA_FLAGS"]


def test_a_gang_knows_where_to_meet() -> None:
    env = env_of(a_spec(coordinator="127.0.0.1:2000"))
    met = (env["JAX_COORDINATOR_ADDRESS"], env["JAX_NUM_PROCESSES"], env["JAX_PROCESS_ID"], env["PENSTOCK_COORDINATOR"])
    assert met == ("127.0.0.1:2000", "4", "1", "127.0.0.1:2000")


def test_python_commands_of_a_gang_start_with_the_entrance() -> None:
    (folder,) = entrance.__path__
    assert env_of(a_spec())["PYTHONPATH"] == folder
    assert env_of(a_spec(env={"PYTHONPATH": "/mine"}))["PYTHONPATH"] == f"{folder}:/mine"
    assert "PYTHONPATH" not in env_of(a_spec(world_size=1))
    assert "PYTHONPATH" not in env_of(a_spec(payload=SnippetRequest("pass"))), "`snippet` does it itself"


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b"\xff", b"[" * 100_000, b"null", b'"x"'])
def test_a_progress_file_may_hold_anything(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "progress").write_bytes(text)
    assert read_progress(tmp_path / "progress") is None


def test_the_last_word_counts(tmp_path: Path) -> None:
    assert read_progress(tmp_path / "progress") is None
    (tmp_path / "progress").write_text('{"done": 1}\n{"done": 2}\n')
    assert read_progress(tmp_path / "progress") == {"done": 2}


def test_progress_is_read_from_no_link_and_no_pipe(tmp_path: Path) -> None:
    """The payload may put there what it likes; the agent can read more than it."""
    (tmp_path / "other").write_text('{"done": 1, "token": "secret"}\n')
    (tmp_path / "link").symlink_to(tmp_path / "other")
    os.mkfifo(tmp_path / "pipe")
    assert read_progress(tmp_path / "link") is None
    assert read_progress(tmp_path / "pipe") is None
    (tmp_path / "long").write_bytes(b"x" * (1 << 20) + b'\n{"done": 2}\n')
    assert read_progress(tmp_path / "long") == {"done": 2}


@pytest.mark.parametrize("there", ["nothing", "link", "pipe"])
def test_the_order_to_stop_is_written_into_no_link_and_no_pipe(tmp_path: Path, there: str) -> None:
    layout = lay_out(tmp_path, None, a_spec())
    layout.control.mkdir(parents=True)
    other = tmp_path / "other"
    other.write_text("precious")
    if there == "link":
        layout.stop.symlink_to(other)
    elif there == "pipe":
        os.mkfifo(layout.stop)
    layout.tell_to_stop(30.0)
    assert (layout.stop.read_text(), other.read_text()) == ("30", "precious")


def test_a_full_disk_still_has_the_stop_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = lay_out(tmp_path, None, a_spec())
    layout.control.mkdir(parents=True)

    def full(path: Path, _text: str) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        layout.tell_to_stop(30.0)
    assert layout.stop.exists()


def gang_env(*, devices: bool, cloud: bool) -> dict[str, str]:
    spec = a_spec(coordinator="10.0.0.7:2000", slices=2, slice_index=1)
    layout = lay_out(Path("/state"), None, spec)
    return environment(spec, layout, {}, devices=devices, deadline=1.0, cloud=cloud)


def test_slices_of_one_gang_are_told_of_each_other_on_a_cloud_only() -> None:
    env = gang_env(devices=True, cloud=True)
    told = {name: value for name, value in env.items() if name.startswith("MEGASCALE_")}
    assert told == {
        "MEGASCALE_COORDINATOR_ADDRESS": "10.0.0.7:8080",
        "MEGASCALE_NUM_SLICES": "2",
        "MEGASCALE_SLICE_ID": "1",
    }
    assert "JAX_COORDINATOR_ADDRESS" not in env, "on a cloud's TPUs JAX finds its hosts itself"
    emulated = gang_env(devices=False, cloud=True)
    assert emulated["JAX_COORDINATOR_ADDRESS"] == "10.0.0.7:2000"
    assert emulated["MEGASCALE_NUM_SLICES"] == "2"
    assert not any(name.startswith("MEGASCALE_") for name in gang_env(devices=True, cloud=False))
