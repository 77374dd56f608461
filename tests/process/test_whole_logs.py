"""Logs and secrets of real jobs: every byte arrives though the server dies, and no secret lies anywhere.

The log is 100 MB with lines of 10 MB, bytes that are no text, and escape sequences (S18). The canary is looked for in
everything the server, the agents and the commands leave behind (S19, T1).
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from backports import zstd

from tests.process.shop import Shop, soon

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    shop = Shop(tmp_path_factory.mktemp("logs") / "home")
    try:
        shop.open()
        yield shop
    finally:
        shop.end()


#: Run by the job, and by the test to know what was written. Noise is no text and does not compress.
FLOOD = """
import random
def pieces():
    chance = random.Random(11)
    for part in range(10):
        noise = chance.randbytes(3 << 20).replace(b"\\n", b" ")
        yield b"\\x1b[31m" + noise + b"\\xff\\xfe\\x00\\r" + b"y" * (7 << 20) + b"\\x1b[0m\\n"
        yield "wörds and ✓ {}\\n".format(part).encode() * 20
"""
WRITE = """
for part, data in enumerate(pieces()):
    while data: data = data[os.write(1, data):]
    if part in (3, 9, 15): gate(f"after-{part}")
"""


def test_a_hundred_megabytes_arrive_though_the_server_is_killed_three_times(shop: Shop) -> None:
    job = shop.submit(FLOOD + WRITE)
    soon(lambda: shop.view(job)["state"] == "running")
    for part in (3, 9, 15):
        # Killed while what was written before the gate may still be on its way.
        soon(lambda part=part: spooled(shop, job) >= (part + 1) // 2 * (10 << 20))  # type: ignore[misc]
        shop.kill_server()
        shop.open_gate(job, f"after-{part}")
        shop.open()
    view = shop.ended(job)
    assert (view["state"], len(view["attempts"])) == ("succeeded", 1), view
    scope: dict[str, object] = {}
    exec(FLOOD, scope)  # noqa: S102 (it is the payload's own text)
    wanted, size = hashlib.sha256(), 0
    for piece in scope["pieces"]():  # type: ignore[operator]
        wanted.update(piece)
        size += len(piece)
    read = shop.log(job)
    assert len(read) == size
    assert hashlib.sha256(read).hexdigest() == wanted.hexdigest()


def spooled(shop: Shop, job: str) -> int:
    """How much of its output the host has taken from the job."""
    attempt = shop.view(job)["attempts"][-1]["id"]
    found = [
        path.stat().st_size for path in shop.home.slices.glob(f"*/host-0/attempts/{attempt}/**/out") if path.is_file()
    ]
    return max(found, default=0)


LEAKS = """
import json, logging
value = os.environ["CANARY"]
say("out", value)
os.write(2, f"err {value} and {value}\\n".encode())
for byte in value.encode(): os.write(1, bytes([byte]))
say()
open(os.environ["PENSTOCK_OUTPUT_DIR"] + "/length", "w").write(str(len(value)))
raise ValueError(f"the key {value} is wrong")
"""


def holding(folder: Path, canary: bytes) -> list[str]:
    """Files below `folder` that hold the canary, as they are or unpacked."""
    found = []
    for path in folder.rglob("*"):
        if path.is_symlink() or not path.is_file():
            continue
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            continue  # an attempt that is being cleared away
        if path.suffix == ".zst":
            data += zstd.decompress(data)
        if canary in data or canary in path.name.encode():
            found.append(str(path.relative_to(folder)))
    return found


def test_a_secret_is_seen_by_its_job_and_lies_nowhere_else(shop: Shop) -> None:
    canary = f"canary-{secrets.token_hex(16)}"
    done = shop.command("secret", "set", "CANARY", stdin=canary.encode() + b"\n")
    assert done.returncode == 0, done.stderr
    said = done.stdout + done.stderr
    command = shop.submit(LEAKS, secrets=["CANARY"])
    assert shop.ended(command)["cause"] == "user_error"
    snippet = shop.command(
        "exec", "--secret", "CANARY", "-c",
        "import os\nkey = os.environ['CANARY']\nlogger.info('log ' + key)\nprint(len(key))\nraise KeyError(key)",
    )  # fmt: skip
    assert snippet.returncode == 1
    assert snippet.stdout == f"{len(canary)}\n".encode(), "the snippet itself saw it"
    assert b"KeyError: '***'" in snippet.stderr
    said += snippet.stdout + snippet.stderr
    for id in (command, str(shop.call("GET", "/v1/jobs?limit=1")[1]["jobs"][0]["id"])):
        for words in (("logs", id), ("show", id), ("show", id, "--json"), ("result", id, "--json"), ("why", id),
                      ("events", id, "--json")):  # fmt: skip
            done = shop.command(*words)
            said += done.stdout + done.stderr
    said += shop.command("events", "--json").stdout + shop.command("ps", "--json").stdout
    said += shop.command("secret", "ls").stdout + shop.command("config", "show").stdout
    assert canary.encode() not in said
    assert shop.log(command) == b"out ***\n***\n"
    assert shop.log(command, "err").startswith(b"err *** and ***\n")
    assert b"ValueError: the key *** is wrong" in shop.log(command, "err")
    with shop.client() as client:
        assert client.artifact(command, "length") == str(len(canary)).encode()
    assert holding(shop.home.path, canary.encode()) == ["secrets/default/CANARY"]
