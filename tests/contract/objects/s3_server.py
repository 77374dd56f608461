"""An S3 with conditional writes: `python -m …` serves moto on a free port of 127.0.0.1 and prints the address.

One request at a time: moto itself checks a condition and stores in two steps, which a second thread could part.
"""

from __future__ import annotations

import sys

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from typing_extensions import override
from werkzeug.serving import WSGIRequestHandler, make_server


class Quiet(WSGIRequestHandler):
    """Says nothing of each request."""

    @override
    def log(self, *_: object) -> None:
        return


def main() -> None:
    application = DomainDispatcherApplication(create_backend_app)
    server = make_server("127.0.0.1", 0, application, threaded=False, request_handler=Quiet)
    sys.stdout.write(f"http://127.0.0.1:{server.port}\n")
    sys.stdout.flush()
    server.serve_forever()


if __name__ == "__main__":
    main()
