"""Reads server-sent events from bytes as they arrive, whatever way they are cut.

Both transports feed it what they read and get whole messages back. It holds the last id, from which a stream that
broke off is resumed. It must not decode `data`, nor know a connection.
"""

from __future__ import annotations

from typing import NamedTuple

END_EVENT = "end"  #: the server's last word on a stream that is complete
PROBLEM_EVENT = "problem"  #: its last word on one that it cannot go on with: `data` is a problem


class Message(NamedTuple):
    """One event of a stream."""

    id: str | None
    event: str
    data: bytes


class Parser:
    """Turns chunks of a text/event-stream into messages. A message cut off at the end is never delivered."""

    def __init__(self) -> None:
        self._rest = b""
        self._id: str | None = None
        self._event = ""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> list[Message]:
        """The messages that `chunk` completes."""
        # \r\n may itself be cut in two: a \r at the end waits for what follows.
        text = self._rest + chunk
        held = b""
        if text.endswith(b"\r"):
            text, held = text[:-1], b"\r"
        *lines, rest = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._rest = rest + held
        found = []
        for line in lines:
            if line:
                self._take(line)
            elif (message := self._finish()) is not None:
                found.append(message)
        return found

    def _take(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
        elif name == b"event":
            self._event = value.decode("utf-8", "replace")
        elif name == b"id" and b"\0" not in value:
            self._id = value.decode("utf-8", "replace")

    def _finish(self) -> Message | None:
        message = Message(self._id, self._event or "message", b"\n".join(self._data)) if self._data else None
        self._event = ""
        self._data = []
        return message
