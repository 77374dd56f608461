"""The shipped security rules on Google's emulator: every kind of request, by every kind of caller, allowed or refused.

Each row is one REST request with the (unsigned) token of its caller against documents that the owner, as the bridge
would, put there before. What is asserted is Firestore's own verdict and that a refused write has changed nothing.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from penstock.firestore.fields import OUT
from tests.process.firestore_people import OWNER, RULES, RuledEmulator, from_fields, to_fields, token
from tests.tidy.tracked import ROOT

ALLOWED, REFUSED = 200, 403

CALLERS: dict[str, dict[str, object] | None] = {
    "ada": {"penstock": True, "email": "ada@example.com", "email_verified": True},
    "bob": {"penstock": True, "email": "bob@example.com", "email_verified": True},
    "stranger": {"email": "stranger@example.com", "email_verified": True},  # signed in, never let in
    "claims_text": {"penstock": "true"},
    "liar": {"penstock": True, "email": "ada@example.com", "email_verified": False},
    "bare": {"penstock": True},  # a uid and no address
    "nobody": None,  # not signed in
}
GOOD = {"code": "result = 1", "status": "pending", "metadata": {"submitted_by": "ada@example.com"}}
FULL = {
    **GOOD, "challenge_number": 7, "timeout": 60, "priority": -5, "accelerator": "v5e-8", "env": {"A": "b"},
    "notify": ["lab"],
}  # fmt: skip

BY_BRIDGE = sorted(set(OUT) - {"status"})


def documented(heading: str) -> set[str]:
    """Names of fields in the table under this heading of the reference, without those inside `metadata`."""
    text = (ROOT / "docs" / "reference" / "firestore.md").read_text().partition(f"## {heading}\n")[2]
    columns = re.findall(r"^\|([^|]+)\|", text.partition("\n## ")[0], re.MULTILINE)
    return {name for column in columns for name in re.findall(r"`(\w+)`", column)}


def good(**changes: Any) -> dict[str, Any]:
    return {**copy.deepcopy(GOOD), **changes}


def without(field: str) -> dict[str, Any]:
    return {name: value for name, value in GOOD.items() if name != field}


class Desk:
    """One project under the shipped rules."""

    _numbers = count()

    def __init__(self, emulator: RuledEmulator) -> None:
        self.emulator = emulator
        self.project = f"demo-rules-{next(self._numbers)}"
        self.documents = f"projects/{self.project}/databases/(default)/documents"
        emulator.load_rules(self.project, RULES.read_text())

    def bearer(self, caller: str) -> str | None:
        claims = CALLERS[caller]
        return None if claims is None else token(self.project, caller, **claims)

    def commit(self, caller: str, write: dict[str, Any]) -> int:
        bearer = OWNER if caller == OWNER else self.bearer(caller)
        status, _ = self.emulator.request("POST", f"/v1/{self.documents}:commit", {"writes": [write]}, bearer)
        return status

    def create(self, caller: str, values: dict[str, Any], path: str = "tpu_jobs/new", created_at: str = "now") -> int:
        write: dict[str, Any] = {
            "update": {"name": f"{self.documents}/{path}", "fields": to_fields(values)},
            "currentDocument": {"exists": False},
        }
        if created_at == "now":
            write["updateTransforms"] = [{"fieldPath": "created_at", "setToServerValue": "REQUEST_TIME"}]
        elif created_at:
            write["update"]["fields"]["created_at"] = {"timestampValue": created_at}
        return self.commit(caller, write)

    def change(self, caller: str, values: dict[str, Any], path: str = "tpu_jobs/there", mask: str = "") -> int:
        write = {
            "update": {"name": f"{self.documents}/{path}", "fields": to_fields(values)},
            "updateMask": {"fieldPaths": [*values, *mask.split()]},
            "currentDocument": {"exists": True},
        }
        return self.commit(caller, write)

    def put(self, status: str = "pending", **changes: Any) -> None:
        """A document as submitters and the bridge have left it."""
        assert self.create(OWNER, good(status=status, **changes), "tpu_jobs/there") == ALLOWED

    def read(self, caller: str, path: str = "tpu_jobs/there") -> int:
        return self.emulator.request("GET", f"/v1/{self.documents}/{path}", bearer=self.bearer(caller))[0]

    def now(self, path: str = "tpu_jobs/there") -> dict[str, Any] | None:
        status, answer = self.emulator.request("GET", f"/v1/{self.documents}/{path}", bearer=OWNER)
        return None if status == 404 else from_fields(answer["fields"])

    def ask(self, caller: str, field: str, value: str) -> tuple[int, int]:
        """The verdict on a query and how many documents it gave."""
        where = {"fieldFilter": {"field": {"fieldPath": field}, "op": "EQUAL", "value": {"stringValue": value}}}
        newest = [{"field": {"fieldPath": "created_at"}, "direction": "DESCENDING"}]
        asked = {"from": [{"collectionId": "tpu_jobs"}], "where": where, "orderBy": newest, "limit": 10}
        if not field:
            del asked["where"]
        path = f"/v1/{self.documents}:runQuery"
        status, answer = self.emulator.request("POST", path, {"structuredQuery": asked}, self.bearer(caller))
        return status, sum("document" in each for each in answer) if status == ALLOWED else 0


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RuledEmulator]:
    emulator = RuledEmulator(tmp_path_factory.mktemp("emulator"))
    yield emulator
    emulator.stop()


@pytest.fixture
def desk(emulator: RuledEmulator) -> Desk:
    return Desk(emulator)


CREATES: list[tuple[str, dict[str, Any], int]] = [
    ("ada", GOOD, ALLOWED),
    ("ada", FULL, ALLOWED),
    ("ada", good(metadata={"submitted_by": "ada"}), ALLOWED),
    ("ada", good(metadata={"submitted_by": "ada", "course": "cs101"}), ALLOWED),
    ("ada", good(challenge_number=None), ALLOWED),
    ("ada", good(timeout=0.5 + 1), ALLOWED),
    ("ada", good(code="x" * 200_000), ALLOWED),
    ("bare", good(metadata={"submitted_by": "bare"}), ALLOWED),
    # who
    ("nobody", GOOD, REFUSED),
    ("stranger", good(metadata={"submitted_by": "stranger"}), REFUSED),
    ("claims_text", good(metadata={"submitted_by": "claims_text"}), REFUSED),
    # as whom
    ("bob", GOOD, REFUSED),
    ("ada", good(metadata={"submitted_by": "bob"}), REFUSED),
    ("liar", GOOD, REFUSED),
    ("liar", good(metadata={"submitted_by": "liar"}), ALLOWED),
    ("bare", GOOD, REFUSED),
    ("ada", good(metadata={}), REFUSED),
    ("ada", good(metadata="ada"), REFUSED),
    ("ada", good(metadata={"submitted_by": ["ada"]}), REFUSED),
    ("ada", without("metadata"), REFUSED),
    # what
    ("ada", without("code"), REFUSED),
    ("ada", good(code=""), REFUSED),
    ("ada", good(code=7), REFUSED),
    ("ada", good(code=["result = 1"]), REFUSED),
    ("ada", good(code="x" * 200_001), REFUSED),
    ("ada", without("status"), REFUSED),
    *[("ada", good(status=status), REFUSED)
      for status in ("scheduled", "running", "completed", "failed", "cancel_requested", "", 1)],
    ("ada", good(challenge_number="7"), REFUSED),
    ("ada", good(challenge_number=7.5), REFUSED),
    *[("ada", good(timeout=timeout), REFUSED) for timeout in (0, -1, 604_801, "300", None)],
    *[("ada", good(priority=priority), REFUSED) for priority in (1001, -1001, 0.5, "high")],
    ("ada", good(accelerator=["v5e-8"]), REFUSED),
    ("ada", good(accelerator="v" * 65), REFUSED),
    ("ada", good(env=["A"]), REFUSED),
    ("ada", good(env={f"N{number}": "" for number in range(101)}), REFUSED),
    ("ada", good(notify="lab"), REFUSED),
    ("ada", good(notify=["lab"] * 9), REFUSED),
    ("ada", good(metadata={"submitted_by": "ada", **{f"n{number}": 1 for number in range(20)}}), REFUSED),
    ("ada", good(anything="else"), REFUSED),
    *[("ada", good(**{field: "mine"}), REFUSED) for field in BY_BRIDGE],
]  # fmt: skip


def test_every_field_there_is_stands_in_the_tables() -> None:
    assert FULL.keys() | {"created_at"} == documented("Fields a client writes"), "FULL has all that a client may write"
    assert set(OUT) == documented("Fields the bridge writes")


def _name(value: object) -> str | None:
    return value if isinstance(value, str) else None


@pytest.mark.parametrize(("caller", "values", "verdict"), CREATES, ids=_name)
def test_creating(desk: Desk, caller: str, values: dict[str, Any], verdict: int) -> None:
    assert desk.create(caller, values) == verdict
    assert (desk.now("tpu_jobs/new") is not None) == (verdict == ALLOWED)


@pytest.mark.parametrize("created_at", ["", "2020-01-01T00:00:00Z", "2999-01-01T00:00:00Z"])
def test_the_time_of_creation_is_the_servers(desk: Desk, created_at: str) -> None:
    assert desk.create("ada", GOOD, created_at=created_at) == REFUSED


@pytest.mark.parametrize("path", ["other/new", "tpu_jobs/there/notes/new", "tpu_jobs_old/new", "users/ada"])
def test_nothing_beside_the_collection_is_open(desk: Desk, path: str) -> None:
    assert desk.create("ada", GOOD, path) == REFUSED
    assert desk.create(OWNER, GOOD, path) == ALLOWED
    assert desk.read("ada", path) == REFUSED


def test_creating_over_a_document_does_not_replace_it(desk: Desk) -> None:
    desk.put("completed")
    assert desk.create("ada", GOOD, "tpu_jobs/there") == 409
    whole = {"update": {"name": f"{desk.documents}/tpu_jobs/there", "fields": to_fields(GOOD)}}
    assert desk.commit("ada", whole) == REFUSED
    assert (desk.now() or {})["status"] == "completed"


@pytest.mark.parametrize(
    ("caller", "verdict"),
    [
        ("ada", ALLOWED),
        ("bob", REFUSED),
        ("stranger", REFUSED),
        ("liar", REFUSED),
        ("bare", REFUSED),
        ("nobody", REFUSED),
    ],
)
def test_reading(desk: Desk, caller: str, verdict: int) -> None:
    desk.put("completed", result="secret")
    assert desk.read(caller) == verdict


@pytest.mark.parametrize(
    ("caller", "field", "value", "answer"),
    [
        ("ada", "metadata.submitted_by", "ada@example.com", (ALLOWED, 1)),
        ("ada", "metadata.submitted_by", "ada", (ALLOWED, 0)),
        ("ada", "metadata.submitted_by", "bob@example.com", (REFUSED, 0)),
        ("bob", "metadata.submitted_by", "ada@example.com", (REFUSED, 0)),
        ("liar", "metadata.submitted_by", "ada@example.com", (REFUSED, 0)),
        ("stranger", "metadata.submitted_by", "stranger@example.com", (REFUSED, 0)),
        ("nobody", "metadata.submitted_by", "ada@example.com", (REFUSED, 0)),
        ("ada", "status", "pending", (REFUSED, 0)),
        ("ada", "", "", (REFUSED, 0)),
    ],
)
def test_asking(desk: Desk, caller: str, field: str, value: str, answer: tuple[int, int]) -> None:
    desk.put()
    assert desk.ask(caller, field, value) == answer


@pytest.mark.parametrize("caller", [caller for caller in CALLERS if caller != "ada"])
def test_only_the_submitter_cancels(desk: Desk, caller: str) -> None:
    desk.put("running")
    assert desk.change(caller, {"status": "cancel_requested"}) == REFUSED
    assert desk.change("ada", {"status": "cancel_requested"}) == ALLOWED
    assert (desk.now() or {})["status"] == "cancel_requested"


def test_who_is_no_longer_let_in_can_do_nothing_with_their_own(desk: Desk) -> None:
    desk.put("running", metadata={"submitted_by": "stranger"})
    assert desk.read("stranger") == REFUSED
    assert desk.change("stranger", {"status": "cancel_requested"}) == REFUSED


@pytest.mark.parametrize("status", ["pending", "scheduled", "running"])
def test_what_lives_can_be_cancelled_and_nothing_else(desk: Desk, status: str) -> None:
    desk.put(status, updated_at="then")
    before = desk.now()
    for wanted in ("pending", "scheduled", "running", "completed", "failed", "anything"):
        if wanted != status:  # writing what is there already changes nothing
            assert desk.change("ada", {"status": wanted}) == REFUSED, wanted
    assert desk.change("ada", {"status": "cancel_requested", "code": "result = 2"}) == REFUSED
    for field in BY_BRIDGE:
        assert desk.change("ada", {"status": "cancel_requested", field: "mine"}) == REFUSED, field
        assert desk.change("ada", {field: "mine"}) == REFUSED, field
    assert desk.change("ada", {"status": "cancel_requested"}, mask="updated_at") == REFUSED, "taking a field away"
    assert desk.change("ada", {"status": "cancel_requested", "metadata": {"submitted_by": "bob"}}) == REFUSED
    assert desk.change("ada", {"priority": 1000}) == REFUSED
    assert desk.now() == before
    assert desk.change("ada", {"status": "cancel_requested"}) == ALLOWED


@pytest.mark.parametrize("status", ["completed", "failed", "cancel_requested"])
def test_what_has_ended_or_is_being_cancelled_stays(desk: Desk, status: str) -> None:
    desk.put(status, result="1")
    for wanted in {"cancel_requested", "pending", "running"} - {status}:
        assert desk.change("ada", {"status": wanted}) == REFUSED, wanted
    assert desk.change("ada", {"result": "2"}) == REFUSED


@pytest.mark.parametrize("caller", sorted(CALLERS))
def test_no_client_deletes(desk: Desk, caller: str) -> None:
    desk.put()
    assert desk.commit(caller, {"delete": f"{desk.documents}/tpu_jobs/there"}) == REFUSED


def test_the_bridge_is_above_the_rules(desk: Desk) -> None:
    """With server credentials; on the emulator that is the owner's token."""
    desk.put()
    for status in ("scheduled", "running", "completed"):
        assert desk.change(OWNER, {"status": status, "attempt": 1}) == ALLOWED
    assert (desk.now() or {})["status"] == "completed"
