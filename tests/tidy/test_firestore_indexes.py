"""`infra/firestore/firestore.indexes.json` against every query that is made: none without its index, none for nothing.

The emulator answers any query; Firestore itself refuses one that has no index. So the shapes are taken from where they
are made (the bridge's requests, caught before they leave, and the text of the example page), what Firestore would ask
for is worked out from its published rules, and that is compared with the file.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import pytest

from penstock.firestore.database import Database, Place, Trouble
from tests.tidy.tracked import ROOT

COLLECTION = "tpu_jobs"
NAME = "__name__"
EQUALITIES = frozenset({"==", "in", "array-contains"})  # served by merging the indexes that every field has
INDEXES = json.loads((ROOT / "infra" / "firestore" / "firestore.indexes.json").read_text())
#: Large, and never asked for: writing them must not cost index entries.
EXEMPT = {"code", "env", "error", "result", "result_json"}


class Shape(NamedTuple):
    """What decides which index a query needs; values and limits do not."""

    filters: tuple[tuple[str, str], ...]  #: field, operator
    order: tuple[tuple[str, str], ...]  #: field, ASCENDING or DESCENDING

    @property
    def fields(self) -> set[str]:
        return {field for field, _ in (*self.filters, *self.order)} - {NAME}


Index = tuple[tuple[str, str], ...]


def index_for(shape: Shape) -> Index | None:
    """The composite index without which Firestore refuses the query, or None if single-field indexes serve it."""
    equal = sorted({field for field, operator in shape.filters if operator in EQUALITIES})
    ranged = {field for field, operator in shape.filters if operator not in EQUALITIES}
    order = [(field, way) for field, way in shape.order if field != NAME]
    order += [(field, "ASCENDING") for field in sorted(ranged - {field for field, _ in order})]
    if not order or (not equal and len(order) == 1):
        return None
    return (*((field, "ASCENDING") for field in equal), *order)


@pytest.mark.parametrize(
    ("filters", "order", "index"),
    [
        ([], [("a", "DESCENDING")], None),
        ([("a", "==")], [], None),
        ([("a", "=="), ("b", "in")], [(NAME, "ASCENDING")], None),
        ([("a", ">")], [], None),
        ([("a", ">")], [("a", "DESCENDING")], None),
        ([("a", "==")], [("b", "DESCENDING")], (("a", "ASCENDING"), ("b", "DESCENDING"))),
        ([("a", "=="), ("b", "<")], [], (("a", "ASCENDING"), ("b", "ASCENDING"))),
        ([("c", "=="), ("a", "==")], [("b", "ASCENDING")], tuple((name, "ASCENDING") for name in "acb")),
        ([], [("a", "ASCENDING"), ("b", "DESCENDING")], (("a", "ASCENDING"), ("b", "DESCENDING"))),
    ],
)
def test_the_rules_as_firestore_publishes_them(
    filters: list[tuple[str, str]], order: list[tuple[str, str]], index: Index | None
) -> None:
    assert index_for(Shape(tuple(filters), tuple(order))) == index


# --- where queries are made ---
class Caught:
    """Stands in for the calls of a database that carry queries, and keeps the queries."""

    def __init__(self) -> None:
        self.queries: list[Any] = []

    def run_query(self, request: Any, **_: object) -> AsyncIterator[Any]:
        self.queries.append(request.structured_query)
        return self._nothing()

    async def _nothing(self) -> AsyncIterator[Any]:
        answers: tuple[Any, ...] = ()
        for answer in answers:
            yield answer

    def listen(self, **_: object) -> Caught:
        return self

    async def write(self, request: Any) -> None:
        self.queries.append(request.add_target.query.structured_query)

    async def read(self) -> Any:
        raise Trouble("heard enough")

    def cancel(self) -> None:
        """As a call has it."""


async def the_queries_of_the_bridge() -> list[Any]:
    database = Database(Place("p", "(default)", COLLECTION), emulator="127.0.0.1:9")
    caught = Caught()
    database._query, database._listen = caught.run_query, caught.listen
    try:
        for statuses in (("pending", "cancel_requested"), ("scheduled", "running")):
            await database.page(statuses, after="projects/p/databases/(default)/documents/tpu_jobs/a", limit=1)
        with pytest.raises(Trouble):
            await anext(database.listen(("pending", "cancel_requested"), 1))
    finally:
        await database.close()
    return caught.queries


def shape_of(query: Any) -> Shape:
    """Of a query message with one filter, as all of the bridge's are."""
    (source,) = query.from_
    assert (source.collection_id, source.all_descendants) == (COLLECTION, False)
    assert query.where.WhichOneof("filter_type") == "field_filter"
    wanted = query.where.field_filter
    operator = {5: "==", 8: "in"}[wanted.op]
    ways = {0: "ASCENDING", 1: "ASCENDING", 2: "DESCENDING"}
    order = tuple((each.field.field_path, ways[each.direction]) for each in query.order_by)
    return Shape(((wanted.field.field_path, operator),), order)


