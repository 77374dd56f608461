"""Faults of the emulated Cloud Storage: which requests go wrong, and how (O1 and O2 of the fault list).

A test plants faults by the constructor or over the control address and asks later which ones struck. Each strikes the
next `times` requests that it is aimed at, after letting `skip` of them pass. `gcs` calls it; it decides nothing else.

- `refuse`: `status` is answered and nothing happens: 503, 429 for one object, 401 for credentials that ran out;
- `refuse_after`: the effect happens, then `status` is answered, so that a retry meets its own success;
- `lose`: the effect happens and the connection breaks before the answer;
- `cut`: the connection breaks while the body is sent; a resumable upload keeps the first half;
- `slow`: the effect happens `seconds` late;
- `damage`: one byte is flipped on the way, up or down, and no hash with it;
- `vanish`: a lifecycle rule deletes the object just before;
- `short`: a page of a listing holds at most `most` entries, and says that there is more.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from penstock.emulator.http_words import Answer, Refused, Request

Kind = Literal["refuse", "refuse_after", "lose", "cut", "slow", "damage", "vanish", "short"]


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One fault: what happens, to whom, how often."""

    kind: Kind
    subject: str = ""  #: `bucket/name` must begin with it; of a listing `bucket/prefix`
    method: str = ""  #: HTTP method; "": any
    skip: int = 0
    times: int = 1
    status: int = 503
    retry_after_s: int | None = None
    seconds: float = 1.0
    most: int = 1


class Planted(msgspec.Struct):
    """A fault and how often it has struck."""

    fault: Fault
    passed: int = 0
    struck: int = 0


class Faults:
    """All faults there are; the first one that is aimed at a request strikes it."""

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self.planted: list[Planted] = []
        self.plant(faults)

    def plant(self, faults: Iterable[Fault]) -> None:
        self.planted.extend(Planted(fault) for fault in faults)

    def clear(self) -> None:
        self.planted.clear()

    def strike(self, request: Request, subject: str) -> Fault | None:
        for planted in self.planted:
            fault = planted.fault
            if planted.struck >= fault.times or fault.method not in ("", request.method):
                continue
            if not subject.startswith(fault.subject) or (fault.kind == "short" and not _lists(request)):
                continue
            if planted.passed < fault.skip:
                planted.passed += 1
                continue
            planted.struck += 1
            return fault
        return None


def refused_by(fault: Fault) -> Refused:
    code, reason = {
        401: ("AuthenticationRequired", "authError"),
        403: ("AccessDenied", "forbidden"),
        429: ("SlowDown", "rateLimitExceeded"),
        503: ("ServiceUnavailable", "backendError"),
    }.get(fault.status, ("InternalError", "internalError"))
    headers = {} if fault.retry_after_s is None else {"retry-after": str(fault.retry_after_s)}
    return Refused(fault.status, code, reason, "a planted fault", headers)


def shortened(request: Request, fault: Fault) -> Request:
    return request._replace(query={**request.query, "maxResults": str(fault.most), "max-keys": str(fault.most)})


def damaged(body: bytes) -> bytes:
    """The same with one bit of its middle byte flipped; nothing can be flipped in nothing."""
    middle = len(body) // 2
    return body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :] if body else body


def damaged_answer(answer: Answer) -> Answer:
    return answer._replace(body=damaged(answer.body))


def _lists(request: Request) -> bool:
    return request.query.get("list-type") == "2" or request.path.endswith("/o")
