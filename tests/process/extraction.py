"""A run with cheap input, workers in processes of their own that can be told where to die, and a checker of the result.

Tests of the extraction ledger use it. The checker knows the input and the file formats, and nothing of
`penstock.extract`: it reads JSON, safetensors and Arrow with their own libraries and demands every vector of every
document once, bit by bit.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
import pyarrow as pa
import safetensors
import safetensors.numpy
from blake3 import blake3
from typing_extensions import Buffer

from penstock.domain.ledger import Unit
from penstock.extract.calls import Calls
from penstock.extract.layout import Piece
from penstock.extract.plan import RunPlan, make_plan, publish
from penstock.extract.worker import STORING_MAX, Settings, Worker
from penstock.objects.addresses import open_address
from penstock.objects.drafts import MemoryDraft
from penstock.ports.objects import AlreadyThere, Draft, Drafting, Kept, ObjectsError, Ranged, Stored

SITES = ("resid_post.1", "mlp_out.0")
WIDTH = 8
T = TypeVar("T")


# --- the input, and what must come out of it ---


def tokens_of(row: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Of one to nine tokens, and none in every eleventh row."""
    count = 0 if row % 11 == 10 else 1 + row * 7919 % 9
    return ((row * 31 + np.arange(count) * 7) % 997).astype(np.int32)


def document_of(row: int) -> str:
    return f"doc {row * 37 % 1000:03d} #{row}"


def values_of(row: int, site: str) -> np.ndarray[Any, np.dtype[Any]]:
    tokens = tokens_of(row).astype(np.float64)
    scale = 1 + SITES.index(site)
    steps = np.arange(len(tokens))[:, None] * 0.25 + np.arange(WIDTH)[None, :] / 3 + row
    return np.sin(steps + tokens[:, None] * scale).astype(ml_dtypes.bfloat16)


def cheap_plan(rows: int = 60, unit_rows: int = 5) -> RunPlan:
    return make_plan(rows=rows, unit_rows=unit_rows, sites=SITES, dtype="bfloat16", work={"test": "cheap"})


def cheap_compute(seconds: float = 0.0) -> Callable[[RunPlan, Unit], Iterator[Piece]]:
    """Documents out of order, as packing gives them; `seconds` is how long a unit takes."""

    def compute(plan: RunPlan, unit: Unit) -> Iterator[Piece]:
        rows = sorted(range(unit.start, unit.stop), key=lambda row: row * 7 % 5)
        for row in rows:
            time.sleep(seconds / len(rows))
            yield Piece(row, document_of(row), tokens_of(row), {site: values_of(row, site) for site in SITES})

    return compute


# --- workers ---


class Trap:
    """Objects that strike at one call.

    They kill or stop the process (`kill-before`, `kill-after`, `stop-before`), `lose` the answer, have it `taken` by
    one's own success, as after a retry, or `damage` what is written.
    """

    def __init__(self, objects: Ranged, point: str) -> None:
        """`point` is `kill-before:put_new:commits:2`: how, where, which time."""
        how, verb, what, *number = point.split(":") if point else ("", "", "")
        self._objects = objects
        self._how, self._verb, self._what = how, verb, what
        self._left = int(number[0]) if number else 1
        self._under_way = 0
        self._open = asyncio.Event()
        self._open.set()
        self.calls: set[str] = set()

    async def put(self, path: str, data: bytes) -> int:
        return await self._do("put", path, lambda: self._objects.put(path, data))

    async def put_new(self, path: str, data: bytes) -> int:
        if self._how == "damage" and self._aimed("put_new", path):
            data = data[:-1] + bytes([data[-1] ^ 1])
        return await self._do("put_new", path, lambda: self._objects.put_new(path, data))

    def draft(self) -> Draft:
        if isinstance(self._objects, Drafting):
            return TrappedDraft(self, self._objects.draft())
        return MemoryDraft(self)

    async def name(self, draft: Draft, path: str) -> int:
        return await self._do("put_new", path, lambda: draft.name(path))

    async def get(self, path: str) -> Stored | None:
        return await self._do("get", path, lambda: self._objects.get(path))

    async def get_range(self, path: str, start: int, stop: int) -> bytes | None:
        return await self._do("get_range", path, lambda: self._objects.get_range(path, start, stop))

    async def list(self, prefix: str) -> tuple[str, ...]:
        return await self._do("list", prefix, lambda: self._objects.list(prefix))

    async def survey(self, prefix: str) -> tuple[Kept, ...]:
        return await self._do("survey", prefix, lambda: self._objects.survey(prefix))

    async def delete(self, path: str) -> None:
        await self._do("delete", path, lambda: self._objects.delete(path))

    async def remove(self, folder: str) -> None:
        raise NotImplementedError

    async def lend(self, path: str, seconds: float) -> str | None:
        raise NotImplementedError

    async def _do(self, verb: str, path: str, call: Callable[[], Awaitable[T]]) -> T:
        self.calls.add(f"{verb}:{kind_of(path)}")
        aimed = self._how != "damage" and self._aimed(verb, path)
        if aimed and self._how == "kill-before":
            os.kill(os.getpid(), signal.SIGKILL)
        if aimed and self._how == "stop-before":
            await self._sleep()
        await self._open.wait()
        self._under_way += 1
        try:
            answer = await call()
        finally:
            self._under_way -= 1
        if aimed and self._how == "kill-after":
            os.kill(os.getpid(), signal.SIGKILL)
        if aimed and self._how == "lose":
            raise ObjectsError(f"{path}: the answer was lost")
        if aimed and self._how == "taken":
            raise AlreadyThere(path)
        return answer

    async def _sleep(self) -> None:
        """Stop between calls: who stops in the middle of a write to a directory holds a lock, and others wait."""
        self._open.clear()
        while self._under_way:  # noqa: ASYNC110 (it ends in milliseconds)
            await asyncio.sleep(0.001)
        os.kill(os.getpid(), signal.SIGSTOP)
        self._open.set()

    def _aimed(self, verb: str, path: str) -> bool:
        if (verb, kind_of(path)) != (self._verb, self._what) or not self._left:
            return False
        self._left -= 1
        return not self._left


