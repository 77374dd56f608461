"""A storm over a fleet: slices are preempted all the time, the controller is killed on the way, and all work gets done.

`python -m tools.storm [--seconds 300]`, run by `make soak` and `.ci/run`; a short one is `tests/process/test_storm.py`.
Emulator, server, hosts and payloads are real processes; the weather is drawn from `--seed`. Each task works through
its units in order, commits each to a bucket of its own accord and saves a checkpoint after it. Afterwards everything
must be done and every slice gone; whether it is so is judged by `tools.storm_judge`, from outside. Exits with 1 on any
violation, or when there was no storm to speak of.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from penstock import Client
from penstock.client import ApiError
from penstock.domain import catalogue
from penstock.wire.api import CommandRequest, JobRequest
from tools.emulated import BUCKET, Emulated, Unusable, until
from tools.storm_judge import Change, Evidence, Happened, Said, Verdict, Work, judge

ZONES: Final = ("us-central1-a", "us-central1-b")
PER_ZONE: Final = 4
TYPE: Final = "v3-8"
FLEET: Final = "storm"
#: Between a notice and the end; the real ones are 30 s, and a storm that waits is none.
NOTICE_S: Final = (3.0, 10.0)
DOWN_S: Final = (0.0, 3.0)  #: how long the controller is away after it was killed
LOOK_S: Final = 1.0  #: between questions about all jobs or all objects: they cost what the storm needs
CALM_S_MAX: Final = 900.0  #: for what is left to do once the storm is over
JUDGED: Final = ("units/", "work/", "begin/", "done/", "clash/")
ENDED: Final = frozenset({"succeeded", "failed", "cancelled"})
WORLD: Final = """
seed = {seed}
[delays]
create = [0.5, 3.0]
delete = [0.5, 3.0]
[[quotas]]
chips = {quota}
per = "zone"
"""
#: Arguments: HOST:PORT of the storage, bucket, task, units, seconds per unit.
PAYLOAD: Final = """
import hashlib, http.client, json, os, pathlib, shutil, signal, socket, sys, time
place, bucket, task, units, pause = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), float(sys.argv[5])
fence, folder = int(os.environ["PENSTOCK_FENCE"]), pathlib.Path(os.environ["PENSTOCK_CHECKPOINT_DIR"])
step, state, asked = 0, "seed", []
signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
def call(method, path, body=None):
    for rest in (0.1, 0.5, 1, 2, 4, 8):
        try:
            line = http.client.HTTPConnection(place, timeout=20)
            line.request(method, path, body)
            answer = line.getresponse()
            found = answer.read()
            if answer.status < 500: return answer.status, found
        except (OSError, http.client.HTTPException): pass
        finally: line.close()
        time.sleep(rest)
    sys.exit("the storage cannot be reached")
def put(name, absent=False, **more):
    said = {"fence": fence, "at": time.time(), "host": socket.gethostname(), **more}
    only = "&ifGenerationMatch=0" if absent else ""
    name = name.replace("/", "%2F")
    return call("POST", f"/upload/storage/v1/b/{bucket}/o?uploadType=media&name={name}{only}", json.dumps(said))[0]
def whole(place):
    return sorted((it for it in pathlib.Path(place).iterdir() if it.name.isdecimal()), key=lambda it: int(it.name))
def save():
    part = folder / f"{step}.tmp"
    part.mkdir()
    (part / "state").write_text(state)
    part.rename(folder / str(step))
    for old in whole(folder)[:-2]: shutil.rmtree(old)
if "PENSTOCK_RESTORE_DIR" in os.environ and (found := whole(os.environ["PENSTOCK_RESTORE_DIR"])):
    step, state = int(found[-1].name), (found[-1] / "state").read_text()
put(f"begin/{task}/{fence}", step=step)
while step < units and not asked:
    time.sleep(pause)
    state = hashlib.sha256(f"{state}/{task}/{step + 1}".encode()).hexdigest()
    put(f"work/{task}/{step + 1}/{fence}")
    if put(f"units/{task}/{step + 1}", absent=True, state=state) == 412:
        found = json.loads(call("GET", f"/{bucket}/units/{task}/{step + 1}")[1])
        if found["state"] != state or found["fence"] > fence: put(f"clash/{task}/{step + 1}/{fence}", **found)
    step += 1
    save()
