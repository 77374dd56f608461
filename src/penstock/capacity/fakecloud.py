"""A cloud that exists only in memory: the ground truth of tests and simulations.

`FakeCloud` is what truly is: zones with so many chips, machines that come, break and go. `capacity.fake`
puts the port in front of it; tests and the simulator's fault injector change it directly (`preempt`,
`replace_host`, …). It must never look at what the controller believes.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from enum import StrEnum

import msgspec

from penstock.domain.invariants.history import Recorder
from penstock.domain.nouns import Slice
from penstock.ports.capacity import (
    CREATING,
    DELETING,
    FAILED,
    PREEMPTED,
    READY,
    REPAIRING,
    CapacityError,
    NameTaken,
    QuotaExceeded,
    Seen,
    Stockout,
)

GONE = "GONE"  #: told to `on_vm` when a machine is no more; no provider shows it
STALE_S_MAX = 600.0  #: how old a stale listing can be: deleted machines are remembered this long
#: States in which a machine holds chips of its zone; a preempted or failed one only holds quota.
_HOLDS_CHIPS = (CREATING, READY, REPAIRING, DELETING)


class FaultKind(StrEnum):
    """What one call may suffer."""

    STOCKOUT = "stockout"
    QUOTA = "quota"
    RATE_LIMIT = "rate_limit"  #: `seconds` > 0 is said as retry_after_s
    TRANSIENT = "transient"  #: fails before it takes effect
    PERMISSION = "permission"
    LOST_REPLY = "lost_reply"  #: takes effect, then fails as `Transient`
    SLOW = "slow"  #: takes effect, and answers only after `seconds`
    LATE_CREATE = "late_create"  #: fails as `Transient`; the machine appears `seconds` later
    NEVER_READY = "never_ready"  #: the create operation never ends
    BROKEN_CREATE = "broken_create"  #: the operation ends with an error after the machines exist
    HOST_MISSING = "host_missing"  #: READY with its last host not up
    DEAD_ON_ARRIVAL = "dead_on_arrival"  #: READY with no host up
    STALE_LIST = "stale_list"  #: the listing as it was `seconds` ago
    PARTIAL_PAGE = "partial_page"  #: half of it, and it says so
    UNREACHABLE = "unreachable"  #: nothing, and it says that this proves nothing
    EMPTY_PAGE = "empty_page"  #: nothing, and it claims to be complete
    ITEM_MISSING = "item_missing"  #: complete by its own word, but one item is left out
    DELETE_IGNORED = "delete_ignored"  #: answered as if absent (404), nothing is deleted
    SLOW_DELETE = "slow_delete"  #: DELETING for `seconds`


class Fault(msgspec.Struct, frozen=True):
    kind: FaultKind
    seconds: float = 0.0


class ZoneModel(msgspec.Struct, frozen=True, kw_only=True):
    """How one zone of one provider behaves. Times are drawn uniformly from their ranges."""

    chips: int = 1_000_000
    ready_s: tuple[float, float] = (20.0, 90.0)
    delete_s: tuple[float, float] = (5.0, 30.0)
    refusal_rate: float = 0.0  #: share of creates refused as stockout though chips are there
    refusal_s: float = 0.0  #: such a request is first taken in and fails after so long; 0: refused at once
    preemptions_per_hour: float = 0.0  #: of each ready spot machine
    notice_s: float = 0.0  #: before such a preemption


class Vm:
    """One slice's machines as they truly are; `hosts[i]` is the incarnation of host i, None while down."""

    __slots__ = (
        "chips", "created_at", "gone_at", "hosts", "label", "name", "past", "provider", "provider_id",
        "seen", "size", "spot", "zone",
    )  # fmt: skip

    def __init__(self, wanted: Slice, provider: str, provider_id: str, label: str | None, now: float) -> None:
        self.name = wanted.id
        self.provider = provider
        self.provider_id = provider_id
        self.zone = wanted.zone
        self.label = label
        self.chips = wanted.chips
        self.size = wanted.hosts
        self.spot = wanted.spot
        self.hosts: tuple[str | None, ...] = (None,) * wanted.hosts
        self.created_at = now
        self.gone_at: float | None = None
        self.seen = Seen(name=self.name, zone=self.zone, provider_id=provider_id, state=CREATING, label=label)
        self.past: list[tuple[float, Seen]] = [(now, self.seen)]  #: what a stale listing would still show

    @property
    def state(self) -> str:
        return self.seen.state

    def seen_at(self, t: float) -> Seen | None:
        """How it was shown at that time; None before it was made and after it was gone."""
        if self.gone_at is not None and self.gone_at <= t:
            return None
        shown = [seen for since, seen in self.past if since <= t]
        return shown[-1] if shown else None


