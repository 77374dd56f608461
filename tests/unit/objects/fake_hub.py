"""A stand-in for the Hugging Face Hub: two servers on loopback, the Hub and the store of large files it redirects to.

It answers what a fetch of a model asks (a revision's listing with hashes, `resolve` of a file) in the Hub's own words:
small files are sent, large ones answered with a redirect to the other server, ranges are kept. Faults are planted as
plain fields. Tests look at `asked`: which path, with which headers, of which server.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from typing_extensions import override

LARGE_BYTES = 1000  #: from here on a file is kept outside of git
REFUSALS = {"GatedRepo": 401, "RepoNotFound": 401, "RevisionNotFound": 404, "EntryNotFound": 404}


class Asked(NamedTuple):
    server: str  #: hub, store
    path: str
    headers: Mapping[str, str]


class FakeHub:
    def __init__(self) -> None:
        self.endpoint = ""
        self.store = ""
        self.files: dict[str, dict[str, dict[str, bytes]]] = {}  #: model -> commit -> path -> bytes
        self.refs: dict[tuple[str, str], str] = {}
        self.gated: set[str] = set()  #: models whose files need a token
        self.asked: list[Asked] = []
        self.cuts: list[int] = []  #: after so many bytes the next answers of the store end
        self.damaged = 0  #: so many answers of the store have a wrong first byte
        self.busy = 0  #: so many answers of either are 503
        self.ignores_ranges = False

    def add(self, model: str, files: Mapping[str, bytes], *, revision: str = "main") -> str:
        """A commit of these files; its hash."""
        facts = json.dumps([model, revision, [(path, _git(data)) for path, data in sorted(files.items())]])
        commit = hashlib.sha1(facts.encode(), usedforsecurity=False).hexdigest()
        self.files.setdefault(model, {})[commit] = dict(files)
        self.refs[model, revision] = commit
        return commit

    def of(self, server: str) -> list[Asked]:
        return [each for each in self.asked if each.server == server]

    # --- answers ---
    def listing(self, model: str, revision: str) -> bytes | str:
        """The listing, or the code of what is wrong."""
        commits = self.files.get(model)
        if commits is None:
            return "RepoNotFound"
        commit = revision if revision in commits else self.refs.get((model, revision))
        if commit is None:
            return "RevisionNotFound"
        siblings = []
        for path, data in commits[commit].items():
            sibling: dict[str, object] = {"rfilename": path, "size": len(data), "blobId": _git(data)}
            if len(data) >= LARGE_BYTES:
                sibling["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
            siblings.append(sibling)
        return json.dumps({"id": model, "sha": commit, "private": False, "siblings": siblings}).encode()

    def content(self, digest: str) -> bytes:
        every = (data for commits in self.files.values() for files in commits.values() for data in files.values())
        return next(data for data in every if hashlib.sha256(data).hexdigest() == digest)


def _git(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub
    server_name: str

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append(Asked(self.server_name, path, {key.lower(): text for key, text in self.headers.items()}))
        if self.hub.busy:
            self.hub.busy -= 1
            self._send(503, b"")
        elif self.server_name == "store":
            self._send_content(self.hub.content(path.strip("/")))
        elif path.startswith("/api/models/"):
            model, _, revision = path.removeprefix("/api/models/").partition("/revision/")
            found = self.hub.listing(model, revision)
            self._refuse(found) if isinstance(found, str) else self._send(200, found)
        else:
            model, _, rest = path.strip("/").partition("/resolve/")
            commit, _, name = rest.partition("/")
            self._resolve(model, commit, name)

    def _resolve(self, model: str, commit: str, name: str) -> None:
        if model in self.hub.gated and "authorization" not in self.hub.asked[-1].headers:
            self._refuse("GatedRepo")
            return
        data = self.hub.files.get(model, {}).get(commit, {}).get(name)
        if data is None:
            self._refuse("EntryNotFound")
        elif len(data) >= LARGE_BYTES:
            digest = hashlib.sha256(data).hexdigest()
            about = {"Location": f"{self.hub.store}/{digest}?signature=x", "X-Repo-Commit": commit}
            self._send(302, b"", {**about, "X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(data))})
        else:
            self._send(200, data, {"ETag": f'"{_git(data)}"', "X-Repo-Commit": commit})

    def _send_content(self, data: bytes) -> None:
        start, whole = 0, len(data)
        asked = self.headers.get("Range", "")
        if asked and not self.hub.ignores_ranges:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, data = int(first), data[: int(last) + 1] if last else data
        if start and start >= len(data):
            self._send(416, b"")
            return
        if self.hub.damaged:
            self.hub.damaged -= 1
            data = bytes([data[0] ^ 1]) + data[1:]
        part = start or len(data) < whole
        self.send_response(206 if part else 200)
        if part:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{whole}")
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        if self.hub.cuts:
            self.wfile.write(data[start : start + self.hub.cuts.pop(0)])
            self.close_connection = True
        else:
            self.wfile.write(data[start:])

    def _refuse(self, code: str) -> None:
        self._send(REFUSALS[code], b"", {"X-Error-Code": code, "X-Error-Message": "no"})

    def _send(self, status: int, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for key, text in (headers or {}).items():
            self.send_header(key, text)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    @override
    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serving() -> Iterator[FakeHub]:
    """A Hub without models."""
    known = FakeHub()
    servers = []
    for name in ("hub", "store"):
        handler = type(f"_{name}", (_Handler,), {"hub": known, "server_name": name})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        servers.append(server)
    known.endpoint, known.store = (f"http://127.0.0.1:{server.server_address[1]}" for server in servers)
    try:
        yield known
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()
