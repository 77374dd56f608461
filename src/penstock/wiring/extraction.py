"""Extraction as commands use it: plans, workers, and what is asked of a run. The one place that opens its bucket.

Each function is one command's work, with an event loop of its own where the bucket is spoken to. What needs jax is
imported in the functions that compute.
"""

from __future__ import annotations

import asyncio
import os
import platform
import random
import secrets
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from penstock import __version__
from penstock.domain import ledger
from penstock.domain.admission import BadInput
from penstock.domain.ledger import Incomplete
from penstock.extract import config, machine
from penstock.extract import plan as plans
from penstock.extract import refused as refusals
from penstock.extract import verify as verifying
from penstock.extract import work as planning
from penstock.extract.calls import Calls, Stopped
from penstock.extract.checkpoint import check_model
from penstock.extract.export import Exported, export_dataset
from penstock.extract.formats import Format
from penstock.extract.layout import Compute
from penstock.extract.mesh import parse_mesh
from penstock.extract.old_shards import OldSample, load_old_shard
from penstock.extract.plan import DtypeName, RunPlan
from penstock.extract.reader import open as open_run
from penstock.extract.replica import STOPPED, listening, replica_name, should_stop, tell
from penstock.extract.seal import find_manifest, read_commits, sweep
from penstock.extract.source import Refused, Source, SourceSpec
from penstock.extract.status import Done, RunView, Watcher
from penstock.extract.tokens import Cut, Rules
from penstock.extract.verify import Checked
from penstock.extract.work import Planned
from penstock.extract.worker import LEASE_S, STORING_MAX, Settings, Standing, Worker
from penstock.objects import hub
from penstock.objects.addresses import Use, open_address
from penstock.ports.objects import ObjectsError
from penstock.wiring.clock import SystemClock
from penstock.wiring.datasets import DataOptions, model_address, reading_of

__all__ = [
    "LEASE_S",
    "BadInput",
    "Checked",
    "DataOptions",
    "Done",
    "Incomplete",
    "Left",
    "ObjectsError",
    "OldSample",
    "PlanWish",
    "Planned",
    "Refused",
    "RunPlan",
    "RunView",
    "check_run",
    "collect_garbage",
    "export",
    "finished_units",
    "is_bucket",
    "left",
    "load_old_shard",
    "make_run",
    "plan_run",
    "refused",
    "requeue",
    "status",
    "watch",
    "work",
]

T = TypeVar("T")

ASK_PATIENCE_S = 60.0  #: of commands; workers wait longer


