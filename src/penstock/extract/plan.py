"""The plan of a run: which input rows make which unit, which sites are captured, and all that decides the result.

`tpu extract` writes it once; every worker reads it. The run's id is the hash of the plan's canonical JSON, so another
plan is another run, in another folder: a worker with other settings cannot write into this one. What a unit's content
is computed from lies in `work`, whose shape belongs to `compute`. It must not hold anything that differs between
workers, such as paths of one machine's cache or a batch size that fits one chip.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from penstock.domain import ledger
from penstock.domain.admission import BadInput
from penstock.extract.calls import Calls
from penstock.ports.objects import ObjectsError

#: Changes when a reader of the last one could not read the next.
FORMAT: Final = 1
RUNS: Final = "runs"
_ID_LETTERS: Final = 32
_SORTED: Final = msgspec.json.Encoder(order="sorted")

DtypeName = Literal["bfloat16", "float16", "float32"]


class RunPlan(ledger.Plan, frozen=True, kw_only=True):
    """`rows` are input rows (documents); `run` is the hash of everything else in here."""

    format: int
    sites: tuple[str, ...]  #: names of sites, as objects are called after them
    dtype: DtypeName
    work: dict[str, Any]  #: model, data and rules, with their hashes: what `compute` makes a unit from


def make_plan(
    *,
    rows: int,
    unit_rows: int,
    sites: tuple[str, ...],
    dtype: DtypeName,
    work: Mapping[str, Any],
    stops: Sequence[int] = (),
) -> RunPlan:
    """The plan for so many input rows, cut into units of `unit_rows`, or at `stops`; its id follows from it."""
    if not sites or len(set(sites)) != len(sites):
        raise BadInput("sites", ", ".join(sites), "names no site, or one twice", "name each site once")
    split = ledger.cut("", stops) if stops else ledger.split("", rows, unit_rows)
    if split.rows != rows:
        raise ValueError(f"units end at row {split.rows} of {rows}")
    # As JSON has it, so that a plan that was read equals the one that was made.
    plain = msgspec.json.decode(msgspec.json.encode(work))
    draft = RunPlan(run="", rows=rows, units=split.units, format=FORMAT, sites=sites, dtype=dtype, work=plain)
    return msgspec.structs.replace(draft, run=run_id(draft))


def run_id(plan: RunPlan) -> str:
    """The hash of the canonical JSON of a plan without its own id."""
    return hashlib.sha256(_SORTED.encode(msgspec.structs.replace(plan, run=""))).hexdigest()[:_ID_LETTERS]


def to_bytes(plan: RunPlan) -> bytes:
    return _SORTED.encode(plan)


async def publish(calls: Calls, plan: RunPlan) -> None:
    """Write the plan if nobody has; what lies there afterwards must be this very plan."""
    await calls.create(ledger.plan_path(plan.run), to_bytes(plan))
    if await load(calls, plan.run) != plan:
        raise BadInput("run", plan.run, "has another plan", "choose another place with --out")


async def load(calls: Calls, run: str) -> RunPlan:
    """The plan of a run, compared with the id that it must give."""
    stored = await calls.read(ledger.plan_path(run))
    if stored is None:
        raise BadInput("run", run, "has no plan there", "give the address that `tpu extract` printed")
    try:
        plan = msgspec.json.decode(stored.data, type=RunPlan)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ObjectsError(f"{ledger.plan_path(run)} cannot be read: {error}") from error
    if plan.format != FORMAT:
        raise BadInput("run", run, f"is of format {plan.format}; this version knows {FORMAT}", "install a matching one")
    if plan.run != run or run_id(plan) != run:
        raise BadInput("run", run, f"holds the plan of {run_id(plan)}: somebody changed it", "make a new run")
    return plan


def parse_address(address: str) -> tuple[str, str | None]:
    """Root and run of an address that ends in `runs/ID`; only a root: None for the run."""
    head, _, last = address.rstrip("/").rpartition("/")
    above, _, folder = head.rpartition("/")
    if folder == RUNS and above and len(last) == _ID_LETTERS and set(last) <= set("0123456789abcdef"):
        return above, last
    return address.rstrip("/"), None


async def only_run(calls: Calls, address: str) -> str:
    """The one run under a root, for those who give the root's address."""
    found = sorted({path.split("/")[1] for path in await calls.list(f"{RUNS}/") if path.endswith("/plan.json")})
    if len(found) != 1:
        rule = f"holds {len(found)} runs"
        fix = f"give one: {', '.join(f'{address}/{RUNS}/{run}' for run in found[:4])}" if found else "look at --out"
        raise BadInput("run", address, rule, fix)
    return found[0]
