"""Fixtures of the SDK's tests: a stand-in server, and a maker of clients, once for each kind of client."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from penstock.client.client import Client
from tests.unit.client.both import blocking
from tests.unit.client.stand_in import TOKEN, StandIn, serving

Make = Callable[..., Any]


@pytest.fixture
def server() -> Iterator[StandIn]:
    stand_in = StandIn()
    with serving(stand_in):
        yield stand_in


@pytest.fixture(params=["sync", "async"])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Makes clients of one kind; closes them."""
    made: list[Any] = []
    with asyncio.Runner() as runner:

        def new(server: StandIn, **options: Any) -> Any:
            args = {"token": TOKEN, **options}
            client = Client(server.url, **args) if request.param == "sync" else blocking(runner, server.url, **args)
            made.append(client)
            return client

        yield new
        for client in made:
            client.close()


@pytest.fixture
def client(make: Make, server: StandIn) -> Any:
    return make(server)
