"""Builds one server process and runs it: API, controller, local capacity, store and objects on one event loop.

`tpu serve` runs it in the foreground, `wiring.embedded` in the background. It says where it listens in `server.json`
once it answers. On SIGTERM it takes no new connection, ends streams and long polls, lets calls under way finish, makes
all bytes durable, and goes; agents and payloads go on without it. It must not decide anything about jobs.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import uvicorn
import uvloop
from typing_extensions import override

from penstock import __version__
from penstock.capacity.local import ZONE, LocalCapacity
from penstock.controller.loop import Controller
from penstock.domain.ids import IdMaker
from penstock.domain.nouns import Slice
from penstock.ports.capacity import Capacity, CapacityError
from penstock.ports.objects import Stock
from penstock.ports.store import Store, StoreError
from penstock.server.agents import bells
from penstock.server.app import make
from penstock.server.arrivals import arrivals
from penstock.server.auth import Tokens, join_token
from penstock.server.drops import Drops
from penstock.server.retention import keep
from penstock.server.routing import Refusal
from penstock.server.secret_files import SecretFiles
from penstock.server.service import Service, Settings
from penstock.wiring.bridges import FirestoreSettings, beside_server, configured_firestore
from penstock.wiring.caches import HostCaches
from penstock.wiring.clock import SystemClock
from penstock.wiring.home import TEAM, Home, Unusable, locked
from penstock.wiring.ports import open_port
from penstock.wiring.roots import open_objects, open_regions
from penstock.wiring.settings import ServerSettings, shown
from penstock.wiring.stores import is_postgres, open_store

if TYPE_CHECKING:
    from penstock.wiring.bundle_roots import BundleRoot, BundleRoots
    from penstock.wiring.cloud import Cloud

logger = logging.getLogger(__name__)

#: What is ours at a provider carries this label.
LABEL: Final = "penstock"
CLOUD: Final = "tpu_vm"
#: Secrets of team `default` that the server's own environment gives: PENSTOCK_SECRET_WANDB_API_KEY.
SECRET_PREFIX: Final = "PENSTOCK_SECRET_"
KEEP_ALIVE_S: Final = 75  #: longer than proxies and pools keep a silent connection, so that they close it first
BACKLOG: Final = 2048
TEAMS_EVERY_S: Final = 1.0  #: while the store is away, teams wait to be welcomed


def run(settings: ServerSettings, ready: Callable[[str], None] | None = None) -> None:
    """Serve until told to stop. `ready` is called with the address once requests are answered."""
    os.umask(0o077)  # the store holds people's code
    home = Home(settings.home)
    firestore = configured_firestore(os.environ, settings.home)
    key = home.prepare()
    # What was imported lives as long as the process: the collector need not look at it, nor come every moment.
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    with home.held(), _sole_writer(settings.store), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(settings, home, key, ready, firestore))


@contextlib.contextmanager
def _sole_writer(store: str) -> Iterator[None]:
    """Two servers on one SQLite file would take the lead from each other; a lock beside the file tells them apart."""
    if is_postgres(store):
        yield
        return
    file = Path(store).absolute()
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with locked(file.with_name(f"{file.name}.lock")) as got:
        if not got:
            raise Unusable(f"{store}: another server uses this store; stop it, or use PostgreSQL for several servers")
        yield


def _holder(store: str) -> str:
    """What this process is called as a leader (ADR 0010): unique, or the same again where a lock proves it alone."""
    if is_postgres(store):
        return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    return "server"


class _Http(uvicorn.Server):
    """Uvicorn that says when it listens, without its signal handlers: they raise the signal before we clean up."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    @override
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @override
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(
    settings: ServerSettings,
    home: Home,
    key: bytes,
    ready: Callable[[str], None] | None,
    firestore: FirestoreSettings | None,
) -> None:
    listener = _listen(settings, home)
    url = _url(settings.host, listener.getsockname()[1])
    clock = SystemClock()
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(listener.close)
        store = open_store(settings.store, clock)
        stack.push_async_callback(store.close)
        service, local, cloud = _build(settings, home, key, store, clock, url)
        http = _Http(
            uvicorn.Config(
                make(service),
                lifespan="on",
                http="httptools",
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=max(1, int(settings.drain_s)),
            )
        )
        _stop_on_signals(service, http)
        drops = Drops(clock, service.controller.look, lambda: service.controller.snapshot.slices)
        bells(service).on_drop = drops.dropped
        work = await stack.enter_async_context(_background(service, local, cloud, http))
        serving = asyncio.create_task(http.serve(sockets=[listener]))
        stack.push_async_callback(_finish, serving, http)
        await _until_it_answers(http, serving)
        said = home.announce(url, __version__)
        stack.callback(home.withdraw, said)
        logger.info("penstock %s serves %s, store %s, root %s", __version__, url, shown(settings.store), settings.root)
        if firestore is not None:
            bridge = asyncio.create_task(beside_server(firestore, url, home.token))
            stack.callback(bridge.cancel)
        if ready is not None:
            ready(url)
        await asyncio.wait((serving, *work), return_when=asyncio.FIRST_COMPLETED)
        logger.info("stopping")
    logger.info("stopped")


