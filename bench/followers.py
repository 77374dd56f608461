"""Many followers of one job's log, in a process of their own: `bench/run.py` starts it and reads its report.

`python bench/followers.py URL JOB COUNT SIZE SHA256` opens COUNT live streams (the token is in PENSTOCK_TOKEN), prints
`following` when all are open, and reads until each has ended. Then it prints how many had exactly the SIZE bytes with
that hash, and how long after the first end the last one came. One thread and raw sockets: it shall cost less than what
it measures.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
import time
from urllib.parse import urlsplit

import msgspec

from penstock.client.results import log_bytes
from penstock.client.sse import END_EVENT, Parser
from penstock.wire.api import LogChunk

PIECE_BYTES = 1 << 20


class Followed(msgspec.Struct):
    """What one follower got."""

    size: int = 0
    sha256: str = ""
    gaps: int = 0
    ended: bool = False
    at: float = 0.0


async def follow(url: str, token: str, job: str, opened: asyncio.Semaphore) -> Followed:
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=PIECE_BYTES)
    path = f"/v1/jobs/{job}/logs?follow=true&host=0&stream=out"
    head = f"GET {path} HTTP/1.1\r\nHost: bench\r\nAuthorization: Bearer {token}\r\nAccept: text/event-stream\r\n\r\n"
    writer.write(head.encode())
    status = await reader.readuntil(b"\r\n\r\n")
    if b" 200 " not in status.partition(b"\r\n")[0]:
        raise RuntimeError(status.decode())
    opened.release()
    found, parser, hashed = Followed(), Parser(), hashlib.sha256()
    while not found.ended:
        line = await reader.readline()  # the body is chunked: a length, then so many bytes
        length = int(line.strip() or b"0", 16)
        if not length:
            break
        piece = (await reader.readexactly(length + 2))[:-2]
        for message in parser.feed(piece):
            if message.event == END_EVENT:
                found.ended = True
                continue
            chunk = msgspec.json.decode(message.data, type=LogChunk)
            found.gaps += chunk.offset != found.size
            data = log_bytes(chunk)
            hashed.update(data)
            found.size = chunk.offset + len(data)
    found.sha256, found.at = hashed.hexdigest(), time.monotonic()
    writer.close()
    return found


async def main() -> None:
    url, job, count, size, sha256 = sys.argv[1:]
    opened = asyncio.Semaphore(0)
    token = os.environ["PENSTOCK_TOKEN"]
    tasks = [asyncio.create_task(follow(url, token, job, opened)) for _ in range(int(count))]
    for _ in tasks:
        await opened.acquire()
    print("following", flush=True)
    done = await asyncio.gather(*tasks)
    whole = [each for each in done if each.size == int(size) and each.sha256 == sha256 and not each.gaps and each.ended]
    ends = [each.at for each in done]
    worst = min(done, key=lambda each: (each.size, each.ended))
    print(json.dumps({"whole": len(whole), "spread_s": max(ends) - min(ends), "worst": msgspec.to_builtins(worst)}))


if __name__ == "__main__":
    asyncio.run(main())
