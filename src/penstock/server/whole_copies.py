"""Which copies of a checkpoint are whole: of one host, and of a gang whose hosts each copied what they saved.

`server.checkpoints` asks it with the lists that it found. A host of a gang tells that it is there before it saves, and
that it saves before it has copied anything; so a step that one host copied and another had only begun does not count.
It must not read anything, nor decide which attempt may be restored.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from penstock.wire.agent import Saved

_DIGIT = re.compile(r"\d")
#: Where a name says which process wrote it: `state-rank0.npz`, `host_3`, `00001-of-00004`.
_RANK = re.compile(r"(?:rank|host|process|proc|worker|shard)[._-]?(\d+)|(\d+)-of-\d+", re.IGNORECASE)


def candidates(copies: Mapping[int, Sequence[Saved]], hosts: int) -> Iterator[dict[int, Saved]]:
    """What can be restored, best first. `copies`: the lists that each rank left, newest first.

    The newest of every host; of a gang also what newer and older lists have in common, because its hosts do not copy
    in step; then the ones before.
    """
    if any(not copies.get(rank) for rank in range(hosts)):
        return
    depth = max(len(lists) for lists in copies.values())
    choices = [{rank: _back(lists, back) for rank, lists in copies.items()} for back in range(depth)]
    if hosts > 1:
        choices.insert(1, {rank: _together(lists) for rank, lists in copies.items()})
    given: list[dict[int, Saved]] = []
    for choice in choices:
        whole = choice if hosts == 1 else _common(choice)
        if any(saved.files for saved in whole.values()) and whole not in given:
            given.append(whole)
            yield whole


def _back(lists: Sequence[Saved], back: int) -> Saved:
    """An older list, with what the newest says of whether this host saves."""
    return msgspec.structs.replace(lists[min(back, len(lists) - 1)], writing=lists[0].writing)


def _together(lists: Sequence[Saved]) -> Saved:
    """All that the lists of one host name; where two name the same, the newer one's."""
    made = lists[0]
    for older in lists[1:]:
        there = _names(made)
        made = msgspec.structs.replace(
            made,
            files=(*made.files, *(file for file in older.files if _top(file.path) not in there)),
            folders=(*made.folders, *(path for path in older.folders if _top(path) not in there)),
            writing=made.writing or older.writing,
        )
    return made


def _common(choice: Mapping[int, Saved]) -> dict[int, Saved]:
    """Only the steps that every host has which saves at all. A name without a number is no step, and stays."""
    saving = {rank: _names(saved) for rank, saved in choice.items() if saved.writing or saved.files}
    alike = {rank: names | {_of_any(name, rank) for name in names} for rank, names in saving.items()}
    kept: dict[int, set[str]] = {}
    for rank, names in saving.items():
        kept[rank] = {
            name
            for name in names
            if not _DIGIT.search(name)
            or all(name in others or _of_any(name, rank) in others for others in alike.values())
        }
    steps = [name for names in saving.values() for name in names if _DIGIT.search(name)]
    if steps and not any(_DIGIT.search(name) for names in kept.values() for name in names):
        return {}
    return {rank: _only(choice[rank], names) for rank, names in kept.items()}


def _only(saved: Saved, names: set[str]) -> Saved:
    files = tuple(file for file in saved.files if _top(file.path) in names)
    folders = tuple(path for path in saved.folders if _top(path) in names)
    return msgspec.structs.replace(saved, files=files, folders=folders)


def _of_any(name: str, rank: int) -> str:
    """A name with the place of its own rank left open."""
    for found in _RANK.finditer(name):
        group = 1 if found[1] is not None else 2
        if int(found[group]) == rank:
            return f"{name[: found.start(group)]}#{name[found.end(group) :]}"
    return name


def _names(saved: Saved) -> set[str]:
    return {_top(path) for path in (*(file.path for file in saved.files), *saved.folders)}


def _top(path: str) -> str:
    return path.split("/", maxsplit=1)[0]
