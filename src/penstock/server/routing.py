"""What a route is: one row of a table that the app serves and the OpenAPI page is written from.

Every module of `server` with routes exports `ROUTES`; `server.app` turns all of them into one application, and
`server.openapi` into its description, so that what is served and what is described cannot differ. Handlers get a `Call`
that is authenticated, within its size, and decoded; they answer a `Reply` or raise. It must not know any route, nor
import Starlette's application.
"""

from __future__ import annotations

import math
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeVar

import msgspec

from penstock.domain import limits
from penstock.domain.lifecycle import JobState
from penstock.domain.nouns import Principal, Role
from penstock.wire.problems import Problem, problem

if TYPE_CHECKING:
    from starlette.requests import Request

    from penstock.server.service import Service

T = TypeVar("T")

FOLLOW_TEXT: Final = "Stay and send what comes as server-sent events; `Last-Event-ID` resumes."
BODY_MAX: Final = 1 << 20  #: bytes of a JSON body unless its route says otherwise: settings and edits are small


class Refusal(Exception):
    """A request that is answered with a problem: a code of `wire.problems`, one line, and what would help."""

    def __init__(
        self,
        code: str,
        detail: str,
        *,
        field: str | None = None,
        advice: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(detail)
        self.problem: Problem = problem(code, detail, field=field, advice=advice, retry_after_s=retry_after_s)


class Parameter(NamedTuple):
    """One value in the query or the path. It is checked before the handler runs; what is not named is refused."""

    name: str
    text: str
    kind: Literal["string", "integer", "number", "boolean"] = "string"
    required: bool = False
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()
    pattern: str | None = None
    longest: int = 512
    shape: Literal["printable", "relative-path"] | None = None  #: what no pattern can say

    def check(self, where: str, value: str) -> None:
        """Refuse a value that does not fit, in one line."""
        rule = self._broken(value)
        if rule is not None:
            shown = value if len(value) <= 60 else value[:57] + "…"
            raise Refusal("bad_input", f"{where} {self.name}: {shown!r} {rule}", field=self.name)

    def _broken(self, value: str) -> str | None:
        if len(value) > self.longest:
            return f"is longer than {self.longest} characters"
        if self.kind == "boolean":
            return None if value in ("true", "false") else "is neither true nor false"
        if self.kind in ("integer", "number"):
            return self._broken_number(value)
        if self.choices and value not in self.choices:
            return f"is not one of {', '.join(self.choices)}"
        # `$` would let a newline pass at the end.
        if self.pattern is not None and (re.search(self.pattern, value) is None or value.endswith("\n")):
            return f"does not match {self.pattern}"
        if "\0" in value or (self.shape is not None and not value.isprintable()):
            return "has control or invisible characters"
        if self.shape == "relative-path" and any(part in ("", ".", "..") for part in value.split("/")):
            return "is not a plain relative name"
        return None

    def _broken_number(self, value: str) -> str | None:
        shape = r"-?[0-9]{1,18}" if self.kind == "integer" else r"-?[0-9]{1,40}(\.[0-9]{1,40})?([eE][+-]?[0-9]{1,3})?"
        if re.fullmatch(shape, value, re.ASCII) is None:
            return f"is not {'a whole number' if self.kind == 'integer' else 'a number'}"
        number = float(value)
        if not math.isfinite(number):
            return "is not a finite number"
        if self.least is not None and number < self.least:
            return f"is less than {self.least:g}"
        if self.most is not None and number > self.most:
            return f"is more than {self.most:g}"
        return None


_STATES: Final = "|".join(state.value for state in JobState)
ID_PATTERN: Final = "^[0-9a-z]{1,40}$"
#: How lists of jobs, and of what happened to them, are narrowed.
JOB_FILTERS: Final = (
    Parameter("state", "States of jobs, separated by commas.", pattern=f"^({_STATES})(,({_STATES}))*$"),
    Parameter("user", "Jobs of this user.", shape="printable", longest=limits.NAME_CHARACTERS_MAX),
    Parameter("tag", "Jobs with this tag.", shape="printable", longest=limits.NAME_CHARACTERS_MAX),
)
#: What parts of a path look like, unless a route says otherwise. A name may be any printable text.
PATH_PARAMETERS: Final = {
    parameter.name: parameter
    for parameter in (
        Parameter("id", "An id, or enough of its first characters to be the only one.", pattern=ID_PATTERN),
        Parameter("attempt", "An attempt's id.", pattern=ID_PATTERN),
        Parameter("sha256", "The hash of the content, in hex.", pattern="^[0-9a-f]{64}$"),
        Parameter("name", "A name.", longest=limits.NAME_CHARACTERS_MAX, shape="printable"),
    )
}


class AgentHost(NamedTuple):
    """The host an agent's credential is for."""

    slice: str
    host: int
    incarnation: str


@dataclass(slots=True)
class Call:
    """One request, as its handler sees it. `body` is of the type its route takes: a struct, bytes or None."""

    principal: Principal | None
    host: AgentHost | None
    params: Mapping[str, str]
    query: Mapping[str, str]
    headers: Mapping[str, str]
    request: Request
    body: object = None

    @property
    def user(self) -> Principal:
        """Whose call it is, on routes for users."""
        if self.principal is None:
            raise Refusal("forbidden", "this route is for users, not for agents")
        return self.principal

    @property
    def agent(self) -> AgentHost:
        """Which host calls, on routes for agents."""
        if self.host is None:
            raise Refusal("forbidden", "this route is for agents")
        return self.host

    @property
    def walls(self) -> str | None:
        """The one team this user may see; None for operators, who see all."""
        user = self.user
        return None if user.role is Role.OPERATOR else user.team

    def given(self, shape: type[T]) -> T:
        """The body, as the struct that the route takes."""
        if not isinstance(self.body, shape):
            raise TypeError(f"this route takes no {shape.__name__}")
        return self.body

    def whole(self, name: str, default: int) -> int:
        """An integer parameter of the query."""
        return int(self.query[name]) if name in self.query else default

    def flag(self, name: str, default: bool = False) -> bool:
        """A boolean parameter of the query."""
        return self.query[name] == "true" if name in self.query else default

    @property
    def last_event_id(self) -> str | None:
        """Where a stream that broke off shall go on."""
        return self.headers.get("last-event-id")


@dataclass(slots=True)
class Raw:
    """Bytes as they are, whole or piece by piece."""

    body: bytes | AsyncIterator[bytes]
    media_type: str = "application/octet-stream"
    headers: Mapping[str, str] = field(default_factory=dict)


class Sent(NamedTuple):
    """One server-sent event. `data` is JSON without a newline."""

    id: str
    event: str
    data: bytes


@dataclass(slots=True)
class Events:
    """A stream of server-sent events. The app adds heartbeats and closes the iterator when the client goes."""

    events: AsyncIterator[Sent]


Reply = msgspec.Struct | Raw | Events | None
Handler = Callable[["Service", Call], Awaitable[Reply]]


class Route(NamedTuple):
    """One method on one path. `path` is as Starlette writes it: `{name:path}` may hold slashes."""

    method: str
    path: str
    handler: Handler
    #: The struct the JSON body is decoded to, `bytes` for a body as it is, None for no body.
    takes: type | None = None
    #: What a good answer is: a struct, "bytes", "events" (a stream only), or None for no content.
    gives: type | str | None = None
    streams: bool = False  #: with `follow=true` it answers a stream of events instead
    #: The least role of a user; Role.AGENT: only agents; None: open to everybody.
    role: Role | None = Role.VIEWER
    agents: bool = False  #: hosts may call it as well as users
    joins: bool = False  #: with role None: for hosts that have not joined, by the join token of the slice they name
    status: int = 200
    query: tuple[Parameter, ...] = ()
    body_max: int = BODY_MAX
    body_optional: bool = False  #: an empty body means the struct with all its defaults, or no bytes
    path_rules: tuple[Parameter, ...] = ()  #: stricter than `PATH_PARAMETERS`
    headers: tuple[Parameter, ...] = ()  #: request headers it looks at, beside Authorization
