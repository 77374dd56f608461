"""Cloud TPUs of one server: the provider, the bundle that its hosts are made from, and what each of them is told.

`wiring.serve` builds one when `[tpu_vm]` names a project, and runs it beside the API. The bundle is packed by another
process, so that the API answers meanwhile; slices are asked for once it is there. It must not decide how many there
are.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib
import importlib.metadata
import logging
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import httpx2
import msgspec

from penstock.capacity.startup import Boot, by_hand, metadata
from penstock.capacity.tpu_requests import Defaults
from penstock.capacity.tpu_rest import FixedTokens, LoginTokens, Tokens, TpuRest
from penstock.capacity.tpu_vm import TpuVmCapacity
from penstock.domain import limits
from penstock.domain.lifecycle import COUNTED_SLICE_STATES, SliceState
from penstock.domain.mounts import as_attached
from penstock.domain.nouns import Slice
from penstock.emulator.vm_disk import OWN_NAME
from penstock.ports.capacity import CapacityError, Existing, PermissionDenied, Unsent
from penstock.ports.clock import Clock
from penstock.server.auth import join_token
from penstock.wiring import bundle
from penstock.wiring.bundle_roots import BundleRoots
from penstock.wiring.home import Unusable
from penstock.wiring.settings import CloudSettings
from penstock.wiring.tunnels import PORT as TUNNEL_PORT
from penstock.wiring.tunnels import Tunnels

logger = logging.getLogger(__name__)

_WAY_EVERY_S: Final = 2.0
_TOKENS_EVERY_S: Final = 1.0
_TOKENS_APART_S: Final = 5.0  #: between two of them: creates need what a project may call in a minute
_TOKENS_REST_S: Final = 60.0  #: of one slice, refused or taken without effect: the token is spent, so it is no hurry
_LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")


class Cloud:
    """The provider `tpu_vm` and what belongs to it."""

    def __init__(
        self,
        settings: CloudSettings,
        *,
        label: str,
        key: bytes,
        clock: Clock,
        directory: Path,
        url: str,
        changed: Callable[[str], None],
        slices: Callable[[], Iterable[Slice]] = tuple,
        noted: Callable[[str, int, str], None] | None = None,
        bundle_roots: BundleRoots | None = None,
    ) -> None:
        """`directory` keeps bundles; `url` is this server's own address, for want of a better one; `slices` are all.

        `noted` is told why a host of a slice cannot be reached, where this server has to; `bundle_roots` are buckets
        that hosts may fetch the bundle from.
        """
        self._settings = settings
        self._key = key
        self._clock = clock
        self._slices = slices
        self._directory = directory
        self._server = _agents_url(settings, url)
        self._bundle: bundle.Bundle | None = None
        self._broken = ""
        self._bundle_roots = bundle_roots
        self._rest = TpuRest(settings.project, _tokens(settings), endpoint=settings.endpoint, clock=clock)
        self.capacity = TpuVmCapacity(
            self._rest,
            label=label,
            # Several installations may share a project: each sweeps up what is its own, and nothing else.
            owner=f"{label}-{hashlib.sha256(b'owner:' + key).hexdigest()[:12]}",
            clock=clock,
            metadata=self._metadata,
            defaults=Defaults(
                runtime_version=settings.runtime_version,
                network=settings.network,
                subnetwork=settings.subnetwork,
                service_account=settings.service_account,
            ),
            changed=changed,
        )
        self._tunnels = (
            Tunnels(
                settings.tunnel,
                url,
                clock=clock,
                directory=directory.parent / "host-keys",
                slices=slices,
                addresses=self.capacity.addresses,
                noted=noted,
                shared_loopback=settings.emulated,
            )
            if settings.tunnel
            else None
        )

    async def run(self) -> None:
        """Until cancelled: build the bundle, then follow creates."""
        try:
            if self._settings.emulated and self._tunnels is None:
                await self._open_way()
            await self._build()
            async with asyncio.TaskGroup() as work:
                work.create_task(self.capacity.run())
                work.create_task(self._clear_tokens())
                if self._bundle is not None and self._bundle_roots is not None:
                    # Beside all else: a slow bucket must not hold slices up, and hosts have the server meanwhile.
                    work.create_task(self._bundle_roots.put(self._bundle))
                if self._tunnels is not None:
                    work.create_task(self._tunnels.run())
        finally:
            await self._rest.close()

    async def _clear_tokens(self) -> None:
        """Join tokens of slices whose hosts have all joined go from where their payloads could read them (ADR 0030)."""
        rests: dict[str, float] = {}
        while True:
            await self._clock.sleep(_TOKENS_EVERY_S)
            now = self._clock.steady()
            live = [slice for slice in self._slices() if slice.state in COUNTED_SLICE_STATES]
            self.capacity.with_token.intersection_update(slice.id for slice in live)
            ready = {slice.id: slice.zone for slice in live if slice.state is SliceState.READY}
            rests = {id: until for id, until in rests.items() if id in ready and until > now}
            due = min((self.capacity.with_token & ready.keys()) - rests.keys(), default=None)
            if due is None:
                continue
            try:
                async with asyncio.timeout(limits.CALL_TIMEOUT_S):
                    await self.capacity.clear_token(due, ready[due])
            except (CapacityError, TimeoutError) as error:
                logger.warning("the join token of %s stays readable on its hosts for now: %s", due, error)
            rests[due] = now + _TOKENS_REST_S
            await self._clock.sleep(_TOKENS_APART_S)

    def file(self, sha256: str) -> Path | None:
        """The bundle with this hash, also an older one that hosts on their way still ask for."""
        return bundle.find(self._directory, sha256)

    async def _build(self) -> None:
        began = self._clock.steady()
        words = (sys.executable, "-P", "-m", bundle.__name__, str(self._directory), *self._settings.bundle)
        packing = await asyncio.create_subprocess_exec(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            out, err = await packing.communicate()
        finally:
            with contextlib.suppress(ProcessLookupError):
                packing.kill()
        if packing.returncode != 0:
            # The server goes on: everything but new cloud slices works, and `tpu why` tells.
            said = err.decode(errors="replace").strip().splitlines()
            self._broken = f"the agent bundle cannot be built: {said[-1] if said else packing.returncode}"
            logger.error("%s", self._broken)
            return
        made = msgspec.json.decode(out, type=bundle.Bundle)
        lacking = [name for name in self._settings.bundle if not _installed(name)]
        if lacking:
            logger.warning("the agent bundle has no %s: not installed here; jobs must bring it", ", ".join(lacking))
        logger.info("agent bundle %s: %.0f MB, %.1f s", made.sha256[:12], made.size / 1e6, self._clock.steady() - began)
        self._bundle = made

    def _packed(self) -> bundle.Bundle:
        if self._bundle is None:
            raise PermissionDenied(self._broken) if self._broken else Unsent("the agent bundle is being built")
        return self._bundle

    def _metadata(self, wanted: Slice) -> Mapping[str, str]:
        made = self._packed()
        boot = Boot(
            server=self._server,
            bundle_url=f"{self._server}/v1/agent/bundle/{made.sha256}",
            bucket_url=self._bundle_roots.url(wanted.zone, made.sha256) if self._bundle_roots is not None else "",
            sha256=made.sha256,
            built_for=made.built_for,
        )
        mounts = as_attached(wanted.cloud.mounts, wanted.cloud.disks) if wanted.cloud is not None else ()
        return metadata(boot, wanted.id, join_token(self._key, wanted.id), mounts)

    # --- adoption (`server.adoption.Adopter`) ---
    def check(self) -> None:
        self._packed()

    async def inspect(self, name: str, zone: str) -> Existing | None:
        return await self.capacity.inspect(name, zone)

    async def take(self, found: Existing, slice: Slice, *, own: bool) -> None:
        """Label it, and let its hosts run our script at every boot, unless they have one of their owner's."""
        assert slice.provider_id is not None
        await self.capacity.adopt(
            found.name, found.zone, slice.id, slice.provider_id, own=own, script=self.script(slice)
        )

    def script(self, slice: Slice) -> str:
        """What makes a host of an adopted slice ours, run as root."""
        assert slice.provider_id is not None
        return by_hand(self._metadata(slice), slice.provider_id)

    async def _open_way(self) -> None:
        """Emulated hosts live in a network without a way out: ask for one to this server. Real ones have routes."""
        parts = urlsplit(self._server)
        way = f"{parts.hostname}:{parts.port or (443 if parts.scheme == 'https' else 80)}"
        async with httpx2.AsyncClient(timeout=10.0) as http:
            while True:
                with contextlib.suppress(httpx2.HTTPError, OSError):
                    answer = await http.post(f"{self._settings.endpoint}/_emulator/tpu/ways", json=[way])
                    if answer.status_code < 500:
                        return  # opened, or an emulator without machines, or another one that has no such thing
                await self._clock.sleep(_WAY_EVERY_S)


def _tokens(settings: CloudSettings) -> Tokens:
    if settings.emulated:
        return FixedTokens("emulated")
    for module in ("google.auth", "requests"):
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise Unusable(f"tpu_vm.project: {module} is missing; pip install 'penstock[gcp]'") from error
    return LoginTokens()


def _agents_url(settings: CloudSettings, url: str) -> str:
    if settings.tunnel:
        # Each host's own end of its tunnel. Emulated hosts share one loopback, and have a name for their part of it.
        return f"http://{OWN_NAME if settings.emulated else '127.0.0.1'}:{TUNNEL_PORT}"
    given = settings.agents_url or url
    if not settings.emulated and urlsplit(given).hostname in _LOOPBACK:
        raise Unusable(
            f"tpu_vm.agents_url: hosts of the cloud cannot reach {given}; say under [tpu_vm] how they reach this "
            'server, such as agents_url = "https://penstock.example.org", or lead them here with tunnel = "ssh"'
        )
    return given


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
