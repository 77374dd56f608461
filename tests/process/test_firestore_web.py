"""The example page in a real browser: Google's emulator under the shipped rules, a real bridge, a real Penstock.

What is asserted is what a person sees on the page. Each person's page is served under their name, with a `config.json`
of their own; nothing is fetched from anywhere else. A picture of the page is left in the test's directory.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from tests.missing import missing
from tests.process.browser import Browser
from tests.process.firestore_people import OWNER, RULES, RuledEmulator, from_fields
from tests.process.machine import until
from tests.process.shop import RUN_S, TPU, Shop
from tests.tidy.tracked import ROOT

pytestmark = pytest.mark.slow

PAGE = ROOT / "examples" / "firestore_web"
PROJECT = "demo-web"
ENDED = frozenset({"completed", "failed"})
CLAIMS: dict[str, dict[str, Any]] = {
    name: {"sub": name, "email": f"{name}@example.com", "email_verified": True, **claims}
    for name, claims in {"ada": {"penstock": True}, "bob": {"penstock": True}, "stranger": {}}.items()
}
#: Notes every status that a card shows, so that none is missed between two looks.
NOTE = """
window.seen = {};
const note = () => document.querySelectorAll("article").forEach(({ dataset: { id, status } }) => {
  const seen = window.seen[id] ??= [];
  if (seen.at(-1) !== status) seen.push(status);
});
new MutationObserver(note).observe(document.getElementById("jobs"), { childList: true });
"""


class PageHandler(SimpleHTTPRequestHandler):
    """The page's folder under the name of each person, with their configuration."""

    def __init__(self, port: int, *arguments: Any) -> None:
        self._emulator_port = port
        super().__init__(*arguments, directory=str(PAGE))

    @override
    def do_GET(self) -> None:
        _, person, rest = self.path.split("/", 2)
        if rest != "config.json":
            self.path = f"/{rest}"
            super().do_GET()
            return
        config = json.loads((PAGE / "config.json").read_text())
        config["firebase"]["projectId"] = PROJECT
        config["emulator"] = {"host": "127.0.0.1", "port": self._emulator_port, "user": CLAIMS[person]}
        body = json.dumps(config).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    @override
    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


class Bridge:
    """A `tpu bridge firestore` process; what it says is in `log`."""

    def __init__(self, shop: Shop, emulator: RuledEmulator) -> None:
        self.log = shop.desk / "bridge.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*TPU, "bridge", "firestore", "--project", PROJECT],
                env={**shop.environment, "FIRESTORE_EMULATOR_HOST": emulator.host},
                cwd=shop.desk,
                stdout=log,
                stderr=log,
            )

    def check(self) -> None:
        assert self.process.poll() is None, self.log.read_text()


class Page:
    """The page as one person has it open, and what is behind it."""

    def __init__(self, browser: Browser, emulator: RuledEmulator, bridge: Bridge, address: str) -> None:
        self.browser = browser
        self.address = address
        self._emulator = emulator
        self._bridge = bridge

    def open(self, person: str) -> None:
        self.browser.open(f"{self.address}/{person}/")
        until(lambda: self.said() == f"Signed in as {person}@example.com")
        self.browser.run(NOTE)

    def said(self) -> str:
        return str(self.browser.run("return document.getElementById('said').textContent"))

    def submit(self, code: str | None = None) -> str:
        """Press the button, with this code or with what the page offers; the document's id."""
        before = self.said()
        if code is not None:
            self.browser.write("textarea", code)
        self.browser.press("form button")
        until(lambda: self.said() != before)
        found = re.fullmatch(r"Submitted (\w+)", self.said())
        assert found, self.said()
        return found[1]

    def shows(self, id: str, part: str = "status") -> str:
        script = "return document.querySelector(`[data-id='${arguments[0]}'] .${arguments[1]}`)?.textContent ?? ''"
        return str(self.browser.run(script, id, part))

    def comes_to(self, id: str, status: str) -> None:
        deadline = time.monotonic() + RUN_S
        while self.shows(id) != status:
            self._bridge.check()
            wrong = self.shows(id) in ENDED or time.monotonic() > deadline
            assert not wrong or self.shows(id) == status, f"not {status}: {self.document(id)}"
            time.sleep(0.05)

    def seen(self, id: str) -> list[str]:
        return list(self.browser.run("return window.seen[arguments[0]]", id))

    def document(self, id: str) -> dict[str, Any]:
        path = f"/v1/projects/{PROJECT}/databases/(default)/documents/tpu_jobs/{id}"
        status, answer = self._emulator.request("GET", path, bearer=OWNER)
        assert status == 200, answer
        return from_fields(answer["fields"])


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RuledEmulator]:
    emulator = RuledEmulator(tmp_path_factory.mktemp("emulator"))
    emulator.load_rules(PROJECT, RULES.read_text())
    yield emulator
    emulator.stop()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("browser"))
    yield browser
    browser.end()


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    shop = Shop(tmp_path_factory.mktemp("web") / "home")
    try:
        shop.open()
        yield shop
    finally:
        shop.end()


