"""Logs and secrets of real jobs: every byte arrives though the server dies, and no secret lies anywhere.

The log is 100 MB with lines of 10 MB, bytes that are no text, and escape sequences, or ten times as much in the long
run (S18). The canary is looked for in everything the server, the agents and the commands leave behind (S19, T1).
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from backports import zstd

from penstock.client.results import log_bytes
from penstock.domain import limits
from tests.process.evidence import Evidence
from tests.process.shop import TPU, Shop, soon

pytestmark = pytest.mark.slow
MB = 1 << 20


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    shop = Shop(tmp_path_factory.mktemp("logs") / "home")
    try:
        shop.open()
        yield shop
    finally:
        shop.end()


#: Ten lines of so many MB and short ones between; noise is no text and does not compress. The payload counts and hashes
#: what it wrote itself, and meets the test after each long line.
FLOOD = """
import hashlib, json, random
chance, digest, size = random.Random(11), hashlib.sha256(), 0
def write(data):
    global size
    digest.update(data); size += len(data)
    data = memoryview(data)
    while data: data = data[os.write(1, data):]
for part in range(10):
    noise = chance.randbytes((MEGABYTES * 3 // 10) << 20).replace(b"\\n", b" ")
    write(b"\\x1b[31m" + noise + b"\\xff\\xfe\\x00\\r" + b"y" * (MEGABYTES * 7 // 10 << 20) + b"\\x1b[0m\\n")
    write("wörds and ✓ {}\\n".format(part).encode() * 20)
    gate(f"after-{part}")
json.dump({"bytes": size, "sha256": digest.hexdigest()}, open(os.environ["PENSTOCK_OUTPUT_DIR"] + "/result.json", "w"))
"""


def flooded(shop: Shop, megabytes: int, kills: tuple[int, ...]) -> tuple[str, Evidence]:
    """A job that writes ten such lines while the server is killed after some of them; nothing of it may be lost."""
    job = shop.submit(FLOOD.replace("MEGABYTES", str(megabytes)))
    soon(lambda: shop.view(job)["state"] == "running")
    for part in range(10):
        # Part of the line is in the bucket and the rest on its way.
        reach(shop, job, part * megabytes * MB + (megabytes * MB) // 8)
        if part in kills:
            shop.kill_server()
        shop.open_gate(job, f"after-{part}")
        if part in kills:
            shop.open()  # the next line is being written meanwhile
    view = shop.ended(job, 600.0)
    assert (view["state"], len(view["attempts"])) == ("succeeded", 1), view
    wrote = shop.result(job)["result"]
    assert wrote["bytes"] > 10 * (megabytes - 2) * MB
    evidence = Evidence()
    evidence.written(stream_of(shop, job), wrote["bytes"], wrote["sha256"])
    evidence.read_whole(stream_of(shop, job), *read_by_tpu(shop, job))
    return job, evidence


def reach(shop: Shop, job: str, size: int) -> None:
    """Until so much of the stream is durable, by what lies in the bucket."""
    folder = shop.home.path / "root" / "jobs" / job / "log"

    def durable() -> int:
        return max((int(path.stem) for path in folder.glob("*/0/out/*.zst")), default=0)

    try:
        soon(lambda: durable() >= size)
    except AssertionError:
        raise AssertionError(f"only {durable()} of {size} bytes arrived; {shop.view(job)}") from None


def stream_of(shop: Shop, job: str) -> str:
    return f"{shop.view(job)['attempts'][-1]['id']}/0/out"


def read_by_tpu(shop: Shop, job: str) -> tuple[int, str]:
    """Size and hash of what `tpu logs` prints; it may be larger than memory."""
    digest, size = hashlib.sha256(), 0
    words = [*TPU, "logs", job, "--stream", "out", "--host", "0"]
    with subprocess.Popen(words, env=shop.environment, cwd=shop.desk, stdout=subprocess.PIPE) as command:
        assert command.stdout is not None
        while data := command.stdout.read(MB):
            digest.update(data)
            size += len(data)
    assert command.returncode == 0
    return size, digest.hexdigest()


def test_a_hundred_megabytes_arrive_though_the_server_is_killed_three_times(shop: Shop) -> None:
    job, evidence = flooded(shop, 10, (1, 4, 7))
    stream = stream_of(shop, job)
    with shop.client() as client:
        evidence.read_pieces(stream, [(chunk, log_bytes(chunk)) for chunk in client.logs(job, stream="out", host=0)])
        # Somebody takes a piece out of the bucket: the reader is told where, and how much.
        folder = shop.home.path / "root" / "jobs" / job / "log" / stream
        objects = sorted(folder.glob("*.zst"))
        first, following = objects[3], objects[4]
        kept = b"".join(zstd.decompress(path.read_bytes()) for path in objects if path != first)
        first.unlink()
        taken = int(following.stem) - int(first.stem)
        evidence.world("log.taken", stream, bytes=taken, sha256=hashlib.sha256(kept).hexdigest())
        shop.kill_server()  # what it has in memory is no witness
        shop.open()
    with shop.client() as client:
        evidence.read_pieces(stream, [(chunk, log_bytes(chunk)) for chunk in client.logs(job, stream="out", host=0)])
    told = shop.command("logs", job, "--stream", "out", "--host", "0")
    assert f"{taken} bytes of out of host 0 are missing here".encode() in told.stderr
    assert hashlib.sha256(told.stdout).digest() == hashlib.sha256(kept).digest()
    assert evidence.prove("S18") == {"S18": 3}


@pytest.mark.long
def test_a_gigabyte_arrives_though_the_server_is_killed_ten_times(shop: Shop) -> None:
    """1 GB in lines of 100 MB, which is below the stated cap, so nothing may be missing."""
    assert limits.LOG_BYTES_MAX > 1_100 * MB
    _, evidence = flooded(shop, 100, tuple(range(10)))
    assert evidence.prove("S18") == {"S18": 1}


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


def scan(evidence: Evidence, folder: Path, canary: bytes) -> None:
    """Look into every file below `folder`, as it is and unpacked, and at its name."""
    # Walked, not globbed: what an agent clears away meanwhile is passed over.
    for path in sorted(Path(place, name) for place, _, names in os.walk(folder) for name in names):
        if path.is_symlink() or not path.is_file():
            continue
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            continue  # an attempt that is being cleared away
        if path.suffix == ".zst":
            data += zstd.decompress(data)
        name = str(path.relative_to(folder))
        found, home = canary in data + name.encode(), name == "secrets/default/CANARY"
        evidence.world("sink.scanned", name, secret="canary", found=found, home=home, bytes=len(data))


def test_a_secret_is_seen_by_its_job_and_lies_nowhere_else(shop: Shop) -> None:
    canary = f"canary-{secrets.token_hex(16)}"
    evidence = Evidence()
    evidence.world("secret.planted", "canary")
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
    wanted = canary.encode()
    evidence.world("sink.scanned", "commands", secret="canary", found=wanted in said, bytes=len(said))
    api = b"".join(read_api(shop, path) for path in (f"/v1/jobs/{command}", "/v1/events?limit=1000", "/v1/secrets"))
    evidence.world("sink.scanned", "API", secret="canary", found=wanted in api, bytes=len(api))
    assert shop.log(command) == b"out ***\n***\n"
    assert shop.log(command, "err").startswith(b"err *** and ***\n")
    assert b"ValueError: the key *** is wrong" in shop.log(command, "err")
    with shop.client() as client:
        assert client.artifact(command, "length") == str(len(canary)).encode()
    assert shop.ended(crash_with(shop, "CANARY"))["cause"] == "user_error"
    scan(evidence, shop.home.path, wanted)
    at_home = [each.subject for each in evidence.history.world if each.body.get("found")]
    assert at_home == ["secrets/default/CANARY"], "where it belongs, it was found"
    assert evidence.prove("S19")["S19"] > 20


def read_api(shop: Shop, path: str) -> bytes:
    return json.dumps(shop.call("GET", path)[1]).encode()


def crash_with(shop: Shop, secret: str) -> str:
    """A payload that dies by SIGSEGV with the secret in its memory, its arguments and its environment."""
    code = (
        "import ctypes, subprocess\n"
        f"key = os.environ[{secret!r}]\n"
        "subprocess.run(['true', key, 'https://host/?token=' + key])\n"
        "ctypes.string_at(0)"
    )
    return shop.submit(code, secrets=[secret])
