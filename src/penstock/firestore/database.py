"""One Firestore database over gRPC: conditional updates, reads, pages and listens, and nothing else.

The only module that knows Google's client. It uses the generated messages and the channel of google-cloud-firestore,
not its `AsyncClient`: that one cannot listen, and its `Watch` keeps whole documents on a thread of its own. Errors
become three: lost a race, no such document, or trouble that may pass. It must not decide what is written or when.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple
from urllib.parse import quote

import grpc
from google.cloud.firestore_v1.services.firestore.transports import FirestoreGrpcAsyncIOTransport
from google.cloud.firestore_v1.types import firestore as messages
from google.cloud.firestore_v1.types import query as queries
from google.protobuf.message import DecodeError

from penstock.firestore.fields import Document, Now, Stamp, decode, encode
from penstock.firestore.patience import Patience

CALL_S: Final = 10.0  #: a call that takes longer is tried again
PAGE: Final = 200  #: documents of a backlog read at once
_SERVICE: Final = "/google.firestore.v1.Firestore/"
_HOST: Final = "firestore.googleapis.com:443"
_MESSAGE_BYTES_MAX: Final = 16 << 20
#: A connection that died silently is found out within a minute.
_OPTIONS: Final = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.max_receive_message_length", _MESSAGE_BYTES_MAX),
    ("grpc.max_reconnect_backoff_ms", 5_000),
)
_REQUEST_TIME: Final = 1  # SET_TO_SERVER_VALUE
_IN: Final = int(queries.StructuredQuery.FieldFilter.Operator.IN)
_REMOVE: Final = int(messages.TargetChange.TargetChangeType.REMOVE)
_CURRENT: Final = int(messages.TargetChange.TargetChangeType.CURRENT)
_RESET: Final = int(messages.TargetChange.TargetChangeType.RESET)
_TARGET: Final = 1


class LostRace(Exception):
    """The document is no longer the version that was expected, or is gone."""


class TooLarge(Exception):
    """Firestore does not take this content: most likely the document would be over its limit of 1 MiB."""


class Trouble(Exception):
    """The database did not do it, or we do not know whether it did; the text says why. It may pass."""


class Change(NamedTuple):
    """News of a listen: a document as it is now, the name of one that left, or something about all of them."""

    kind: str  #: "document", "left", "reset" (forget all), "current" (that was all), "count" (so many there are)
    document: Any = None  #: raw, so that what is known already need not be decoded
    name: str = ""
    total: int = 0


class Place(NamedTuple):
    """Where the documents are."""

    project: str
    database: str
    collection: str

    @property
    def root(self) -> str:
        return f"projects/{self.project}/databases/{self.database}"

    @property
    def parent(self) -> str:
        return f"{self.root}/documents/{self.collection}"


class Database:
    """Calls about one collection of one database. `emulator` is HOST:PORT of one, instead of Google's."""

    def __init__(self, place: Place, *, emulator: str | None = None) -> None:
        self.place = place
        metadata = [
            ("google-cloud-resource-prefix", place.root),
            ("x-goog-request-params", f"database={quote(place.root, safe='')}"),
        ]
        if emulator:
            self._channel: Any = grpc.aio.insecure_channel(emulator, options=_OPTIONS)
            metadata.append(("authorization", "Bearer owner"))  # there, what a service account is elsewhere
        else:
            self._channel = FirestoreGrpcAsyncIOTransport.create_channel(_HOST, options=_OPTIONS)
        self._metadata = tuple(metadata)
        self._commit = self._channel.unary_unary(**_call("Commit", messages.CommitRequest))
        self._get = self._channel.unary_stream(**_call("BatchGetDocuments", messages.BatchGetDocumentsRequest))
        self._query = self._channel.unary_stream(**_call("RunQuery", messages.RunQueryRequest))
        self._listen = self._channel.stream_stream(**_call("Listen", messages.ListenRequest))

    async def close(self) -> None:
        await self._channel.close()

    # --- writes ---
    async def update(
        self, name: str, content: Mapping[str, object], stamp: Stamp, *, remove: Collection[str] = ()
    ) -> Stamp:
        """Write some fields if the document is still the version `stamp`; the new version. `remove` deletes fields."""
        request = _pb(messages.CommitRequest)(database=self.place.root)
        write = request.writes.add()
        write.update.name = name
        for field, value in content.items():
            if isinstance(value, Now):
                transform = write.update_transforms.add(field_path=field)
                transform.set_to_server_value = _REQUEST_TIME
            else:
                encode(value, write.update.fields[field])
                write.update_mask.field_paths.append(field)
        write.update_mask.field_paths.extend(field for field in remove if field not in content)
        write.current_document.update_time.seconds = stamp.seconds
        write.current_document.update_time.nanos = stamp.nanos
        try:
            raw = await self._commit(request, metadata=self._metadata, timeout=CALL_S)
        except grpc.aio.AioRpcError as error:
            raise _meaning(error) from error
        answer = _read(messages.CommitResponse, raw)
        return _stamp(answer.commit_time if not answer.write_results else answer.write_results[0].update_time)

    # --- reads ---
    async def get(self, names: Sequence[str], fields: Sequence[str] = ()) -> dict[str, Document | None]:
        """Documents by name, None for those that are not there; only these fields of them, if any are named."""
        request = _pb(messages.BatchGetDocumentsRequest)(database=self.place.root, documents=names)
        request.mask.field_paths.extend(fields)
        if not fields:
            request.ClearField("mask")
        found: dict[str, Document | None] = {}
        try:
            async for raw in self._get(request, metadata=self._metadata, timeout=CALL_S):
                answer = _read(messages.BatchGetDocumentsResponse, raw)
                if answer.WhichOneof("result") == "missing":
                    found[answer.missing] = None
                else:
                    found[answer.found.name] = document_of(answer.found)
        except grpc.aio.AioRpcError as error:
            raise Trouble(_line(error)) from error
        return found

    async def at_last(self, names: Sequence[str], fields: Sequence[str] = ()) -> dict[str, Document | None]:
        """The same, asked until it is answered."""
        patience = Patience("reading documents")
        while True:
            try:
                return await self.get(names, fields)
            except Trouble as trouble:
                await patience.rest(trouble)

    async def page(
        self, statuses: Sequence[str], *, after: str | None, limit: int, fields: Sequence[str] = ()
    ) -> list[Document]:
        """Documents with one of these statuses, by name, after one; only some fields of them, if any are named."""
        request = _pb(messages.RunQueryRequest)(parent=f"{self.place.root}/documents")
        self._fill(request.structured_query, statuses, limit)
        if after is not None:
            request.structured_query.start_at.values.add().reference_value = after
        for field in fields:
            request.structured_query.select.fields.add(field_path=field)
        try:
            return [
                document_of(one.document)
                async for raw in self._query(request, metadata=self._metadata, timeout=CALL_S)
                if (one := _read(messages.RunQueryResponse, raw)).HasField("document")
            ]
        except grpc.aio.AioRpcError as error:
            raise Trouble(_line(error)) from error

    async def listen(self, statuses: Sequence[str], limit: int) -> AsyncGenerator[Change]:
        """The first documents with one of these statuses, by name, as they change. It ends only by `Trouble`."""
        request = _pb(messages.ListenRequest)(database=self.place.root)
        request.add_target.target_id = _TARGET
        request.add_target.query.parent = f"{self.place.root}/documents"
        self._fill(request.add_target.query.structured_query, statuses, limit)
        call = self._listen(metadata=self._metadata)
        try:
            await call.write(request)
            while (raw := await call.read()) is not grpc.aio.EOF:
                for change in _changes(_read(messages.ListenResponse, raw)):
                    yield change
            raise Trouble("the listen ended by itself")
        except grpc.aio.AioRpcError as error:
            raise Trouble(_line(error)) from error
        finally:
            call.cancel()

    def _fill(self, query: Any, statuses: Sequence[str], limit: int) -> None:
        query.from_.add().collection_id = self.place.collection
        wanted = query.where.field_filter
        wanted.field.field_path = "status"
        wanted.op = _IN
        for status in statuses:
            wanted.value.array_value.values.add().string_value = status
        query.order_by.add().field.field_path = "__name__"
        query.limit.value = limit


