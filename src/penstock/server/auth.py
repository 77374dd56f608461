"""Who calls: users by tokens that are kept only as hashes, agents by credentials that the server's key has signed.

`server.app` asks `authenticate` before anything else of a request is read; `server.agents` makes credentials when a
host joins. It must not decide what a team owns: that is each handler's business, behind `Call.walls`.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
from pathlib import Path
from typing import Final

import msgspec

from penstock.domain.nouns import Principal, Role
from penstock.server.routing import AgentHost, Refusal, Route

logger = logging.getLogger(__name__)

#: What each role may do, the next includes the one before; agents stand beside it.
_RANK: Final = {Role.VIEWER: 0, Role.SUBMITTER: 1, Role.ADMIN: 2, Role.OPERATOR: 3}
_BEARER_MAX: Final = 2048  #: characters; longer ones are not ours, and need not be hashed


class Token(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One row of the tokens file: whose token has this hash."""

    sha256: str
    name: str
    team: str
    role: Role


class Tokens:
    """The users' tokens. A file that has changed is read again, so a token taken out of it stops working at once."""

    def __init__(self, path: Path | None = None, rows: tuple[Token, ...] = ()) -> None:
        self._path = path
        self._stamp: tuple[int, int] | None = None
        self._known = _by_hash(rows)
        if path is not None:
            self._stamp = _stamp(path)
            self._known = _by_hash(_read(path))

    def find(self, bearer: str) -> Principal | None:
        self._refresh()
        return self._known.get(token_hash(bearer))

    @property
    def teams(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(principal.team for principal in self._known.values()))

    def _refresh(self) -> None:
        if self._path is None:
            return
        try:
            stamp = _stamp(self._path)
            if stamp == self._stamp:
                return
            self._known = _by_hash(_read(self._path))
        except (OSError, msgspec.MsgspecError, ValueError):
            # A half-edited file must not lock everybody out; what was known stays until it can be read.
            logger.exception("the tokens file %s cannot be read; the tokens known so far stay valid", self._path)
            return
        self._stamp = stamp


def token_hash(bearer: str) -> str:
    return hashlib.sha256(bearer.encode()).hexdigest()


def _stamp(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_mtime_ns, found.st_size


def _read(path: Path) -> tuple[Token, ...]:
    return msgspec.json.decode(path.read_bytes(), type=tuple[Token, ...])


def _by_hash(rows: tuple[Token, ...]) -> dict[str, Principal]:
    return {row.sha256: Principal(name=row.name, team=row.team, role=row.role) for row in rows}


# --- agents: nothing is stored, the key decides ---
def _sign(key: bytes, text: str) -> str:
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def join_token(key: bytes, slice: str) -> str:
    """What a slice's hosts join with; it is put beside the agent when the slice is made."""
    return _sign(key, f"join:{slice}")


def join_token_fits(key: bytes, slice: str, token: str) -> bool:
    return hmac.compare_digest(join_token(key, slice).encode(), token.encode())


def joins(key: bytes, slice: str, authorization: str | None) -> bool:
    """Whether a request brings the join token of a slice, on routes for hosts that have not joined yet."""
    return join_token_fits(key, slice, _bearer(authorization))


def belongs(key: bytes, slice: str, authorization: str | None) -> bool:
    """Whether a request comes from a host of a slice, before it has joined or after."""
    host = host_of(key, _bearer(authorization))
    return host.slice == slice if host is not None else joins(key, slice, authorization)


def host_credential(key: bytes, host: AgentHost) -> str:
    """What one host in one life calls with. The incarnation is inside, as hex: it may be any text."""
    life = host.incarnation.encode().hex()
    return f"h.{host.slice}.{host.host}.{life}.{_sign_host(key, host)}"


def _sign_host(key: bytes, host: AgentHost) -> str:
    return _sign(key, f"host:{host.slice}:{host.host}:{host.incarnation}")


def host_of(key: bytes, bearer: str) -> AgentHost | None:
    """The host a credential was made for; None when this server's key did not make it."""
    parts = bearer.split(".")
    if len(parts) != 5 or not (parts[2].isascii() and parts[2].isdigit() and len(parts[2]) < 10):
        return None
    try:
        life = bytes.fromhex(parts[3]).decode()
    except ValueError:
        return None
    host = AgentHost(parts[1], int(parts[2]), life)
    return host if hmac.compare_digest(_sign_host(key, host).encode(), parts[4].encode()) else None


# --- every request ---
def authenticate(
    tokens: Tokens, key: bytes, route: Route, authorization: str | None
) -> tuple[Principal | None, AgentHost | None]:
    """Who calls and whether this route is for them; raises a `Refusal` that says what is missing."""
    if route.role is None:
        return None, None
    bearer = _bearer(authorization)
    if bearer.startswith("h."):
        host = host_of(key, bearer)
        if host is None:
            raise Refusal("unauthenticated", "the host's credential is not of this server", advice="join again")
        if not (route.agents or route.role is Role.AGENT):
            raise Refusal("forbidden", "agents may not call this route")
        return None, host
    principal = tokens.find(bearer)
    if principal is None:
        raise Refusal("unauthenticated", "this token is not known here", advice="ask your administrator for a token")
    if route.role is Role.AGENT:
        raise Refusal("forbidden", "only agents may call this route")
    if not has_role(principal, route.role):
        raise Refusal(
            "forbidden",
            f"{principal.name} is {principal.role.value} of team {principal.team}; this needs {route.role.value}",
            advice="ask an administrator of your team",
        )
    return principal, None


def has_role(principal: Principal, least: Role) -> bool:
    return _RANK.get(principal.role, -1) >= _RANK[least]


def _bearer(authorization: str | None) -> str:
    if authorization is None:
        raise Refusal("unauthenticated", "there is no Authorization header", advice="send Authorization: Bearer TOKEN")
    scheme, _, bearer = authorization.partition(" ")
    bearer = bearer.strip()
    if scheme.lower() != "bearer" or not bearer or len(bearer) > _BEARER_MAX or not bearer.isascii():
        raise Refusal("unauthenticated", "the Authorization header is not `Bearer TOKEN`")
    return bearer
