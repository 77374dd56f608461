"""What others need for the same, in the same run: importing jax, RQ on Redis, dask.distributed.

`bench/run.py` calls it. Neither is what Penstock is: RQ's jobs have no slices, walls, logs or results beyond a pickle;
dask's are not durable at all. RQ runs on a Redis that syncs its log after every write, as our store does; its `Worker`
forks for each job and its `SimpleWorker` does not, like `fork` and `inline`. What is not installed is skipped, with the
reason.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from core import Row
from served import p, wall_and_cpu

PART = "yardsticks"
READY_S_MAX = 30.0


def import_jax(runs: int) -> list[Row]:
    wall, cpu = wall_and_cpu([sys.executable, "-c", "import jax"], runs)
    return [
        Row(part=PART, what="python -c 'import jax', wall", measured=wall * 1e3, unit="ms"),
        Row(part=PART, what="python -c 'import jax', processor", measured=cpu * 1e3, unit="ms"),
    ]


def rows_of(
    name: str, one: Callable[[], object], single: int, drained_s: Callable[[int], float], many: int
) -> list[Row]:
    """Latency of one no-op after another, then the rate of many."""
    for _ in range(3):
        one()
    times = []
    for _ in range(single):
        began = time.monotonic()
        one()
        times.append(time.monotonic() - began)
    return [
        Row(part=PART, what=f"{name}: no-op p50", measured=p(times, 50) * 1e3, unit="ms"),
        Row(part=PART, what=f"{name}: no-op p99", measured=p(times, 99) * 1e3, unit="ms"),
        Row(part=PART, what=f"{name}: {many:,} no-ops", measured=many / drained_s(many), unit="/s"),
    ]


# --- RQ ---
def rq(single: int, many: int) -> tuple[list[Row], str]:
    try:
        import redis
        import rq as rq_package
    except ImportError as error:
        return [], f"RQ: {error}"
    if shutil.which("redis-server") is None:
        return [], "RQ: redis-server is not installed (Debian: redis-server)"
    rows: list[Row] = []
    with _redis() as socket:
        queue = rq_package.Queue("bench", connection=redis.Redis(unix_socket_path=socket))
        for kind in ("Worker", "SimpleWorker"):
            with _rq_workers(socket, kind):

                def one() -> None:
                    queue.enqueue("operator.pos", 1).latest_result(timeout=30)

                def drained_s(count: int) -> float:
                    began = time.monotonic()
                    jobs = queue.enqueue_many(
                        [rq_package.Queue.prepare_data("operator.pos", (1,)) for _ in range(count)]
                    )
                    for job in jobs:
                        job.latest_result(timeout=60)
                    return time.monotonic() - began

                rows += rows_of(f"RQ {rq_package.VERSION} {kind}", one, single, drained_s, many)
    return rows, ""


@contextmanager
def _redis() -> Iterator[str]:
    import redis

    # Not under the working directory: the path of a socket may have a hundred characters only.
    with tempfile.TemporaryDirectory(prefix="penstock-rq-") as folder:
        socket = f"{folder}/redis.sock"
        options = ["--port", "0", "--unixsocket", socket, "--dir", folder, "--save", "", "--appendonly", "yes"]
        command = ["redis-server", *options, "--appendfsync", "always"]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            _until(lambda: Path(socket).exists() and bool(redis.Redis(unix_socket_path=socket).ping()))
            yield socket
        finally:
            server.terminate()
            server.wait()


@contextmanager
def _rq_workers(socket: str, kind: str) -> Iterator[None]:
    import redis
    from rq import Worker

    command = [sys.executable, "-m", "rq.cli", "worker", "--quiet", "--url", f"unix://{socket}"]
    command += ["--worker-class", f"rq.worker.{kind}", "bench"]
    workers = [subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for _ in range(2)]
    try:
        connection = redis.Redis(unix_socket_path=socket)
        _until(lambda: Worker.count(connection=connection) == len(workers))
        yield
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.wait()


def _until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + READY_S_MAX
    while not true():
        if time.monotonic() > deadline:
            raise RuntimeError(f"not ready within {READY_S_MAX:g} s")
        time.sleep(0.05)


# --- dask ---
def dask(single: int, many: int) -> tuple[list[Row], str]:
    try:
        import distributed
    except ImportError as error:
        return [], f"dask: {error}"
    from operator import pos

    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        distributed.Client(cluster) as client,
    ):

        def one() -> None:
            client.submit(pos, 1, pure=False).result()

        def drained_s(count: int) -> float:
            began = time.monotonic()
            client.gather(client.map(pos, list(range(count)), pure=False))
            return time.monotonic() - began

        name = f"dask {distributed.__version__}, not durable"
        return rows_of(name, one, single, drained_s, many), ""