def _build(
    settings: ServerSettings, home: Home, key: bytes, store: Store, clock: SystemClock, url: str
) -> tuple[Service, LocalCapacity | None, Cloud | None]:
    objects, root = open_objects(settings.root)
    root_region, region_roots = open_regions(settings.regions, root)
    ids = IdMaker(lambda: secrets.randbits(30))
    capacities: dict[str, Capacity] = {}
    local = None
    if settings.local_hosts:
        local = LocalCapacity(
            home.slices,
            label=LABEL,
            clock=clock,
            server=lambda: url,
            join_token=lambda slice: join_token(key, slice),
            changed=lambda: controller.look("local", ZONE),
            environment={**_without_credentials(os.environ), "PENSTOCK_HOME": str(home.path)},
            hosts_max=settings.local_hosts,
        )
        capacities[local.name] = local
    cloud = None
    if settings.cloud is not None:
        # Few servers have one, and it brings an HTTP client along.
        from penstock.wiring.bundle_roots import BundleRoot
        from penstock.wiring.cloud import Cloud

        cloud = Cloud(
            settings.cloud,
            label=LABEL,
            key=key,
            clock=clock,
            directory=home.path / "bundles",
            url=url,
            changed=lambda zone: controller.look(CLOUD, zone),
            slices=lambda: list(controller.snapshot.slices.values()),
            noted=lambda slice, host, why: arrivals(service).note(slice, host, why),
            bundle_roots=_bundle_roots(settings, BundleRoot(root, objects), region_roots, clock),
        )
        capacities[CLOUD] = cloud.capacity
    controller = Controller(
        store=store,
        capacities=capacities,
        objects=objects,
        clock=clock,
        ids=ids,
        label=LABEL,
        holder=_holder(settings.store),
    )
    service = Service(
        controller=controller,
        store=store,
        objects=objects,
        clock=clock,
        ids=ids,
        tokens=Tokens(home.path / "tokens.json"),
        key=key,
        secrets=SecretFiles(home.path / "secrets", _given_secrets()),
        settings=_chosen(settings, root, tuple(capacities), clock.now()),
        preempt=_preempting(local) if local is not None else None,
        restart_agent=_restarting(local),
        caches=HostCaches(home.path / "cache", local) if local is not None else None,
        bundle=cloud.file if cloud is not None else None,
        adopter=cloud,
        addresses={CLOUD: cloud.capacity.addresses} if cloud is not None else {},
        known_addresses={CLOUD: cloud.capacity.known_addresses} if cloud is not None else {},
        region_roots=region_roots,
        root_region=root_region,
    )
    return service, local, cloud


def _bundle_roots(
    settings: ServerSettings, main: BundleRoot, region_roots: Mapping[str, Stock], clock: SystemClock
) -> BundleRoots:
    from penstock.wiring.bundle_roots import BundleRoot, BundleRoots

    regions = {
        region: BundleRoot(address, region_roots[region])
        for region, address in settings.regions
        if region in region_roots
    }
    return BundleRoots(main, regions, clock)


def _chosen(settings: ServerSettings, root: str, providers: tuple[str, ...], now: float) -> Settings:
    return Settings(
        version=__version__,
        store=shown(settings.store),
        root=root,
        started_at=now,
        default_on=settings.default_on,
        local_pools=settings.embedded,
        local_slices=settings.local_slices,
        providers=providers,
        cloud_zones=settings.cloud.zones if settings.cloud is not None else (),
        retention=settings.retention,
    )


