"""Compares a real project with `facts.toml`: sends the probes, waits as reality needs, counts the money, tidies up.

`tpu cloud selftest` runs it through wiring, against Google's service or an emulator in tests. What is made bears a
label and a name of this run; nothing else is ever changed, whatever a probe says. A probe begins only if what was spent
and the most it may cost fit into the budget. It must not decide what a difference means: people read the report.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Literal
from urllib.parse import parse_qs, quote, urlsplit

import msgspec

from penstock.emulator.fact_places import LABEL, PREFIX, Place, moved
from penstock.emulator.facts import Fact, Send, differences, probe
from penstock.emulator.http_words import Answer
from penstock.emulator.selftest_plan import Costs, Planned, settled_before, unsuited

DELETE_MINUTES: Final = 5.0  #: a deletion takes so long at most; paid for, like the time before
_OVER: Final = ("ACTIVE", "FAILED", "SUSPENDED")
_MAIL: Final = re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
_SEEN_MAX: Final = 4_000


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One row: `holds`, `differs`, `blocked` (reality did not let it be shown) or `skipped`, and why."""

    fact: str
    what: str
    verdict: Literal["holds", "differs", "blocked", "skipped"]
    why: str = ""
    expected: str = ""
    differences: tuple[str, ...] = ()
    seen_status: int | None = None
    seen_body: str = ""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What is written to a file that may be sent in: the project's name and addresses of people are left out."""

    penstock: str
    at: float
    zone: str
    endpoint: str
    budget_usd: float
    spent_usd: float
    leftovers: tuple[str, ...]  #: of earlier runs, found by label or name and deleted
    undeleted: tuple[str, ...]  #: what could not be deleted: look at these
    results: tuple[Result, ...]


class Stuck(Exception):
    """Something of ours could not be deleted: nothing more may be made."""


