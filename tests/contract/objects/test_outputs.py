"""Files for users, in directories and buckets: named when they are whole, never over another, of any size."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from penstock.domain.admission import BadInput
from penstock.extract.dataset_split import split
from penstock.extract.grid_files import write_prompts
from penstock.extract.grid_prompts import GridOrder
from penstock.extract.output_files import new_file, new_files
from penstock.extract.source import Source, SourceSpec
from penstock.objects import outputs
from penstock.objects.inputs import find_inputs, open_input, read_input
from penstock.objects.outputs import open_folder
from penstock.ports.objects import ObjectsError
from tests.contract.objects.servers import BUCKET, S3_ENVIRONMENT, Emulator

_numbers = count()
TASK = {"train": [{"input": [[1]], "output": [[2]]}], "test": [{"input": [[3]]}]}


class Place(NamedTuple):
    """A folder that is not there yet."""

    address: str
    environment: Mapping[str, str]

    def names(self) -> list[str]:
        found = find_inputs(f"{self.address}/", self.environment)
        return [each.address.removeprefix(f"{self.address}/") for each in found]

    def read(self, name: str) -> bytes:
        data = read_input(f"{self.address}/{name}", self.environment, at_most=1 << 30)
        assert data is not None
        return data


@pytest.fixture(params=["directory", "gcs", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "directory":
        return Place(str(tmp_path / "out"), os.environ)
    prefix = f"outputs{next(_numbers)}/a b"
    if request.param == "gcs":
        emulator: Emulator = request.getfixturevalue("gcs")
        return Place(f"gs://{BUCKET}/{prefix}", emulator.environment)
    url: str = request.getfixturevalue("s3")
    return Place(f"s3://{BUCKET}/{prefix}", {**S3_ENVIRONMENT, "AWS_ENDPOINT_URL": url})


def source_of(folder: Path, rows: int) -> Source:
    lines = [json.dumps({"n": number}) for number in range(rows)]
    (folder / "a.jsonl").write_text("\n".join([*lines, "{"]) + "\n")
    return Source.open(SourceSpec(data=(str(folder / "a.jsonl"),)), whole_rows=True)


def test_a_split_is_written_there_and_read_from_there(place: Place, tmp_path: Path) -> None:
    source = source_of(tmp_path, 20)
    done = split(source, place.address, streams=3, environment=place.environment)
    streams = [f"stream_{number:03d}.jsonl" for number in range(3)]
    assert place.names() == [*streams, "streams.json", "streams.refused"]
    rows = [[json.loads(line)["n"] for line in place.read(name).splitlines()] for name in streams]
    assert rows == [list(range(20))[start::3] for start in range(3)]
    assert [stream.sha256 for stream in done.streams] == [
        hashlib.sha256(place.read(name)).hexdigest() for name in streams
    ]
    for data in (f"{place.address}/stream_*.jsonl", f"{place.address}/"):
        assert Source.open(SourceSpec(data=(data,)), place.environment, whole_rows=True).rows == 20
    with pytest.raises(BadInput, match="holds 3 streams already"):
        split(source, place.address, streams=2, environment=place.environment)
    split(source, place.address, streams=2, environment=place.environment, replace=True)
    assert place.names() == [*streams[:2], "streams.json", "streams.refused"]


def test_prompts_are_written_there(place: Place, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(json.dumps(TASK))
    words = [str(tmp_path / "t.json")], f"{place.address}/p.jsonl", GridOrder(variants=2)
    done, _ = write_prompts(*words, environment=place.environment)
    assert done.sha256 == hashlib.sha256(place.read("p.jsonl")).hexdigest()
    assert len(place.read("p.jsonl").splitlines()) == 2
    with pytest.raises(BadInput, match="is there already"):
        write_prompts(*words, environment=place.environment)


def test_what_fails_on_the_way_leaves_nothing(place: Place) -> None:
    def fail() -> None:
        with new_files(place.address, ["a", "b"], replace=False, environment=place.environment) as (first, _):
            first.line(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert place.names() == []
    if "://" not in place.address:
        assert not list(Path(place.address).iterdir())


def test_what_is_replaced_only_in_part_has_no_summary_of_before(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def written(word: bytes) -> None:
        words = place.address, ["a", "b", "summary"]
        with new_files(*words, replace=True, environment=place.environment) as files:
            for file in files:
                file.line(word)

    written(b"old")
    folder = type(open_folder(place.address, place.environment))
    publish = folder.publish

    def fail(self: Any, file: Path, name: str, *, replace: bool) -> None:
        if name == "b":
            raise ObjectsError("b: no room")
        publish(self, file, name, replace=replace)

    monkeypatch.setattr(folder, "publish", fail)
    with pytest.raises(ObjectsError, match="no room"):
        written(b"new")
    assert {name: place.read(name) for name in place.names()} == {"a": b"new\n", "b": b"old\n"}


def test_a_name_that_another_took_meanwhile_is_not_written_over(place: Place) -> None:
    address = f"{place.address}/a"

    def race() -> None:
        with new_file("out", address, replace=False, environment=place.environment) as mine:
            mine.line(b"mine")
            with new_file("out", address, replace=False, environment=place.environment) as other:
                other.line(b"other's")

    with pytest.raises(BadInput, match="is there already"):
        race()
    assert place.read("a") == b"other's\n"


def test_a_directory_without_links_takes_files_too_and_none_is_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it is with a bucket that is mounted by gcsfuse."""

    def link(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(os, "link", link)
    with new_file("out", str(tmp_path / "a"), replace=False) as file:
        file.line(b"first")

    def race() -> None:
        with new_file("out", str(tmp_path / "b"), replace=False) as mine:
            mine.line(b"mine")
            (tmp_path / "b").write_bytes(b"other's")

    with pytest.raises(BadInput, match="is there already"):
        race()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a": b"first\n", "b": b"other's"}


def test_a_large_file_goes_up_in_parts(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs, "PART_BYTES", 5 << 20)  # S3 takes no smaller one
    line = bytes(range(1, 10)) + b"x" * ((1 << 20) - 10)
    with new_file("out", f"{place.address}/large", replace=False, environment=place.environment) as file:
        for _ in range(12):
            file.line(line)
    (found,) = find_inputs(f"{place.address}/large", place.environment)
    digest = hashlib.sha256()
    with open_input(found, place.environment) as opened:
        while data := opened.read(1 << 20):
            digest.update(data)
    assert (found.size, digest.hexdigest()) == (12 << 20, file.sha256)


def test_a_bucket_that_is_not_there_is_an_error_of_the_store(gcs: Emulator) -> None:
    with pytest.raises(ObjectsError, match="gs://no-such-bucket/x"):
        open_folder("gs://no-such-bucket/x", gcs.environment).names()


def test_a_place_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot be made"), new_files(str(tmp_path / "file"), ["a"], replace=False):
        pass
    with pytest.raises(BadInput, match="names no file"), new_file("out", "gs://bucket", replace=False):
        pass
    with pytest.raises(BadInput, match="is no place we can write to"):
        open_folder("ftp://x/y")