class PlanWish(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan is made from, as options say it."""

    model: str
    data: DataOptions
    sites: str
    dtype: str
    width: int | None  #: None: `planning.WIDTH`, or the model's positions if these are fewer
    cut: str
    overlap: int
    max_samples: int | None
    unit_rows: int | None
    out: str | None = None


def plan_run(wish: PlanWish, progress: Callable[[int, int], None] | None = None) -> Planned:
    """Look model and data over and make the plan; nothing is written."""
    named, data = wish.model, wish.data
    wish = msgspec.structs.replace(wish, model=model_address("model", named))
    if data.tokenizer is not None:
        tokenizer = wish.model if data.tokenizer == named else model_address("tokenizer", data.tokenizer)
        data = msgspec.structs.replace(data, tokenizer=tokenizer)
    if data.tokenizer is None and data.tokens is None:
        data = msgspec.structs.replace(data, tokenizer=wish.model)
    reading, keep = reading_of(data)
    model = config.load_config(wish.model)  # before the data: what is wrong with the model is known at once
    check_model(wish.model, model)
    width = min(planning.WIDTH, model.positions_max) if wish.width is None else wish.width
    rules = Rules(width=width, cut=Cut(wish.cut), overlap=wish.overlap, keep=keep)
    kind = None if data.format is None else Format(data.format)
    spec = SourceSpec(data=data.data, format=kind, split=data.split, reading=reading)
    made = planning.Wish(
        model=wish.model,
        tokenizer=data.tokenizer,
        source=Source.open(spec, progress=progress),
        sites=wish.sites,
        rules=rules,
        dtype=msgspec.convert(wish.dtype, DtypeName),
        max_samples=wish.max_samples,
        unit_rows=wish.unit_rows,
        object_bytes_max=planning.OBJECT_BYTES[0 if is_bucket(wish.out or "") else 1],
    )
    return planning.plan_run(made)


def is_bucket(out: str) -> bool:
    """Whether a run is kept in a bucket there; `file:///a` and `a` are both a directory, of this machine alone."""
    return out.startswith(("gs://", "s3://"))


def make_run(plan: RunPlan, out: str) -> str:
    """Publish the plan under `out`; the run's address."""
    objects, understood = open_address("out", out, os.environ)
    calls = Calls(objects, random.Random(), ASK_PATIENCE_S)
    asyncio.run(plans.publish(calls, plan))
    return f"{understood}/{plans.RUNS}/{plan.run}"


def check_run(address: str, *, so_far: bool = False) -> Checked:
    return _asked(address, lambda calls, plan: verifying.verify(calls, plan, so_far=so_far))


def collect_garbage(address: str) -> int:
    return _asked(address, sweep, Use.WRITE)


def requeue(address: str, unit: str, *, force: bool) -> str:
    return _asked(address, lambda calls, plan: verifying.requeue(calls, plan, unit, force=force), Use.WRITE)


def status(address: str, lease_s: float = LEASE_S) -> RunView:
    now = SystemClock().now
    return _asked(address, lambda calls, plan: Watcher(calls, plan, lease_s).look(now()))


class Left(NamedTuple):
    """What there is still to do of a run."""

    open: int  #: units without a commit
    sealed: bool


def left(address: str) -> Left:
    async def found(calls: Calls, plan: RunPlan) -> Left:
        names = await calls.list(ledger.commits_prefix(plan.run))
        open_units = ledger.open_units(plan, ledger.editions(plan.run, names).committed)
        return Left(len(open_units), not open_units and await find_manifest(calls, plan.run) is not None)

    return _asked(address, found)


def refused(address: str) -> list[Refused]:
    """The rows that gave nothing in the units that are committed, in the order of the data."""

    async def found(calls: Calls, plan: RunPlan) -> list[Refused]:
        commits = await read_commits(calls, plan)
        return await refusals.of_units(calls, [commits[unit.id] for unit in plan.units if unit.id in commits])

    return _asked(address, found)


def finished_units(address: str) -> tuple[RunPlan, list[Done]]:
    async def found(calls: Calls, plan: RunPlan) -> tuple[RunPlan, list[Done]]:
        return plan, await Watcher(calls, plan, LEASE_S).done()

    return _asked(address, found)


def watch(address: str, every_s: float, lease_s: float = LEASE_S) -> Iterator[RunView]:
    """One view after another, until the run is sealed."""
    clock = SystemClock()
    with asyncio.Runner() as runner:
        calls, run = _calls(address, Use.READ)
        plan = runner.run(_plan(calls, address, run))
        watcher = Watcher(calls, plan, lease_s)
        while True:
            view = runner.run(watcher.look(clock.now()))
            yield view
            if view.sealed:
                return
            runner.run(clock.sleep(every_s))


def export(address: str, site: str, folder: Path, *, context: int, column: str) -> Exported:
    with open_run(address) as run:
        return export_dataset(run, site, folder, context=context, column=column)


def work(
    address: str,
    *,
    lease_s: float,
    rows: int | None,
    processes: int | None,
    mesh: str | None,
    read_back: bool,
    one_unit: bool,
    synced: bool,
    cache: str | None,
    say: Callable[[str], None],
) -> int:
    """Be a worker until no unit is open: the exit code."""
    root, run = plans.parse_address(address)
    objects, _ = open_address("run", root, os.environ, use=Use.WRITE, synced=synced)
    calls = Calls(objects, random.Random(), should_stop=should_stop)

    async def worked() -> None:
        plan = await _plan(calls, address, run)
        settings = Settings(
            worker=replica_name(os.environ, platform.node(), secrets.token_hex(4)),
            fence=int(os.environ.get("PENSTOCK_FENCE", "0")),
            lease_s=lease_s,
            read_back=read_back,
            storing_max=0 if one_unit else STORING_MAX,
            code=f"penstock {__version__}",
        )
        compute = await asyncio.to_thread(_compute, plan, rows, processes, mesh, cache, say)
        rng = random.Random()
        clock = SystemClock()
        worker = Worker(
            calls,
            plan,
            compute,
            settings,
            rng=rng,
            steady=clock.steady,
            should_stop=should_stop,
            report=_Report(say),
        )
        say(f"{settings.worker} works on {plan.run}: {len(plan.units)} units, {plan.rows} rows")
        await worker.work()

    with listening():
        try:
            asyncio.run(worked())
        except Stopped:
            say("asked to stop: what was begun is given back")
            return STOPPED
    return 0


def _compute(
    plan: RunPlan,
    rows: int | None,
    processes: int | None,
    mesh: str | None,
    cache: str | None,
    say: Callable[[str], None],
) -> Compute:
    from penstock.extract import compute, engine

    backend = machine.platform()
    if processes is None:
        processes = machine.usual_processes(backend, len(os.sched_getaffinity(0)))
    folder = machine.usual_cache(backend, os.environ) if cache is None else Path(cache)
    if folder is not None:
        try:
            engine.keep_compiled(folder)
        except OSError as error:
            if cache is not None:
                raise BadInput("cache", cache, f"is no place to write: {error.strerror}", "give another") from error
            say(f"{folder}: {error.strerror}; programs are compiled anew by each worker")
    if (model := planning.work_of(plan).model).startswith(f"{hub.SCHEME}://"):
        say(f"{model}: what of it is not yet in {hub.cache()} is fetched first")
    return compute.ModelCompute(plan, compute.Settings(rows=rows, processes=processes, mesh=parse_mesh(mesh)), say)


class _Report:
    """Tells Penstock how a run stands each time, and people when it has changed."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._last: Standing | None = None

    def __call__(self, standing: Standing) -> None:
        tell(standing)
        if standing == self._last:
            return
        self._last = standing
        own = f"{standing.documents} rows, {standing.tokens} tokens by this worker"
        self._say(f"{standing.units - standing.open} of {standing.units} units committed; {own}")


def _calls(address: str, use: Use) -> tuple[Calls, str | None]:
    root, run = plans.parse_address(address)
    objects, _ = open_address("run", root, os.environ, use=use)
    return Calls(objects, random.Random(), ASK_PATIENCE_S), run


async def _plan(calls: Calls, address: str, run: str | None) -> RunPlan:
    return await plans.load(calls, run if run is not None else await plans.only_run(calls, address))


def _asked(address: str, question: Callable[[Calls, RunPlan], Awaitable[T]], use: Use = Use.READ) -> T:
    if not address:
        raise BadInput("run", address, "is empty", "give the address that `tpu extract` printed")
    calls, run = _calls(address, use)

    async def ask() -> T:
        return await question(calls, await _plan(calls, address, run))

    return asyncio.run(ask())