class Selftest:
    """One run at one place."""

    def __init__(
        self,
        send: Send,
        place: Place,
        *,
        now: Callable[[], float],
        sleep: Callable[[float], None],
        budget_usd: float,
        minutes: float,
        every_s: float,
    ) -> None:
        """`minutes` is how long the nodes of one probe may live; `every_s` how often reality is asked."""
        self._send_raw = send
        self.place = place
        self.now, self.sleep = now, sleep
        self._budget = budget_usd
        self._minutes = minutes
        self.every_s = every_s
        self._costs = Costs(minutes + DELETE_MINUTES)
        self.spent_usd = 0.0
        self.undeleted: list[str] = []
        self.made: set[str] = set()  #: names of what was asked for and is not proven to be gone

    # --- what there is ---
    def plan(self, facts: Mapping[str, Fact]) -> list[Planned]:
        """What each row would take; the most it may cost, or why it cannot be probed."""
        lonely = not any(not _is_ours(each) for each in self._listed("nodes"))
        return [
            Planned(name, why, self._costs.most(fact))
            for name, fact in facts.items()
            for why in [unsuited(name, fact, self._minutes, lonely, self._costs)]
        ]

    def leftovers(self) -> list[str]:
        """Things of this or an earlier run that are there, by label or name."""
        return [each["name"] for kind in ("queuedResources", "nodes") for each in self._listed(kind) if _is_ours(each)]

    def _listed(self, kind: str) -> Iterator[dict[str, Any]]:
        token = ""
        while True:
            query = f"?pageToken={quote(token)}" if token else ""
            answer = self.ask("GET", f"/v2/projects/{self.place.project}/locations/-/{kind}{query}")
            if answer is None or answer.status != 200:
                said = "no answer" if answer is None else f"{answer.status}: {answer.body[:200]!r}"
                raise Stuck(f"{kind} of project {self.place.project} cannot be listed: {said}")
            content = msgspec.json.decode(answer.body or b"{}")
            yield from content.get(kind, [])
            token = content.get("nextPageToken", "")
            if not token:
                return

    # --- tidying ---
    def tidy(self) -> list[str]:
        """Delete all that is ours, and wait until it is gone; what there was."""
        until = self.now() + DELETE_MINUTES * 60
        left = found = self._left()
        while left:
            for name in left:
                self.ask("DELETE", f"/v2/{name}" + ("?force=true" if "/queuedResources/" in name else ""))
            self.sleep(self.every_s)
            left = self._left()
            if left and self.now() > until:
                self.undeleted = left
                raise Stuck(f"not deleted within {DELETE_MINUTES:g} minutes: {', '.join(left)}")
        return found

    def _left(self) -> list[str]:
        """What is listed as ours, and what we made and is not proven gone: a listing may lack a zone."""
        listed = self.leftovers()
        for name in sorted(self.made - set(listed)):
            answer = self.ask("GET", f"/v2/{name}")
            if answer is not None and answer.status in (400, 403, 404):  # gone, or where nothing can be
                self.made.discard(name)
            else:
                listed.append(name)
        return listed

    # --- probing ---
    def check(self, name: str, fact: Fact) -> Result:
        """Probe one row, and take everything away again."""
        most = self._costs.most(fact)
        here = moved(fact, self.place)
        if self.spent_usd + most > self._budget:
            why = f"may cost ${most:.2f}, and ${max(0.0, self._budget - self.spent_usd):.2f} of the budget are left"
            return Result(fact=name, what=fact.what, verdict="skipped", why=why)
        began = self.now()
        walk = _Walk(self, here, began + self._minutes * 60)
        try:
            told = probe(here, walk.send, lambda _: None, self.place.project)
        finally:
            if walk.made:
                self.tidy()
                self.spent_usd += self._costs.per_hour(fact) * (self.now() - began) / 3600
        verdict: Literal["holds", "differs", "blocked"] = "holds"
        if told:
            verdict = "blocked" if walk.blocked else "differs"
        last = walk.last
        return Result(
            fact=name,
            what=fact.what,
            verdict=verdict,
            why=self.hide(walk.blocked) if verdict == "blocked" else "",
            expected=self.hide(_expected(here)),
            differences=tuple(self.hide(each) for each in told),
            seen_status=None if last is None else last.status,
            seen_body="" if last is None else self.hide(last.body.decode("utf-8", "replace")[:_SEEN_MAX]),
        )

    def hide(self, text: str) -> str:
        """Without what tells whose project it is."""
        return _MAIL.sub("ACCOUNT", text.replace(self.place.project, "PROJECT").replace(self.place.prefix, ""))

    def ask(self, method: str, target: str, body: bytes = b"", headers: dict[str, str] | None = None) -> Answer | None:
        """One request; None when there was no answer. Nothing that is not ours is changed."""
        if method != "GET":
            self._guard(target)
        return self._send_raw(method, target, body, headers or {})

    def _guard(self, target: str) -> None:
        """Only what has our name may be changed. What a probe says to make has it too."""
        parts = urlsplit(target)
        named = re.search(r"/(?:nodes|queuedResources)/([^/:?]+)", parts.path)
        query = parse_qs(parts.query)
        name = (
            named[1] if named else next((query[key][0] for key in ("nodeId", "queuedResourceId") if key in query), "")
        )
        if not name or name.startswith(PREFIX) or not re.fullmatch(r"[\w.~+-]+", name):
            return  # ours; or a name that cannot be, which is what the probe is about
        if name not in {each.rpartition("/")[2] for each in self.leftovers()}:
            raise Stuck(f"a probe would touch {name!r}, which is not ours; nothing was sent")


