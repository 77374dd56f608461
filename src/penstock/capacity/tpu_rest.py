"""Speaks the Cloud TPU API over REST: one request in, one JSON answer or one typed error out.

`capacity.tpu_vm` makes every call through it. Unknown fields of answers are kept, because the service is ahead of any
list of ours. It decides only what a refusal means: what time heals, what another zone heals, and what needs a person.
It must not retry: the controller repeats what the store still wants, at its own pace. Whoever calls, a kind of call
that a zone is tired of is not sent there again until the time that it asked for is over.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from email.utils import parsedate_to_datetime
from typing import Any, Final, Protocol

import httpx2
import msgspec

from penstock.domain import limits
from penstock.ports.capacity import (
    CapacityError,
    NameTaken,
    PermissionDenied,
    QuotaExceeded,
    RateLimited,
    Stockout,
    Transient,
    Unsent,
)
from penstock.ports.clock import Clock

PAGE_SIZE: Final = 500
CALL_S: Final = 30.0
#: google.rpc codes inside operations.
_EXHAUSTED, _DENIED, _INVALID, _EXISTS = 8, 7, 3, 6
#: Words of a refusal that tell why; the service uses one code for quota, rate and capacity.
_NO_ROOM: Final = ("no more capacity", "insufficient capacity", "not enough resources", "stockout", "out of capacity")
_RATE: Final = ("per minute", "rate limit", "too many requests", "requests per")


class Absent(CapacityError):
    """The service says that there is no such thing."""


class Tokens(Protocol):
    """Who we are, for one request."""

    async def token(self) -> str: ...


class TpuRest:
    """One project's API. `endpoint` is the service, or an emulator of it."""

    def __init__(
        self,
        project: str,
        tokens: Tokens,
        *,
        endpoint: str,
        clock: Clock,
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        self.project = project
        self._clock = clock
        self._held_until: dict[tuple[str, str, str, bool], float] = {}  #: kinds of calls that are not made before
        self._tokens = tokens
        self._endpoint = endpoint.rstrip("/")
        # Every zone is asked at its own pace: one that hangs must not use up the connections of the others.
        self._http = httpx2.AsyncClient(timeout=CALL_S, limits=httpx2.Limits(max_connections=128), transport=transport)

    async def close(self) -> None:
        await self._http.aclose()

    def zone(self, name: str) -> str:
        return f"projects/{self.project}/locations/{name}"

    async def call(
        self,
        method: str,
        path: str,
        *,
        version: str = "v2",
        query: Mapping[str, str] | None = None,
        body: object = None,
    ) -> dict[str, Any]:
        """One request; the answer's JSON object."""
        kind = _kind(method, path)
        left_s = self._held_until.get(kind, 0.0) - self._clock.steady()
        if left_s > 0.0:
            raise RateLimited(f"{method} {path}: not sent, the service asked for {left_s:.0f} s more of rest", left_s)
        headers = {"authorization": f"Bearer {await self._tokens.token()}"}
        content = None
        if body is not None:
            content = msgspec.json.encode(body)
            headers["content-type"] = "application/json"
        url = f"{self._endpoint}/{version}/{path}"
        try:
            answer = await self._http.request(method, url, params=query, content=content, headers=headers)
        except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout) as error:
            raise Unsent(f"{method} {path}: {error or type(error).__name__}") from error
        except (httpx2.HTTPError, OSError) as error:
            raise Transient(f"{method} {path}: {error or type(error).__name__}") from error
        try:
            return _read(answer, f"{method} {path}")
        except RateLimited as error:
            rest_s = limits.RATE_REST_S if error.retry_after_s is None else error.retry_after_s
            self._held_until[kind] = self._clock.steady() + min(rest_s, limits.RATE_REST_S_MAX)
            raise

    async def pages(self, path: str, key: str, *, version: str = "v2") -> AsyncIterator[dict[str, Any]]:
        """All pages of a list: each with `key`, and `unreachable` where the service could not look everywhere."""
        query = {"pageSize": str(PAGE_SIZE)}
        while True:
            page = await self.call("GET", path, version=version, query=query)
            if not isinstance(page.get(key, []), list):
                raise Transient(f"GET {path}: {key} is not a list")
            yield page
            if not page.get("nextPageToken"):
                return
            query["pageToken"] = page["nextPageToken"]


