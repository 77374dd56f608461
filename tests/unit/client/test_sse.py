"""Server-sent events are read the same however their bytes are cut."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from penstock.client.sse import Message, Parser

TEXT = (
    b": heartbeat\n\nretry: 1000\n\n"
    b'id: 1\nevent: job.placed\ndata: {"a":1}\n\n'
    b"data: first\r\ndata:second\r\n\r\n"
    b"event: nothing\n\n"
    b"id: 7\rdata:  two spaces\r\r"
    b"unknown: x\ndata\n\n"
    b"data: cut off"
)
MESSAGES = [
    Message("1", "job.placed", b'{"a":1}'),
    Message("1", "message", b"first\nsecond"),
    Message("7", "message", b" two spaces"),
    Message("7", "message", b""),
]


@given(st.lists(st.integers(0, len(TEXT)), max_size=12))
def test_however_it_is_cut(places: list[int]) -> None:
    edges = [0, *sorted(places), len(TEXT)]
    parser = Parser()
    found = [message for start, end in pairwise(edges) for message in parser.feed(TEXT[start:end])]
    assert found == MESSAGES


def test_an_event_is_delivered_with_its_last_byte() -> None:
    parser = Parser()
    assert parser.feed(b"data: x\n") == []
    assert parser.feed(b"\n") == [Message(None, "message", b"x")]
