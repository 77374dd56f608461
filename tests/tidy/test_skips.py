"""No test is left out in CI: `tests/missing.py` is the one place that skips, and it fails there."""

from __future__ import annotations

import ast

import pytest

from tests.missing import missing
from tests.tidy.tracked import ROOT

SKIPS = frozenset({"skip", "skipif", "importorskip", "xfail"})
#: Skips that have another reason than that something is missing.
OTHER_REASONS = {
    "tests/contract/objects/test_inputs.py": "a directory has no bucket",
}


def test_only_one_module_skips() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if path != ROOT / "tests" / "missing.py" and str(path.relative_to(ROOT)) not in OTHER_REASONS
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in SKIPS and "pytest" in ast.unparse(node)
    ]
    assert found == [], "call tests.missing.missing instead"


def test_what_is_missing_fails_in_ci_and_skips_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="needs a moon, and in CI"):
        missing("a moon")
    monkeypatch.setenv("CI", "")
    with pytest.raises(BaseException, match="needs a moon") as skipped:
        missing("a moon")
    assert type(skipped.value).__name__ == "Skipped"
