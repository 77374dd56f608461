"""Parameters: what is let through, and the one line for what is not."""

from __future__ import annotations

import pytest

from penstock.server.routing import PATH_PARAMETERS, Parameter, Refusal


@pytest.mark.parametrize(
    ("parameter", "value"),
    [
        (Parameter("limit", "", "integer", least=1, most=10), "10"),
        (Parameter("since", "", "number"), "3.35e-124"),
        (Parameter("follow", "", "boolean"), "true"),
        (Parameter("stream", "", choices=("out", "err")), "err"),
        (PATH_PARAMETERS["id"], "j01mcc5rm9b000007"),
        (PATH_PARAMETERS["name"], "große Queue 🚀"),
        (Parameter("name", "", shape="relative-path"), "metrics/loss.json"),
    ],
)
def test_what_fits_is_let_through(parameter: Parameter, value: str) -> None:
    parameter.check("query", value)


@pytest.mark.parametrize(
    ("parameter", "value", "rule"),
    [
        (Parameter("limit", "", "integer"), "", "is not a whole number"),
        (Parameter("limit", "", "integer"), "٣", "is not a whole number"),
        (Parameter("limit", "", "integer"), "1_0", "is not a whole number"),
        (Parameter("limit", "", "integer"), "9" * 19, "is not a whole number"),
        (Parameter("limit", "", "integer", least=1), "0", "is less than 1"),
        (Parameter("limit", "", "integer", most=10), "11", "is more than 10"),
        (Parameter("since", "", "number"), "nan", "is not a number"),
        (Parameter("since", "", "number"), "1e999", "is not a finite number"),
        (Parameter("follow", "", "boolean"), "True", "is neither true nor false"),
        (Parameter("stream", "", choices=("out", "err")), "log", "is not one of out, err"),
        (PATH_PARAMETERS["id"], "../etc", "does not match"),
        (PATH_PARAMETERS["id"], "j01\n", "does not match"),
        (PATH_PARAMETERS["sha256"], "0" * 63, "does not match"),
        (PATH_PARAMETERS["name"], "a\u202eb", "has control or invisible characters"),
        (PATH_PARAMETERS["name"], "x" * 129, "is longer than 128 characters"),
        (Parameter("user", ""), "a\0b", "has control or invisible characters"),
        (Parameter("name", "", shape="relative-path"), "a/../b", "is not a plain relative name"),
        (Parameter("name", "", shape="relative-path"), "/a", "is not a plain relative name"),
    ],
)
def test_what_does_not_is_refused_in_one_line(parameter: Parameter, value: str, rule: str) -> None:
    with pytest.raises(Refusal) as refused:
        parameter.check("query", value)
    said = refused.value.problem
    assert said.code == "bad_input"
    assert said.field == parameter.name
    assert said.detail.startswith(f"query {parameter.name}: ")
    assert rule in said.detail
    assert len(said.detail) < 200
