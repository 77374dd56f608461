"""Roots by region, bundles in buckets, and what payloads of cloud machines can reach: judged by the emulator's books.

One emulator with machines, two buckets and one server serve all of them but the last, whose server is killed.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.capacity import processes
from penstock.domain.catalogue_egress import egress_usd
from penstock.emulator.gcs_faults import Fault
from penstock.server.auth import join_token
from tests.process.region_scene import BUCKETS, EU, US, ZONES, RegionScene, region_scene

#: Counts for ever. Every tenth step is saved, the newest two are kept; the state is so many MiB of that step's own.
SAVES = """
import hashlib, pathlib, shutil
folder, step, size = pathlib.Path(os.environ["PENSTOCK_CHECKPOINT_DIR"]), 0, int(sys.argv[1])
def whole(place):
    return sorted((it for it in pathlib.Path(place).iterdir() if it.name.isdecimal()), key=lambda it: int(it.name))
def state():
    return b"".join(hashlib.sha256(b"%d.%d" % (step, block)).digest() * 32768 for block in range(size))
if "PENSTOCK_RESTORE_DIR" in os.environ:
    newest = whole(os.environ["PENSTOCK_RESTORE_DIR"])[-1]
    step = int(newest.name)
    assert (newest / "state").read_bytes() == state(), "it is not what was saved"
    say("resumed at", step)
while True:
    step += 1
    if step % 10 == 0:
        part = folder / f"{step}.tmp"
        part.mkdir()
        (part / "state").write_bytes(state())
        part.rename(folder / str(step))
        for old in whole(folder)[:-2]: shutil.rmtree(old)
        say("saved", step)
    time.sleep(0.1)
"""


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RegionScene]:
    with region_scene(tmp_path_factory.mktemp("regions")) as scene:
        # Hosts that come before the bundle lies in the buckets have it from the server.
        scene.soon(lambda: all(scene.written(region, "agent/") for region in BUCKETS))
        yield scene


def other(region: str) -> str:
    return EU if region == US else US


def region_of_job(scene: RegionScene, job: str) -> str:
    place = scene.slice_of(job)
    return next(region for region, zone in ZONES.items() if f"/{zone}/" in scene.nodes()[place]["name"])


def leave(scene: RegionScene, job: str) -> tuple[str, str]:
    """Let the region of a job have no more capacity, and take its slice away; (from, to)."""
    here, place = region_of_job(scene, job), scene.slice_of(job)
    scene.dry(ZONES[here])
    scene.happen("preempt", place)
    return here, other(here)


def fence_of(scene: RegionScene, job: str) -> int:
    """Of its last attempt: under it lies what that saves."""
    return int(scene.shop.view(job)["attempts"][-1]["fence"])


def pieces(scene: RegionScene, region: str, job: str, fence: int) -> dict[str, list[str]]:
    """Hash -> the MD5s of all writes of that piece."""
    found: dict[str, list[str]] = {}
    for each in scene.written(region, f"jobs/{job}/checkpoints/{fence}/"):
        if "/pieces/" in each["name"]:
            found.setdefault(each["name"].rpartition("/")[2], []).append(each["md5"])
    return found


def saved(scene: RegionScene, region: str, job: str) -> bool:
    """Whether there is a whole checkpoint of its last attempt."""
    below = f"jobs/{job}/checkpoints/{fence_of(scene, job)}/"
    return any("/lists/" in each["name"] for each in scene.written(region, below))


def markers(scene: RegionScene, region: str, job: str, fence: int) -> list[str]:
    return [each["name"] for each in scene.written(region, f"jobs/{job}/checkpoints/{fence}/copied/")]


def check_copy(scene: RegionScene, job: str, fence: int, here: str, there: str) -> int:
    """Each piece came once and as it was, and the marker after all of them; the bytes of all of them."""
    copies, originals = pieces(scene, there, job, fence), pieces(scene, here, job, fence)
    assert copies
    assert all(len(writes) == 1 for writes in copies.values()), "nothing is copied twice"
    assert all(writes[0] in originals[name] for name, writes in copies.items())
    (marker,) = markers(scene, there, job, fence)
    names = [each["name"] for each in scene.written(there, f"jobs/{job}/checkpoints/{fence}/")]
    assert names[-1] == marker
    (copied,) = [each["copied"] for each in scene.shop.view(job)["attempts"] if each.get("copied")]
    assert (copied["source"], copied["target"]) == (here, there)
    assert copied["usd"] == pytest.approx(egress_usd(here, there, copied["size"]))
    return int(copied["size"])


def bundle_requests(scene: RegionScene, region: str) -> list[tuple[int, str]]:
    """(status, whose token) of every request of hosts for the bundle in a region's bucket."""
    path = f"/{BUCKETS[region]}/team/agent/"
    return [
        (each["status"], each["bearer"])
        for each in scene.storage("requests")
        if each["method"] == "GET" and each["path"].startswith(path)
    ]


