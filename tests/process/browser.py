"""A real headless Chromium, driven through chromedriver by plain WebDriver requests.

Tests of web pages open pages with it, type, press and look. It decides when the want of a browser is a reason to skip:
never in CI. It must not judge what it sees.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import shutil
import signal
import subprocess
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from tests.missing import missing
from tests.process.firestore_house import free_port

START_S = 60.0
ANSWER_S = 60.0
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  #: the key under which WebDriver gives an element's id


class StaleElement(Exception):
    """The element is no longer on the page."""


class Browser:
    """One browser with one window; its profile and its files are in `folder`."""

    def __init__(self, folder: Path) -> None:
        chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
        if not (chromium and driver):
            missing("a browser (on Debian: apt-get install chromium chromium-driver)")
        self._port = free_port()
        self._session = ""
        # A session of its own, so that whatever the browser starts can be ended with it.
        self._driver = subprocess.Popen(
            [driver, f"--port={self._port}"],
            env={**os.environ, "HOME": str(folder), "TMPDIR": str(folder)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            self._await_driver()
            self._session = self._open(chromium, folder)
        except BaseException:
            self.end()
            raise

    def _open(self, chromium: str, folder: Path) -> str:
        words = ["--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1000,1100"]
        words += [f"--user-data-dir={folder / 'profile'}", "--no-first-run", "--disable-background-networking"]
        # A page that was left must be gone: kept for going back, it keeps its connections too, and six is the most.
        words.append("--disable-features=BackForwardCache")
        if os.geteuid() == 0:
            words.append("--no-sandbox")  # Chromium's sandbox refuses to serve root
        capabilities = {
            "browserName": "chrome",
            "goog:chromeOptions": {"binary": chromium, "args": words},
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        made = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": capabilities}})
        return f"/session/{made['sessionId']}"

    def open(self, url: str) -> None:
        self._ask("POST", f"{self._session}/url", {"url": url})

    def find(self, css: str) -> str:
        found = self._ask("POST", f"{self._session}/element", {"using": "css selector", "value": css})
        return str(found[ELEMENT])

    def press(self, css: str) -> None:
        """Click it; once more if the page put another one in its place between looking and clicking."""
        try:
            self._ask("POST", f"{self._session}/element/{self.find(css)}/click", {})
        except StaleElement:
            self._ask("POST", f"{self._session}/element/{self.find(css)}/click", {})

    def write(self, css: str, text: str) -> None:
        """Type into a field, in place of what is there."""
        element = self.find(css)
        self._ask("POST", f"{self._session}/element/{element}/clear", {})
        self._ask("POST", f"{self._session}/element/{element}/value", {"text": text})

    def run(self, script: str, *arguments: object) -> Any:
        """What a JavaScript function with this body returns."""
        return self._ask("POST", f"{self._session}/execute/sync", {"script": script, "args": list(arguments)})

    def complaints(self) -> list[str]:
        """What the page and the browser wrote to the console as errors since the last call."""
        entries = self._ask("POST", f"{self._session}/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._ask("GET", f"{self._session}/screenshot")))

    def end(self) -> None:
        if self._session:
            self._ask("DELETE", self._session)
        os.killpg(self._driver.pid, signal.SIGKILL)  # its own group: the session was made for it
        self._driver.wait(START_S)

    def _await_driver(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            try:
                if self._ask("GET", "/status")["ready"]:
                    return
            except OSError:
                assert self._driver.poll() is None, f"chromedriver ended with {self._driver.returncode}"
                assert time.monotonic() < deadline, "chromedriver did not start in time"
                time.sleep(0.05)

    def _ask(self, method: str, path: str, body: object = None) -> Any:
        with closing(http.client.HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_S)) as connection:
            sent = None if body is None else json.dumps(body).encode()
            connection.request(method, path, sent, {"content-type": "application/json"})
            answer = connection.getresponse()
            value = json.loads(answer.read())["value"]
        if answer.status != 200 and value["error"] == "stale element reference":
            raise StaleElement(value["message"])
        assert answer.status == 200, f"{method} {path}: {value}"
        return value
