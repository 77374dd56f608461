"""Control groups: which of the two versions counts, what is written where, and what is said when there is none."""

from __future__ import annotations

from pathlib import Path

from penstock.agent import cgroups


def a_machine(folder: Path, lines: dict[str, str], mounts: list[tuple[str, str, str]]) -> tuple[Path, Path]:
    """Files as /proc shows them, over plain folders."""
    proc, mounted = folder / "cgroup", folder / "mounts"
    proc.write_text("".join(f"{number}:{name}:{path}\n" for number, (name, path) in enumerate(lines.items())))
    mounted.write_text("".join(f"x {folder / where} {kind} {options} 0 0\n" for where, kind, options in mounts))
    return proc, mounted


def test_version_1_counts_where_it_holds_the_controllers(tmp_path: Path) -> None:
    for each in ("memory/own", "pids", "unified"):
        (tmp_path / each).mkdir(parents=True)
    proc, mounts = a_machine(
        tmp_path,
        {"memory": "/own", "pids": "/", "": "/"},
        [("memory", "cgroup", "rw,memory"), ("pids", "cgroup", "rw,pids"), ("unified", "cgroup2", "rw")],
    )
    found = cgroups.find(proc, mounts)
    assert found.folders == {"memory": str(tmp_path / "memory/own"), "pids": str(tmp_path / "pids")}


def test_version_2_serves_alone(tmp_path: Path) -> None:
    (tmp_path / "unified/service").mkdir(parents=True)
    proc, mounts = a_machine(tmp_path, {"": "/service"}, [("unified", "cgroup2", "rw")])
    found = cgroups.find(proc, mounts)
    assert found.folders == {"unified": str(tmp_path / "unified/service")}
    group = cgroups.make(found, "a1")
    assert group is not None
    assert group.entrances == [str(tmp_path / "unified/service/penstock-a1/cgroup.procs")]


def test_where_there_is_none_there_is_none(tmp_path: Path) -> None:
    proc, mounts = a_machine(tmp_path, {"": "/"}, [])
    found = cgroups.find(proc, mounts)
    assert found.folders == {}
    assert cgroups.make(found, "a1") is None


def test_limits_and_counts_use_the_files_of_their_version(tmp_path: Path) -> None:
    memory, unified = tmp_path / "memory/penstock-a1", tmp_path / "unified/penstock-a1"
    for folder in (memory, unified):
        folder.mkdir(parents=True)
    for path in (memory / "memory.limit_in_bytes", unified / "memory.max", unified / "pids.max"):
        path.touch()
    (memory / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    (unified / "memory.events").write_text("low 0\noom 1\noom_kill 1\n")
    for kind, kills in (("memory", 2), ("unified", 1)):
        group = cgroups.make(cgroups.Hierarchies({kind: str(tmp_path / kind)}), "a1")
        assert group is not None
        group.limit(memory_bytes=4096, tasks=7)
        assert group.oom_kills() == kills
    assert (memory / "memory.limit_in_bytes").read_text() == "4096"
    assert ((unified / "memory.max").read_text(), (unified / "pids.max").read_text()) == ("4096", "7")
    cgroups.Group({"unified": str(unified)}).close()
    assert (unified / "pids.max").read_text() == "0"


def test_a_group_that_a_note_tells_of_is_removed(tmp_path: Path) -> None:
    (tmp_path / "group/inner").mkdir(parents=True)
    note = tmp_path / "group.json"
    assert cgroups.remove_noted(note, 0.0), "no note, no group"
    note.write_text(f'{{"pids": "{tmp_path / "group"}"}}')
    assert cgroups.remove_noted(note, 0.0)
    assert not (tmp_path / "group").exists()
    (tmp_path / "group").mkdir()
    (tmp_path / "group/busy").touch()
    assert not cgroups.remove_noted(note, 0.05)
