"""Words of the Container API (Kubernetes Engine) on the wire: refusals with their reasons, names and links.

All `gke_*` modules use it. It holds no state and decides nothing about what exists.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from typing import Final

from typing_extensions import override

from penstock.emulator.http_words import Answer, as_json
from penstock.emulator.tpu_words import TpuRefusal

LINKS: Final = "https://container.googleapis.com/v1/"
#: What clients of Google's older kind read in place of the status.
_REASONS: Final[Mapping[str, str]] = {
    "INVALID_ARGUMENT": "badRequest",
    "FAILED_PRECONDITION": "failedPrecondition",
    "NOT_FOUND": "notFound",
    "ALREADY_EXISTS": "alreadyExists",
    "RESOURCE_EXHAUSTED": "rateLimitExceeded",
}
_LOCATION: Final = re.compile(r"[a-z]+-[a-z]+\d+(-[a-z])?")


class GkeRefusal(TpuRefusal):
    """A call that the service itself refuses. Google's front end, which reads requests, words its own as for TPUs."""

    def __init__(self, status: str, message: str) -> None:
        request = {"@type": "type.googleapis.com/google.rpc.RequestInfo"}
        super().__init__(status, message, details=[{**request, "requestId": f"{zlib.crc32(message.encode()):#010x}"}])

    @override
    def answer(self) -> Answer:
        inner = {"message": self.message, "domain": "global", "reason": _REASONS[self.status]}
        error = {"code": self.http, "message": self.message, "errors": [inner], "status": self.status}
        return as_json({"error": {**error, "details": self.details}}, self.http)


def invalid(message: str) -> GkeRefusal:
    return GkeRefusal("INVALID_ARGUMENT", message)


def no_such(name: str) -> GkeRefusal:
    return GkeRefusal("NOT_FOUND", f"Not found: {name}.")


def taken(name: str) -> GkeRefusal:
    return GkeRefusal("ALREADY_EXISTS", f"Already exists: {name}.")


def is_location(text: str) -> bool:
    return _LOCATION.fullmatch(text) is not None


def is_zone(text: str) -> bool:
    found = _LOCATION.fullmatch(text)
    return found is not None and found[1] is not None


def region_of(zone: str) -> str:
    return zone.rpartition("-")[0]


def below(project: str, location: str) -> str:
    """The beginning of a resource's name: what is in a zone is named so, though clients ask by `locations/`."""
    return f"projects/{project}/{'zones' if is_zone(location) else 'locations'}/{location}"
