"""Gangs of real `jax.distributed` processes: one leaves, is killed or is stopped, and what becomes of the others.

Each program calls JAX itself, without `penstock.payload`, so that nothing of it knows of Penstock. JAX alone would keep
such a gang for its timeouts of minutes; the bounds here are far below those and leave room for a busy machine.
"""

from __future__ import annotations

import secrets
import signal
import time
from collections.abc import Iterator

import pytest

from penstock.capacity import processes
from penstock.domain import limits
from tests.process.shop import Shop

pytestmark = pytest.mark.slow
AT_ONCE_S = 0.8 * limits.GRACE_S  #: a quiet machine needs one to two; a job's grace and JAX's timeouts are beyond it

JOIN = """
import jax
rank, hosts = int(os.environ["JAX_PROCESS_ID"]), int(os.environ["JAX_NUM_PROCESSES"])
jax.distributed.initialize(os.environ["JAX_COORDINATOR_ADDRESS"], hosts, rank)
from jax.experimental import multihost_utils
multihost_utils.sync_global_devices("all are here")
say("world", jax.process_count())
"""
#: One is in the middle of a collective, the next one busy with something else.
HANG = """
if rank % 2: time.sleep(600)
multihost_utils.sync_global_devices("never")
"""


#: The same of a snippet, by Penstock's own word.
JOIN_SNIPPET = """
import os, sys, time
from penstock import payload
assert payload.distributed()
from jax.experimental import multihost_utils
multihost_utils.sync_global_devices("all are here")
os.write(1, b"world\\n")
"""


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    shop = Shop(tmp_path_factory.mktemp("gangs") / "home")
    try:
        shop.open()
        yield shop
    finally:
        shop.end()


@pytest.mark.parametrize(
    ("on", "hosts", "leaver", "death", "code"),
    [
        ("v4-16", 2, 1, "sys.exit(3)", 3),
        ("v4-16", 2, 0, "sys.exit('no data')", 1),
        ("v5e-16", 4, 2, "sys.exit(3)", 3),
        ("v5e-16", 4, 0, "raise RuntimeError('no data')", 1),
    ],
    ids=["two-exit", "two-coordinator-says-why", "four-exit", "four-coordinator-raises"],
)
def test_who_leaves_with_a_failure_ends_the_gang_at_once(
    shop: Shop, on: str, hosts: int, leaver: int, death: str, code: int
) -> None:
    mark = f"leaver-{secrets.token_hex(6)}"
    job = shop.submit(f"{JOIN}\nif rank == {leaver}:\n    gate('leave')\n    {death}\n{HANG}", mark, on=on)
    shop.says(job, b"world", hosts=hosts)
    assert len(shop.payloads(mark)) == hosts
    began = time.monotonic()
    shop.open_gate(job, "leave")
    view = shop.ended(job)
    took_s = time.monotonic() - began
    assert (view["state"], view["cause"], view["exit_code"], len(view["attempts"])) == ("failed", "user_error", code, 1)
    assert not shop.payloads(mark)
    assert took_s < AT_ONCE_S, f"the others lived on for {took_s:.1f} s"


def test_a_snippet_that_leaves_with_a_failure_ends_its_gang_at_once(shop: Shop) -> None:
    code = JOIN_SNIPPET + (
        "if payload.rank() == 0: multihost_utils.sync_global_devices('never')\n"
        "while not os.path.exists(os.environ['PENSTOCK_CHECKPOINT_DIR'] + '/leave'): time.sleep(0.02)\nsys.exit(3)"
    )
    with shop.client() as client:
        job = client.start(code, on="v4-16").id
    shop.says(job, b"world", hosts=2)
    began = time.monotonic()
    shop.open_gate(job, "leave")
    view = shop.ended(job)
    took_s = time.monotonic() - began
    assert (view["state"], view["cause"], view["exit_code"], len(view["attempts"])) == ("failed", "user_error", 3, 1)
    assert took_s < AT_ONCE_S, f"the other lived on for {took_s:.1f} s"


