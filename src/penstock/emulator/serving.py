"""Runs an emulator on a socket that is bound until it is told to stop, and lets it break connections.

`wiring.emulators` calls it. A broken connection is what no ASGI application can ask for, so the protocol of the HTTP
server puts a function for it into each request's scope.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from typing import Any

import uvicorn
from typing_extensions import override
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from penstock.emulator.asgi import CUT


class _Breakable(HttpToolsProtocol):
    @override
    def on_message_begin(self) -> None:
        super().on_message_begin()
        scope: Any = self.scope
        scope["extensions"] = {CUT: self.transport.abort}


def serve(application: Callable[..., Any], listener: socket.socket, ready: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT; `ready` gets the address once connections are accepted."""
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    listener.listen(128)
    host, port = listener.getsockname()
    ready(f"http://{host}:{port}")
    config = uvicorn.Config(
        application,
        http=_Breakable,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    uvicorn.Server(config).run(sockets=[listener])
