"""Streams: each row in one of them, in order, named only when all are whole; what cannot be read is set aside."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.domain.admission import BadInput
from penstock.extract.dataset_split import Split, split
from penstock.extract.output_files import new_file
from penstock.extract.source import Refused, Source, SourceSpec


def source_of(path: Path, lines: list[bytes]) -> Source:
    path.write_bytes(b"\n".join(lines) + b"\n")
    return Source.open(SourceSpec(data=(str(path),)), whole_rows=True)


def read(folder: Path, done: Split) -> list[list[int]]:
    return [
        [msgspec.json.decode(line)["n"] for line in (folder / stream.file).read_bytes().splitlines()]
        for stream in done.streams
    ]


@settings(max_examples=15, deadline=None)
@given(rows=st.integers(1, 60), streams=st.integers(1, 12), contiguous=st.booleans(), taken=st.integers(1, 80))
def test_each_row_is_in_one_stream(
    tmp_path_factory: pytest.TempPathFactory, rows: int, streams: int, contiguous: bool, taken: int
) -> None:
    folder = tmp_path_factory.mktemp("split")
    source = source_of(folder / "a.jsonl", [b'{"n": %d}' % number for number in range(rows)])
    done = split(source, str(folder / "out"), streams=streams, contiguous=contiguous, rows=taken)
    parts = read(folder / "out", done)
    whole = list(range(min(rows, taken)))
    if contiguous:
        assert [number for part in parts for number in part] == whole
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    else:
        assert parts == [whole[index::streams] for index in range(streams)]
    assert [stream.file for stream in done.streams] == [f"stream_{index:03d}.jsonl" for index in range(streams)]
    assert [stream.rows for stream in done.streams] == list(map(len, parts))
    assert done.rows == len(whole)


def test_what_cannot_be_read_is_set_aside_with_its_line(tmp_path: Path) -> None:
    source = source_of(tmp_path / "a.jsonl", [b'{"n": 0}', b"{", b'{"n": 2}', b"", b'{"n": 4, "x": [1, {"y": null}]}'])
    done = split(source, str(tmp_path / "out"), streams=2, number="row")
    assert (done.rows, done.refused) == (3, 2)
    assert read(tmp_path / "out", done) == [[0, 2, 4], []]
    lines = (tmp_path / "out" / "streams.refused").read_bytes().splitlines()
    refused = [msgspec.json.decode(line, type=Refused) for line in lines]
    assert [(each.line, each.reason.partition(":")[0]) for each in refused] == [
        (2, "is not JSON"),
        (4, "is a blank line"),
    ]
    last = (tmp_path / "out" / "stream_000.jsonl").read_bytes().splitlines()[-1]
    assert msgspec.json.decode(last) == {"n": 4, "x": [1, {"y": None}], "row": 4}


@pytest.mark.parametrize("data", ["out", "out/", "out/*", "out/*.jsonl", "."])
@pytest.mark.parametrize("older", [False, True])
def test_a_split_that_is_named_as_data_is_its_streams(tmp_path: Path, data: str, older: bool) -> None:
    lines = [b'{"n": %d}' % number for number in range(12)]
    source = source_of(tmp_path / "in.jsonl", [*lines[:5], b"{", b"", b"[", b"7", *lines[5:]])
    done = split(source, str(tmp_path / "deep" / "out"), streams=3)
    assert (done.rows, done.refused) == (12, 4)
    if older:
        (tmp_path / "deep" / "out" / "streams.refused").rename(tmp_path / "deep" / "out" / "refused.jsonl")
    address = f"{tmp_path}/deep/{data}"
    again = Source.open(SourceSpec(data=(address,)), whole_rows=True)
    assert again.rows == 12


def test_a_file_that_only_has_the_name_of_what_older_splits_refused_is_data(tmp_path: Path) -> None:
    source_of(tmp_path / "refused.jsonl", [b"{}"])
    source_of(tmp_path / "stream_001.jsonl", [b"{}"])
    assert Source.open(SourceSpec(data=(str(tmp_path),)), whole_rows=True).rows == 2
    source_of(tmp_path / "stream_000.jsonl", [b"{}"])
    assert Source.open(SourceSpec(data=(str(tmp_path / "refused.jsonl"),)), whole_rows=True).rows == 1


def test_a_split_in_the_place_of_an_older_one_leaves_nothing_of_it(tmp_path: Path) -> None:
    source = source_of(tmp_path / "a.jsonl", [b"{}"])
    split(source, str(tmp_path / "out"), streams=1)
    (tmp_path / "out" / "streams.refused").rename(tmp_path / "out" / "refused.jsonl")
    split(source, str(tmp_path / "out"), streams=2, replace=True)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "stream_000.jsonl",
        "stream_001.jsonl",
        "streams.json",
        "streams.refused",
    ]


def test_a_file_that_only_has_an_older_splits_name_stays(tmp_path: Path) -> None:
    source = source_of(tmp_path / "a.jsonl", [b"{}"])
    split(source, str(tmp_path / "out"), streams=1)
    (tmp_path / "out" / "refused.jsonl").write_text("of somebody else")
    split(source, str(tmp_path / "out"), streams=1, replace=True)
    assert (tmp_path / "out" / "refused.jsonl").read_text() == "of somebody else"


def test_the_summary_tells_what_was_written(tmp_path: Path) -> None:
    source = source_of(tmp_path / "a.jsonl", [b'{"n": %d}' % number for number in range(5)])
    done = split(source, str(tmp_path / "out"), streams=2)
    assert msgspec.json.decode((tmp_path / "out" / "streams.json").read_bytes(), type=Split) == done
    data = (tmp_path / "out" / "stream_001.jsonl").read_bytes()
    assert done.streams[1].sha256 == hashlib.sha256(data).hexdigest()


def test_streams_that_are_there_are_kept_unless_told_otherwise(tmp_path: Path) -> None:
    source = source_of(tmp_path / "a.jsonl", [b'{"n": %d}' % number for number in range(5)])
    split(source, str(tmp_path / "out"), streams=4)
    with pytest.raises(BadInput, match="holds 4 streams already; choose another, or say --replace"):
        split(source, str(tmp_path / "out"), streams=2)
    split(source, str(tmp_path / "out"), streams=2, replace=True)
    assert sorted(path.name for path in (tmp_path / "out").glob("stream_*")) == ["stream_000.jsonl", "stream_001.jsonl"]


def test_a_split_that_fails_leaves_nothing_and_keeps_what_was_there(tmp_path: Path) -> None:
    source = source_of(tmp_path / "a.jsonl", [b'{"n": %d}' % number for number in range(5)])
    before = split(source, str(tmp_path / "out"), streams=1)
    (tmp_path / "a.jsonl").write_bytes(b"changed")
    with pytest.raises(Exception, match="it was changed"):
        split(source, str(tmp_path / "out"), streams=3, replace=True)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "stream_000.jsonl",
        "streams.json",
        "streams.refused",
    ]
    assert read(tmp_path / "out", before) == [[0, 1, 2, 3, 4]]


@pytest.mark.parametrize("streams", [0, 513])
def test_a_number_of_streams_that_cannot_be_is_refused(streams: int, tmp_path: Path) -> None:
    source = source_of(tmp_path / "a.jsonl", [b"{}"])
    with pytest.raises(BadInput, match="is not between 1 and 512"):
        split(source, str(tmp_path / "out"), streams=streams)


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    address = str(tmp_path / "a")
    with pytest.raises(BadInput, match="is there already"), new_file("out", address, replace=False):
        pass
    with new_file("out", address, replace=True) as file:
        file.line(b"new")
        assert (tmp_path / "a").read_text() == "old"
    assert (tmp_path / "a").read_text() == "new\n"
