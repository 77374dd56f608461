"""A fake cloud with fixed times, for tests of capacity/: what it said, and what the port answered."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

from penstock.capacity.fake import FakeCapacity, ScriptedFaults
from penstock.capacity.fakecloud import FakeCloud, Fault, ZoneModel
from penstock.domain.invariants.history import History, Recorder
from penstock.domain.nouns import Slice
from penstock.sim.loop import run

ZONE = "z"


def wanted(name: str = "s1", *, chips: int = 8, hosts: int = 2, zone: str = ZONE, spot: bool = True) -> Slice:
    return Slice(
        id=name,
        team="t",
        pool="p",
        provider="fake",
        zone=zone,
        accelerator="v5e-8",
        chips=chips,
        hosts=hosts,
        intended_at=0.0,
        spot=spot,
    )


class Bench:
    """A cloud with fixed times (ready after 10 s, deleted after 5 s) and everything it said."""

    def __init__(self, faults: ScriptedFaults | None = None, **model: float) -> None:
        self.history = History()
        recorder = Recorder(self.history, lambda: 0, lambda: asyncio.get_running_loop().time())
        self.told: list[tuple[str, str, tuple[bool, ...], str]] = []
        self.notices: list[str] = []
        settings = {"ready_s": (10.0, 10.0), "delete_s": (5.0, 5.0), **model}
        self.cloud = FakeCloud(
            rng=random.Random(1),
            recorder=recorder,
            on_vm=lambda name, id, hosts, state: self.told.append(
                (name, id, tuple(host is not None for host in hosts), state)
            ),
            on_notice=lambda name, id: self.notices.append(name),
            zone_model=ZoneModel(**settings),  # type: ignore[arg-type]
        )
        self.port = FakeCapacity(self.cloud, faults=faults, recorder=recorder, rng=random.Random(2))

    async def state(self, name: str = "s1") -> str | None:
        seen = await self.port.get(name, ZONE)
        return None if seen is None else seen.state

    def calls(self, verb: str) -> list[object]:
        return [
            record.body["outcome"]
            for record in self.history.world
            if record.kind == "provider.call" and record.body["verb"] == verb
        ]

    def kinds(self, name: str = "s1") -> list[str]:
        return [record.kind for record in self.history.world if record.subject == name and "vm." in record.kind]


def story(tell: Callable[[Bench], Awaitable[None]], *faults: tuple[str, Fault], **model: float) -> Bench:
    bench: list[Bench] = []

    async def main() -> None:
        script = ScriptedFaults()
        for verb, fault in faults:
            script.add(verb, fault)
        bench.append(Bench(script, **model))
        await tell(bench[0])

    run(main())
    return bench[0]
