"""Which files a dataset is: names, globs, folders, and the directories that Hugging Face's `datasets` writes.

`source` calls it. A directory made by `save_to_disk` names its own files (`state.json`), and a `DatasetDict` its own
splits (`dataset_dict.json`); in any other folder all files with a known ending count, and a split is recognised by the
name of a file (`train-00000-of-00002.parquet`) or of a folder (`train/`), as on the Hub. What `tpu dataset split` could
not read is no data, though it once had the name of some.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from penstock.domain.admission import BadInput
from penstock.extract.formats import SUFFIXES, Format, format_of
from penstock.objects.inputs import Input, find_inputs, normal_address, open_input

_SMALL_BYTES_MAX: Final = 16 << 20  #: of a description; Hugging Face's are some kilobytes
_DESCRIPTIONS: Final = ("state.json", "dataset_dict.json")
#: Where splits listed rows that they could not read, until they had a better name for it; beside
OLD_REFUSED: Final = "refused.jsonl"
_FIRST_STREAM: Final = "stream_000.jsonl"
_PART: Final = re.compile(r"(?P<split>.+?)(-\d{5}-of-\d{5})?(-[0-9a-f]{16})?(\.[a-z]+)+")


def find(
    data: Sequence[str], kind: Format | None, split: str | None, environment: Mapping[str, str]
) -> tuple[list[Input], Format]:
    """The files, in the order of rows, and their one format."""
    if not data:
        raise BadInput("data", data, "names nothing", "give files, a folder or a glob")
    found: dict[Input, Format] = {}
    for address in data:
        inputs = _without_old_refused(find_inputs(address, environment))
        if not inputs:
            raise BadInput("data", address, "matches no file", "look at the name; quote globs for the shell")
        saved = [each for each in inputs if each.address.rpartition("/")[2] in _DESCRIPTIONS] if kind is None else []
        chosen = _saved(address, inputs, saved, split, environment) if saved else _plain(address, inputs, kind, split)
        found |= chosen
    kinds = sorted(set(found.values()))
    if len(kinds) > 1:
        shown = ", ".join(data)
        raise BadInput("data", shown, f"are files of several formats: {', '.join(kinds)}", "name those of one format")
    return list(found), kinds[0]


def _without_old_refused(inputs: Sequence[Input]) -> list[Input]:
    """Of a file that is named alone nothing is left out: only streams beside it tell that it is a split's."""
    beside = {f"{each.address.removesuffix(_FIRST_STREAM)}{OLD_REFUSED}" for each in inputs if _is_first_stream(each)}
    return [each for each in inputs if each.address not in beside]


def _is_first_stream(file: Input) -> bool:
    return file.address.rpartition("/")[2] == _FIRST_STREAM


def _plain(address: str, inputs: Sequence[Input], kind: Format | None, split: str | None) -> dict[Input, Format]:
    """Files by their names. A single file may have any ending if its format is given; in folders others are no data."""
    if kind is not None:
        known = {each: kind for each in inputs if len(inputs) == 1 or format_of(each.address) is not None}
        known = known or dict.fromkeys(inputs, kind)
    else:
        known = {each: found for each in inputs if (found := format_of(each.address)) is not None}
    if not known:
        endings = ", ".join(SUFFIXES)
        raise BadInput("data", address, f"has no file that ends in {endings}", "say what it is with --format")
    if split is None:
        return known
    above = normal_address(re.split(r"[*?[]", address)[0])
    of_split = {each: found for each, found in known.items() if split in _splits(each.address.removeprefix(above))}
    if not of_split:
        have = sorted({name for each in known for name in _splits(each.address.removeprefix(above))})
        raise BadInput("split", split, f"is in no name under {address}; there are {', '.join(have[:8])}", "name one")
    return of_split


def _splits(path: str) -> set[str]:
    """Names of splits that a file may belong to: its folders, and the beginning of its own name."""
    *folders, name = path.strip("/").split("/")
    match = _PART.fullmatch(name)
    return {*folders, *([match["split"]] if match else [])}


def _saved(
    address: str, inputs: Sequence[Input], saved: Sequence[Input], split: str | None, environment: Mapping[str, str]
) -> dict[Input, Format]:
    """What `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote, in the order it says."""
    by_address = {each.address: each for each in inputs}
    states = {each.address.rpartition("/")[0]: each for each in saved if each.address.endswith("/state.json")}
    splits = [each for each in saved if each.address.endswith("/dataset_dict.json")]
    folder = splits[0].address.rpartition("/")[0] if splits else next(iter(states))
    if splits:
        names = _read(splits[0], environment).get("splits", [])
        if split is None and len(names) > 1:
            raise BadInput("data", address, f"has the splits {', '.join(names)}", "choose one with split")
        chosen = split or (names[0] if names else "")
        if chosen not in names:
            raise BadInput("split", chosen, f"is not in {address}; there are {', '.join(names) or 'none'}", "name one")
        folder = f"{folder}/{chosen}"
    elif len(states) > 1:
        raise BadInput("data", address, f"holds {len(states)} datasets", f"name one, such as {folder}")
    if folder not in states:
        raise BadInput("data", folder, "has no state.json", "was it saved to the end?")
    state = _read(states[folder], environment)
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise BadInput("data", folder, "keeps its order in a separate table", "save it again after flatten_indices()")
    files = [f"{folder}/{part['filename']}" for part in state.get("_data_files", [])]
    missing = [name for name in files if name not in by_address]
    if missing or not files:
        raise BadInput("data", folder, f"lacks {missing[0] if missing else 'files of data'}", "copy it again")
    return {by_address[name]: Format.ARROW for name in files}


def _read(file: Input, environment: Mapping[str, str]) -> dict[str, Any]:
    if file.size > _SMALL_BYTES_MAX:
        raise BadInput("data", file.address, f"has {file.size} bytes, too many for a description", "is it a dataset?")
    with open_input(file, environment) as opened:
        try:
            return msgspec.json.decode(opened.read(), type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadInput("data", file.address, f"cannot be read: {error}", "copy it again") from error