@pytest.mark.long
def test_a_job_that_resumes_in_another_region_takes_its_checkpoint_along_and_says_what_that_costs(
    scene: RegionScene,
) -> None:
    before = {region: len(bundle_requests(scene, region)) for region in BUCKETS}
    scene.pool("both", ",".join(ZONES.values()), "--spot", "--max", "2")
    job = scene.shop.submit(SAVES, "1", on="v6e-1", pool="both")
    here = region_of_job(scene, job)
    scene.soon(lambda: saved(scene, here, job))
    assert not scene.written(other(here), f"jobs/{job}/checkpoints/"), "what an attempt saves lies in its own region"
    fence = fence_of(scene, job)
    here, there = leave(scene, job)
    scene.soon(lambda: b"resumed at" in scene.shop.everything(job))
    size = check_copy(scene, job, fence, here, there)
    told = f"from {here} to {there} first: {size} bytes"
    assert told in scene.shop.tpu("show", job).stdout
    assert told in scene.shop.tpu("why", job).stdout
    assert told in scene.shop.everything(job).decode()
    kinds = [line for line in scene.shop.tpu("events", job).stdout.splitlines() if "attempt.cop" in line]
    assert ["attempt.copying" in line or "attempt.copied" in line for line in kinds] == [True, True]
    # What it saves from now on lies where it runs.
    scene.soon(lambda: saved(scene, there, job))
    assert not pieces(scene, here, job, fence_of(scene, job))
    for region in BUCKETS:  # each had a host of it: that fetched the bundle nearby, as the machine that it is
        (bundle,) = scene.written(region, "agent/")
        assert len(bundle["name"].rpartition("/")[2]) == 64, "it is called by its hash, and put once"
        asked = bundle_requests(scene, region)[before[region] :]
        assert all(status == 200 and bearer.startswith("emulated-") for status, bearer in asked)
    scene.shop.command("cancel", job)
    scene.drop("both")
    scene.cloud.control("POST", "capacity", [{"chips": 1000, "zone": ZONES[here]}])


# --- the bundle ---
@pytest.mark.long
def test_a_bucket_with_other_bytes_or_none_makes_hosts_ask_the_server(scene: RegionScene) -> None:
    path = f"{BUCKETS[US]}/team/agent/"
    before = len(bundle_requests(scene, US))
    scene.plant(Fault("damage", path, "GET"), Fault("refuse", path, "GET", times=1000, status=403))
    try:
        for name in ("first", "second"):
            scene.pool(name, ZONES[US])
        jobs = [scene.shop.submit("say('here')", on="v6e-1", pool=name) for name in ("first", "second")]
        for job in jobs:
            scene.soon(lambda job=job: scene.shop.view(job)["state"] == "succeeded")  # type: ignore[misc]
        assert sorted(status for status, _ in bundle_requests(scene, US)[before:]) == [200, 403]
    finally:
        scene.heal()
        for name in ("first", "second"):
            scene.drop(name)


# --- what payloads can reach ---
#: Tries what a payload should not be able to do; argv: server, its slice, another, the token, a life, its address.
THIEF = """
import json, pathlib, urllib.error, urllib.request
server, own, other, token, life, address = sys.argv[1:]
meta = f"http://{address}/computeMetadata/v1/instance/"
def ask(request):
    try:
        with urllib.request.urlopen(request, timeout=30) as answer: return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error: return error.code, ""
def read(key): return ask(urllib.request.Request(meta + key, headers={"Metadata-Flavor": "Google"}))
def join(slice, host, incarnation):
    machine = read("attributes/penstock-machine")[1]
    wanted = {"slice": slice, "host": host, "provider_id": machine, "incarnation": incarnation, "token": token}
    body = json.dumps(wanted).encode()
    return ask(urllib.request.Request(server + "/v1/agent/join", body, {"content-type": "application/json"}))[0]
def there(path):
    try: return bool(pathlib.Path(path).read_bytes())
    except OSError: return False
say("join token:", read("attributes/penstock-join")[0])
say("account token:", read("service-accounts/default/token")[0])
say("join:", join(own, 0, "another-life"), join(own, 0, life), join(own, 1, "another-life"), join(other, 0, "x"))
say("files:", there("/var/lib/penstock/join-token"), there("/var/lib/penstock/host/credential.json"))
"""


