"""Bridges as processes, and inside a server: which database, which Penstock, and what happens when one fails.

`tpu bridge firestore` runs one in the foreground; `wiring.serve` runs one beside the server when `[bridge.firestore]`
of penstock.toml says so. Google's client is imported here and nowhere earlier: it takes half a second. It must not
decide anything about documents.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from penstock.client.errors import ApiError
from penstock.domain.admission import BadInput
from penstock.domain.nouns import Role
from penstock.wire.problems import problem
from penstock.wiring.settings import bridge_table

logger = logging.getLogger(__name__)

EMULATOR_VARIABLE: Final = "FIRESTORE_EMULATOR_HOST"
DATABASE_DEFAULT: Final = "(default)"
COLLECTION_DEFAULT: Final = "tpu_jobs"
SWEEP_S_DEFAULT: Final = 10.0
RESTART_S: Final = 5.0  #: until a bridge that failed inside a server is started again
_PROJECT: Final = re.compile(r"[a-z0-9][a-z0-9.:-]{1,98}[a-z0-9]\Z", re.ASCII)
_DATABASE: Final = re.compile(r"(\(default\)|[a-z][a-z0-9-]{2,61}[a-z0-9])\Z", re.ASCII)


class FirestoreSettings(NamedTuple):
    """What one bridge needs to know."""

    project: str
    database: str = DATABASE_DEFAULT
    collection: str = COLLECTION_DEFAULT
    public_url: str | None = None  #: of Penstock, as whoever reads the documents reaches it
    sweep_s: float = SWEEP_S_DEFAULT  #: between looks at unfinished documents


def firestore_settings(given: Mapping[str, object], where: str = "") -> FirestoreSettings:
    """Checked settings; `where` is put before the names of fields in refusals. What is None is left out."""
    values = {name: value for name, value in given.items() if value is not None}
    for name in values.keys() - set(FirestoreSettings._fields):
        raise BadInput(f"{where}{name}", values[name], "stands under a name that nobody knows", _known())
    if "project" not in values:
        raise BadInput(f"{where}project", None, "is missing", "name the Google Cloud project")
    _match(where, "project", values["project"], _PROJECT, "is not a project's id")
    _match(where, "database", values.get("database", DATABASE_DEFAULT), _DATABASE, "is not a database's id")
    collection = values.get("collection", COLLECTION_DEFAULT)
    if not isinstance(collection, str) or not collection or "/" in collection or len(collection.encode()) > 200:
        raise BadInput(f"{where}collection", collection, "is not the name of a top-level collection")
    url = values.get("public_url")
    if url is not None and (not isinstance(url, str) or not url.startswith(("http://", "https://"))):
        raise BadInput(f"{where}public_url", url, "is not an http:// or https:// address")
    sweep_s = values.get("sweep_s", SWEEP_S_DEFAULT)
    if not isinstance(sweep_s, int | float) or isinstance(sweep_s, bool) or not 0.1 <= sweep_s <= 3600:
        raise BadInput(f"{where}sweep_s", sweep_s, "is not a number of seconds from 0.1 to 3600")
    return FirestoreSettings(**values)  # type: ignore[arg-type]  # each was checked above


def configured_firestore(environment: Mapping[str, str], state: Path) -> FirestoreSettings | None:
    """The bridge that a server shall run beside itself, if penstock.toml of the state directory says so."""
    found = bridge_table(environment, state)
    if found is None:
        return None
    file, table = found
    return firestore_settings(table, f"{file}: bridge.firestore.")


def _known() -> str:
    return f"there are {', '.join(FirestoreSettings._fields)}"


def _match(where: str, name: str, value: object, pattern: re.Pattern[str], rule: str) -> None:
    if not isinstance(value, str) or pattern.match(value) is None:
        raise BadInput(f"{where}{name}", value, rule)


def run_firestore(
    settings: FirestoreSettings,
    ready: Callable[[str], None],
    url: str | None = None,
    token: str | None = None,
    *,
    log_level: str = "info",
) -> None:
    """Run a bridge until told to stop; `ready` is called once it listens."""
    form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=log_level.upper(), stream=sys.stderr, format=form, force=True)
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # it tells of every call
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    asyncio.run(_in_foreground(settings, ready, url, token))


async def _in_foreground(
    settings: FirestoreSettings, ready: Callable[[str], None], url: str | None, token: str | None
) -> None:
    work = asyncio.ensure_future(bridge(settings, ready, url, token))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, work.cancel)
    try:
        await work
    except asyncio.CancelledError:
        logger.info("stopped")
    except ExceptionGroup:
        logger.exception("the bridge failed; start it again, it goes on where it was")
        raise


async def bridge(
    settings: FirestoreSettings, ready: Callable[[str], None], url: str | None = None, token: str | None = None
) -> None:
    """One bridge, until cancelled."""
    from penstock.client.aio import AsyncClient
    from penstock.firestore.bridge import Bridge
    from penstock.firestore.database import Database, Place
    from penstock.firestore.desk import Desk
    from penstock.firestore.documents import collection_tag

    place = Place(settings.project, settings.database, settings.collection)
    me = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(AsyncClient(url, token))
        server = await client.server()
        if server.role not in (Role.ADMIN, Role.OPERATOR):
            detail = f"{server.principal} is {server.role} of team {server.team}; a bridge submits for others"
            raise ApiError(problem("forbidden", detail, advice="use an administrator's token"))
        database = Database(place, emulator=os.environ.get(EMULATOR_VARIABLE))
        stack.push_async_callback(database.close)
        desk = Desk(client, team=server.team, tag=collection_tag(place.parent), public_url=settings.public_url)
        running = Bridge(database, desk, me=me, sweep_s=settings.sweep_s)
        telling = asyncio.ensure_future(_tell(running.listening, ready, f"{place.parent} -> {client.url}"))
        stack.callback(telling.cancel)
        logger.info("bridge %s: %s -> %s, team %s", me, place.parent, client.url, server.team)
        await running.run()


async def _tell(event: asyncio.Event, ready: Callable[[str], None], line: str) -> None:
    await event.wait()
    ready(line)


async def beside_server(settings: FirestoreSettings, url: str, token: str) -> None:
    """A bridge inside a server. One that fails is started again: it must not take the server with it."""
    while True:
        try:
            await bridge(settings, lambda line: logger.info("bridge listens: %s", line), url, token)
        except ApiError as error:
            logger.warning("the Firestore bridge cannot start: %s", error)
        except Exception:
            logger.exception("the Firestore bridge failed; it starts again in %g s", RESTART_S)
        await asyncio.sleep(RESTART_S)
