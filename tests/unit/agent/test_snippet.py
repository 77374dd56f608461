"""One snippet in this very process: its scope, its result, its errors with its own lines, the device check."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.agent import snippet


@pytest.fixture
def order(tmp_path: Path) -> snippet.Order:
    return {
        "code": "",
        "variables": {},
        "env": {},
        "hidden": [],
        "work": str(tmp_path),
        "output": str(tmp_path),
        "result": str(tmp_path / "result.json"),
        "devices": 1,
        "accelerator": False,
        "gang": False,
        "rlimits": {},
        "json_max": 1 << 20,
        "array_max": 1 << 20,
    }


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    main, argv, path = sys.modules["__main__"], sys.argv, list(sys.path)
    yield
    sys.modules["__main__"], sys.argv, sys.path[:] = main, argv, path


def run(order: snippet.Order, code: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, report, what `logger` wrote."""
    reader, writer = os.pipe()
    order["code"] = code
    exit_code = snippet.run(order, writer)
    os.close(writer)
    # The logger's own copy of the pipe is closed with the logger, which the scope of the snippet holds.
    sys.modules["__main__"].__dict__["logger"].handlers[0].stream.close()
    with os.fdopen(reader) as log:
        said = log.read()
    report = Path(order["result"])  # there is none when there is nothing to say
    return exit_code, json.loads(report.read_text()) if report.exists() else {}, said


def test_given_names_are_in_scope_and_result_is_kept(order: snippet.Order) -> None:
    order["variables"] = {"lr": 0.1, "challenge_number": 7}
    exit_code, report, log = run(order, "logger.info('at %s', lr)\nresult = {'n': challenge_number}\n")
    assert exit_code == 0
    assert report == {"result": {"n": 7}, "note": "", "artifacts": []}
    assert log.endswith("Z INFO at 0.1\n")


def test_without_a_result_nothing_is_reported(order: snippet.Order) -> None:
    order["result"] += ".report"
    assert run(order, "pass")[:2] == (0, {})
    assert not Path(order["result"]).exists()  # a file less for each of many snippets
    (Path(order["output"]) / "result.json").write_text("1")  # without a report it would count as a command's result
    assert run(order, "pass")[:2] == (0, {})
    assert Path(order["result"]).exists()
    with pytest.raises(KeyError):
        sys.modules["__main__"].__dict__["challenge_number"]


def test_an_exception_shows_the_snippets_own_lines_and_none_of_ours(order: snippet.Order) -> None:
    code = "def inner(x):\n    return 1 / x  # here\n\ninner(0)\n"
    exit_code, report, _ = run(order, code)
    assert exit_code == 1
    error = report["error"]
    assert (error["type"], error["message"]) == ("ZeroDivisionError", "division by zero")
    assert 'File "<snippet>", line 2, in inner\n    return 1 / x  # here' in error["traceback"]
    assert "snippet.py" not in error["traceback"]


def test_a_cause_is_part_of_the_traceback(order: snippet.Order) -> None:
    _, report, _ = run(order, "try:\n    {}['k']\nexcept KeyError as e:\n    raise ValueError('bad') from e\n")
    assert "KeyError: 'k'" in report["error"]["traceback"]
    assert "direct cause" in report["error"]["traceback"]


