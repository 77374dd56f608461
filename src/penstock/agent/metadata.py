"""Listens to the metadata server of a cloud host for the one thing worth hearing: that the host will be taken away.

`loop` runs `watch` beside the syncs when the startup script named a metadata server. A question waits there until its
answer changes, so a notice is heard at once and nothing is polled. Live migration is no notice: nothing is lost by it.
It must not decide what a notice means.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final
from urllib.parse import urlsplit

from penstock.domain import limits
from penstock.ports.clock import Clock

logger = logging.getLogger(__name__)

WAIT_S: Final = 60  #: a question is put again after so long, in case the connection died without a word
ANSWER_S: Final = 10.0  #: beyond that
RETRY_FIRST_S, RETRY_MAX_S = 0.5, 10.0
NOTICE_S: Final = limits.GRACE_S  #: what the platform gives between notice and end; it does not say so itself
_BODY_BYTES_MAX: Final = 64 << 10
_HEAD_BYTES_MAX: Final = 64 << 10
#: Key -> the answer that means the end of this host.
_ENDINGS: Final = {"preempted": "TRUE", "maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE"}


class Unheard(Exception):
    """The metadata server did not answer, or not as one."""


async def address(url: str, clock: Clock) -> str:
    """This machine's own address in its network."""
    rest_s = RETRY_FIRST_S
    while True:
        try:
            async with asyncio.timeout(ANSWER_S):
                return (await _get(url, "/network-interfaces/0/ip"))[0]
        except (Unheard, OSError, EOFError, TimeoutError) as error:
            logger.info("metadata: %s; it is asked again", str(error) or type(error).__name__)
        await clock.sleep(rest_s)
        rest_s = min(2 * rest_s, RETRY_MAX_S)


async def watch(url: str, clock: Clock, notice: Callable[[str, float], None]) -> None:
    """Call `notice` with what was told and the seconds that are left, for each thing that is told; never returns."""

    async def hear(key: str) -> None:
        await _until(url, key, _ENDINGS[key], clock)
        notice(key, NOTICE_S)

    await asyncio.gather(*(hear(key) for key in _ENDINGS))
    await asyncio.Event().wait()


async def _until(url: str, key: str, ending: str, clock: Clock) -> None:
    """Wait for the answer that means the end."""
    etag, rest_s, heard = "", RETRY_FIRST_S, True
    while True:
        # Without a tag the first answer comes at once: what has changed before we came must be heard too.
        query = f"?wait_for_change=true&timeout_sec={WAIT_S}&last_etag={etag}" if etag else ""
        try:
            async with asyncio.timeout(WAIT_S + ANSWER_S):
                value, etag = await _get(url, f"/{key}{query}")
        except (Unheard, OSError, EOFError, TimeoutError, ValueError) as error:
            if heard:
                logger.warning("metadata %s: %s; it is asked again", key, str(error) or type(error).__name__)
            heard = False
            await clock.sleep(rest_s)
            rest_s = min(2 * rest_s, RETRY_MAX_S)
            continue
        if value == ending:
            return
        if not etag:  # it cannot wait for a change from here: then it is asked now and then
            await clock.sleep(RETRY_FIRST_S)
        rest_s, heard = RETRY_FIRST_S, True


async def _get(url: str, path: str) -> tuple[str, str]:
    """An answer's text and its tag. The header proves that no browser or redirect asks."""
    parts = urlsplit(url)
    if not parts.hostname:
        raise ValueError(f"{url!r} is no address of a metadata server")
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 80, limit=_HEAD_BYTES_MAX)
    try:
        head = f"GET {parts.path}{path} HTTP/1.1\r\nHost: {parts.netloc}\r\nMetadata-Flavor: Google\r\n"
        writer.write(f"{head}Connection: close\r\n\r\n".encode())
        raw = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = raw.split("\r\n")
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if not first.startswith("HTTP/1.") or first.split(" ", 2)[1:2] != ["200"]:
            raise Unheard(f"it says {first[:60]!r}")
        size = int(headers.get("content-length", "-1"))
        if size > _BODY_BYTES_MAX:
            raise Unheard(f"it sends {size} bytes")
        body = await (reader.readexactly(size) if size >= 0 else reader.read(_BODY_BYTES_MAX))
        return body.decode("utf-8", "replace").strip(), headers.get("etag", "")
    except asyncio.LimitOverrunError as error:
        raise Unheard("its headers have no end") from error
    finally:
        writer.close()