@pytest.mark.long
def test_a_payload_can_neither_read_the_join_token_nor_join_with_it(scene: RegionScene) -> None:
    scene.pool("walled", ZONES[US])
    first = scene.shop.submit("say('here')", on="v6e-1", pool="walled")
    scene.soon(lambda: scene.shop.view(first)["state"] == "succeeded")
    place = str(scene.shop.view(first)["slice"])
    # The hosts have joined: the token goes from the node, and its file from the host.
    scene.soon(lambda: "penstock-join" not in scene.nodes()[place]["metadata"])
    assert "startup-script" in scene.nodes()[place]["metadata"], "all else stays"
    assert not (scene.disk(place) / "var/lib/penstock/join-token").exists()
    said = [line for line in scene.shop.tpu("events", "--json").stdout.splitlines() if "slice.joined" in line]
    (life,) = [each["body"]["incarnation"] for each in map(json.loads, said) if each["id"] == place]
    # A payload that has the token all the same, say from before: it is spent, also for the life that all can read of.
    token = join_token(scene.shop.home.prepare(), place)
    address = scene.nodes()[place]["hosts"][0]["address"]
    thief = (scene.shop.server.url, place, "s-another", token, life, address)
    job = scene.shop.submit(THIEF, *thief, on="v6e-1", pool="walled")
    scene.soon(lambda: scene.shop.view(job)["state"] in ("succeeded", "failed"))
    assert scene.shop.view(job)["slice"] == place
    assert scene.shop.log(job).decode().splitlines() == [
        "join token: 404",
        "account token: 200",  # not closed: ADR 0030
        "join: 403 403 403 401",
        "files: False False",
    ], scene.shop.everything(job)
    # A reboot comes back without the token, by the credential that the host kept.
    scene.happen("stop_host", place)
    scene.happen("start_host", place)
    again = scene.shop.submit("say('back')", on="v6e-1", slice=place)
    scene.soon(lambda: scene.shop.view(again)["state"] == "succeeded")
    assert scene.shop.view(again)["slice"] == place
    scene.drop("walled")


# --- agents that hang ---
def agents_of(slice: str) -> list[processes.Process]:
    """The agent processes of an emulated host, without the shell that starts them again."""
    found = processes.with_arguments("--slice", slice)
    return [each for each in found if b"/bundle-" in _program(each)]


def _program(process: processes.Process) -> bytes:
    try:
        return Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")[0]
    except OSError:
        return b""  # it ended meanwhile


def said_of(scene: RegionScene, slice: str) -> str:
    """What people are told of a slice; it has at most a few seconds between falling silent and being given up."""
    found = scene.shop.call("GET", "/v1/slices")[1]["slices"]
    return " ".join(each["why"] for each in found if each["id"] == slice)


@pytest.mark.long
@pytest.mark.parametrize("how", ["hangs", "dead"])
def test_an_agent_that_hangs_or_is_dead_on_a_ready_machine_is_found_and_the_machine_replaced(
    scene: RegionScene, how: str
) -> None:
    scene.pool(how, ZONES[US], "--max", "2")
    job = scene.shop.submit(SAVES, "1", on="v6e-1", pool=how)
    place = scene.slice_of(job)
    scene.soon(lambda: saved(scene, US, job))
    (agent,) = agents_of(place)
    if how == "dead":  # for good: what would start it again dies first
        for each in processes.with_arguments("--slice", place):
            if each != agent:
                processes.send(each, signal.SIGKILL)
    processes.send(agent, signal.SIGSTOP if how == "hangs" else signal.SIGKILL)
    try:
        scene.soon(lambda: re.search("not called for|silent for", said_of(scene, place)))
        scene.soon(lambda: b"resumed at" in scene.shop.everything(job))
        view = scene.shop.view(job)
        assert view["slice"] != place
        lost = view["attempts"][0]
        assert lost["cause"] == "lost"
        assert f"slice {place} was silent for " in lost["evidence"][0]
        assert "said READY" in lost["evidence"][0]
        assert f"slice {place} was silent for " in scene.shop.tpu("why", job).stdout
        scene.soon(lambda: place not in scene.nodes())
        scene.soon(lambda: not agent.alive)  # with the machine goes whatever still ran on it
    finally:
        processes.send(agent, signal.SIGCONT)
    scene.shop.command("cancel", job)
    scene.drop(how)


# --- a server that is killed ---
@pytest.mark.long
def test_a_server_killed_while_it_copies_goes_on_and_sends_nothing_twice(tmp_path: Path) -> None:
    with region_scene(tmp_path) as scene:
        scene.pool("both", ",".join(ZONES.values()), "--spot", "--max", "2")
        job = scene.shop.submit(SAVES, "100", on="v6e-1", pool="both")  # thirteen pieces each
        here = region_of_job(scene, job)
        scene.soon(lambda: saved(scene, here, job))
        scene.plant(Fault("slow", f"{BUCKETS[other(here)]}/team/jobs/{job}/", "PUT", times=10_000, seconds=5.0))
        fence, halfway = fence_of(scene, job), 0
        here, there = leave(scene, job)
        for count in (1, 9):  # within the first round of pieces, and the second
            scene.soon(lambda count=count: len(pieces(scene, there, job, fence)) >= count)  # type: ignore[misc]
            scene.kill()
            halfway += not markers(scene, there, job, fence)
            scene.serve()
        assert halfway, "it was never killed half-way"
        scene.heal()
        scene.soon(lambda: b"resumed at" in scene.shop.everything(job))
        check_copy(scene, job, fence, here, there)
        bundles = [each["name"] for each in scene.written(there, "agent/")]
        assert len(bundles) == len(set(bundles)), "nor is a bundle"
