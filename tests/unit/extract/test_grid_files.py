"""Files of tasks: rows of datasets and the challenge's own files become prompts; what is no task is set aside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.domain.admission import BadInput
from penstock.extract.grid_files import write_prompts
from penstock.extract.grid_prompts import GridOrder

PAIR = [[[1, 2]], [[2, 1]]]
TASK = {"train": [{"input": [[1]], "output": [[2]]}], "test": [{"input": [[3]]}]}


def written(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_with_pairs_become_prompts(tmp_path: Path) -> None:
    rows = [{"examples": [PAIR, PAIR], "name": "a"}, {"examples": [PAIR]}, {"examples": [PAIR, [[[1]], 7], PAIR]}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n{")
    done, refused = write_prompts(
        [str(tmp_path / "a.jsonl")], str(tmp_path / "out.jsonl"), GridOrder(column="examples", variants=2, id="name")
    )
    assert (done.tasks, done.prompts, done.refused, done.examples_left_out) == (2, 4, 2, 1)
    assert [(each.line, each.reason.partition(":")[0]) for each in refused] == [
        (2, "column 'examples' does not hold two pairs of grids or more"),
        (4, "is not JSON"),
    ]
    ids = [row["id"] for row in written(tmp_path / "out.jsonl")]
    assert ids == ["a/0/0", "a/0/1", "task_00000002/0/0", "task_00000002/0/1"]


def test_the_challenges_own_files_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "007bbfb7.json").write_text(json.dumps(TASK))
    (folder / "many.json").write_text(json.dumps({"x": TASK, "y": TASK, "z": 7}))
    done, refused = write_prompts([str(folder)], str(tmp_path / "out.jsonl"), GridOrder(variants=1))
    assert (done.tasks, done.refused) == (3, 1)
    assert refused[0].reason == "is no task"
    assert [row["task"] for row in written(tmp_path / "out.jsonl")] == ["007bbfb7", "x", "y"]


def test_a_part_of_the_tasks_is_the_first_ones(tmp_path: Path) -> None:
    (tmp_path / "many.json").write_text(json.dumps(dict.fromkeys("abcdef", TASK)))
    done, _ = write_prompts([str(tmp_path / "many.json")], str(tmp_path / "out.jsonl"), GridOrder(), tasks=2)
    assert (done.tasks, done.prompts) == (2, 16)


def test_prompts_do_not_depend_on_the_other_tasks_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text(json.dumps({"b": TASK}))
    (tmp_path / "two.json").write_text(json.dumps({"a": TASK, "b": TASK}))
    write_prompts([str(tmp_path / "one.json")], str(tmp_path / "one.jsonl"), GridOrder())
    write_prompts([str(tmp_path / "two.json")], str(tmp_path / "two.jsonl"), GridOrder())
    assert written(tmp_path / "two.jsonl")[8:] == written(tmp_path / "one.jsonl")


def test_a_file_without_tasks_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"examples": 1}\n')
    with pytest.raises(BadInput, match="has no task: line 1 has no lists train and test; name the column of pairs"):
        write_prompts([str(tmp_path / "a.jsonl")], str(tmp_path / "out.jsonl"), GridOrder())
    (tmp_path / "b.json").write_text("[")
    with pytest.raises(BadInput, match="is no JSON object"):
        write_prompts([str(tmp_path / "b.json")], str(tmp_path / "out.jsonl"), GridOrder())
    assert not (tmp_path / "out.jsonl").exists()
    assert not list(tmp_path.glob(".*"))
