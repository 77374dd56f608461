"""`tpu cloud selftest` put together: who sends requests to Google (or an emulator), with which credential and clock.

`cli.cloud` calls it. Whatever ends the run, what it made is deleted, or named if that fails.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Final
from urllib.parse import urlsplit

import httpx2

from penstock import __version__
from penstock.capacity.tpu_rest import CALL_S, FixedTokens, LoginTokens, Tokens
from penstock.domain.admission import BadInput
from penstock.emulator.fact_places import Place
from penstock.emulator.facts import Fact, Send, known_facts
from penstock.emulator.http_words import Answer
from penstock.emulator.selftest import Report, Result, Selftest, Stuck
from penstock.emulator.selftest_plan import Planned
from penstock.ports.capacity import CapacityError
from penstock.wiring.clock import SystemClock
from penstock.wiring.settings import CLOUD_ENDPOINT

__all__ = ["Planned", "Report", "Stuck", "Trial"]

_ASK_EVERY_S: Final = 5.0
_ASK_EMULATOR_EVERY_S: Final = 0.1
_PROJECT: Final = re.compile(r"[a-z][a-z0-9.:-]{4,100}[a-z0-9]")
_ZONE: Final = re.compile(r"[a-z]+(-[a-z0-9]+)+")


class Trial:
    """A selftest that is ready to be run: `planned` first, then `run`."""

    def __init__(
        self,
        project: str,
        zone: str,
        *,
        budget_usd: float,
        minutes: float,
        endpoint: str | None = None,
        words: tuple[str, ...] = (),
    ) -> None:
        """`words` narrow the rows, as in `tpu emulator facts`; `minutes` is the life of the nodes of one probe."""
        for field, value, rule, example in (
            ("project", project, _PROJECT, "my-project"),
            ("zone", zone, _ZONE, "us-central1-a"),
        ):
            if not rule.fullmatch(value):
                raise BadInput(field, value, f"is not the name of a {field}", f"such as {example}")
        endpoint = endpoint or CLOUD_ENDPOINT
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BadInput("endpoint", endpoint, "is not an address", "such as http://127.0.0.1:9090")
        self._endpoint = endpoint.rstrip("/")
        emulated = parts.hostname in ("127.0.0.1", "localhost", "::1")
        self._http = httpx2.Client(timeout=CALL_S)
        self._budget = budget_usd
        self.place = Place(project, zone, secrets.token_hex(3))
        self._test = Selftest(
            self._sender(FixedTokens("emulated") if emulated else LoginTokens()),
            self.place,
            now=time.monotonic,
            sleep=time.sleep,
            budget_usd=budget_usd,
            minutes=minutes,
            every_s=_ASK_EMULATOR_EVERY_S if emulated else _ASK_EVERY_S,
        )
        self._facts: Mapping[str, Fact] = {
            name: fact
            for name, fact in known_facts().items()
            if all(word.lower() in f"{name} {fact.what}" for word in words)
        }
        self._at = SystemClock().now()

    def close(self) -> None:
        self._http.close()

    def planned(self) -> tuple[list[Planned], list[str]]:
        """What would be probed, and what earlier runs left behind. Nothing is changed by asking."""
        return self._test.plan(self._facts), self._test.leftovers()

    def run(self, planned: list[Planned], told: Callable[[Result], None]) -> Report:
        """Probe what was planned; `told` hears of each row as it is known."""
        results: list[Result] = []
        leftovers: list[str] = []
        try:
            leftovers = self._test.tidy()
            for each in planned:
                fact = self._facts[each.fact]
                if each.skipped:
                    done = Result(fact=each.fact, what=fact.what, verdict="skipped", why=each.skipped)
                else:
                    done = self._test.check(each.fact, fact)
                results.append(done)
                told(done)
        except (Stuck, KeyboardInterrupt) as ended:
            why = self._test.hide(str(ended)) or "interrupted"
            results.append(Result(fact="-", what="the run was given up", verdict="blocked", why=why))
        finally:
            self._tidy_at_last()
        return Report(
            penstock=__version__,
            at=self._at,
            zone=self.place.zone,
            endpoint=self._endpoint,
            budget_usd=self._budget,
            spent_usd=round(self._test.spent_usd, 4),
            leftovers=tuple(self._test.hide(name) for name in leftovers),
            undeleted=tuple(self._test.undeleted),
            results=tuple(results),
        )

    def _tidy_at_last(self) -> None:
        """Also after Ctrl-C. What stays is in `undeleted`, and printed."""
        try:
            self._test.tidy()
            self._test.undeleted = []
        except Stuck as stuck:
            self._test.undeleted = self._test.undeleted or [str(stuck)]

    def _sender(self, tokens: Tokens) -> Send:
        def send(method: str, target: str, body: bytes, headers: dict[str, str]) -> Answer | None:
            try:
                sent = {"authorization": f"Bearer {asyncio.run(tokens.token())}", **headers}
            except CapacityError as error:
                raise Stuck(str(error)) from error
            if body:
                sent.setdefault("content-type", "application/json")
            try:
                got = self._http.request(method, self._endpoint + target, content=body or None, headers=sent)
            except (httpx2.HTTPError, OSError):
                return None
            return Answer(got.status_code, got.content, {name.lower(): value for name, value in got.headers.items()})

        return send
