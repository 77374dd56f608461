"""Files of others, on this machine and in buckets: found by name, folder and glob, read from anywhere, never mixed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import NamedTuple

import obstore
import pytest

from penstock.domain.admission import BadInput
from penstock.extract.source import Source, SourceSpec, documents
from penstock.objects import inputs
from penstock.objects.bucket import gcs_store, s3_store
from penstock.objects.inputs import Changed, find_inputs, is_folder, open_input, read_input
from penstock.ports.objects import ObjectsError
from tests.contract.objects.servers import BUCKET, S3_ENVIRONMENT, Emulator

_numbers = count()


class Place(NamedTuple):
    """An empty folder somewhere."""

    address: str
    environment: Mapping[str, str]
    write: Callable[[str, bytes], None]
    bucket: bool

    def names(self, pattern: str) -> list[str]:
        found = find_inputs(f"{self.address}/{pattern}", self.environment)
        return [each.address.removeprefix(f"{self.address}/") for each in found]


@pytest.fixture(params=["directory", "gcs", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "directory":

        def write(name: str, data: bytes) -> None:
            path = tmp_path / "in" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

        return Place(str(tmp_path / "in"), os.environ, write, bucket=False)
    prefix = f"inputs{next(_numbers)}"
    if request.param == "gcs":
        emulator: Emulator = request.getfixturevalue("gcs")
        environment: Mapping[str, str] = emulator.environment
        return Place(
            f"gs://{BUCKET}/{prefix}",
            environment,
            lambda name, data: _put(gcs_store(BUCKET, environment), f"{prefix}/{name}", data),
            bucket=True,
        )
    url: str = request.getfixturevalue("s3")
    settings = {**S3_ENVIRONMENT, "AWS_ENDPOINT_URL": url}
    return Place(
        f"s3://{BUCKET}/{prefix}",
        settings,
        lambda name, data: _put(s3_store(BUCKET, settings), f"{prefix}/{name}", data),
        bucket=True,
    )


def _put(store: obstore.store.GCSStore | obstore.store.S3Store, path: str, data: bytes) -> None:
    obstore.put(store, path, data, use_multipart=False)


def test_files_are_found_by_name_folder_and_glob(place: Place) -> None:
    for name in ("a.jsonl", "b.jsonl", "b.txt", "deep/a.jsonl", "deep/er/a.jsonl", ".hidden", "deep/.git/a.jsonl"):
        place.write(name, name.encode())
    assert place.names("") == ["a.jsonl", "b.jsonl", "b.txt", "deep/a.jsonl", "deep/er/a.jsonl"]
    assert place.names("a.jsonl") == ["a.jsonl"]
    assert place.names("*.jsonl") == ["a.jsonl", "b.jsonl"]
    assert place.names("?.[jx]sonl") == ["a.jsonl", "b.jsonl"]
    assert place.names("[!a].jsonl") == ["b.jsonl"]
    assert place.names("**/a.jsonl") == ["a.jsonl", "deep/a.jsonl", "deep/er/a.jsonl"]
    assert place.names("deep/*/a.jsonl") == ["deep/er/a.jsonl"]
    assert place.names("deep") == ["deep/a.jsonl", "deep/er/a.jsonl"]
    assert place.names("deep/") == ["deep/a.jsonl", "deep/er/a.jsonl"]
    assert place.names("dee") == []
    assert place.names("none*") == []
    (found,) = find_inputs(f"{place.address}/b.txt", place.environment)
    assert found.size == 5
    assert bool(found.tag) == place.bucket
    assert is_folder(f"{place.address}/deep/")
    assert not is_folder(f"{place.address}/b.txt")


def test_a_file_is_read_from_anywhere_in_it(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "RANGE_BYTES", 1000)
    data = b"".join(b"line %05d\n" % number for number in range(2000))
    place.write("a.bin", data)
    (file,) = find_inputs(f"{place.address}/a.bin", place.environment)
    with open_input(file, place.environment) as opened:
        assert opened.read() == data
        assert opened.read(1) == b""
        opened.seek(11 * 777)
        assert opened.readline() == b"line 00777\n"
        assert opened.tell() == 11 * 778
        opened.seek(-11, os.SEEK_END)
        assert opened.read(100) == b"line 01999\n"
        opened.seek(0)
        assert len(opened.read(2500)) == 2500


def test_a_file_that_was_replaced_is_an_error_and_no_mixture(place: Place) -> None:
    place.write("a.bin", b"one" * 100)
    (file,) = find_inputs(f"{place.address}/a.bin", place.environment)
    place.write("a.bin", b"other" * 100)
    with pytest.raises(Changed, match="it was changed"), open_input(file, place.environment) as opened:
        opened.read()


def test_small_files_are_read_whole_if_they_are_there(place: Place) -> None:
    place.write("deep/a.json", b"{}")
    assert read_input(f"{place.address}/deep/a.json", place.environment, at_most=2) == b"{}"
    assert read_input(f"{place.address}/a.json", place.environment, at_most=2) is None
    assert read_input(f"{place.address}/deep", place.environment, at_most=2) is None
    with pytest.raises(BadInput, match="has 2 bytes, more than 1"):
        read_input(f"{place.address}/deep/a.json", place.environment, at_most=1)


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_dataset_is_the_same_wherever_it_lies(place: Place, ending: str, tmp_path: Path) -> None:
    rows = [{"text": f"row {number}"} for number in range(500)]
    if ending == "jsonl":
        import msgspec

        data = b"".join(msgspec.json.encode(row) + b"\n" for row in rows)
    else:
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=100)
        data = (tmp_path / "a.parquet").read_bytes()
    place.write(f"data/a.{ending}", data)
    place.write("data/README.md", b"about")
    source = Source.open(SourceSpec(data=(f"{place.address}/data",)), place.environment)
    assert source.rows == 500
    found = [each.text for each in documents(source, 333, 444, environment=place.environment)]
    assert found == [row["text"] for row in rows[333:444]]


def test_a_bucket_that_is_not_there_is_told_in_one_line(place: Place) -> None:
    if not place.bucket:
        assert find_inputs(f"{place.address}/none") == ()
        return
    with pytest.raises(ObjectsError) as caught:
        find_inputs(f"{place.address.partition('://')[0]}://no-such-bucket/a", place.environment)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("address", ["https://host/a", "gs://", "s3:///a"])
def test_addresses_that_name_nothing_are_refused(address: str) -> None:
    with pytest.raises(BadInput):
        find_inputs(address)
