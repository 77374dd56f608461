"""Bodies that cannot be read: field, value and rule in one line, and no secret repeated."""

from __future__ import annotations

import pytest

from penstock.server.decoding import Reading
from penstock.server.routing import Refusal
from penstock.wire.agent import Join
from penstock.wire.api import BatchRequest, JobRequest, SecretRequest

JOB = Reading(JobRequest)
DEEP = b'{"payload": {"type": "snippet", "code": "", "variables": {"a": ' + b"[" * 100_000


def refusal(reading: Reading[object], body: bytes) -> tuple[str, str | None]:
    with pytest.raises(Refusal) as refused:
        reading.decode(body)
    said = refused.value.problem
    assert said.code == "bad_input"
    assert "\n" not in said.detail
    return said.detail, said.field


@pytest.mark.parametrize(
    ("body", "detail", "field"),
    [
        (b"", "body: is empty", "body"),
        (b"{", "body: is not JSON: Input data was truncated", "body"),
        (b'{"payload": NaN}', "body: is not JSON: JSON is malformed: invalid character (byte 12)", "body"),
        (DEEP, "body: is nested too deeply", "body"),
        (b"[1]", "body: Expected object, got array", "body"),
        (b"{}", "payload: is missing", "payload"),
        (b'{"payload": {"type": "snippet", "code": ""}, "nmae": "x"}', "nmae: is not a field here", "nmae"),
        (b'{"payload": {"type": "snippet"}}', "payload.code: is missing", "payload.code"),
        (b'{"slices": "two"}', "slices: 'two': Expected int, got str", "slices"),
        (b'{"slices": 0}', "slices: 0: Expected int >= 1", "slices"),
        (b'{"slices": 1.5}', "slices: 1.5: Expected int, got float", "slices"),
        (b'{"payload": {"type": "task"}}', "payload.type: 'task': Invalid value 'task'", "payload.type"),
        (b'{"tags": [1]}', "tags[0]: 1: Expected str, got int", "tags[0]"),
        (b'{"name": "\xff"}', "body: is not UTF-8 (byte 0)", "body"),
    ],
)
def test_one_line(body: bytes, detail: str, field: str) -> None:
    assert refusal(JOB, body) == (detail, field)


def test_long_values_are_cut() -> None:
    detail, _ = refusal(JOB, b'{"slices": "' + b"x" * 5000 + b'"}')
    assert len(detail) < 150
    assert "…" in detail


@pytest.mark.parametrize(
    ("reading", "body"),
    [
        (Reading(SecretRequest), b'{"value": 5550123}'),
        (Reading(Join), b'{"token": 5550123, "slice": "s", "host": 0, "provider_id": "", "incarnation": ""}'),
        (JOB, b'{"env": {"TOKEN": 5550123}}'),
        (JOB, b'{"payload": {"type": "snippet", "code": 5550123}}'),
    ],
)
def test_what_may_be_secret_is_not_repeated(reading: Reading[object], body: bytes) -> None:
    detail, _ = refusal(reading, body)
    assert "5550123" not in detail


def test_whole_numbers_may_be_written_as_floats() -> None:
    reading = Reading(BatchRequest)
    one = b'{"payload": {"type": "snippet", "code": "", "variables": {"a": 1.0}}, "priority": 7.0, "slices": 2.0}'
    request = reading.decode(b'{"jobs": [' + b",".join([one] * 50) + b"]}")
    assert [(job.priority, job.slices) for job in request.jobs] == [(7, 2)] * 50
    assert type(request.jobs[49].slices) is int
    assert repr(request.jobs[0].payload.variables) == "{'a': 1.0}"  # type: ignore[union-attr]
    detail, field = refusal(reading, b'{"jobs": [' + one + b"," + one.replace(b"2.0", b"2.5") + b"]}")
    assert field == "jobs[1].slices"
    assert "2.5" in detail


def test_a_misfit_before_broken_json_is_still_one_line() -> None:
    assert refusal(JOB, b'{"slices": 0, "tags": [')[1] == "slices"


def test_huge_numbers_are_no_fault() -> None:
    assert refusal(JOB, b'{"priority": ' + b"9" * 10_000 + b"}")[1] in {"priority", "body"}
