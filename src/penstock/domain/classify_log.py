"""Find the one line in the tail of a log that best explains a failure.

It decides which part of a log is read, which lines are noise, and which row of `classify_patterns` wins when
several match. `classify` calls it, and only after typed facts have said that the attempt failed. It must stay
linear in the size of the log and must not raise: logs are written by anybody.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import msgspec

from penstock.domain.classify_patterns import NOISE, PATTERNS, PYTHON_EXCEPTION, Confidence, Pattern, Weight

#: Characters of the end of a log that are read: the reason is near the end, and a log may be gigabytes.
SCAN_CHARS: Final = 64 * 1024
#: Characters of one line that are shown as evidence: one or two lines of a terminal.
EVIDENCE_CHARS: Final = 240
#: Lines that may stand between an exception and its aftermath. Farther apart, the exception was caught and
#: the program went on.
NEAR_LINES: Final = 50
#: Tracebacks looked at, from the last one backwards, for one that is not noise.
TRACEBACKS: Final = 8

#: Colours, cursor moves and window titles. Each part excludes the next one's start and is bounded: linear.
_ESCAPE: Final = re.compile(r"\x1b(?:\[[0-?]{0,32}[ -/]{0,4}[@-~]|\][^\x07\x1b]{0,256}(?:\x07|\x1b\\)|[@-Z\\^_])")
_HEADER: Final = "Traceback (most recent call last):"
_CHAINED: Final = ("During handling of the above exception", "The above exception was the direct cause")
_QUIET_LEVELS: Final = tuple(
    f"{before}{level}{after}"
    for level in ("DEBUG", "INFO", "WARNING", "WARN")
    for before, after in (("", ":"), (" ", " "), ("[", ""), ("|", "|"))
)
#: Where the level of a log line stands, if it has one: after a time stamp and a name at most.
_LEVEL_CHARS: Final = 48
#: Shorter lines match no row; a log of nothing but line ends costs nothing.
_SHORTEST: Final = min(sum(map(len, words)) for row in PATTERNS for words in row.words)
_RANK: Final = {row.id: (row.weight is Weight.ECHO, place) for place, row in enumerate(PATTERNS)}


class Finding(msgspec.Struct, frozen=True):
    """The row that matched, the line it matched, and how far to trust it here."""

    row: Pattern
    line: str
    confidence: Confidence


class _Exception(msgspec.Struct, frozen=True):
    start: int  # the first line of the chain of tracebacks
    line: int  # the line that names the exception


def printable(text: str) -> str:
    """One line, safe on a terminal and bounded, from text that anybody wrote."""
    bare = _ESCAPE.sub("", text[: 4 * EVIDENCE_CHARS])
    clean = "".join(c if c.isprintable() else " " for c in bare).strip()
    return clean if len(clean) <= EVIDENCE_CHARS else clean[: EVIDENCE_CHARS - 1] + "…"


def read_log(log_tail: str) -> Finding | None:
    """The best explanation in the last `SCAN_CHARS` of a failed attempt's log, or None."""
    lines = _ESCAPE.sub("", log_tail[-SCAN_CHARS:]).splitlines()
    lowered = ["" if _is_quiet(line) else line.lower() for line in lines]
    lowered = _without_noise(lowered)
    hits = _hits(lowered)
    raised = _last_exception(lines, lowered)
    if raised is None:
        return _best(lines, hits)
    near = {i: row for i, row in hits.items() if i >= raised.start - NEAR_LINES}
    own = hits.get(raised.line)
    if own is None:
        return _weigh(lines, near, raised)
    if own.weight is Weight.ROOT and own.confidence != "guess":
        return Finding(own, printable(lines[raised.line]), own.confidence)
    return _best(lines, near)


def _weigh(lines: Sequence[str], hits: dict[int, Pattern], raised: _Exception) -> Finding:
    """An exception nobody knows, against the rows that matched around it."""
    after = len(lines) - 1 - raised.line
    found = _best(lines, hits)
    unknown = Finding(PYTHON_EXCEPTION, printable(lines[raised.line]), "likely" if after <= NEAR_LINES else "guess")
    if found is None:
        return unknown
    if found.row.weight is Weight.ECHO:
        # The program's own exception comes first and the others then complain that it left: it is the cause.
        # The other way round, or long before, it is not.
        first_echo = min(i for i, row in hits.items() if row.weight is Weight.ECHO)
        if raised.line < first_echo <= raised.line + NEAR_LINES:
            return Finding(PYTHON_EXCEPTION, unknown.line, "likely")
    return found


def _best(lines: Sequence[str], hits: dict[int, Pattern]) -> Finding | None:
    """Guesses last, causes before echoes, then the order of the table, then the earliest line."""
    if not hits:
        return None
    index = min(hits, key=lambda i: (hits[i].confidence == "guess", *_RANK[hits[i].id], i))
    return Finding(hits[index], printable(lines[index]), hits[index].confidence)


def _hits(lowered: Sequence[str]) -> dict[int, Pattern]:
    """The first row of the table that each line matches."""
    text = "\n".join(lowered)
    groups = [(words, row) for row in PATTERNS for words in row.words if all(word in text for word in words)]
    hits: dict[int, Pattern] = {}
    if not groups:
        return hits
    for i, line in enumerate(lowered):
        if len(line) < _SHORTEST:  # also what noise was turned into
            continue
        for words, row in groups:
            if words[0] in line and all(word in line for word in words):
                hits[i] = row
                break
    return hits


def _without_noise(lowered: list[str]) -> list[str]:
    text = "\n".join(lowered)
    groups = [words for words in NOISE if all(word in text for word in words)]
    if not groups:
        return lowered
    return ["" if any(all(w in line for w in words) for words in groups) else line for line in lowered]


def _is_quiet(line: str) -> bool:
    """Said at warning level or below: whatever words it uses, the writer thought the program would go on."""
    head = line[:_LEVEL_CHARS]
    if head[:1] == "I" and head[1:5].isdigit() and head[5:6] == " ":  # the glog style of libtpu and XLA
        return True
    return any(level in head for level in _QUIET_LEVELS)


def _last_exception(lines: Sequence[str], lowered: Sequence[str]) -> _Exception | None:
    """The last uncaught-looking exception of the log that is not noise."""
    headers = [i for i, line in enumerate(lines) if _HEADER in line]
    for place in range(len(headers) - 1, max(-1, len(headers) - 1 - TRACEBACKS), -1):
        named = _exception_line(lines, headers[place])
        if named is None or not lowered[named]:
            continue
        first = place
        while first > 0 and _is_chained(lines, headers[first - 1], headers[first]):
            first -= 1
        return _Exception(headers[first], named)
    return None


def _is_chained(lines: Sequence[str], earlier: int, header: int) -> bool:
    between = range(max(earlier, header - 4), header)
    return any(sentence in lines[i] for i in between for sentence in _CHAINED)


def _exception_line(lines: Sequence[str], header: int) -> int | None:
    """The line after a traceback's frames that names the exception; a launcher's prefix to lines is cut."""
    prefix = lines[header].partition(_HEADER)[0]
    for i in range(header + 1, min(len(lines), header + 8 * NEAR_LINES)):
        line = lines[i].removeprefix(prefix)
        if _HEADER in line:
            return None
        name = line.partition(":")[0].strip()
        if line[:1].strip() and name[:1].isalpha() and name.replace(".", "").replace("_", "").isalnum():
            return i
    return None