class _Walk:
    """The requests of one row, as reality needs them: what takes time there is waited for."""

    def __init__(self, test: Selftest, fact: Fact, until: float) -> None:
        self._test = test
        self._fact = fact
        self._until = until
        self._settle = settled_before(fact)
        self._at = 0
        self._pending: list[str] = []
        self._queued: list[str] = []
        self.made = False
        self.blocked = ""  #: what in `before` did not work
        self.last: Answer | None = None

    def send(self, method: str, target: str, body: bytes, headers: dict[str, str]) -> Answer | None:
        at, self._at = self._at, self._at + 1
        last = at == len(self._fact.before)
        if self._settle[at]:
            self._wait(_version(target))
        answer = self._ask(method, target, body, headers)
        if last and method == "GET" and self.made:
            while differences(self._fact.expect, answer) and self._test.now() < self._until:
                self._test.sleep(self._test.every_s)
                answer = self._ask(method, target, body, headers)
        elif not last and (answer is None or answer.status >= 400) and not self.blocked:
            self.blocked = "no answer" if answer is None else f"{method}: {answer.status}: {answer.body[:300]!r}"
        self.last = answer
        return answer

    def _ask(self, method: str, target: str, body: bytes, headers: dict[str, str]) -> Answer | None:
        if method == "POST" and ("nodeId=" in target or "queuedResourceId=" in target):
            self.made = True  # also if it is refused, or the answer is lost: looking for it costs nothing
            self._test.made.update(_names_made(target, body))
        answer = self._test.ask(method, target, body, headers)
        if answer is not None and answer.status < 400 and method != "GET":
            content = _decoded(answer.body)
            if "/operations/" in str(content.get("name", "")) and not content.get("done"):
                self._pending.append(content["name"])
            if method == "POST" and "queuedResourceId=" in target:
                path = urlsplit(target)
                self._queued.append(f"{path.path}/{parse_qs(path.query)['queuedResourceId'][0]}")
        return answer

    def _wait(self, version: str) -> None:
        """Until what was begun is done, or time is up."""
        for name in self._pending:
            content = self._poll(f"/{version}/{name}", lambda found: bool(found.get("done")))
            if content.get("error") and not self.blocked:
                self.blocked = f"{name.rpartition('/')[2]}: {content['error']}"
        for path in self._queued:
            self._poll(path, lambda found: found.get("state", {}).get("state") in _OVER)
        self._pending.clear()
        self._queued.clear()

    def _poll(self, path: str, over: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        while True:
            answer = self._test.ask("GET", path)
            content = _decoded(answer.body) if answer is not None else {}
            if over(content) or self._test.now() >= self._until:
                return content
            self._test.sleep(self._test.every_s)


def _is_ours(each: dict[str, Any]) -> bool:
    labels = each.get("labels") or {}
    specs = (each.get("tpu") or {}).get("nodeSpec") or ()
    inner = any(LABEL in (spec.get("node", {}).get("labels") or {}) for spec in specs)
    return LABEL in labels or inner or str(each["name"]).rpartition("/")[2].startswith(PREFIX)


def _names_made(target: str, body: bytes) -> Iterator[str]:
    """What a request would make, by its full names."""
    parts = urlsplit(target)
    query, parent = parse_qs(parts.query), parts.path.split("/", 2)[2]
    for key in ("nodeId", "queuedResourceId"):
        if key in query:
            yield f"{parent}/{quote(query[key][0], safe='')}"
    for spec in (_decoded(body).get("tpu") or {}).get("nodeSpec") or ():
        several = spec.get("multisliceParams") or {}
        names = [f"{several.get('nodeIdPrefix')}-{index}" for index in range(several.get("nodeCount", 0))]
        yield from (f"{spec['parent']}/nodes/{name}" for name in [spec.get("nodeId"), *names] if name)


def _version(target: str) -> str:
    return target.split("/")[1]


def _decoded(raw: bytes) -> dict[str, Any]:
    try:
        content = msgspec.json.decode(raw) if raw else {}
    except msgspec.DecodeError:
        return {}
    return content if isinstance(content, dict) else {}


def _expected(fact: Fact) -> str:
    wanted = fact.expect
    body = "" if wanted.body is None else msgspec.json.encode(wanted.body).decode()
    return " ".join(word for word in (str(wanted.status), wanted.reason, wanted.message, body) if word)
