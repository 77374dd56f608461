"""The API described as OpenAPI 3.1, from the same table that is served and the same structs that are decoded.

`server.app` makes the page once. Types come from the structs; the rules that `domain.admission` and the handlers add to
them are stated here from the same limits, so that a client knows before it asks. It must not describe what is not in
the table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from penstock.domain import cloud, cloud_admission, limits
from penstock.domain.nouns import Role
from penstock.domain.policies import PRESETS
from penstock.server.routing import ID_PATTERN, PATH_PARAMETERS, Parameter, Route
from penstock.server.secret_files import NAME_PATTERN
from penstock.server.submission import ARRAY_PATTERN, ENV_PATTERN
from penstock.wire.problems import KINDS, Problem

Schema = dict[str, Any]

#: Printable text of a name's length. JSON Schema cannot say "printable", so it is a format.
_NAME: Final[Schema] = {"format": "printable", "minLength": 1, "maxLength": limits.NAME_CHARACTERS_MAX}
_NO_NUL: Final = "^[^\\u0000]*$"
_ACCELERATORS: Final[Schema] = {
    "maxItems": limits.CHOICES_MAX,
    "items": {"type": "string", "format": "accelerator", "examples": ["v5e-8"]},
}
_TAGS: Final[Schema] = {"maxItems": limits.TAGS_MAX, "items": {"type": "string", **_NAME}}
_PRIORITY: Final[Schema] = {"minimum": -limits.PRIORITY_MAX, "maximum": limits.PRIORITY_MAX}
_OUTPUT: Final[Schema] = {"type": "string", "format": "relative-path", "minLength": 1, "maxLength": 128}
_WORD_OR_NONE: Final[Schema] = {"pattern": f"^$|{cloud_admission.WORD_PATTERN}"}
_CHIPS: Final[Schema] = {"minimum": 0, "maximum": 10_000_000}

#: Rules beyond the types, by struct and field; tests hold them against what the server refuses.
RULES: Final[Mapping[str, Mapping[str, Schema]]] = {
    "JobRequest": {
        "on": _ACCELERATORS,
        "pool": _NAME,
        "slice": _NAME,
        "zones": {"maxItems": limits.CHOICES_MAX, "items": {"type": "string", **_NAME}},
        "slices": {"maximum": limits.GANG_SLICES_MAX},
        "memory_bytes": {"minimum": 1 << 20, "maximum": limits.MEMORY_BYTES_MAX},
        "team": _NAME,
        "user": _NAME,
        "queue": _NAME,
        "name": {**_NAME, "minLength": 0},
        "replicas_min": {"maximum": limits.REPLICAS_MAX},
        "replicas_max": {"maximum": limits.REPLICAS_MAX},
        "rule": {"enum": sorted(PRESETS)},
        "max_retries": {"minimum": 0, "maximum": 10_000},
        "priority": _PRIORITY,
        "timeout_s": {"minimum": 1, "maximum": limits.TIMEOUT_S_MAX},
        "expected_s": {"minimum": 0, "maximum": limits.TIMEOUT_S_MAX},
        "after": {"maxItems": limits.AFTER_MAX, "items": {"type": "string", "pattern": ID_PATTERN}},
        "tags": _TAGS,
        "note": {"maxLength": limits.NOTE_CHARACTERS_MAX},
        "env": {
            "propertyNames": {"pattern": ENV_PATTERN},
            "additionalProperties": {"type": "string", "pattern": _NO_NUL},
        },
        "secrets": {"maxItems": limits.CHOICES_MAX, "items": {"type": "string", "pattern": NAME_PATTERN}},
        "outputs": {"maxItems": limits.OUTPUTS_MAX, "uniqueItems": True, "items": _OUTPUT},
        "idempotency_key": _NAME,
        "array": {"pattern": ARRAY_PATTERN},
        "at_most": {"maximum": limits.ARRAY_MEMBERS_MAX},
    },
    "SnippetRequest": {
        "code": {"maxLength": limits.CODE_BYTES_MAX},
        "variables": {"propertyNames": {"format": "identifier", "pattern": "^[A-Za-z_][A-Za-z0-9_]*$"}},
        "setup": {"maxLength": limits.SETUP_CHARACTERS_MAX, "pattern": _NO_NUL},
    },
    "CommandRequest": {
        "argv": {"items": {"type": "string", "pattern": _NO_NUL}},
        "setup": {"maxLength": limits.SETUP_CHARACTERS_MAX, "pattern": _NO_NUL},
    },
    "AgainRequest": {"on": _ACCELERATORS, "idempotency_key": _NAME},
    "EditRequest": {"priority": _PRIORITY, "tags": _TAGS},
    "PoolRequest": {
        "accelerator": {"format": "accelerator", "examples": ["v5e-8"]},
        "zones": {"minItems": 1, "uniqueItems": True, "items": {"type": "string", **_NAME}},
        "team": _NAME,
        "min": {"minimum": 0, "maximum": limits.POOL_SLICES_MAX},
        "max": {"minimum": 0, "maximum": limits.POOL_SLICES_MAX},
        "per_zone": {"minimum": 0, "maximum": limits.POOL_SLICES_MAX},
        "race": {"minimum": 1, "maximum": limits.RACE_ZONES_MAX},
        "idle_s": {"minimum": 0, "maximum": 365 * 24 * 3600},
    },
    "CloudWish": {
        "kind": {"enum": list(cloud.KINDS)},
        "wait_s": {"minimum": cloud_admission.WAIT_S[0], "maximum": cloud_admission.WAIT_S[1]},
        "life_s": {"minimum": cloud_admission.LIFE_S[0], "maximum": cloud_admission.LIFE_S[1]},
        **dict.fromkeys(("reservation", "runtime_version", "network", "subnetwork"), _WORD_OR_NONE),
        "service_account": _WORD_OR_NONE,
        "tags": {
            "maxItems": cloud_admission.LIST_MAX,
            "items": {"type": "string", "pattern": cloud_admission.TAG_PATTERN},
        },
        "disks": {
            "maxItems": cloud_admission.LIST_MAX,
            "items": {"type": "string", "pattern": cloud_admission.WORD_PATTERN},
        },
        "mounts": {"maxItems": cloud_admission.LIST_MAX},
    },
    "Mount": {
        "kind": {"enum": list(cloud.MOUNT_KINDS)},
        "source": {"pattern": cloud_admission.WORD_PATTERN},
        "path": {"pattern": cloud_admission.PATH_PATTERN},
    },
    "ReserveRequest": {"note": {**_NAME, "minLength": 0}, "user": _NAME},
    "AdoptRequest": {"name": _NAME, "zone": _NAME},
    "QueueRequest": {
        "team": _NAME,
        "weight": {"minimum": 0.001, "maximum": 1e6},
        "quota_chips": _CHIPS,
        "borrow_chips": _CHIPS,
        "band": {"minimum": -100, "maximum": 100},
    },
}

#: One event of a stream; `data` is JSON.
_SENT: Final[Schema] = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "event": {"type": "string"},
        "data": {"type": "string", "contentMediaType": "application/json"},
        "retry": {"type": "integer"},
    },
    "required": ["event", "data"],
}

#: Which refusals a route can give beside those that all give.
_ALWAYS: Final = ("bad_input", "fault", "unavailable")
_TEXTS: Final = {
    "jobs": "Jobs: submit, look, change.",
    "events": "What happened, in order.",
    "pools": "Wishes for slices.",
    "queues": "Where jobs wait.",
    "slices": "Capacity that is there.",
    "secrets": "Names whose values only a job's host sees.",
    "blobs": "Content of snapshots.",
    "snapshots": "Frozen working directories.",
    "agent": "What hosts say and ask.",
    "server": "The server itself.",
}


def page(routes: Sequence[Route], version: str) -> bytes:
    """The whole description, as JSON."""
    structs = [route.takes for route in routes if route.takes not in (None, bytes)]
    structs += [route.gives for route in routes if isinstance(route.gives, type)]
    kinds = list(dict.fromkeys([*structs, Problem]))
    _, components = msgspec.json.schema_components(kinds, schema_hook=_any, ref_template="#/components/schemas/{name}")
    for name, rules in RULES.items():
        for field, rule in rules.items():
            if name in components:
                _add_rule(components[name]["properties"][field], rule)
    paths: dict[str, Schema] = {}
    for route in routes:
        paths.setdefault(_plain(route.path), {})[route.method.lower()] = _operation(route)
    description = {
        "openapi": "3.1.0",
        "info": {"title": "Penstock", "version": version, "description": "Jobs on accelerators that come and go."},
        "tags": [{"name": name, "description": _TEXTS[name]} for name in sorted({_tag(route) for route in routes})],
        "paths": paths,
        "components": {
            "schemas": components,
            "responses": {code: _problem_response(code) for code in KINDS},
            "securitySchemes": {
                "user": {"type": "http", "scheme": "bearer", "description": "A user's token."},
                "agent": {"type": "http", "scheme": "bearer", "description": "The credential a host got by joining."},
                "joining": {"type": "http", "scheme": "bearer", "description": "The join token of a host's slice."},
            },
        },
    }
    return msgspec.json.encode(description)


def _any(shape: type) -> Schema:
    """Types msgspec has no schema for; by its contract NotImplementedError lets it name the type it refuses."""
    if shape is object:
        return {"description": "Any JSON value."}
    raise NotImplementedError(shape)


def _add_rule(schema: Schema, rule: Schema) -> None:
    """Put a rule where the type it is about stands: beside null in a choice, or in the schema itself."""
    for choice in schema.get("anyOf", ()):
        if choice.get("type") not in (None, "null"):
            choice.update(rule)
            return
    schema.update(rule)


def _plain(path: str) -> str:
    return path.replace(":path}", "}")


def _tag(route: Route) -> str:
    parts = route.path.split("/")
    word = parts[2] if len(parts) > 2 and parts[1] == "v1" else "server"
    return word if word in _TEXTS else "server"


def _operation(route: Route) -> Schema:
    name = route.handler.__name__
    text = " ".join((route.handler.__doc__ or "").split())
    parameters = [*_path_parameters(route)]
    parameters += [_parameter("query", one) for one in route.query]
    parameters += [_parameter("header", one) for one in route.headers]
    operation: Schema = {
        "operationId": name,
        "tags": [_tag(route)],
        "summary": text.split(". ")[0].rstrip("."),
        "description": text,
        "responses": _responses(route),
        "security": _security(route),
    }
    if parameters:
        operation["parameters"] = parameters
    if route.takes is not None:
        operation["requestBody"] = {"required": not route.body_optional, "content": _content(route.takes)}
    return operation


def _security(route: Route) -> list[Schema]:
    if route.joins:
        return [{"joining": []}]
    if route.role is None:
        return []
    if route.role is Role.AGENT:
        return [{"agent": []}]
    return [{"user": []}, {"agent": []}] if route.agents else [{"user": []}]


def _path_parameters(route: Route) -> Iterable[Schema]:
    rules = PATH_PARAMETERS | {parameter.name: parameter for parameter in route.path_rules}
    for name in re.findall(r"\{(\w+)(?::path)?\}", route.path):
        yield _parameter("path", rules[name]._replace(required=True))


def _parameter(where: str, parameter: Parameter) -> Schema:
    schema: Schema = {"type": parameter.kind}
    if parameter.kind == "string":
        schema["maxLength"] = parameter.longest
        if where == "path":
            schema["minLength"] = 1
        if parameter.shape is not None:
            schema["format"] = parameter.shape
        if parameter.pattern is not None:
            schema["pattern"] = parameter.pattern
    if parameter.choices:
        schema["enum"] = list(parameter.choices)
    if parameter.least is not None:
        schema["minimum"] = parameter.least
    if parameter.most is not None:
        schema["maximum"] = parameter.most
    if parameter.kind == "integer" and parameter.most is None:
        schema["maximum"] = 10**18 - 1
    return {
        "name": parameter.name,
        "in": where,
        "required": parameter.required,
        "description": parameter.text,
        "schema": schema,
    }


def _content(shape: type | str) -> Schema:
    if shape is bytes or shape == "bytes":
        return {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    if shape == "events":
        return {"text/event-stream": {"schema": _SENT}}
    if isinstance(shape, str):
        return {"application/json": {"schema": {"type": "object"}}}
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{shape.__name__}"}}}


def _responses(route: Route) -> Schema:
    good: Schema = {"description": "Done."}
    if route.gives is not None:
        good["content"] = _content(route.gives) | (_content("events") if route.streams else {})
    codes = [*_ALWAYS]
    if route.role is not None or route.takes is not None or route.joins:
        # An open route that takes something looks for a token in it.
        codes += ["unauthenticated", "forbidden"]
    if "{" in route.path or route.takes is not None:
        codes += ["not_found", "conflict"]
    if "{attempt}" in route.path:
        codes.append("gone")
    if route.takes is not None:
        codes += ["too_large", "unsupported_media_type"]
    responses: Schema = {str(route.status): good}
    for code in codes:
        responses[str(KINDS[code].status)] = {"$ref": f"#/components/responses/{code}"}
    return responses


def _problem_response(code: str) -> Schema:
    kind = KINDS[code]
    response: Schema = {
        "description": f"{kind.title[0].upper()}{kind.title[1:]}.",
        "content": {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}},
    }
    if kind.status == 503:
        response["headers"] = {"Retry-After": {"description": "Seconds to wait.", "schema": {"type": "integer"}}}
    return response
