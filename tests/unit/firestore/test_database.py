"""Answers that are no messages, from a real gRPC server: trouble that may pass, never a bridge that ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest
from google.cloud.firestore_v1.types import document as documents
from google.cloud.firestore_v1.types import firestore as messages

from penstock.firestore.database import Database, Place, Trouble
from penstock.firestore.fields import Stamp

PLACE = Place("demo", "(default)", "jobs")
NAME = f"{PLACE.parent}/one"
DOCUMENT = documents.Document.pb()(name=NAME)
#: What the emulator sent a listen: one message's frame inside another's, by two threads of it that wrote at once.
GARBAGE = bytes.fromhex("000000001c121f0804120101220b0a0908d4c6b1a68e8b9803320b121a220b0a09")
GOOD = {
    "Commit": messages.CommitResponse.pb()(commit_time={"seconds": 7}),
    "BatchGetDocuments": messages.BatchGetDocumentsResponse.pb()(found=DOCUMENT),
    "RunQuery": messages.RunQueryResponse.pb()(document=DOCUMENT),
    "Listen": messages.ListenResponse.pb()(document_change={"document": DOCUMENT, "target_ids": [1]}),
}


async def commit(database: Database) -> object:
    return await database.update(NAME, {"status": "running"}, Stamp(1, 0))


async def get(database: Database) -> object:
    return set(await database.get([NAME]))


async def page(database: Database) -> object:
    return {one.name for one in await database.page(["pending"], after=None, limit=5)}


async def listen(database: Database) -> object:
    return {(await anext(database.listen(["pending"], 5))).name}


def service(answers: list[bytes]) -> Any:
    """What a server needs to answer all four methods with the next of these bytes."""

    async def one(request: bytes, context: object) -> bytes:
        return answers.pop(0)

    async def many(request: object, context: object) -> AsyncIterator[bytes]:
        yield answers.pop(0)

    methods = {
        "Commit": grpc.unary_unary_rpc_method_handler(one),
        "BatchGetDocuments": grpc.unary_stream_rpc_method_handler(many),
        "RunQuery": grpc.unary_stream_rpc_method_handler(many),
        "Listen": grpc.stream_stream_rpc_method_handler(many),
    }
    return grpc.method_handlers_generic_handler("google.firestore.v1.Firestore", methods)


@pytest.mark.parametrize(
    ("method", "ask", "meant"),
    [
        ("Commit", commit, Stamp(7, 0)),
        ("BatchGetDocuments", get, {NAME}),
        ("RunQuery", page, {NAME}),
        ("Listen", listen, {NAME}),
    ],
)
def test_an_answer_that_cannot_be_read_is_trouble_and_the_next_one_is_read(
    method: str, ask: Callable[[Database], Awaitable[object]], meant: object
) -> None:
    async def play() -> None:
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((service([GARBAGE, GOOD[method].SerializeToString()]),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        database = Database(PLACE, emulator=f"127.0.0.1:{port}")
        try:
            with pytest.raises(Trouble, match=f"an answer is no {method}Response: "):
                await ask(database)
            assert await ask(database) == meant
        finally:
            await database.close()
            await server.stop(None)

    asyncio.run(play())