def test_source_that_is_no_python_is_the_snippets_error(order: snippet.Order) -> None:
    exit_code, report, _ = run(order, "result = (\n")
    assert exit_code == 1
    assert report["error"]["type"] == "SyntaxError"
    assert "line 1" in report["error"]["traceback"]


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        ("import sys; sys.exit()", 0),
        ("import sys; sys.exit(0)", 0),
        ("import sys; sys.exit(3)", 3),
        ("import sys; sys.exit(True)", 1),
        ("import sys; sys.exit(-1)", 255),
        ("import sys; sys.exit('no data')", 1),
        ("raise KeyboardInterrupt", 1),
        ("exit(4)", 4),
    ],
)
def test_leaving_early_has_the_interpreters_own_codes(
    order: snippet.Order, code: str, exit_code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    got, report, _ = run(order, code)
    assert got == exit_code
    assert ("error" in report) == (exit_code != 0)
    if "no data" in code:
        assert capfd.readouterr().err == "no data\n"


def test_leaving_early_without_error_keeps_the_result(order: snippet.Order) -> None:
    assert run(order, "result = 5\nimport sys; sys.exit(0)")[1]["result"] == 5


def test_errors_that_cannot_be_shown_are_shown_somehow(order: snippet.Order) -> None:
    code = "class Bad(Exception):\n    def __str__(self): raise RuntimeError\nraise Bad()"
    _, report, _ = run(order, code)
    assert report["error"]["type"] == "Bad"
    assert report["error"]["message"] == "(its __str__ raised RuntimeError)"


def test_tracebacks_and_messages_have_an_end(order: snippet.Order) -> None:
    _, report, _ = run(order, "raise ValueError('x' * 1_000_000)")
    assert len(report["error"]["message"]) == snippet.MESSAGE_CHARACTERS_MAX
    assert len(report["error"]["traceback"]) < snippet.TRACEBACK_CHARACTERS_MAX + 100


def test_half_characters_in_an_error_are_written_and_read(order: snippet.Order) -> None:
    _, report, _ = run(order, "raise ValueError('\\ud800')")
    assert report["error"]["message"] == "\ud800"


class FakeJax:
    """Counts what is asked of it."""

    def __init__(self, devices: list[str], *, total: float = 28.0) -> None:
        self.asked: list[str] = []
        self.config = SimpleNamespace(values={})
        self.numpy = SimpleNamespace(arange=lambda _: SimpleNamespace(sum=lambda: total), pi=3)
        self._devices = devices

    def local_devices(self) -> list[SimpleNamespace]:
        self.asked.append("devices")
        if not self._devices:
            raise RuntimeError("Unable to initialize backend 'tpu'")
        return [SimpleNamespace(platform=name) for name in self._devices]


@pytest.fixture
def jax(monkeypatch: pytest.MonkeyPatch) -> FakeJax:
    return give(monkeypatch, FakeJax(["cpu", "cpu"]))


def give(monkeypatch: pytest.MonkeyPatch, fake: FakeJax) -> FakeJax:
    monkeypatch.setitem(sys.modules, "jax", fake)
    monkeypatch.setitem(sys.modules, "jax.numpy", fake.numpy)
    return fake


def test_jax_is_not_touched_before_it_is_used(order: snippet.Order, jax: FakeJax) -> None:
    assert run(order, "result = [jax.__name__, repr(jnp)]")[0] == 0
    assert jax.asked == []
    assert run(order, "result = jnp.pi + jnp.pi")[1]["result"] == 6
    assert jax.asked == ["devices"], "checked once"


def test_settings_come_before_the_check(order: snippet.Order, jax: FakeJax) -> None:
    run(order, "jax.config")
    assert jax.asked == []


def test_too_few_devices_fail_with_the_reason(order: snippet.Order, jax: FakeJax) -> None:
    order["devices"] = 8
    _, report, _ = run(order, "jnp.pi")
    assert report["error"]["type"] == "DeviceCheckFailed"
    assert report["error"]["message"] == "jax sees 2 devices (cpu) on this host, the job needs 8"


@pytest.mark.parametrize(
    ("found", "total", "why"),
    [
        (["cpu"], 28.0, "jax sees only CPUs"),
        (["tpu"], 28.0, "jax sees 1 devices (tpu) on this host, the job needs 4"),
        ([], 28.0, "jax cannot start its backend: Unable to initialize backend 'tpu'"),
        (["tpu"] * 4, 3.0, "adds 0 to 7 to 3.0"),
    ],
)
def test_real_devices_are_tried_before_the_users_code(
    order: snippet.Order, found: list[str], total: float, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    give(monkeypatch, FakeJax(found, total=total))
    order["devices"], order["accelerator"] = 4, True
    order["variables"] = {"ran": []}
    exit_code, report, _ = run(order, "ran.append(1)")
    assert exit_code == 1
    assert report["error"]["type"] == "DeviceCheckFailed"
    assert why in report["error"]["message"]
    assert order["variables"]["ran"] == []


def test_a_gang_starts_jax_distributed_before_anything_is_checked(order: snippet.Order, jax: FakeJax) -> None:
    order["gang"], order["accelerator"], order["devices"] = True, True, 99
    assert run(order, "result = jnp.pi")[1]["result"] == 3
    assert jax.asked == []


def test_an_environment_without_jax_says_so_when_jax_is_used(
    order: snippet.Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jax", None)
    assert run(order, "result = 1")[0] == 0
    _, report, _ = run(order, "jax.devices()")
    assert "jax cannot be imported in this environment" in report["error"]["message"]


def test_the_environment_is_the_payloads_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("INHERITED", "ADDED_BY_JAX", "NEW"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("INHERITED", "secret of the parent")
    monkeypatch.setenv("ADDED_BY_JAX", "1")
    monkeypatch.delitem(sys.modules, "jax", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("NEW", "")
    snippet.adjust({"NEW": "x", "PYTHONPATH": "/some/where"}, {"INHERITED": "secret of the parent"})
    assert "INHERITED" not in os.environ
    assert (os.environ["ADDED_BY_JAX"], os.environ["NEW"]) == ("1", "x")
    assert sys.path[0] == "/some/where"


def test_an_imported_jax_is_told_what_changed(jax: FakeJax, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"jax_enable_x64": False, "jax_log_compiles": 0, "jax_compilation_cache_dir": None, "jax_platforms": "cpu"}
    jax.config = SimpleNamespace(values=values, update=values.__setitem__)
    env = {
        "JAX_ENABLE_X64": "True",
        "JAX_LOG_COMPILES": "2",
        "JAX_COMPILATION_CACHE_DIR": "/c",
        "JAX_PLATFORMS": "cpu",
        "JAX_COORDINATOR_ADDRESS": "a:1",
    }
    for name in env:
        monkeypatch.setenv(name, "")
    snippet.adjust(env, {"JAX_PLATFORMS": "cpu"})
    assert values == {
        "jax_enable_x64": True,
        "jax_log_compiles": 2,
        "jax_compilation_cache_dir": "/c",
        "jax_platforms": "cpu",
    }


@pytest.mark.parametrize(
    "code", ["raise KeyError(key)", "import sys; sys.exit(key)", "raise ValueError('x' * 8190 + key)"]
)
def test_errors_do_not_show_secrets(order: snippet.Order, code: str) -> None:
    order["hidden"] = ["", "hunter", "hunter2\nhunter3"]
    order["variables"] = {"key": "hunter2\nhunter3"}
    exit_code, report, _ = run(order, code)
    assert exit_code == 1
    assert "hunt" not in json.dumps(report)
    assert "**" in report["error"]["message"]
