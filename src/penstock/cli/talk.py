"""From a command to the server: find it, start the embedded one where that is wanted, and turn its no into one line.

Every command that needs a server enters `talking`. An error of the SDK leaves it as a click error with the exit code of
`wire.problems`, so that commands never handle refusals themselves. The SDK is imported when it is first needed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from penstock.client.client import Client
    from penstock.wire.api import JobView

ANSWER_PATIENCE_S = 3.0  #: for one answer: a server that restarts is back by then, a wrong address is told soon
STAY_PATIENCE_S = 600.0  #: for commands that stay with a job: as long as an agent keeps it without the server
COMPLETION_TIMEOUT_S = 1.0  #: the shell's user waits for this
COMPLETION_JOBS = 50


class Refused(click.ClickException):
    """What the server or the SDK said no to, with the exit code that belongs to it."""

    def __init__(self, line: str, exit_code: int) -> None:
        super().__init__(line)
        self.exit_code = exit_code  # type: ignore[misc]  # click has one per class; here the server's answer decides


@contextlib.contextmanager
def talking(*, start: bool = False, stay: bool = False) -> Iterator[Client]:
    """A client for the length of one command.

    With `start`, the embedded server is started if none is configured. With `stay`, a server that goes away later is
    waited for, but it has to answer first.
    """
    from penstock.client.client import Client
    from penstock.client.errors import ApiError

    try:
        if start and _is_embedded():
            from penstock.wiring.embedded import ensure_server

            ensure_server()
        if stay:
            with Client(patience_s=ANSWER_PATIENCE_S) as probe:
                probe.server()
        with Client(patience_s=STAY_PATIENCE_S if stay else ANSWER_PATIENCE_S) as client:
            yield client
    except ApiError as error:
        raise Refused(_hinted(error), error.exit_code) from error
    except ValueError as error:
        # Its module brings the catalogue, which most commands never need: look only when there is an error.
        from penstock.domain.admission import BadInput

        if not isinstance(error, BadInput):
            raise
        raise Refused(str(error), 2) from error


def _is_embedded() -> bool:
    """Whether nothing but this machine's own state directory says where the server is."""
    from penstock.client.settings import find, home

    found = find()
    return found is None or found.url_from == str(home() / "server.json")


def _hinted(error: Exception) -> str:
    from penstock.client.errors import Unreachable

    if not isinstance(error, Unreachable) or not _is_embedded():
        return str(error)
    if isinstance(error.__cause__, TimeoutError):
        return f"{error} (the server of this machine runs and did not answer in time; its log may say why)"
    return f"{error} (the server of this machine is down; `tpu serve` or `tpu run` starts it)"


def newest_jobs() -> list[JobView]:
    """For the shell's completion, which has no place for an error: then there is nothing to offer."""
    from penstock.client.client import Client
    from penstock.client.errors import ApiError

    with contextlib.suppress(ApiError, OSError), Client(timeout_s=COMPLETION_TIMEOUT_S, patience_s=0) as client:
        return list(client.page(limit=COMPLETION_JOBS).jobs)
    return []
