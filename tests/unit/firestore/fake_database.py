"""A Firestore of a test's own, in memory: versions and conditional writes as the real one has, and faults on demand."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence

from penstock.firestore.database import LostRace, Place
from penstock.firestore.fields import NOW, Document, Stamp

PLACE = Place("p1", "(default)", "tpu_jobs")


def name_of(id: str) -> str:
    return f"{PLACE.parent}/{id}"


class FakeDatabase:
    """Has the methods of `Database` that claims and the mirror use; `faults` are raised before the next writes."""

    def __init__(self) -> None:
        self.place = PLACE
        self.documents: dict[str, Document] = {}
        self.writes: list[tuple[str, dict[str, object]]] = []
        self.faults: list[Exception] = []
        self.lost_answers = 0  #: so many writes land, and their answers do not come
        self._clock = 100

    def put(self, id: str, **fields: object) -> Document:
        """Make a document, or change it as a client would."""
        old = self.documents.get(name_of(id))
        stamp = self._tick()
        document = Document(
            name=name_of(id),
            fields={**(old.fields if old else {}), **fields},
            created=old.created if old else stamp,
            stamp=stamp,
        )
        self.documents[document.name] = document
        return document

    def delete(self, id: str) -> None:
        del self.documents[name_of(id)]

    def fields(self, id: str) -> dict[str, object]:
        return self.documents[name_of(id)].fields

    def statuses(self, id: str) -> list[object]:
        """What was written to a document's status, in order."""
        return [content["status"] for name, content in self.writes if name == name_of(id) and "status" in content]

    def _tick(self) -> Stamp:
        self._clock += 1
        return Stamp(self._clock, 0)

    async def update(
        self, name: str, content: Mapping[str, object], stamp: Stamp, *, remove: Collection[str] = ()
    ) -> Stamp:
        await asyncio.sleep(0)
        if self.faults:
            raise self.faults.pop(0)
        document = self.documents.get(name)
        if document is None or document.stamp != stamp:
            raise LostRace(name)
        kept = {field: value for field, value in document.fields.items() if field not in remove}
        told = {field: "now" if value is NOW else value for field, value in content.items()}
        new = Document(name=name, fields={**kept, **told}, created=document.created, stamp=self._tick())
        self.documents[name] = new
        self.writes.append((name, dict(content)))
        if self.lost_answers:
            from penstock.firestore.database import Trouble

            self.lost_answers -= 1
            raise Trouble("the answer was lost")
        return new.stamp

    async def get(self, names: Sequence[str], fields: Sequence[str] = ()) -> dict[str, Document | None]:
        await asyncio.sleep(0)
        return {name: self.documents.get(name) for name in names}

    at_last = get