class TrappedDraft:
    """A draft that meets the trap when it gets its name, which is a `put_new` like any other."""

    def __init__(self, trap: Trap, draft: Draft) -> None:
        self._trap = trap
        self._draft = draft

    def write(self, at: int, parts: Sequence[Buffer]) -> None:
        self._draft.write(at, parts)

    async def name(self, path: str) -> int:
        return await self._trap.name(self._draft, path)


def kind_of(path: str) -> str:
    """`plan.json`, `leases`, `clocks`, `data`, `commits`, `index`, `manifest`."""
    return path.split("/")[2]


#: Every object call that a worker of a whole run makes; a test compares it with what one truly made.
CALLS = (
    "delete:clocks",
    "delete:leases",
    "get:commits",
    "get:data",
    "get:index",
    "get:plan.json",
    "list:clocks",
    "list:commits",
    "list:data",
    "list:leases",
    "list:manifest",
    "put:clocks",
    "put_new:commits",
    "put_new:data",
    "put_new:index",
    "put_new:leases",
    "put_new:manifest",
    "put_new:plan.json",
    "survey:clocks",
    "survey:data",
    "survey:leases",
)


class Noting:
    """Computes, and writes down who began which unit: what a checker knows that no worker tells it."""

    def __init__(self, compute: Callable[[RunPlan, Unit], Iterator[Piece]], path: str, name: str) -> None:
        self._compute = compute
        self._path = path
        self._name = name

    def __call__(self, plan: RunPlan, unit: Unit) -> Iterator[Piece]:
        line = f"{self._name} {unit.id}\n".encode()
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(file, line)
        os.close(file)
        yield from self._compute(plan, unit)


async def work(
    address: str,
    plan: RunPlan,
    name: str,
    *,
    point: str = "",
    lease_s: float,
    unit_s: float,
    storing_max: int = STORING_MAX,
    notes: str | None = None,
) -> set[str]:
    """One worker to its end; the calls it made."""
    objects, _ = open_address("root", address, os.environ)
    trap = Trap(objects, point)
    rng = random.Random(name)
    calls = Calls(trap, rng, patience_s=120)
    await publish(calls, plan)
    settings = Settings(
        worker=name,
        lease_s=lease_s,
        look_s=lease_s / 5,
        storing_max=storing_max,
        code="test",
        read_back=point.startswith("damage"),
    )
    cheap = cheap_compute(unit_s)
    compute = cheap if notes is None else Noting(cheap, notes, name)
    await Worker(calls, plan, compute, settings, rng=rng, steady=time.monotonic).work()
    return trap.calls


def spawn(
    address: str,
    plan: RunPlan,
    name: str,
    *,
    point: str = "",
    lease_s: float = 0.5,
    unit_s: float = 0.0,
    storing_max: int = STORING_MAX,
    notes: str | None = None,
) -> int:
    """A worker as a fork of this process, which must have no threads; its process id."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        course = work(
            address, plan, name, point=point, lease_s=lease_s, unit_s=unit_s, storing_max=storing_max, notes=notes
        )
        asyncio.run(course)
        code = 0
    except BaseException as error:  # noqa: BLE001 (the fork must not go on as its parent)
        sys.stderr.write(f"{name}: {type(error).__name__}: {error}\n")
    finally:
        os._exit(code)


def ended(child: int) -> int:
    """How a fork ended: its exit code, or minus its signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def stopped(child: int) -> bool:
    """Wait until a fork has stopped itself; False when it ended instead."""
    return os.WIFSTOPPED(os.waitpid(child, os.WUNTRACED)[1])