#: Told of every true change: name, provider_id, hosts (incarnation or None each), state (or GONE).
OnVm = Callable[[str, str, tuple[str | None, ...], str], None]
OnNotice = Callable[[str, str], None]


class FakeCloud:
    """All machines of all providers. Its methods are what happens in the world, not what was asked for."""

    def __init__(
        self,
        *,
        rng: random.Random,
        recorder: Recorder | None = None,
        on_vm: OnVm | None = None,
        on_notice: OnNotice | None = None,
        zone_model: ZoneModel | None = None,
    ) -> None:
        self._rng = rng
        self._recorder = recorder
        self.on_vm = on_vm
        self.on_notice = on_notice
        self._default = zone_model or ZoneModel()
        self._models: dict[tuple[str, str], ZoneModel] = {}
        self._quotas: dict[str, int] = {}
        self._vms: dict[str, dict[str, Vm]] = {}  #: provider -> name -> machine
        self._zones: dict[tuple[str, str], dict[str, Vm]] = {}
        self._used: dict[tuple[str, str], int] = {}
        self._billed: dict[str, int] = {}
        self._gone: deque[Vm] = deque()
        self._made = 0

    # --- the model ---

    def set_zone(self, zone: str, model: ZoneModel, provider: str = "fake") -> None:
        """Change a zone from now on; fewer chips than are in use take spot machines away, newest first."""
        self._models[(provider, zone)] = model
        for vm in reversed(list(self._zones.get((provider, zone), {}).values())):
            if self.used_chips(zone, provider) <= model.chips:
                return
            if vm.spot and vm.state in _HOLDS_CHIPS:
                self.preempt(vm.name)

    def zone_model(self, zone: str, provider: str = "fake") -> ZoneModel:
        return self._models.get((provider, zone), self._default)

    def set_quota(self, chips: int | None, provider: str = "fake") -> None:
        """How many chips the project may hold at a provider, machines on their way out included."""
        if chips is None:
            self._quotas.pop(provider, None)
        else:
            self._quotas[provider] = chips

    def schedule(self, zone: str, steps: list[tuple[float, int]], provider: str = "fake") -> None:
        """Chips over time: from each loop time on, that many."""
        loop = asyncio.get_running_loop()
        for when, chips in steps:
            loop.call_at(when, self._set_chips, zone, chips, provider)

    def _set_chips(self, zone: str, chips: int, provider: str) -> None:
        model = msgspec.structs.replace(self.zone_model(zone, provider), chips=chips)
        self.set_zone(zone, model, provider)

    # --- the truth, for checkers and hooks ---

    def vm(self, name: str) -> Vm | None:
        for vms in self._vms.values():
            if name in vms:
                return vms[name]
        return None

    def vms(self, provider: str | None = None) -> list[Vm]:
        """All machines that exist, oldest first within a provider."""
        return [vm for each, vms in self._vms.items() if provider in (None, each) for vm in vms.values()]

    def used_chips(self, zone: str, provider: str = "fake") -> int:
        return self._used.get((provider, zone), 0)

    def billed_chips(self, provider: str = "fake") -> int:
        return self._billed.get(provider, 0)

    # --- what happens by itself, or by somebody else's hand ---

    def preempt(self, name: str, *, notice_s: float = 0.0, undo_delete: bool = False) -> None:
        """Take the machines away, now or after a notice; a delete under way goes on unless `undo_delete`."""
        vm = self.vm(name)
        if vm is None or vm.state not in _HOLDS_CHIPS:
            return
        if notice_s > 0:
            if self.on_notice is not None:
                self.on_notice(vm.name, vm.provider_id)
            asyncio.get_running_loop().call_later(notice_s, self._preempt_same, vm, undo_delete)
        else:
            self._preempt_same(vm, undo_delete)

    def _preempt_same(self, vm: Vm, undo_delete: bool) -> None:
        if vm.gone_at is not None or vm.state not in _HOLDS_CHIPS:
            return
        self._record("vm.preempted", vm)
        keeps = vm.state == DELETING and not undo_delete
        self._become(vm, DELETING if keeps else PREEMPTED, (None,) * vm.size)

    def maintain(self, name: str, seconds: float) -> None:
        """All hosts go down and come back as the same incarnations: their processes are lost."""
        vm = self.vm(name)
        if vm is None or vm.state != READY:
            return
        hosts = vm.hosts
        self._become(vm, REPAIRING, (None,) * vm.size)
        asyncio.get_running_loop().call_later(seconds, self._maintained, vm, hosts)

    def _maintained(self, vm: Vm, hosts: tuple[str | None, ...]) -> None:
        if vm.gone_at is None and vm.state == REPAIRING:
            self._become(vm, READY, hosts)

    def stop_host(self, name: str, host: int) -> None:
        """One host is down for good; the provider goes on saying READY."""
        self._set_host(name, host, None)

    def replace_host(self, name: str, host: int) -> None:
        """Another machine under the same name and index."""
        vm = self.vm(name)
        if vm is not None:
            self._set_host(name, host, self._incarnation(vm, host))

    def _set_host(self, name: str, host: int, incarnation: str | None) -> None:
        vm = self.vm(name)
        if vm is not None and vm.state in (READY, FAILED):
            self._become(vm, vm.state, (*vm.hosts[:host], incarnation, *vm.hosts[host + 1 :]))

    def die_unseen(self, name: str) -> None:
        """Every host is dead and the provider goes on saying READY."""
        vm = self.vm(name)
        if vm is not None:
            self._become(vm, vm.state, (None,) * vm.size)

    def fail(self, name: str) -> None:
        """The provider says FAILED; what runs on the hosts goes on."""
        vm = self.vm(name)
        if vm is not None and vm.state in (CREATING, READY, REPAIRING):
            self._become(vm, FAILED, vm.hosts)

    def delete_outside(self, name: str) -> None:
        """Somebody deletes it by hand, at once."""
        vm = self.vm(name)
        if vm is not None:
            self._vanish(vm)

    def create_outside(self, wanted: Slice, label: str | None, provider: str = "fake") -> Vm:
        """Somebody makes a machine by hand: a foreign one, or an orphan that carries our label."""
        return self._make(wanted, provider, label, None)

    # --- what the port's calls do ---

    def create(self, wanted: Slice, provider: str, label: str | None, fault: Fault | None) -> Vm:
        model = self.zone_model(wanted.zone, provider)
        if wanted.id in self._vms.get(provider, {}):
            raise NameTaken(f"{wanted.id} exists already")
        quota = self._quotas.get(provider)
        if quota is not None and self.billed_chips(provider) + wanted.chips > quota:
            raise QuotaExceeded(f"{provider}: {self.billed_chips(provider)} of {quota} chips are in use")
        if self.used_chips(wanted.zone, provider) + wanted.chips > model.chips:
            raise Stockout(f"no more capacity in {wanted.zone}")
        if model.refusal_rate and self._rng.random() < model.refusal_rate:
            if model.refusal_s <= 0:
                raise Stockout(f"no more capacity in {wanted.zone} just now")
            vm = self._make(wanted, provider, label, Fault(FaultKind.NEVER_READY))
            asyncio.get_running_loop().call_later(model.refusal_s, self._refuse_late, vm)
            return vm
        return self._make(wanted, provider, label, fault)

    def land(self, wanted: Slice, provider: str, label: str | None) -> None:
        """A create that was on its way long: it lands unless its name is taken or there is no room by now."""
        try:
            self.create(wanted, provider, label, None)
        except CapacityError as refused:
            if self._recorder is not None:
                self._recorder.world("fault", "C2", what=f"late create of {wanted.id} refused: {refused}")

    def delete(self, name: str, provider: str, seconds: float | None) -> Vm | None:
        vm = self._vms.get(provider, {}).get(name)
        if vm is None:
            return None
        if vm.state != DELETING:
            self._become(vm, DELETING, vm.hosts)
        if seconds is None:
            seconds = self._rng.uniform(*self.zone_model(vm.zone, provider).delete_s)
        asyncio.get_running_loop().call_later(seconds, self._vanish_deleted, vm)
        return vm

    def listing(self, zone: str, provider: str, age_s: float = 0.0) -> tuple[Seen, ...]:
        """What exists, or what existed `age_s` ago."""
        present = self._zones.get((provider, zone), {}).values()
        if age_s <= 0:
            return tuple([vm.seen for vm in present])
        then = asyncio.get_running_loop().time() - age_s
        gone = [vm for vm in self._gone if (vm.provider, vm.zone) == (provider, zone)]
        return tuple([seen for vm in (*gone, *present) if (seen := vm.seen_at(then)) is not None])

    def _make(self, wanted: Slice, provider: str, label: str | None, fault: Fault | None) -> Vm:
        loop = asyncio.get_running_loop()
        self._made += 1
        vm = Vm(wanted, provider, f"{provider}-{self._made:06d}", label, loop.time())
        place = (provider, vm.zone)
        self._vms.setdefault(provider, {})[vm.name] = vm
        self._zones.setdefault(place, {})[vm.name] = vm
        self._used[place] = self._used.get(place, 0) + vm.chips
        self._billed[provider] = self._billed.get(provider, 0) + vm.chips
        self._record("vm.created", vm, zone=vm.zone, label=label, chips=vm.chips, provider=provider)
        kind = fault.kind if fault is not None else None
        if kind is not FaultKind.NEVER_READY:
            delay = self._rng.uniform(*self.zone_model(vm.zone, provider).ready_s)
            loop.call_later(delay, self._made_ready, vm, kind)
        return vm

    def _refuse_late(self, vm: Vm) -> None:
        """The long-running operation behind a create ends without capacity."""
        if vm.gone_at is None and vm.state == CREATING:
            self._record("vm.refused", vm)
            self._become(vm, FAILED, vm.hosts)

    def _made_ready(self, vm: Vm, kind: FaultKind | None) -> None:
        if vm.gone_at is not None or vm.state != CREATING:
            return
        up = vm.size
        if kind is FaultKind.HOST_MISSING:
            up -= 1
        elif kind is FaultKind.DEAD_ON_ARRIVAL:
            up = 0
        hosts = tuple([self._incarnation(vm, host) if host < up else None for host in range(vm.size)])
        if kind is FaultKind.BROKEN_CREATE:
            self._become(vm, FAILED, hosts)
            return
        self._record("vm.ready", vm)
        self._become(vm, READY, hosts)
        model = self.zone_model(vm.zone, vm.provider)
        if vm.spot and model.preemptions_per_hour > 0:
            life_s = self._rng.expovariate(model.preemptions_per_hour / 3600.0)
            asyncio.get_running_loop().call_later(life_s, self._taken, vm, model.notice_s)

    def _taken(self, vm: Vm, notice_s: float) -> None:
        if vm.gone_at is None:
            self.preempt(vm.name, notice_s=notice_s)

    def _incarnation(self, vm: Vm, host: int) -> str:
        self._made += 1
        return f"{vm.provider_id}/{host}/{self._made}"

    def _become(self, vm: Vm, state: str, hosts: tuple[str | None, ...]) -> None:
        now = asyncio.get_running_loop().time()
        if state != vm.state:
            held, holds = vm.state in _HOLDS_CHIPS, state in _HOLDS_CHIPS
            if held != holds:
                self._used[(vm.provider, vm.zone)] += vm.chips if holds else -vm.chips
            vm.seen = msgspec.structs.replace(vm.seen, state=state)
            vm.past = [*vm.past[-8:], (now, vm.seen)]
        vm.hosts = hosts
        if self.on_vm is not None:
            self.on_vm(vm.name, vm.provider_id, hosts, state)

    def _vanish_deleted(self, vm: Vm) -> None:
        if vm.state == DELETING:
            self._vanish(vm)

    def _vanish(self, vm: Vm) -> None:
        if vm.gone_at is not None:
            return
        now = asyncio.get_running_loop().time()
        vm.gone_at = now
        if vm.state in _HOLDS_CHIPS:
            self._used[(vm.provider, vm.zone)] -= vm.chips
        self._billed[vm.provider] -= vm.chips
        del self._vms[vm.provider][vm.name]
        del self._zones[(vm.provider, vm.zone)][vm.name]
        self._gone.append(vm)
        while self._gone[0].gone_at is not None and self._gone[0].gone_at < now - STALE_S_MAX:
            self._gone.popleft()
        vm.hosts = (None,) * vm.size
        self._record("vm.deleted", vm)
        if self.on_vm is not None:
            self.on_vm(vm.name, vm.provider_id, vm.hosts, GONE)

    def _record(self, kind: str, vm: Vm, **body: object) -> None:
        if self._recorder is not None:
            self._recorder.world(kind, vm.name, provider_id=vm.provider_id, **body)
