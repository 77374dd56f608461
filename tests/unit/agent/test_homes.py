"""Used homes: given to the next attempt only as they were made, and never with anything a payload left."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.agent import homes
from penstock.agent.layout import Layout, attempt_home


def layout(state: Path, attempt: str) -> Layout:
    home = attempt_home(state, attempt)
    return Layout(home=home, checkpoint=str(state / "c"), restore=None, jax_cache=str(state / "j"))


def begun(state: Path, attempt: str) -> Layout:
    made = layout(state, attempt)
    homes.take(made, state / "spare")
    made.make()
    return made


def test_a_home_that_was_left_as_it_was_made_serves_again_without_its_notes(tmp_path: Path) -> None:
    first = begun(tmp_path, "a1")
    number = first.work.stat().st_ino
    homes.write_note(first.home / "exit.json", json.dumps({"code": 0}))
    homes.write_note(first.home / "group.json", json.dumps({"pids": "/a/long/name/of/a/group"}))
    first.result.write_text("{}")
    assert homes.give_back(first, tmp_path / "spare")
    assert not first.home.exists()
    second = begun(tmp_path, "a2")
    assert second.work.stat().st_ino == number
    assert not any((second.home / name).exists() for name in ("exit.json", "group.json"))
    assert list(second.control.iterdir()) == []
    homes.write_note(second.home / "group.json", json.dumps({"pids": "/short"}))
    assert json.loads((second.home / "group.json").read_bytes()) == {"pids": "/short"}


def link(made: Layout) -> None:
    made.output.rmdir()
    made.output.symlink_to("/etc")


LEFT: dict[str, Callable[[Layout], object]] = {
    "a file": lambda made: (made.work / "x").touch(),
    "a file in /tmp": lambda made: (made.temporary / "x").touch(),
    "output": lambda made: made.stream("out").write_bytes(b"x"),
    "another mode": lambda made: made.control.chmod(0o777),
    "an attribute": lambda made: os.setxattr(made.work, "user.left", b"for the next one"),
    "a link for a folder": link,
    "a folder less": lambda made: made.temporary.rmdir(),
    "something beside": lambda made: (made.home / "checkpoints").mkdir(),
}


@pytest.mark.parametrize("what", LEFT)
def test_a_home_with_anything_left_in_it_does_not(tmp_path: Path, what: str) -> None:
    made = begun(tmp_path, "a1")
    LEFT[what](made)
    assert not homes.give_back(made, tmp_path / "spare")
    assert made.home.exists()


def test_few_are_kept(tmp_path: Path) -> None:
    made = [begun(tmp_path, f"a{number}") for number in range(homes.SPARES_MAX + 1)]
    kept = [homes.give_back(each, tmp_path / "spare") for each in made]
    assert kept == [True] * homes.SPARES_MAX + [False]


def test_a_home_that_is_there_already_is_not_replaced(tmp_path: Path) -> None:
    """An agent before this one had begun."""
    assert homes.give_back(begun(tmp_path, "a1"), tmp_path / "spare")
    before = layout(tmp_path, "a2")
    before.make()
    (before.work / "x").touch()
    homes.take(before, tmp_path / "spare")
    assert (before.work / "x").exists()
    assert len(list((tmp_path / "spare").iterdir())) == 1
