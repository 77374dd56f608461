"""From what people pass to `run`, `exec` and `map` to the requests of the API.

Both clients call it. Names and defaults are those of `wire.api.JobRequest`; only what Python callers write differently
is turned: one accelerator or several, one number of replicas or a range, items of `map` into variables. It must not
check values the server checks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, TypedDict

import msgspec

from penstock.client.calls import new_key
from penstock.client.errors import bad_input
from penstock.wire.api import CommandRequest, JobRequest, SnippetRequest

Isolation = Literal["fork", "inline"]
ITEM_VARIABLE = "item"


class JobOptions(TypedDict, total=False):
    """What every kind of job takes beside its payload; what is left out takes the server's default."""

    pool: str | None
    slice: str | None  #: only this slice
    zones: Sequence[str]
    spot: bool | None
    slices: int  #: a gang of so many equal slices
    memory_bytes: int | None
    team: str | None
    queue: str | None
    name: str
    replicas: int | tuple[int, int]  #: copies at once: a number, or the least and the most
    rule: str  #: how it goes on after a failure: `tpu rules`
    max_retries: int | None
    priority: int
    timeout_s: float | None  #: of each attempt
    expected_s: float | None
    after: Sequence[str]  #: jobs that must succeed first
    tags: Sequence[str]
    note: str
    env: Mapping[str, str]
    secrets: Sequence[str]  #: names; values stay on the server until the host needs them
    outputs: Sequence[str]
    idempotency_key: str | None  #: the same key and request again mean the same job


def job_request(
    payload: SnippetRequest | CommandRequest, on: str | Sequence[str] | None, options: JobOptions
) -> JobRequest:
    """The request for one job."""
    fields: dict[str, object] = dict(options)
    replicas = options.get("replicas")
    if replicas is not None:
        del fields["replicas"]
        fields["replicas_min"], fields["replicas_max"] = (replicas, replicas) if isinstance(replicas, int) else replicas
    made = JobRequest(payload=payload, on=accelerators(on), **fields)  # type: ignore[arg-type]  # checked just below
    try:
        return msgspec.json.decode(msgspec.json.encode(made), type=JobRequest)
    except (TypeError, msgspec.ValidationError) as error:
        raise bad_input(f"the job's options: {error}") from error


def accelerators(on: str | Sequence[str] | None) -> tuple[str, ...]:
    """`"v5e-8"`, `"v5e-8,v4-8"` and `["v5e-8", "v4-8"]`; best first."""
    if on is None:
        return ()
    return tuple(name.strip() for name in on.split(",")) if isinstance(on, str) else tuple(on)


def snippet(code: str, variables: Mapping[str, object] | None, isolation: Isolation, setup: str = "") -> SnippetRequest:
    """A snippet whose variables can travel as JSON."""
    return SnippetRequest(code, _jsonable("variables", dict(variables or {})), isolation, setup)


def members(template: JobRequest, items: Iterable[object], at_most: int | None = None) -> Iterator[JobRequest]:
    """One job per item: the template's snippet with the item among its variables.

    An item that is a mapping gives its keys as variables, any other is called `item`. All are members of one array,
    called by the template's key if it has one; of these, `at_most` are under way at once.
    """
    if not isinstance(template.payload, SnippetRequest):
        raise bad_input("map: the template's payload is a command; only snippets have variables", field="payload")
    # The same key again must be the same request: the array's name is part of it.
    array = template.idempotency_key or new_key()
    for index, item in enumerate(items):
        given = dict(item) if isinstance(item, Mapping) else {ITEM_VARIABLE: item}
        variables = _jsonable(f"items[{index}]", {**template.payload.variables, **given})
        payload = msgspec.structs.replace(template.payload, variables=variables)
        member = f"{array}/{index}"
        yield msgspec.structs.replace(template, payload=payload, array=member, at_most=at_most, idempotency_key=member)


def _jsonable(field: str, variables: dict[str, object]) -> dict[str, object]:
    """Plain JSON values, checked before anything is sent: one bad item of many must not leave half of them running."""
    import json

    try:
        # msgspec would turn NaN, dates and bytes into something else in silence.
        json.dumps(variables, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise bad_input(
            f"{field}: cannot be sent as JSON: {error}", field=field, advice="pass lists and numbers, or save a file"
        ) from error
    if not all(isinstance(name, str) and name.isidentifier() for name in variables):
        raise bad_input(f"{field}: {list(variables)!r} are not all names of Python variables", field=field)
    return variables
