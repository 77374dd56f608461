"""The schema's text against the domain: same states, same transitions; and every statement against its index."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from typing_extensions import override

import penstock.store
from penstock.domain import lifecycle
from penstock.domain.lifecycle import AttemptState, JobState, SliceState
from penstock.store.dialects import POSTGRES, SQLITE, Dialect
from penstock.store.migrate import migrate, migrations
from penstock.store.reading import RowReader
from penstock.store.rows import Arguments, Row
from penstock.store.sqlite import SqliteLink
from tests.contract.store.harness import HandClock

FOLDER = Path(str(penstock.store.__file__)).parent
DIALECTS = pytest.mark.parametrize("dialect", [SQLITE, POSTGRES], ids=lambda dialect: dialect.name)
TABLES = pytest.mark.parametrize(
    ("entity", "table", "states"),
    [("job", "jobs", JobState), ("attempt", "attempts", AttemptState), ("slice", "slices", SliceState)],
)


def last_trigger(dialect: Dialect, name: str) -> str:
    """The newest text of a trigger: a later migration may have replaced it."""
    sql = "\n".join(migration.sql for migration in migrations(dialect))
    return str(re.findall(rf"create trigger {name} .*?;\n", sql, re.DOTALL)[-1])


@DIALECTS
@TABLES
def test_triggers_allow_the_pairs_of_the_life_cycle_and_no_others(
    dialect: Dialect, entity: str, table: str, states: type[JobState]
) -> None:
    pairs = re.findall(r"'(\w+)>(\w+)'", last_trigger(dialect, f"{table}_step"))
    assert len(pairs) == len(set(pairs))
    assert set(pairs) == lifecycle.state_pairs(entity)


@DIALECTS
@TABLES
def test_triggers_know_where_a_life_starts(dialect: Dialect, entity: str, table: str, states: type[JobState]) -> None:
    starts = {new.value for (old, _), new in lifecycle.TABLES[entity].items() if old is None}
    assert set(re.findall(r"new.state <> '(\w+)'", last_trigger(dialect, f"{table}_start"))) == starts


@DIALECTS
def test_only_terminal_jobs_may_leave(dialect: Dialect) -> None:
    kept = re.findall(r"'(\w+)'[,)]", last_trigger(dialect, "jobs_keep").partition("begin")[0].partition("execute")[0])
    assert set(kept) == {state.value for state in lifecycle.TERMINAL_JOB_STATES}


@TABLES
def test_columns_hold_the_states_of_the_domain(entity: str, table: str, states: type[JobState]) -> None:
    sql = migrations(SQLITE)[0].sql
    text = re.findall(rf"create table {table} \(.*?\n\);", sql, re.DOTALL)[0]
    listed = re.findall(r"check \(\s*state in \((.*?)\)", text, re.DOTALL)[0]
    assert set(re.findall(r"'(\w+)'", listed)) == {state.value for state in states}


def test_migrations_are_numbered_without_holes_and_the_same_for_both() -> None:
    names = [migration.name for migration in migrations(SQLITE)]
    assert names == [migration.name for migration in migrations(POSTGRES)]
    assert [int(name[:4]) for name in names] == list(range(1, len(names) + 1))


def statements() -> list[str]:
    """Every SQL text in the package that has placeholders."""
    found = []
    for module in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(module.read_text())):
            if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
                continue
            if re.match(r"\s*(select|insert|update|delete)\b.*\$\d", node.value, re.DOTALL):
                found.append(node.value)
    return found


def test_placeholders_come_in_the_order_of_their_first_use() -> None:
    assert len(statements()) > 50
    for sql in statements():
        used = [int(digits) for digits in re.findall(r"\$(\d+)", sql)]
        assert list(dict.fromkeys(used)) == list(range(1, max(used) + 1)), sql


class Explainer(SqliteLink):
    """Answers no rows, and remembers how SQLite would have found them."""

    def __init__(self) -> None:
        self.plans: list[str] | None = None
        super().__init__(":memory:")
        migrate(self, HandClock())

    @override
    def rows(self, sql: str, arguments: Arguments = ()) -> list[Row]:
        found = super().rows(sql if self.plans is None else f"explain query plan {sql}", arguments)
        if self.plans is None:
            return found
        self.plans += [row[3] for row in found]
        return []

    def plan(self, ask: Callable[[], object]) -> list[str]:
        self.plans = []
        ask()
        return [step for step in self.plans if "json_each" not in step and "LIST SUBQUERY" not in step]


def test_reads_find_their_rows_by_index() -> None:
    link = Explainer()
    reader = RowReader(link)
    asked: dict[str, Callable[[], object]] = {
        "jobs_waiting": lambda: reader.heads(["a", "b"], 5),
        "COVERING INDEX jobs_waiting": reader.waiting_counts,
        "jobs_live": reader.live_jobs,
        "jobs_one_per_key": lambda: reader.job_by_key("a", "b"),
        "jobs_by_team (team=? AND state=? AND id<?)": lambda: reader.jobs_page(
            team="a", states=("failed",), after="j", limit=5
        ),
        "jobs_by_state (state=? AND id<?)": lambda: reader.jobs_page(
            team=None, states=("failed",), after=None, limit=5
        ),
        "dependencies_by_need": lambda: reader.dependants("j"),
        "attempts_live": reader.live_attempts,
        "attempts_one_per_fence": lambda: reader.attempts_of("j"),
        "slices_live": reader.live_slices,
        "slices_by_race": lambda: reader.race("r"),
        "slices_gone": lambda: reader.tombstones(5.0),
        "events_of_entity": lambda: reader.events_of("job", "j"),
        "INTEGER PRIMARY KEY": lambda: reader.events(5, 5),
        "sqlite_autoindex_jobs_1": lambda: reader.jobs(["a", "b"]),
        "sqlite_autoindex_slices_1": lambda: reader.slices(["a", "b"]),
    }
    for index, ask in asked.items():
        plan = link.plan(ask)
        assert any(index in step for step in plan), (index, plan)
        assert not [step for step in plan if re.match(r"SCAN \w+$", step)], (index, plan)
    link.close()
