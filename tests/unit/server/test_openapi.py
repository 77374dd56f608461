"""The description: it says what is served, and its rules are those that the server keeps."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from penstock.domain import cloud
from penstock.domain.nouns import Role
from penstock.server.app import all_routes
from penstock.server.openapi import RULES, page
from penstock.wire import api, capacity, inventory
from penstock.wire.problems import KINDS
from tests.unit.server.house import JOB, House

PAGE: Any = msgspec.json.decode(page(all_routes(), "1.2.3"))


def operations() -> dict[str, Any]:
    return {
        f"{method.upper()} {path}": operation
        for path, methods in PAGE["paths"].items()
        for method, operation in methods.items()
    }


def test_it_is_served_to_everybody(house: House) -> None:
    seen = house.call("GET", "/v1/openapi.json", None).json
    assert seen["openapi"] == "3.1.0"
    assert seen["paths"] == PAGE["paths"]


def test_every_route_is_in_it_once() -> None:
    named = [f"{route.method} {route.path.replace(':path', '')}" for route in all_routes()]
    assert sorted(named) == sorted(operations())
    ids = [operation["operationId"] for operation in operations().values()]
    assert len(set(ids)) == len(ids)
    assert all(operation["summary"] and operation["tags"] for operation in operations().values())


def test_every_reference_leads_somewhere() -> None:
    def references(part: Any) -> Any:
        if isinstance(part, dict):
            if "$ref" in part:
                yield part["$ref"]
            for value in part.values():
                yield from references(value)
        elif isinstance(part, list):
            for value in part:
                yield from references(value)

    found = set(references(PAGE))
    assert "#/components/schemas/Problem" in found
    for reference in found:
        part = PAGE
        for step in reference.removeprefix("#/").split("/"):
            part = part[step]


def test_security_is_as_the_table_says() -> None:
    for route in all_routes():
        operation = operations()[f"{route.method} {route.path.replace(':path', '')}"]
        named = {scheme for choice in operation["security"] for scheme in choice}
        wanted = {"agent"} if route.role is Role.AGENT else {"user"}
        if route.joins:
            wanted = {"joining"}
        opened = route.role is None and not route.joins
        assert named == (set() if opened else wanted | ({"agent"} if route.agents else set()))
        assert ("401" in operation["responses"]) == (not opened or route.takes is not None)


def test_problems_are_problems_everywhere() -> None:
    for name, operation in operations().items():
        for status, response in operation["responses"].items():
            if int(status) >= 400:
                code = response["$ref"].rpartition("/")[2]
                assert KINDS[code].status == int(status), name
    problem = PAGE["components"]["responses"]["unavailable"]
    assert list(problem["content"]) == ["application/problem+json"]
    assert "Retry-After" in problem["headers"]


def test_streams_are_described_as_streams() -> None:
    for path in ("/v1/events", "/v1/jobs/{id}/events"):
        content = operations()[f"GET {path}"]["responses"]["200"]["content"]
        assert set(content) == {"application/json", "text/event-stream"}
    logs = operations()["GET /v1/jobs/{id}/logs"]["responses"]["200"]["content"]
    assert set(logs) == {"application/octet-stream", "text/event-stream"}


def test_unknown_fields_and_tags_are_described() -> None:
    schemas = PAGE["components"]["schemas"]
    assert schemas["JobRequest"]["additionalProperties"] is False
    assert schemas["JobRequest"]["properties"]["payload"]["discriminator"]["propertyName"] == "type"


def test_rules_name_fields_that_there_are() -> None:
    for struct, rules in RULES.items():
        shape = next(getattr(place, struct) for place in (api, capacity, cloud, inventory) if hasattr(place, struct))
        fields = {field.encode_name for field in msgspec.structs.fields(shape)}
        assert set(rules) <= fields, struct


def numbers() -> list[tuple[str, str, float, float]]:
    found = []
    for struct, rules in RULES.items():
        for field, rule in rules.items():
            if "maximum" in rule:
                schema = PAGE["components"]["schemas"][struct]["properties"][field]
                schema = next((one for one in schema.get("anyOf", ()) if one.get("type") != "null"), schema)
                found.append((struct, field, schema["minimum"], schema["maximum"]))
    return found


@pytest.mark.parametrize(("struct", "field", "least", "most"), numbers(), ids=str)
def test_the_server_keeps_the_numbers_it_describes(
    house: House, struct: str, field: str, least: float, most: float
) -> None:
    """At each bound a value is not called bad input; just beyond, it is, by the name of the field."""
    house.call("PUT", "/v1/queues/lab", "admin", json={})
    id = house.submit()
    method, path, whole = {
        "JobRequest": ("POST", "/v1/jobs", JOB),
        "EditRequest": ("PATCH", f"/v1/jobs/{id}", {}),
        "PoolRequest": ("PUT", "/v1/pools/p", {"accelerator": "v5e-8"}),
        "QueueRequest": ("PUT", "/v1/queues/q", {}),
        "CloudWish": ("PUT", "/v1/pools/p", {"accelerator": "v5e-8"}),
    }[struct]
    inner = struct == "CloudWish"  # a part of a pool's request, where refusals name both

    def asked(value: float) -> dict[str, Any]:
        return {**whole, "cloud": {field: value}} if inner else {**whole, field: value}

    for value in (least, most):
        assert house.call(method, path, "admin", json=asked(value)).status in (200, 201, 409)
    step = 0.0005 if least == 0.001 else 1
    for value in (least - step, most + 1):
        said = house.refused(400, method, path, "admin", json=asked(value))
        assert said["field"] == (f"cloud.{field}" if inner else field)
