"""What `--on` means: accelerators, lists, patterns, pools, slices, and nothing by guessing."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest

from penstock.cli.targets import Target, resolve
from penstock.client.client import Client
from penstock.wire.api import SliceView
from tests.unit.cli.stand_in import StandIn


@pytest.fixture
def client(server: StandIn) -> Iterator[Client]:
    server.pool("lab", "v4-32")
    server.pool("one", "v5e-1")
    server.pool("many", "v5e-16")
    for id in ("s10", "s11", "s2"):
        server.slices.append(
            SliceView(
                id=id,
                team="lab",
                pool="lab",
                provider="local",
                zone="local",
                accelerator="v4-32",
                chips=16,
                hosts=4,
                state="ready",
            )
        )
    with Client(patience_s=0) as made:
        yield made


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("", Target()),
        ("v5e-8", Target(on=("v5e-8",))),
        ("v5litepod-8", Target(on=("v5e-8",))),
        ("v4-8, v5e-8", Target(on=("v4-8", "v5e-8"))),
        ("v5e-*", Target(on=("v5e-1", "v5e-16"))),
        ("v5e-*,v4-8,v5e-1", Target(on=("v5e-1", "v5e-16", "v4-8"))),
        ("lab", Target(pool="lab")),
        ("pool:v5e-8", Target(pool="v5e-8")),
        ("s2", Target(slice="s2")),
        ("slice:s10", Target(slice="s10")),
        ("slice:s2", Target(slice="s2")),
    ],
)
def test_what_a_word_means(text: str, target: Target, client: Client) -> None:
    assert resolve(text, client) == target


def test_an_accelerator_needs_no_question(client: Client, server: StandIn) -> None:
    resolve("v5e-8", client)
    assert server.asked == []


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("nothing", "pools: lab, one, many"),
        ("v9x-*", "pools: lab, one, many"),
        ("s1", "no pool or slice has that name either"),
        ("slice:s1", "'s1' means 2 slices"),
        ("slice:x", "'x' is no slice"),
        ("v5e-8,lab", "lab"),
    ],
)
def test_what_means_nothing_is_refused_with_what_there_is(text: str, told: str, client: Client) -> None:
    with pytest.raises(click.BadParameter) as refused:
        resolve(text, client)
    assert told in refused.value.format_message()
