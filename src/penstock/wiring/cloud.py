"""Cloud TPUs of one server: the provider, the bundle that its hosts are made from, and what each of them is told.

`wiring.serve` builds one when `[tpu_vm]` names a project, and runs it beside the API. The bundle is built in a thread,
so that the API answers meanwhile; slices are asked for once it is there. It must not decide how many there are.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.metadata
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import httpx2

from penstock.capacity.startup import Boot, metadata
from penstock.capacity.tpu_requests import Defaults
from penstock.capacity.tpu_rest import FixedTokens, LoginTokens, TpuRest
from penstock.capacity.tpu_vm import TpuVmCapacity
from penstock.domain.nouns import Slice
from penstock.ports.capacity import PermissionDenied, Transient
from penstock.ports.clock import Clock
from penstock.server.auth import join_token
from penstock.wiring import bundle
from penstock.wiring.elf import NotRelocatable
from penstock.wiring.home import Unusable
from penstock.wiring.settings import CloudSettings

logger = logging.getLogger(__name__)

_WAY_EVERY_S: Final = 2.0
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
    ) -> None:
        """`directory` keeps bundles; `url` is this server's own address, for want of a better one."""
        self._settings = settings
        self._key = key
        self._clock = clock
        self._directory = directory
        self._server = _agents_url(settings, url)
        self._bundle: bundle.Bundle | None = None
        self._broken = ""
        tokens = FixedTokens("emulated") if settings.emulated else LoginTokens()
        self._rest = TpuRest(settings.project, tokens, endpoint=settings.endpoint)
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

    async def run(self) -> None:
        """Until cancelled: build the bundle, then follow creates."""
        try:
            if self._settings.emulated:
                await self._open_way()
            await self._build()
            await self.capacity.run()
        finally:
            await self._rest.close()

    def file(self, sha256: str) -> Path | None:
        """The bundle with this hash, also an older one that hosts on their way still ask for."""
        return bundle.find(self._directory, sha256)

    async def _build(self) -> None:
        began = self._clock.steady()
        try:
            made = await asyncio.to_thread(bundle.build, self._directory, self._settings.bundle)
        except (OSError, ValueError, NotRelocatable) as error:
            # The server goes on: everything but new cloud slices works, and `tpu why` tells.
            self._broken = f"the agent bundle cannot be built: {error}"
            logger.exception("%s", self._broken)
            return
        lacking = [name for name in self._settings.bundle if not _installed(name)]
        if lacking:
            logger.warning("the agent bundle has no %s: not installed here; jobs must bring it", ", ".join(lacking))
        logger.info("agent bundle %s: %.0f MB, %.1f s", made.sha256[:12], made.size / 1e6, self._clock.steady() - began)
        self._bundle = made

    def _metadata(self, wanted: Slice) -> Mapping[str, str]:
        made = self._bundle
        if made is None:
            raise PermissionDenied(self._broken) if self._broken else Transient("the agent bundle is being built")
        boot = Boot(
            server=self._server,
            bundle_url=f"{self._server}/v1/agent/bundle/{made.sha256}",
            sha256=made.sha256,
            built_for=made.built_for,
        )
        mounts = wanted.cloud.mounts if wanted.cloud is not None else ()
        return metadata(boot, wanted.id, join_token(self._key, wanted.id), mounts)

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


def _agents_url(settings: CloudSettings, url: str) -> str:
    given = settings.agents_url or url
    if not settings.emulated and urlsplit(given).hostname in _LOOPBACK:
        raise Unusable(
            f"tpu_vm.agents_url: hosts of the cloud cannot reach {given}; say under [tpu_vm] how they reach this "
            'server, such as agents_url = "https://penstock.example.org"'
        )
    return given


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