if step < units: sys.exit(1)
pathlib.Path(os.environ["PENSTOCK_OUTPUT_DIR"], "state").write_text(state)
put(f"done/{task}/{fence}", state=state)
"""


class Weather(msgspec.Struct, frozen=True, kw_only=True):
    """How hard and how long it blows."""

    seconds: float = 300.0
    every_s: float = 20.0  #: between two preemptions, on average
    kills: int = 3
    seed: int = 9  #: of the first dozen the one whose storm is as hard as it says: 15 preemptions, 6 with notice
    units: int = 20
    unit_s: float = 2.0

    @property
    def tasks(self) -> int:
        """Work for all slices as long as it blows, if it did not: so there is some until after its end."""
        slices = PER_ZONE * len(ZONES)
        return max(2 * slices, round(slices * self.seconds / (self.units * self.unit_s)))


class Gust(NamedTuple):
    """Something that happens at a moment of the storm."""

    at_s: float
    what: str  #: preempt, kill, serve
    notice_s: float = 0.0
    whom: float = 0.0  #: which of the nodes that can be taken then, as a share of them


def forecast(weather: Weather) -> list[Gust]:
    """All that will happen, from the seed alone: preemptions as a Poisson process, kills spread over the storm."""
    rng = random.Random(f"storm/{weather.seed}")
    gusts = []
    at_s = rng.expovariate(1 / weather.every_s)
    while at_s < weather.seconds:
        notice_s = rng.uniform(*NOTICE_S) if rng.random() < 0.5 else 0.0
        gusts.append(Gust(at_s, "preempt", notice_s, rng.random()))
        at_s += rng.expovariate(1 / weather.every_s)
    for number in range(weather.kills):
        at_s = (number + rng.uniform(0.3, 0.7)) * weather.seconds / weather.kills
        gusts += [Gust(at_s, "kill"), Gust(at_s + rng.uniform(*DOWN_S), "serve")]
    return sorted(gusts)


class Storm:
    """One storm, from an empty project to an empty project."""

    def __init__(self, weather: Weather, folder: Path, tell: Callable[[str], None]) -> None:
        chips = catalogue.find(TYPE).chips
        self.weather = weather
        self.work = Work(
            tasks=weather.tasks,
            units=weather.units,
            quota_chips=PER_ZONE * chips,
            slices=PER_ZONE * len(ZONES),
        )
        self._tell = tell
        self._kills = 0
        self._cloud = Emulated(folder, WORLD.format(seed=weather.seed, quota=self.work.quota_chips))

    def run(self) -> Verdict:
        began = time.monotonic()
        with self._cloud.running():
            self._tell(f"storm: seed {self.weather.seed}, {self.work.tasks} tasks of {self.work.units} units")
            options = ("--zones", ",".join(ZONES), "--per-zone", str(PER_ZONE), "--type", TYPE, "--spot")
            self._cloud.tpu("fleet", "create", FLEET, *options)
            jobs = self._submit()
            until(lambda: self._begun() >= self.work.slices, CALM_S_MAX, "every slice works", LOOK_S)
            self._tell(f"storm: {self.work.slices} slices work after {time.monotonic() - began:.0f} s; it begins")
            self._blow()
            self._tell("storm: over; what is left to do is done")
            outputs = self._finish(jobs)
            self._cloud.tpu("fleet", "delete", FLEET, "--yes")
            until(lambda: not self._cloud.nodes(), CALM_S_MAX, "every slice is gone", LOOK_S)
            evidence = self._gather(outputs)
        (self._cloud.folder / "evidence.json").write_bytes(msgspec.json.encode(evidence))
        self._tell(f"storm: {time.monotonic() - began:.0f} s in all")
        return judge(self.work, evidence)

    def _submit(self) -> dict[int, str]:
        """One job for each task; their ids."""
        place = self._cloud.url.removeprefix("http://")
        words = (place, BUCKET)
        more = (str(self.weather.units), str(self.weather.unit_s))
        with self._cloud.client() as client:
            accepted = client.submit_many(
                JobRequest(
                    payload=CommandRequest(("python3", "-c", PAYLOAD, *words, str(task), *more)),
                    pool=FLEET,
                    on=(TYPE,),
                    array=f"storm/{task}",
                    outputs=("state",),
                )
                for task in range(self.work.tasks)
            )
        return {task: each.id for task, each in enumerate(accepted)}

    def _begun(self) -> int:
        return len({change.name.split("/")[1] for change in self._changes() if change.name.startswith("begin/")})

    # --- the weather ---
    def _blow(self) -> None:
        began = time.monotonic()
        for gust in forecast(self.weather):
            time.sleep(max(0.0, began + gust.at_s - time.monotonic()))
            if gust.what == "preempt":
                self._preempt(gust)
            elif gust.what == "kill":
                self._tell(f"storm: {gust.at_s:.0f} s: the controller is killed")
                self._cloud.kill_server()
                self._kills += 1
            else:
                self._cloud.serve()
        time.sleep(max(0.0, began + self.weather.seconds - time.monotonic()))

    def _preempt(self, gust: Gust) -> None:
        """Any node that has machines, also one that is being made; not one that is going anyway."""
        there = sorted(each["name"] for each in self._cloud.nodes() if each["state"] in ("CREATING", "READY"))
        if not there:
            self._tell(f"storm: {gust.at_s:.0f} s: there is nothing to take")
            return
        name = there[int(gust.whom * len(there))].rpartition("/")[2]
        self._cloud.preempt(name, gust.notice_s)
        told = f"with {gust.notice_s:.1f} s of notice" if gust.notice_s else "without a word"
        self._tell(f"storm: {gust.at_s:.0f} s: {name} goes {told}; {len(there)} there")

    # --- afterwards ---
    def _finish(self, jobs: dict[int, str]) -> dict[int, str | None]:
        """Wait for the end of all jobs; what a user gets of each."""
        outputs: dict[int, str | None] = {}
        with self._cloud.client() as client:
            until(lambda: self._ended(client) >= len(jobs), CALM_S_MAX, "every job has ended", LOOK_S)
            for task, job in jobs.items():
                view = client.get(job)
                if view.state != "succeeded":
                    self._tell(f"storm: task {task} is {view.state}: {view.attempts}")
                outputs[task] = client.artifact(job, "state").decode() if view.state == "succeeded" else None
        if not self._cloud.server_lives():
            raise Unusable("the server has ended by itself")
        return outputs

    def _ended(self, client: Client) -> int:
        try:
            return sum(job.state in ENDED for job in client.jobs())
        except ApiError:
            return 0

    def _changes(self) -> Iterator[Change]:
        for each in self._cloud.control("GET", "history"):
            if each["name"].startswith(JUDGED):
                yield Change(each["verb"], each["name"])

    def _gather(self, outputs: dict[int, str | None]) -> Evidence:
        changes = tuple(self._changes())
        names = sorted({change.name for change in changes})
        now_s: Any = self._cloud.control("POST", "tpu/advance", {"seconds": 0.0})["now_s"]
        return Evidence(
            began_at=time.time() - now_s,  # noqa: TID251 (payloads and emulator stamp by the same clock)
            happened=msgspec.convert(self._cloud.control("GET", "tpu/history"), tuple[Happened, ...]),
            changes=changes,
            said={name: msgspec.json.decode(self._cloud.object(name), type=Said) for name in names},
            outputs=outputs,
            kills=self._kills,
        )


def table(verdict: Verdict) -> str:
    """The verdict as people read it."""
    seen = verdict.figures
    held = ", ".join(f"{zone} {chips}" for zone, chips in sorted(seen.held_chips_max.items()))
    again = "never"
    if seen.again_median_s is not None and seen.again_max_s is not None:
        again = f"median {seen.again_median_s:.1f} s, at most {seen.again_max_s:.1f} s"
    lines = [
        f"slices      {seen.slices_made} made, {seen.taken} taken away, {seen.noticed} of them with notice",
        f"controller  killed {seen.kills} times",
        f"attempts    {seen.attempts}: {seen.lost_attempts} lost their host, {seen.unexplained} ended otherwise",
        f"loss to running again  {again}",
        f"units       {seen.units} committed, {seen.redone} worked on again",
        f"quota       most chips held: {held}; {seen.quota_refusals} requests beyond it refused",
        f"violations  {len(verdict.violations)}",
    ]
    return "\n".join([*lines, *(f"            {each}" for each in verdict.violations)])


def no_storm(weather: Weather, verdict: Verdict) -> str:
    """Why nothing was proved, though nothing was violated; empty when something was."""
    seen = verdict.figures
    wanted = sum(gust.what == "preempt" for gust in forecast(weather))
    if seen.kills != weather.kills:
        return f"the controller was killed {seen.kills} times, not {weather.kills}"
    if seen.taken < wanted / 2:
        return f"only {seen.taken} of {wanted} preemptions struck"
    return "" if seen.lost_attempts else "no attempt lost its host"


def main() -> int:
    parser = argparse.ArgumentParser(description="work on a fleet that is preempted all the time")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--every", type=float, default=20.0, help="seconds between preemptions, on average")
    parser.add_argument("--kills", type=int, default=3, help="of the controller")
    parser.add_argument("--seed", type=int, default=9)
    parser.add_argument("--out", type=Path, default=None, help="write the verdict here as JSON")
    parser.add_argument("--keep", type=Path, default=None, help="a folder that does not exist, for all files and logs")
    options = parser.parse_args()
    weather = Weather(seconds=options.seconds, every_s=options.every, kills=options.kills, seed=options.seed)
    with tempfile.TemporaryDirectory(prefix="penstock-storm-") as folder:
        place = options.keep or Path(folder) / "storm"
        try:
            verdict = Storm(weather, place, lambda line: print(line, flush=True)).run()
        except Unusable as why:
            print(f"storm: {why}", file=sys.stderr)
            return 1
    print(table(verdict))
    if options.out is not None:
        options.out.write_bytes(msgspec.json.format(msgspec.json.encode(verdict), indent=1))
    calm = no_storm(weather, verdict)
    if calm:
        print(f"storm: {calm}", file=sys.stderr)
    return 1 if verdict.violations or calm else 0


if __name__ == "__main__":
    sys.exit(main())
