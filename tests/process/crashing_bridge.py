"""A bridge that dies by SIGKILL at one named step, the first time it comes there: `CRASH_AT=after:claim`.

Steps are the bridge's effects: `claim`, `note` (the job's id), `running`, `end` (writes to the document), `submit` and
`cancel` (calls to Penstock); each has a moment `before` and one `after`. The tests of faults start it as they start
`tpu`; nothing of the product knows of it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from penstock.cli.main import main
from penstock.firestore.database import Database
from penstock.firestore.desk import Desk

VARIABLE = "CRASH_AT"


def step_of(content: Mapping[str, object]) -> str:
    """Which step a write to a document is."""
    match content.get("status"):
        case "scheduled":
            return "claim"
        case "running":
            return "running"
        case None:
            return "note"
        case _:
            return "end"


def dying(where: str, call: Callable[..., Awaitable[Any]], name: Callable[..., str]) -> Callable[..., Awaitable[Any]]:
    async def wrapped(*words: Any, **named: Any) -> Any:
        step = name(*words)
        if where == f"before:{step}":
            os.kill(os.getpid(), signal.SIGKILL)
        answer = await call(*words, **named)
        if where == f"after:{step}":
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    return wrapped


if __name__ == "__main__":
    where = os.environ[VARIABLE]
    Database.update = dying(where, Database.update, lambda _self, _name, content, *_: step_of(content))  # type: ignore[method-assign, assignment]
    Desk.submit = dying(where, Desk.submit, lambda *_: "submit")  # type: ignore[method-assign, assignment]
    Desk.cancel = dying(where, Desk.cancel, lambda *_: "cancel")  # type: ignore[method-assign, assignment]
    main()
