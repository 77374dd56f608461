"""Requests to Google's Firestore emulator as different people would make them, and documents as its REST writes them.

The tests of rules and of the example page use it. Everything is in the emulator's memory and rules are per project, so
each test takes a project of its own in place of an emulator of its own. It must not judge any answer.
"""

from __future__ import annotations

import base64
import http.client
import json
import time
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tests.process.firestore_house import Emulator, require_emulator
from tests.tidy.tracked import ROOT

RULES = ROOT / "infra" / "firestore" / "firestore.rules"
OWNER = "owner"  #: a token that rules do not apply to, as they do not apply to server credentials
ANSWER_S = 30.0


def token(project: str, uid: str, **claims: object) -> str:
    """What a signed-in person's browser sends; the emulator takes it unsigned."""
    now = int(time.time())  # noqa: TID251 (the emulator compares it with its own clock)
    body = {
        "iss": f"https://securetoken.google.com/{project}", "aud": project, "iat": now, "exp": now + 3600,
        "auth_time": now, "sub": uid, "user_id": uid, **claims,
    }  # fmt: skip
    parts = (json.dumps(part).encode() for part in ({"alg": "none", "typ": "JWT"}, body))
    return ".".join(base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in parts) + "."


class RuledEmulator(Emulator):
    """An emulator whose answers are read, and whose projects can be put under rules."""

    def __init__(self, folder: Path) -> None:
        require_emulator()
        super().__init__(folder)
        self.start()

    def load_rules(self, project: str, text: str) -> None:
        body = {"rules": {"files": [{"name": "firestore.rules", "content": text}]}}
        status, answer = self.request("PUT", f"/emulator/v1/projects/{project}:securityRules", body)
        assert status == 200, answer

    def request(self, method: str, path: str, body: object = None, bearer: str | None = None) -> tuple[int, Any]:
        """The verdict and the answer, to someone with this token or to nobody in particular."""
        headers = {"content-type": "application/json"}
        if bearer is not None:
            headers["authorization"] = f"Bearer {bearer}"
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_S)) as connection:
            sent = None if body is None else json.dumps(body).encode()
            connection.request(method, quote(path, safe="/:?=&()"), sent, headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read() or b"null")


# --- documents as Firestore's REST writes them ---
def to_fields(values: dict[str, Any]) -> dict[str, Any]:
    return {name: to_value(value) for name, value in values.items()}


def to_value(value: Any) -> dict[str, Any]:
    match value:
        case None:
            return {"nullValue": None}
        case bool():
            return {"booleanValue": value}
        case int():
            return {"integerValue": str(value)}
        case float():
            return {"doubleValue": value}
        case str():
            return {"stringValue": value}
        case list():
            return {"arrayValue": {"values": [to_value(each) for each in value]}}
        case dict():
            return {"mapValue": {"fields": to_fields(value)}}
        case _:
            raise AssertionError(f"no Firestore value is made of {value!r}")


def from_fields(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: from_value(value) for name, value in fields.items()}


def from_value(value: dict[str, Any]) -> Any:
    ((kind, inner),) = value.items()
    match kind:
        case "integerValue":
            return int(inner)
        case "arrayValue":
            return [from_value(each) for each in inner.get("values", [])]
        case "mapValue":
            return from_fields(inner.get("fields", {}))
        case _:
            return inner
