"""Long-running operations of the emulated Cloud TPU API: begun by a call, ended by what happens, asked for until then.

`tpu_service` begins them, `tpu_cloud` and `tpu_queued` end them through `Operation.end`. Nothing is decided here.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

from penstock.emulator.timeline import Timeline
from penstock.emulator.tpu_words import TpuRefusal, not_found, stamp

KEPT_MAX: Final = 50_000  #: operations that are remembered; the oldest are forgotten first

Result = Callable[[], dict[str, Any] | None]


class Operation:
    """One operation. `result` is asked once, when it ends well."""

    def __init__(
        self, name: str, target: str, verb: str, version: str, kind: str, result: Result, timeline: Timeline
    ) -> None:
        self.name = name
        self.target = target
        self._verb = verb
        self._version = version
        self._kind = kind
        self._result = result
        self._timeline = timeline
        self._created_at = timeline.now
        self._ended_at: float | None = None
        self._error: dict[str, Any] | None = None
        self._response: dict[str, Any] = {}
        self.cancel_requested = False

    def end(self, why: TpuRefusal | None) -> None:
        """It is done: well, or with an error. Only the first end counts."""
        if self._ended_at is not None:
            return
        self._ended_at = self._timeline.now
        if why is not None:
            self._error = why.rpc()
        else:
            self._response = self._result() or {}

    def shown(self) -> dict[str, Any]:
        package = f"type.googleapis.com/google.cloud.tpu.{self._version}"
        metadata: dict[str, Any] = {
            "@type": f"{package}.OperationMetadata",
            "createTime": stamp(self._created_at),
            "target": self.target,
            "verb": self._verb,
            "cancelRequested": self.cancel_requested,
            "apiVersion": self._version,
        }
        found: dict[str, Any] = {"name": self.name, "metadata": metadata, "done": self._ended_at is not None}
        if self._ended_at is None:
            return found
        metadata["endTime"] = stamp(self._ended_at)
        if self._error is not None:
            return {**found, "error": self._error}
        kind = "type.googleapis.com/google.protobuf.Empty" if self._kind == "Empty" else f"{package}.{self._kind}"
        return {**found, "response": {"@type": kind, **self._response}}


class Operations:
    """All operations that are remembered."""

    def __init__(self, timeline: Timeline, rng: random.Random) -> None:
        self._timeline = timeline
        self._rng = rng
        self._all: dict[str, Operation] = {}

    def begin(self, target: str, verb: str, version: str, kind: str, result: Result) -> Operation:
        parent = "/".join(target.split("/")[:4])
        marks = f"{int(self._timeline.now * 1000)}-{self._rng.getrandbits(52):013x}-{self._rng.getrandbits(32):08x}"
        name = f"{parent}/operations/operation-{marks}-{self._rng.getrandbits(32):08x}"
        operation = Operation(name, target, verb, version, kind, result, self._timeline)
        self._all[name] = operation
        if len(self._all) > KEPT_MAX:
            del self._all[next(iter(self._all))]
        return operation

    def get(self, name: str) -> Operation:
        if name not in self._all:
            raise not_found(name)
        return self._all[name]

    def forget(self, name: str) -> None:
        self.get(name)
        del self._all[name]

    def listing(self, parent: str) -> list[dict[str, Any]]:
        return [each.shown() for each in self._all.values() if each.name.startswith(f"{parent}/operations/")]