def shapes_of_bridge() -> set[Shape]:
    return {shape_of(query) for query in asyncio.run(the_queries_of_the_bridge())}


def shapes_of_page() -> set[Shape]:
    shapes = set()
    for path in sorted((ROOT / "examples" / "firestore_web").glob("*.*")):
        for line in re.findall(r"\bquery\((\w+, .*)\);", path.read_text(errors="replace")):
            filters = re.findall(r'where\("([\w.]+)", "([^"]+)"', line)
            order = re.findall(r'orderBy\("([\w.]+)"(?:, "(asc|desc)")?\)', line)
            ways = tuple((field, "DESCENDING" if way == "desc" else "ASCENDING") for field, way in order)
            shapes.add(Shape(tuple(filters), ways))
    return shapes


def test_the_shapes_are_seen() -> None:
    by_name = ((NAME, "ASCENDING"),)
    assert shapes_of_bridge() == {Shape((("status", "in"),), by_name)}
    newest = (("created_at", "DESCENDING"),)
    assert shapes_of_page() == {Shape((("metadata.submitted_by", "=="),), newest)}


def test_the_bridge_makes_queries_nowhere_else() -> None:
    """What is caught above is then all there is."""
    texts = {path.name: path.read_text() for path in sorted((ROOT / "src" / "penstock" / "firestore").glob("*.py"))}
    making = re.compile(r"structured_query|RunQuery|RunAggregationQuery|ListDocuments|PartitionQuery|add_target")
    assert {name for name, text in texts.items() if making.search(text)} == {"database.py"}
    assert len(re.findall(r"self\._fill\(", texts["database.py"])) == 2, "a third place: catch its query above too"


# --- the file ---
def test_there_is_an_index_for_every_query_and_none_for_nothing() -> None:
    needed = {index for shape in shapes_of_bridge() | shapes_of_page() if (index := index_for(shape))}
    assert {(each["collectionGroup"], each["queryScope"]) for each in INDEXES["indexes"]} == {
        (COLLECTION, "COLLECTION")
    }
    kept = [tuple((field["fieldPath"], field["order"]) for field in each["fields"]) for each in INDEXES["indexes"]]
    assert len(kept) == len(set(kept))
    assert set(kept) == needed


def test_what_is_large_is_not_indexed_and_what_is_asked_for_is() -> None:
    exempt = {each["fieldPath"] for each in INDEXES["fieldOverrides"]}
    assert all(each["indexes"] == [] for each in INDEXES["fieldOverrides"])
    assert {each["collectionGroup"] for each in INDEXES["fieldOverrides"]} == {COLLECTION}
    assert exempt == EXEMPT
    asked = set().union(*(shape.fields for shape in shapes_of_bridge() | shapes_of_page()))
    within = {field for field in asked for other in exempt if field == other or field.startswith(f"{other}.")}
    assert not within, "an exemption would take away the index that every field has"