class LoginTokens:
    """Application-default credentials by google-auth, renewed in a thread before they run out."""

    _SCOPES: Final = ("https://www.googleapis.com/auth/cloud-platform",)

    def __init__(self) -> None:
        self._credentials: Any = None
        self._turn = asyncio.Lock()

    async def token(self) -> str:
        async with self._turn:
            if self._credentials is None or not self._credentials.valid:
                await asyncio.to_thread(self._renew)
            return str(self._credentials.token)

    def _renew(self) -> None:
        import google.auth
        import google.auth.exceptions as refused
        from google.auth.transport.requests import Request

        try:
            if self._credentials is None:
                self._credentials, _ = google.auth.default(scopes=self._SCOPES)
            self._credentials.refresh(Request())
        except refused.DefaultCredentialsError as error:
            raise PermissionDenied("no Google credentials: run `gcloud auth application-default login`") from error
        except refused.RefreshError as error:
            raise PermissionDenied(f"the Google credentials are refused: {error}") from error
        except refused.GoogleAuthError as error:
            raise Transient(f"a Google access token cannot be had now: {error}") from error


class FixedTokens:
    """A token that somebody gave: for emulators."""

    def __init__(self, token: str) -> None:
        self._token = token

    async def token(self) -> str:
        return self._token


def operation_error(operation: Mapping[str, Any]) -> CapacityError | None:
    """Why an operation that is done has failed, or None."""
    error = operation.get("error")
    if not error:
        return None
    said = str(error.get("message") or error)
    code = error.get("code")
    if code == _EXHAUSTED:
        return _exhausted(said, None)
    if code == _EXISTS:
        return NameTaken(said)
    if code in (_DENIED, _INVALID):
        return QuotaExceeded(said) if "quota" in said.lower() else PermissionDenied(said)
    return Stockout(said) if _says(said, _NO_ROOM) else Transient(said)


def _kind(method: str, path: str) -> tuple[str, str, str, bool]:
    """What the service counts apart: the method, the zone, the collection, and whether one thing of it is meant."""
    _, _, _, zone, collection, *name = [*path.split("/"), "", "", "", "", ""][:6]
    return method, zone, collection, any(name)


def _read(answer: httpx2.Response, what: str) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(answer.content) if answer.content else {}
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Transient(f"{what}: {answer.status_code} with a body that is not JSON") from error
    if answer.is_success and isinstance(body, dict):
        return body
    reason = body.get("error") if isinstance(body, dict) else None
    said = str(reason.get("message") if isinstance(reason, dict) else body) or answer.reason_phrase
    raise _refusal(answer, said)


def _refusal(answer: httpx2.Response, said: str) -> CapacityError:
    match answer.status_code:
        case 404:
            return Absent(said)
        case 409:
            return NameTaken(said)
        case 429:
            return _exhausted(said, answer)
        case 403 if "quota" in said.lower():
            return _exhausted(said, answer)
        case 400 | 401 | 403:
            return PermissionDenied(said)
        case status:
            return Transient(f"{status}: {said}")


def _exhausted(said: str, answer: httpx2.Response | None) -> CapacityError:
    """What "resource exhausted" means here: asked too often, no room in the zone, or no quota."""
    retry_after = None if answer is None else answer.headers.get("retry-after")
    if answer is not None and retry_after is not None:
        return RateLimited(said, _seconds(retry_after, answer.headers.get("date", "")))
    if _says(said, _RATE):
        return RateLimited(said)
    return Stockout(said) if _says(said, _NO_ROOM) else QuotaExceeded(said)


def _seconds(retry_after: str, date: str) -> float | None:
    """Retry-After is a number of seconds, or a moment by the clock of whoever sent it; None when it is neither."""
    if retry_after.strip().isdecimal():
        return float(retry_after)
    try:
        return max(0.0, (parsedate_to_datetime(retry_after) - parsedate_to_datetime(date)).total_seconds())
    except (TypeError, ValueError):  # no such moment, or one of them without a time zone
        return None


def _says(said: str, words: tuple[str, ...]) -> bool:
    return any(word in said.lower() for word in words)
