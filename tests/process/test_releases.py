"""S21: a real server takes over the store of each older release and goes on with it.

The stores in `releases/` were written by those releases' own code, in the middle of jobs' lives (`releases/make.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from backports import zstd

from penstock.domain.invariants.history import History
from penstock.domain.invariants.rules import check
from penstock.domain.nouns import Event
from tests.process.evidence import Evidence, events_of
from tests.process.shop import Shop

pytestmark = pytest.mark.slow
STORES = sorted((Path(__file__).parent / "releases").glob("*.db.zst"))
#: Rules that events alone can show. The others need what the world did, which nobody has kept.
REPLAYED = ("S3", "S4", "S5", "S13", "S15", "S16")


@pytest.fixture(params=STORES, ids=lambda path: path.name.removesuffix(".db.zst"))
def release(request: pytest.FixtureRequest) -> str:
    return str(request.param.name.removesuffix(".db.zst"))


@pytest.fixture
def shop(release: str, tmp_path: Path) -> Iterator[Shop]:
    """A machine whose store is the release's."""
    shop = Shop(tmp_path / "home")
    shop.home.path.mkdir(mode=0o700)
    packed = next(path for path in STORES if path.name.startswith(release))
    (shop.home.path / "penstock.db").write_bytes(zstd.decompress(packed.read_bytes()))
    try:
        yield shop
    finally:
        shop.end()


def rejected(events: list[Event]) -> list[str]:
    report = check(History(events=events), rules=REPLAYED)
    return [str(violation) for violation in report.violations]


def test_its_history_replays_and_its_jobs_go_on(shop: Shop, release: str) -> None:
    shop.open()
    doctor = shop.command("doctor", "--store", str(shop.home.path / "penstock.db"))
    assert doctor.returncode == 0, doctor.stdout + doctor.stderr
    listed: dict[str, str] = {}
    cursor = ""
    while True:
        page = shop.call("GET", f"/v1/jobs?limit=50{cursor}")[1]
        listed |= {job["id"]: job["state"] for job in page["jobs"]}
        if page.get("next") is None:
            break
        cursor = f"&cursor={page['next']}"
    events = events_of(shop.home.path / "penstock.db")
    made = {event.id for event in events if event.kind == "job.created"}
    gone = {event.id for event in events if event.kind == "job.purged"}
    assert set(listed) == made - gone
    assert len(listed) > 50
    waiting = next(id for id, state in listed.items() if state == "queued")
    assert shop.call("POST", f"/v1/jobs/{waiting}/cancel")[0] == 200
    assert shop.ended(waiting)["state"] == "cancelled"
    new = shop.submit("say('hello')")
    assert shop.ended(new)["state"] == "succeeded"
    assert shop.log(new) == b"hello\n"

    evidence = Evidence(shop.home.path / "penstock.db")
    evidence.read_events()
    evidence.world("replayed", release, events=len(events), rejected=rejected(evidence.history.events))
    assert evidence.prove("S21")["S21"] > 300