def _without_credentials(environment: Mapping[str, str]) -> dict[str, str]:
    """What agents on this machine get: neither the bucket's keys nor the database's, which they have no use for."""
    own = (SECRET_PREFIX, "AWS_ACCESS_KEY", "AWS_SECRET_", "AWS_SESSION_TOKEN", "PGPASS", "PENSTOCK_STORE")
    return {name: value for name, value in environment.items() if not name.startswith(own)}


def _given_secrets() -> dict[tuple[str, str], str]:
    return {
        (TEAM, name.removeprefix(SECRET_PREFIX)): value
        for name, value in os.environ.items()
        if name.startswith(SECRET_PREFIX) and value
    }


def _preempting(local: LocalCapacity) -> Callable[[str, float], Awaitable[None]]:
    async def preempt(slice: str, notice_s: float) -> None:
        try:
            await local.preempt(slice, notice_s)
        except CapacityError as error:
            raise Refusal("conflict", str(error), field="id") from error

    return preempt


def _restarting(local: LocalCapacity | None) -> Callable[[Slice, int], Awaitable[None]]:
    async def restart(slice: Slice, host: int) -> None:
        if slice.provider != "local" or local is None:
            # Its startup script starts an agent that ended; a machine that hangs can only be replaced.
            raise CapacityError("its startup script did not bring it back, and its provider has no other way")
        await local.restart_agent(slice.id, host)

    return restart


@contextlib.asynccontextmanager
async def _background(
    service: Service, local: LocalCapacity | None, cloud: Cloud | None, http: _Http
) -> AsyncIterator[tuple[asyncio.Task[None], ...]]:
    """What runs beside requests. If any of it ends, the process must: half a server is worse than none."""
    with contextlib.suppress(StoreError):  # the first caller shall find its queue; if the store is away, it is tried on
        await service.welcome_teams()
    coroutines = {"controller": service.controller.run(), "teams": _welcome_teams(service)}
    if service.settings.retention.by_itself:
        coroutines["retention"] = keep(service)
    if local is not None:
        coroutines["local capacity"] = local.run()
    if cloud is not None:
        coroutines["cloud capacity"] = cloud.run()
    tasks = [asyncio.create_task(work, name=name) for name, work in coroutines.items()]

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.critical("%s failed; the server stops", task.get_name(), exc_info=error)
            service.stopping.set()
            http.should_exit = True

    for task in tasks:
        task.add_done_callback(ended)
    lasting = tuple(task for task in tasks if task.get_name() != "teams")
    try:
        yield lasting
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in lasting:
        if not task.cancelled():
            task.result()


async def _welcome_teams(service: Service) -> None:
    """Every team that has a token gets its queue, as soon as the store can be written."""
    while True:
        try:
            return await service.welcome_teams()
        except StoreError as error:
            logger.warning("teams cannot be entered yet: %s", error)
            await service.clock.sleep(TEAMS_EVERY_S)


def _stop_on_signals(service: Service, http: _Http) -> None:
    loop = asyncio.get_running_loop()

    def stop() -> None:
        if http.should_exit:
            http.force_exit = True  # told twice: somebody is in a hurry
        http.should_exit = True
        service.stopping.set()
        bells(service).hush()  # agents that wait for orders are answered, and ask the next server

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)


async def _finish(serving: asyncio.Task[None], http: _Http) -> None:
    http.should_exit = True
    await serving


async def _until_it_answers(http: _Http, serving: asyncio.Task[None]) -> None:
    listening = asyncio.create_task(http.listening.wait())
    await asyncio.wait((listening, serving), return_when=asyncio.FIRST_COMPLETED)
    listening.cancel()
    if serving.done():
        serving.result()
        raise Unusable("the server ended before it began to listen; see its log")


def _listen(settings: ServerSettings, home: Home) -> socket.socket:
    """The listening socket. Without a port of the operator's choice, the one agents and people knew last time."""
    tried = [settings.port] if settings.port else [*([home.last_port()] if home.last_port() else []), 0]
    for port in tried:
        try:
            listener = open_port(settings.host, port)
        except Unusable:
            if port == tried[-1]:
                raise
            continue
        if not settings.port:
            home.keep_port(listener.getsockname()[1])
        return listener
    raise AssertionError("at least one port is tried")


def _url(host: str, port: int) -> str:
    """How processes of this machine reach the server."""
    name = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"


def log_to_stderr(level: str) -> None:
    logging.basicConfig(
        level=level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    # Uvicorn tells of each start and stop; we say that ourselves.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    # One line for every request to a cloud would bury the rest.
    logging.getLogger("httpx2").setLevel(logging.WARNING)