# --- the checker ---


async def _download(address: str) -> dict[str, bytes]:
    objects, _ = open_address("root", address, os.environ)
    found = {}
    for path in await objects.list(""):
        stored = await objects.get(path)
        if stored is not None:
            found[path] = stored.data
    return found


def whole_bucket(address: str) -> dict[str, bytes]:
    """All objects under an address. Starts threads: only when nothing is forked any more."""
    return asyncio.run(_download(address))


def whole_directory(root: str) -> dict[str, bytes]:
    found = {}
    for folder, _, files in os.walk(root):
        if "/.penstock" not in folder:
            for file in files:
                with open(f"{folder}/{file}", "rb") as opened:  # noqa: PTH123
                    found[f"{folder}/{file}".removeprefix(f"{root}/")] = opened.read()
    return found


def check(objects: dict[str, bytes], plan: RunPlan) -> None:
    """Exactly one committed copy of each row, whole and unchanged, and nothing else left in the bucket."""
    run = f"runs/{plan.run}/"
    (manifest_path,) = [path for path in objects if path.startswith(f"{run}manifest/")]
    assert manifest_path.endswith(hashlib.sha256(objects[manifest_path]).hexdigest())
    manifest = json.loads(objects[manifest_path])
    named = {manifest_path, f"{run}plan.json", manifest["index"]["path"]}
    side = manifest["refused"]["path"] if manifest["refused"] is not None else None
    listed = [] if side is None else [json.loads(line)["row"] for line in objects[side].splitlines()]
    assert listed == [row for row in range(plan.rows) if not len(tokens_of(row))]
    named |= set() if side is None else {side}
    rows: list[int] = []
    vectors = 0
    for unit in manifest["units"]:
        edition = f".{unit['edition']}" if unit["edition"] else ""
        commit_path = f"{run}commits/{unit['unit']}{edition}"
        assert json.loads(objects[commit_path]) == unit
        named.add(commit_path)
        for data in unit["objects"]:
            check_hash(objects[data["path"]], data["checksum"])
            named.add(data["path"])
        unit_rows, count = check_unit({data["path"].split("/")[-1]: objects[data["path"]] for data in unit["objects"]})
        assert unit["facts"]["tokens"] == count
        rows += unit_rows
        vectors += count
    assert sorted(rows) == list(range(plan.rows)), "each input row once"
    assert vectors == sum(len(tokens_of(row)) for row in range(plan.rows)) == manifest["facts"]["tokens"]
    # A commit that was made void stays, with the record that says so beside it.
    voids = {path for path in objects if path.startswith(f"{run}commits/void/")}
    named |= voids | {path.replace("/void/", "/") for path in voids}
    assert set(objects) == named, f"left over: {sorted(set(objects) - named)}"


def check_hash(data: bytes, named: str) -> None:
    """The hash of all bytes, or of the hashes of blocks of 8 MiB; these objects are smaller than one."""
    kind, _, digest = named.rpartition(":")
    assert kind in ("", "sha256-of-8MiB-blake3")
    assert len(data) < 8 << 20
    assert digest == hashlib.sha256(blake3(data).digest() if kind else data).hexdigest()


def check_unit(content: dict[str, bytes]) -> tuple[list[int], int]:
    """The input rows of a unit and the number of its vectors."""
    content = {name.removesuffix(".1").removesuffix(".2"): data for name, data in content.items()}
    tokens = safetensors.numpy.load(content["tokens.safetensors"])
    values = {site: _bf16(content[f"{site}.safetensors"]) for site in SITES}
    with pa.ipc.open_file(pa.BufferReader(content["index.arrow"])) as reader:
        index = reader.read_all().to_pylist()
    for entry in index:
        row, here = entry["row"], slice(entry["start"], entry["start"] + entry["count"])
        assert entry["document"] == document_of(row)
        assert np.array_equal(tokens["tokens"][here], tokens_of(row))
        assert np.array_equal(tokens["positions"][here], np.arange(entry["count"]))
        for site in SITES:
            assert values[site][here].tobytes() == values_of(row, site).tobytes(), (row, site)
    return [entry["row"] for entry in index], len(tokens["tokens"])


def _bf16(data: bytes) -> np.ndarray[Any, np.dtype[Any]]:
    """The library's numpy side knows no bfloat16."""
    ((name, facts),) = safetensors.deserialize(data)  # type: ignore[no-untyped-call]
    assert (name, facts["dtype"]) == ("acts", "BF16")
    return np.frombuffer(bytes(facts["data"]), ml_dtypes.bfloat16).reshape(facts["shape"])