def test_who_leaves_well_waits_for_the_others(shop: Shop) -> None:
    """`sys.exit(0)` and a caught `sys.exit(3)` change nothing of how JAX ends a gang."""
    code = (
        f"{JOIN}\nif rank == 0: gate('last')\n"
        "try: sys.exit(3)\nexcept SystemExit as left: assert left.code == 3\n"
        "import atexit\natexit.register(say, 'my own end')\n"
        "sys.exit(0 if rank else None)"
    )
    job = shop.submit(code, on="v4-16")
    shop.says(job, b"world", hosts=2)
    shop.open_gate(job, "last")
    view = shop.ended(job)
    assert (view["state"], len(view["attempts"])) == ("succeeded", 1), view
    for host in range(2):
        assert b"my own end\n" in shop.log(job, host=host)


def test_a_cancelled_gang_that_does_not_ask_goes_at_once(shop: Shop) -> None:
    mark = f"cancelled-{secrets.token_hex(6)}"
    job = shop.submit(JOIN + HANG, mark, on="v5e-16")
    shop.says(job, b"world", hosts=4)
    began = time.monotonic()
    assert shop.command("cancel", job).returncode == 0
    view = shop.ended(job)
    took_s = time.monotonic() - began
    assert (view["state"], view["cause"]) == ("cancelled", "cancelled")
    assert not shop.payloads(mark)
    assert took_s < AT_ONCE_S, f"it took {took_s:.1f} s of a grace of {limits.GRACE_S:g} s"


def test_a_gang_that_asks_jax_about_preemption_has_its_grace(shop: Shop) -> None:
    """As orbax does at each step: SIGTERM is a notice then, and all hosts save at the same step.

    The first is ahead of the other, and is its coordinator: it must not leave before that one has saved.
    """
    code = (
        f"{JOIN}\nstep = 0\n"
        "while not multihost_utils.reached_preemption_sync_point(step):\n"
        "    if step == 0: say('asks')\n"
        "    step += 1\n    time.sleep(0.1 + 0.3 * rank)\n"
        "say('saved')\nsys.exit(143)"
    )
    job = shop.submit(code, on="v4-16")
    shop.says(job, b"asks", hosts=2)
    began = time.monotonic()
    assert shop.command("cancel", job).returncode == 0
    view = shop.ended(job)
    assert time.monotonic() - began < limits.GRACE_S + 5.0
    assert (view["state"], view["cause"]) == ("cancelled", "cancelled")
    for host in range(2):
        assert b"saved\n" in shop.log(job, host=host)


def test_snippets_of_a_gang_that_is_stopped_save_each_in_its_time(shop: Shop) -> None:
    code = JOIN_SNIPPET + (
        "while not payload.should_stop(): time.sleep(0.02)\n"
        "time.sleep(1.5 * payload.rank())\nos.write(1, b'saved\\n')\nsys.exit(payload.STOPPED)"
    )
    with shop.client() as client:
        job = client.start(code, on="v4-16").id
    shop.says(job, b"world", hosts=2)
    assert shop.command("cancel", job).returncode == 0
    view = shop.ended(job)
    assert (view["state"], view["cause"]) == ("cancelled", "cancelled")
    for host in range(2):
        assert b"saved\n" in shop.log(job, host=host)


def test_a_payload_killed_from_outside_is_no_lack_of_memory(shop: Shop) -> None:
    """The kernel counted no kill for memory, so it is infrastructure, and goes on as after any such loss."""
    mark = f"killed-{secrets.token_hex(6)}"
    job = shop.submit("say('up')\nif os.environ['PENSTOCK_FENCE'] == '1': gate('never')", mark)
    shop.says(job, b"up")
    for payload in shop.payloads(mark):
        processes.send(payload, signal.SIGKILL)
    view = shop.ended(job)
    first = view["attempts"][0]
    assert (first["cause"], first["exit_code"]) == ("infra", 137)
    assert (view["state"], len(view["attempts"])) == ("succeeded", 2)
    with shop.client() as client:
        told = [event for event in client.events(job) if "SIGKILL" in str(event)]
    assert told, "the signal is named"