def _pb(message: Any) -> Any:
    """The plain protobuf class under one of Google's wrapped ones: building and reading it costs a tenth."""
    return message.pb()


def _call(method: str, request: Any) -> dict[str, Any]:
    """What a channel is told of a method. Answers stay bytes: grpc logs one it cannot read and hands on None for it."""
    return {"method": _SERVICE + method, "request_serializer": _pb(request).SerializeToString}


def _read(kind: Any, raw: bytes) -> Any:
    """An answer as a message. One that is none may be half of one, of a server that went or is only coming up."""
    try:
        return _pb(kind).FromString(raw)
    except DecodeError as error:
        raise Trouble(f"an answer is no {kind.__name__}: {error}") from error


def document_of(raw: Any) -> Document:
    return Document(
        name=raw.name,
        fields={name: decode(value) for name, value in raw.fields.items()},
        created=_stamp(raw.create_time),
        stamp=_stamp(raw.update_time),
    )


def stamp_of(raw: Any) -> Stamp:
    """The version of a document that has not been decoded."""
    return _stamp(raw.update_time)


def _stamp(time: Any) -> Stamp:
    return Stamp(time.seconds, time.nanos)


def _changes(answer: Any) -> list[Change]:
    match answer.WhichOneof("response_type"):
        case "document_change":
            changed = answer.document_change
            if _TARGET in changed.removed_target_ids:
                return [Change("left", name=changed.document.name)]
            return [Change("document", changed.document, changed.document.name)]
        case "document_delete":
            return [Change("left", name=answer.document_delete.document)]
        case "document_remove":
            return [Change("left", name=answer.document_remove.document)]
        case "target_change":
            change = answer.target_change
            if change.target_change_type == _REMOVE:
                raise Trouble(f"the listen was refused: {change.cause.message} (code {change.cause.code})")
            kinds = {_RESET: "reset", _CURRENT: "current"}
            kind = kinds.get(change.target_change_type)
            return [Change(kind)] if kind is not None else []
        case "filter":
            return [Change("count", total=answer.filter.count)]
        case _:
            return []


def _meaning(error: Any) -> Exception:
    match error.code():
        case grpc.StatusCode.FAILED_PRECONDITION | grpc.StatusCode.NOT_FOUND:
            return LostRace(_line(error))
        case grpc.StatusCode.INVALID_ARGUMENT:
            return TooLarge(_line(error))
        case _:
            return Trouble(_line(error))


def _line(error: Any) -> str:
    return f"{error.code().name}: {' '.join(str(error.details()).split())[:300]}"