@pytest.fixture(scope="module")
def bridge(shop: Shop, emulator: RuledEmulator) -> Iterator[Bridge]:
    bridge = Bridge(shop, emulator)
    try:
        yield bridge
        bridge.process.terminate()
        assert bridge.process.wait(RUN_S) == 0, bridge.log.read_text()
    finally:
        bridge.process.kill()
        bridge.process.wait()


@pytest.fixture(scope="module")
def page(browser: Browser, emulator: RuledEmulator, bridge: Bridge) -> Iterator[Page]:
    fetched = subprocess.run(
        [sys.executable, "tools/fetch_firebase.py"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if fetched.returncode:
        missing(f"Google's web client ({fetched.stderr.strip()})")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(PageHandler, emulator.port))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield Page(browser, emulator, bridge, f"http://127.0.0.1:{server.server_port}")
    server.shutdown()
    server.server_close()


def test_what_the_page_offers_runs(page: Page) -> None:
    page.open("ada")
    id = page.submit()
    page.comes_to(id, "completed")
    assert page.shows(id, "result") == "45.0"
    steps = [step.split()[0] for step in page.shows(id, "steps").split(" → ")]
    assert steps == ["submitted", "scheduled", "running", "ended"]
    assert page.browser.complaints() == []


def test_a_document_is_watched_from_pending_to_its_result(page: Page, shop: Shop) -> None:
    page.open("ada")
    gate = (
        "import os, time\nwhile not os.path.exists(os.environ['PENSTOCK_CHECKPOINT_DIR'] + '/go'): time.sleep(0.02)\n"
    )
    markup = "<img src=x onerror='document.title=1'>"
    id = page.submit(f"{gate}result = {markup!r}")
    page.comes_to(id, "running")
    assert page.shows(id, "result") == ""
    shop.open_gate(page.document(id)["job_id"], "go")
    page.comes_to(id, "completed")
    assert page.shows(id, "result") == markup
    assert page.browser.run("return document.querySelectorAll('article img').length") == 0
    seen = page.seen(id)
    in_order = ["pending", "scheduled", "running", "completed"]
    assert seen == [status for status in in_order if status in seen], "never backwards"
    assert {"pending", "running", "completed"} <= set(seen), "a status that passes quickly may be skipped"
    assert page.browser.run("return document.querySelector(`[data-id='${arguments[0]}'] button`).hidden", id)


def test_a_failure_is_shown(page: Page, tmp_path: Path) -> None:
    page.open("ada")
    id = page.submit("print('so far')\nraise ValueError('seven is not allowed')")
    page.comes_to(id, "failed")
    error = page.shows(id, "error")
    assert error.startswith("ValueError: seven is not allowed")
    assert "raise ValueError" in error or "so far" in error, "the last lines too"
    page.browser.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 10_000


def test_cancelling(page: Page, shop: Shop) -> None:
    page.open("ada")
    id = page.submit("import time\nwhile True: time.sleep(0.1)")
    page.comes_to(id, "running")
    page.browser.press(f"[data-id='{id}'] button")
    page.comes_to(id, "failed")
    assert page.shows(id, "error").startswith("Cancelled: ")
    assert page.seen(id)[-2:] == ["cancel_requested", "failed"]
    assert shop.ended(page.document(id)["job_id"])["state"] == "cancelled"


def test_nobody_sees_what_is_anothers(page: Page) -> None:
    page.open("ada")
    ours = page.submit("result = 'of ada'")
    page.comes_to(ours, "completed")
    page.open("bob")
    own = page.submit("result = 'of bob'")
    page.comes_to(own, "completed")
    assert set(page.browser.run("return Object.keys(window.seen)")) == {own}


def test_who_was_not_let_in_is_told_so(page: Page) -> None:
    page.browser.open(f"{page.address}/stranger/")
    until(lambda: "permission-denied" in page.said())
    page.browser.press("form button")
    until(lambda: page.said().startswith("Not submitted: "))
    assert "permission-denied" in page.said()
