"""What this process has seen with its own steady clock: contacts, silences, absences, and calls in flight.

Agents' syncs, listings, direct gets and calls are noted here as they happen; before each plan the loop takes a
`Witness` of ages from it. Nothing here is stored: after a restart it is seen again, and until then nobody is suspected.
It must not decide what follows from an age.
"""

from __future__ import annotations

from collections.abc import Collection
from math import inf

from penstock.domain import limits
from penstock.domain.lifecycle import SliceState
from penstock.planner.snapshot import Mute, Snapshot, Witness
from penstock.ports.capacity import READY
from penstock.ports.clock import Clock


class Evidence:
    """Stamps of the steady clock, by what was seen."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.listening_since = clock.steady()
        self._ticked_at = clock.steady()
        self._heard: dict[str, dict[int, float]] = {}  #: slice -> host -> when it was last heard
        self._least: dict[str, float] = {}  #: slice -> when its most silent host of those was last heard
        self._met: dict[str, float] = {}  #: slice -> when it was first seen ready with a host not heard yet
        self._listed_without: dict[str, tuple[float, float]] = {}
        self._missing: set[str] = set()
        self._denied: set[str] = set()
        self._fenced: dict[str, float] = {}
        self._stopping: dict[str, float] = {}
        self._unjoined: dict[str, float] = {}
        self._asked: dict[str, float] = {}
        self._deletes: dict[str, float] = {}
        self._tried: dict[str, float] = {}
        self._unanswered: dict[tuple[str, str], float] = {}  #: zone -> when the first listing without an answer began
        self._said: dict[tuple[str, str], tuple[str, bool]] = {}  #: what was said instead, and whether that was a no
        #: Slices that this leader intended and of which nothing can exist: each create was refused, if one was called.
        self.unmade: set[str] = set()
        self.busy: set[str] = set()
        self.objects_down = False

    def listen(self) -> None:
        """Start anew: syncs reach this process from now on."""
        self.listening_since = self._ticked_at = self._clock.steady()
        self._unanswered.clear()
        self._said.clear()
        # Another leader may have made them meanwhile. A new set: calls of our last lead still write into the old one.
        self.unmade = set()

    def heard(self, slice: str, host: int) -> None:
        hosts = self._heard.setdefault(slice, {})
        hosts[host] = self._clock.steady()
        self._least[slice] = min(hosts.values())

    def present(self, slice: str) -> None:
        """A listing or a get showed it: earlier absences prove nothing any more."""
        self._listed_without.pop(slice, None)
        self._missing.discard(slice)
        self._denied.discard(slice)

    def absent(self, slice: str) -> None:
        """A complete listing lacked it."""
        now = self._clock.steady()
        first, _ = self._listed_without.get(slice, (now, now))
        self._listed_without[slice] = (first, now)

    def listing(self, zone: tuple[str, str]) -> None:
        """A listing of a zone, (provider, name), begins."""
        self._unanswered.setdefault(zone, self._clock.steady())

    def unlisted(self, zone: tuple[str, str], said: str, denied: bool) -> None:
        """It had no listing to show."""
        self._said[zone] = (said, denied)

    def listed(self, zone: tuple[str, str]) -> bool:
        """It answered, if only in part; true when it would not let us look before."""
        self._unanswered.pop(zone, None)
        return self._said.pop(zone, ("", False))[1]

    def put_off(self, zone: tuple[str, str]) -> None:
        """It is asked too often, or is not asked for that: its silence proves nothing. One that said no still does."""
        if not self._said.get(zone, ("", False))[1]:
            self.listed(zone)

    def watched(self, zones: Collection[tuple[str, str]]) -> None:
        """Only these are listed from now on: of others nothing is known."""
        for zone in [zone for zone in self._unanswered if zone not in zones]:
            self.listed(zone)

    def _mute(self, steady: float) -> dict[tuple[str, str], Mute]:
        mute = {}
        for zone, since in self._unanswered.items():
            said, denied = self._said.get(zone, ("", False))
            if denied or steady - since >= limits.ZONE_MUTE_S:
                mute[zone] = Mute(seconds=steady - since, said=said, denied=denied)
        return mute

    def asked(self, slice: str, exists: bool) -> None:
        """The provider answered a direct get. Denial counts only after two listings far enough apart."""
        self._asked[slice] = self._clock.steady()
        if exists:
            self.present(slice)
            return
        self._missing.add(slice)
        if self._absence(slice) >= limits.GONE_LISTINGS_APART_S:
            self._denied.add(slice)

    def doubted(self, slice: str) -> None:
        """The provider was asked and did not answer: nothing is known, but do not ask again at once."""
        self._asked[slice] = self._clock.steady()

    def fenced(self, attempt: str) -> None:
        self._fenced.setdefault(attempt, self._clock.steady())

    def deleted(self, slice: str) -> None:
        self._deletes[slice] = self._clock.steady()

    def tried(self, slice: str) -> None:
        """A create was called, and whether it took effect is unknown."""
        self._tried.setdefault(slice, self._clock.steady())

    def forget_slice(self, slice: str) -> None:
        for stamps in (self._listed_without, self._asked, self._deletes, self._tried):
            stamps.pop(slice, None)
        self.unmade.discard(slice)
        self._missing.discard(slice)
        self._denied.discard(slice)

    def _absence(self, slice: str) -> float:
        first, last = self._listed_without.get(slice, (0.0, 0.0))
        return last - first

    def take(self, snapshot: Snapshot, now: float) -> Witness:
        """Ages as of now, for what the snapshot holds."""
        steady = self._clock.steady()
        # A stall of this process ages all contacts at once. It is our silence, not theirs: listen anew.
        if steady - self._ticked_at > limits.SILENCE_S:
            self.listening_since = steady
            self._unanswered = dict.fromkeys(self._unanswered, steady)
        self._ticked_at = steady
        self._note_stops(snapshot, steady)
        self._note_unjoined(snapshot, steady)
        self._prune(snapshot)
        return Witness(
            silent=self.silent_slices(snapshot, steady),
            absent={id: last - first for id, (first, last) in self._listed_without.items()},
            unjoined={id: steady - at for id, at in self._unjoined.items()},
            missing=set(self._missing),
            denied=set(self._denied),
            fenced={id: steady - at for id, at in self._fenced.items()},
            stopping={id: steady - at for id, at in self._stopping.items()},
            asked={id: steady - at for id, at in self._asked.items()},
            deletes={id: steady - at for id, at in self._deletes.items()},
            tried={id: steady - at for id, at in self._tried.items()},
            unmade=set(self.unmade),
            mute=self._mute(steady),
            busy=set(self.busy),
            overdue=self._overdue(snapshot, now),
            objects_down=self.objects_down,
        )

    def silent_slices(self, snapshot: Snapshot, steady: float) -> dict[str, float]:
        """Slices with a host not heard for long, and for how long; the simulator's quiet agents answer otherwise."""
        floor = self.listening_since
        limit = steady - limits.SILENCE_S
        # Ten thousand slices pass here each tick, nearly all of them heard a moment ago: one look-up each.
        least, heard = self._least, self._heard
        doubtful = [
            slice
            for id, slice in snapshot.slices.items()
            if least.get(id, -inf) <= limit or (slice.hosts > 1 and len(heard[id]) < slice.hosts)
        ]
        silent = {}
        for slice in doubtful:
            if slice.ready_at is None:
                continue
            hosts = heard.get(slice.id, {})
            if len(hosts) == slice.hosts:
                oldest = min(hosts.values())
            else:
                # A plan may see that a slice is ready before whoever committed its last host's join says so here.
                oldest = self._met.setdefault(slice.id, steady)
            age = steady - max(oldest, floor)
            if age >= limits.SILENCE_S:
                silent[slice.id] = age
        return silent

    def _note_stops(self, snapshot: Snapshot, steady: float) -> None:
        for id, attempt in snapshot.troubled.items():
            if attempt.stop is not None:
                self._stopping.setdefault(id, steady)

    def _note_unjoined(self, snapshot: Snapshot, steady: float) -> None:
        """A slice the provider calls ready while we wait for its agents; one that is ready or leaving is no more."""
        waiting = {
            id
            for id, slice in snapshot.unsettled.items()
            if slice.state is SliceState.CREATING and slice.provider_state == READY
        }
        self._unjoined = {id: self._unjoined.get(id, steady) for id in sorted(waiting)}

    def _overdue(self, snapshot: Snapshot, now: float) -> set[str]:
        """Past their timeout and the grace their own agents had. The agent's timer binds; this is the second line."""
        late = snapshot.timeouts.before(now - limits.GRACE_S - 2 * limits.TICK_S)
        return {id for id in late if snapshot.attempts[id].stop is None}

    def _prune(self, snapshot: Snapshot) -> None:
        """Forget stamps of what no longer lives, so that memory follows what lives."""
        for id in [id for id in self._stopping if id not in snapshot.troubled]:
            del self._stopping[id]
        for id in [id for id in self._fenced if id not in snapshot.attempts]:
            del self._fenced[id]
        stamped = {*self._listed_without, *self._asked, *self._deletes, *self._tried, *self._missing, *self.unmade}
        for id in stamped - snapshot.slices.keys():
            self.forget_slice(id)
        if len(self._heard) > 2 * (len(snapshot.slices) + 256):
            for id in [id for id in self._heard if id not in snapshot.slices]:
                del self._heard[id], self._least[id]
        for id in [id for id in self._met if id not in snapshot.slices]:
            del self._met[id]
