"""The story of one entity: its slice of all three histories, in order, short enough to read.

Printed when a rule is broken, by `tpu sim` and by failing tests. It takes what names the entity directly and what names
the attempts and slices bound to it. It must not judge or explain; the reader does.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.domain.invariants.facts import items, text
from penstock.domain.invariants.history import History, Record
from penstock.domain.nouns import Event

LINES_MAX = 60  #: one screen; of a longer story the middle is left out
_LINE_CHARACTERS_MAX = 150
#: Records that set the scene for every story.
_SCENES = frozenset({"heal", "store.down", "store.up", "controller.started", "controller.crashed"})

_Place = tuple[int, int]


def story(history: History, entity: str, id: str) -> str:
    """What the histories say of one entity, oldest first, at most 60 lines."""
    names = {id} | _close_to(history, entity, id)
    lines: list[tuple[_Place, str]] = []
    lines += [((event.seq, 0), _event_line(event)) for event in history.events if _names_event(event, names)]
    for source, records in (("client", history.clients), ("world", history.world)):
        lines += [
            ((record.seq, record.order), _record_line(source, record))
            for record in records
            if _names_record(record, names)
        ]
    head = f"story of {entity} {id}"
    if not lines:
        return f"{head}: nothing names it"
    scenes = [((each.seq, each.order), _record_line("world", each)) for each in history.world if each.kind in _SCENES]
    first, last = min(place for place, _ in lines), max(place for place, _ in lines)
    lines += [scene for scene in scenes if first <= scene[0] <= last]
    told = _without_echoes([line for _, line in sorted(lines)])
    return "\n".join([f"{head} ({len(told)} lines)", *_shortened(told)])


def _close_to(history: History, entity: str, id: str) -> set[str]:
    """A job's attempts, an attempt's job and slices, a slice's attempts: without them a story has no sense."""
    close: set[str] = set()
    for event in history.events:
        if event.kind != "attempt.created":
            continue
        slices = {str(pair[0]) for pair in items(event.body, "slices") if isinstance(pair, list | tuple) and pair}
        if entity == "job" and text(event.body, "job") == id:
            close |= {event.id}
        elif entity == "attempt" and event.id == id:
            close |= {text(event.body, "job")} | slices
        elif entity == "slice" and id in slices:
            close.add(event.id)
    return close - {""}


def _names_event(event: Event, names: set[str]) -> bool:
    return event.id in names or any(value in names for value in _words(event.body))


def _names_record(record: Record, names: set[str]) -> bool:
    if record.subject in names or any(value in names for value in _words(record.body)):
        return True
    # Paths and run/unit subjects carry ids inside.
    return "/" in record.subject and not names.isdisjoint(record.subject.split("/"))


def _words(body: dict[str, object]) -> Iterator[str]:
    for value in body.values():
        if isinstance(value, str):
            yield value


def _event_line(event: Event) -> str:
    fence = f" fence {event.fence}" if event.fence else ""
    epoch = f" epoch {event.epoch}" if event.epoch else ""
    return _cut(
        f"{event.seq:>7} t={event.at:<9.1f} store  {event.kind} {event.id} v{event.version}{fence}{epoch}"
        f" {_told(event.body)}"
    )


def _record_line(source: str, record: Record) -> str:
    return _cut(f"{record.seq:>7} t={record.t:<9.1f} {source:<6} {record.kind} {record.subject} {_told(record.body)}")


def _without_echoes(lines: list[str]) -> list[str]:
    """A reason that is asked for every tick and stays the same is told once."""
    told: list[str] = []
    last = ""
    for line in lines:
        if " world  why " in line:
            reason = line[line.index(" why ") :].partition(" as_of=")[0]
            if reason == last:
                continue
            last = reason
        told.append(line)
    return told


def _told(body: dict[str, object]) -> str:
    return " ".join(f"{name}={value}" for name, value in body.items() if value is not None)


def _cut(line: str) -> str:
    line = line.rstrip()
    return line if len(line) <= _LINE_CHARACTERS_MAX else line[: _LINE_CHARACTERS_MAX - 1] + "…"


def _shortened(lines: list[str]) -> list[str]:
    """All lines, or the first and the last of them: how it began and how it ended matter most."""
    room = LINES_MAX - 1
    if len(lines) <= room:
        return lines
    head = room // 3
    tail = room - head - 1
    return [*lines[:head], f"        … {len(lines) - head - tail} lines left out …", *lines[-tail:]]
