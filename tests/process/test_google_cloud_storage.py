"""Google's own Python client for Cloud Storage against the emulator, pointed at it by STORAGE_EMULATOR_HOST alone.

It verifies checksums itself, follows pages and reads typed answers, so that an answer which another client passes over
fails here.
"""

from __future__ import annotations

import importlib
import urllib.request
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.missing import missing
from tests.process.google_cloud import GoogleCloud, google_cloud

QUANTUM = 256 << 10
WITHIN_S = 30


@pytest.fixture(scope="module")
def storage() -> Any:
    try:
        return importlib.import_module("google.cloud.storage")
    except ImportError:
        missing("google-cloud-storage: the emulator's conformance to it is not checked")


@pytest.fixture(scope="module")
def errors(storage: Any) -> Any:
    return importlib.import_module("google.api_core.exceptions")


@pytest.fixture(scope="module")
def cloud() -> Iterator[GoogleCloud]:
    with google_cloud() as cloud:
        yield cloud


@pytest.fixture
def client(storage: Any, cloud: GoogleCloud, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", cloud.url)
    credentials = importlib.import_module("google.auth.credentials").AnonymousCredentials()
    with storage.Client(project="p1", credentials=credentials) as client:
        yield client


@pytest.fixture
def bucket(client: Any, request: pytest.FixtureRequest) -> Any:
    """A bucket of the test's own."""
    return client.create_bucket(f"b{request.node.name.replace('_', '-')[4:60]}")


def control(cloud: GoogleCloud, method: str, what: str, content: object = None) -> Any:
    body = None if content is None else msgspec.json.encode(content)
    request = urllib.request.Request(f"{cloud.url}/_emulator/{what}", body, method=method)
    with urllib.request.urlopen(request, timeout=WITHIN_S) as answer:
        return msgspec.json.decode(answer.read() or b"null")


def uploads(cloud: GoogleCloud, bucket: Any) -> list[tuple[str, int]]:
    """Methods and statuses of the requests that carried bytes of objects into a bucket."""
    place = f"/upload/storage/v1/b/{bucket.name}/o"
    return [(each["method"], each["status"]) for each in control(cloud, "GET", "requests") if each["path"] == place]


def test_buckets(client: Any, errors: Any) -> None:
    for name in ("own-a", "own-b", "own-c"):
        assert client.create_bucket(name).name == name
    with pytest.raises(errors.Conflict):
        client.create_bucket("own-a")
    assert [each.name for each in client.list_buckets(prefix="own-")] == ["own-a", "own-b", "own-c"]
    pages = [[each.name for each in page] for page in client.list_buckets(prefix="own-", page_size=2).pages]
    assert pages == [["own-a", "own-b"], ["own-c"]]
    assert client.get_bucket("own-a").time_created is not None
    assert client.lookup_bucket("own-z") is None
    with pytest.raises(errors.NotFound):
        client.get_bucket("own-z")
    client.bucket("own-b").blob("x").upload_from_string(b"x")
    with pytest.raises(errors.Conflict):
        client.get_bucket("own-b").delete()
    client.get_bucket("own-b").delete(force=True)
    client.get_bucket("own-c").delete()
    assert [each.name for each in client.list_buckets(prefix="own-")] == ["own-a"]


def test_uploads_of_every_kind(bucket: Any, cloud: GoogleCloud, tmp_path: Path) -> None:
    small, large = b"hello", bytes(range(256)) * 2_700
    bucket.blob("small").upload_from_string(small, content_type="text/x-small", checksum="md5")
    assert uploads(cloud, bucket) == [("POST", 200)], "in one request of several parts"
    (tmp_path / "large").write_bytes(large)
    bucket.blob("file").upload_from_filename(str(tmp_path / "large"))
    chunked = bucket.blob("chunked", chunk_size=QUANTUM)
    chunked.upload_from_file(BytesIO(large), checksum="crc32c", if_generation_match=0)
    assert uploads(cloud, bucket)[2:] == [("POST", 200), ("PUT", 308), ("PUT", 308), ("PUT", 200)]
    bucket.blob("resumable").upload_from_file(BytesIO(large), checksum="md5")
    with bucket.blob("written").open("wb", chunk_size=QUANTUM) as out:
        out.write(large[:300_000])
        out.write(large[300_000:])
    found = {each.name: (each.size, each.content_type) for each in bucket.list_blobs()}
    assert found["small"] == (len(small), "text/x-small")
    assert {found[name][0] for name in found if name != "small"} == {len(large)}
    for name in found:
        data = small if name == "small" else large
        assert bucket.blob(name).download_as_bytes(checksum="crc32c") == data, name
        assert bucket.blob(name).download_as_bytes(checksum="md5") == data, name


def test_an_upload_that_was_cut_goes_on(bucket: Any, cloud: GoogleCloud) -> None:
    data = bytes(range(256)) * 5_000
    retry = importlib.import_module("google.cloud.storage.retry").DEFAULT_RETRY
    control(cloud, "POST", "faults", [{"kind": "cut", "method": "PUT", "subject": f"{bucket.name}/cut", "skip": 1}])
    blob = bucket.blob("cut", chunk_size=2 * QUANTUM)
    hurried = retry.with_delay(initial=0.01, maximum=0.1)
    blob.upload_from_file(BytesIO(data), if_generation_match=0, retry=hurried)
    assert [each for each in uploads(cloud, bucket) if each[0] == "PUT"].count(("PUT", 0)) == 1
    assert bucket.blob("cut").download_as_bytes() == data


def test_downloads_and_ranges(bucket: Any, errors: Any, tmp_path: Path) -> None:
    data = bytes(range(256)) * 40
    blob = bucket.blob("dir/näme with spaces & signs?#")
    blob.upload_from_string(data)
    assert blob.download_as_bytes(start=10, end=19) == data[10:20]
    assert blob.download_as_bytes(start=10_000) == data[10_000:]
    assert blob.download_as_bytes(start=-7) == data[-7:]
    blob.download_to_filename(str(tmp_path / "got"))
    assert (tmp_path / "got").read_bytes() == data
    with blob.open("rb", chunk_size=QUANTUM) as stream:
        stream.seek(100)
        assert stream.read(5) == data[100:105]
    with pytest.raises(errors.RequestRangeNotSatisfiable):
        blob.download_as_bytes(start=len(data) + 1)
    with pytest.raises(errors.NotFound):
        bucket.blob("nothing").download_as_bytes()
    assert not bucket.blob("nothing").exists()
    assert bucket.get_blob("nothing") is None


def test_listings(client: Any, bucket: Any) -> None:
    names = ["a/1", "a/2", "a/b/3", "c", "d/4", "e"]
    for name in names:
        bucket.blob(name).upload_from_string(b"x")
    assert [each.name for each in client.list_blobs(bucket)] == names
    assert [each.name for each in client.list_blobs(bucket, prefix="a/")] == names[:3]
    folders = client.list_blobs(bucket, delimiter="/")
    assert ([each.name for each in folders], folders.prefixes) == (["c", "e"], {"a/", "d/"})
    below = client.list_blobs(bucket, prefix="a/", delimiter="/")
    assert ([each.name for each in below], below.prefixes) == (["a/1", "a/2"], {"a/b/"})
    pages = [[each.name for each in page] for page in client.list_blobs(bucket, page_size=4).pages]
    assert pages == [names[:4], names[4:]]
    assert [each.name for each in client.list_blobs(bucket, max_results=3)] == names[:3]
    assert [each.name for each in client.list_blobs(bucket, start_offset="a/b", end_offset="d/4")] == ["a/b/3", "c"]
    assert [each.name for each in client.list_blobs(bucket, versions=True)] == names, "there are no others"


def test_preconditions(bucket: Any, errors: Any) -> None:
    blob = bucket.blob("once")
    blob.upload_from_string(b"first", if_generation_match=0)
    first = blob.generation
    with pytest.raises(errors.PreconditionFailed):
        bucket.blob("once").upload_from_string(b"second", if_generation_match=0)
    with pytest.raises(errors.PreconditionFailed):
        bucket.blob("once", chunk_size=QUANTUM).upload_from_file(BytesIO(b"resumable"), if_generation_match=0)
    assert bucket.blob("once").download_as_bytes(if_generation_match=first) == b"first"
    blob.upload_from_string(b"third", if_generation_match=first)
    assert blob.generation > first
    stale: list[Callable[[], object]] = [
        lambda: blob.upload_from_string(b"x", if_generation_match=first),
        lambda: bucket.blob("once").delete(if_generation_match=first),
        lambda: bucket.blob("once").reload(if_generation_match=first),
        lambda: bucket.copy_blob(blob, bucket, "copy", if_source_generation_match=first),
        lambda: bucket.blob("whole").compose([blob], if_generation_match=first),
        lambda: bucket.blob("whole").compose([blob], if_source_generation_match=[first]),
    ]
    for call in stale:
        with pytest.raises(errors.PreconditionFailed):
            call()
    blob.metadata = {"a": "b"}
    blob.patch(if_metageneration_match=1)
    with pytest.raises(errors.PreconditionFailed):
        blob.patch(if_metageneration_match=1)
    bucket.blob("once").delete(if_generation_match=blob.generation)
    assert list(bucket.list_blobs()) == []


def test_copies_and_compositions(bucket: Any, errors: Any, client: Any) -> None:
    one, two = bucket.blob("1"), bucket.blob("2")
    one.upload_from_string(b"one", content_type="text/x-one")
    two.upload_from_string(b"two")
    whole = bucket.blob("12")
    whole.content_type = "text/x-whole"
    whole.compose([one, two])
    assert (whole.download_as_bytes(), whole.content_type, whole.component_count) == (b"onetwo", "text/x-whole", 2)
    assert whole.md5_hash is None, "the service gives none for what was composed"
    assert bucket.get_blob("12").crc32c == whole.crc32c
    other = client.create_bucket("copies-elsewhere")
    copy = bucket.copy_blob(one, other, "copy")
    assert (copy.download_as_bytes(), copy.content_type) == (b"one", "text/x-one")
    rewritten = other.blob("rewritten")
    token, done, size = rewritten.rewrite(whole)
    assert (token, done, size) == (None, 6, 6)
    assert rewritten.download_as_bytes() == b"onetwo"
    bucket.rename_blob(one, "renamed")
    assert [each.name for each in bucket.list_blobs()] == ["12", "2", "renamed"]
    with pytest.raises(errors.NotFound):
        bucket.copy_blob(bucket.blob("nothing"), other, "x")


def test_what_is_said_of_an_object(bucket: Any) -> None:
    blob = bucket.blob("said")
    blob.metadata = {"who": "me, for 5 €", "gone": "soon"}
    blob.cache_control = "no-store"
    blob.content_disposition = "attachment"
    blob.upload_from_string(b"hello", content_type="text/plain")
    assert blob.download_as_bytes() == b"hello"
    blob.content_language = "en"
    blob.metadata = {"who": "you", "gone": None}
    blob.patch()
    found = bucket.get_blob("said")
    assert found.metadata == {"who": "you"}
    assert (found.content_type, found.size, found.metageneration) == ("text/plain", 5, 2)
    assert (found.cache_control, found.content_disposition, found.content_language) == ("no-store", "attachment", "en")
    assert (found.md5_hash, found.crc32c) == ("XUFAKrxLKna5cZ2REBfFkg==", "mnG7TA==")
    assert found.generation == blob.generation
    assert found.updated >= found.time_created
    assert found.storage_class == "STANDARD"


def test_deletions_one_by_one_and_in_a_batch(client: Any, bucket: Any, errors: Any) -> None:
    for name in ("1", "2", "3", "4"):
        bucket.blob(name).upload_from_string(b"x")
    bucket.blob("1").delete()
    with pytest.raises(errors.NotFound):
        bucket.blob("1").delete()
    with client.batch():
        bucket.blob("2").delete()
        bucket.blob("3").delete()
    assert [each.name for each in bucket.list_blobs()] == ["4"]
    with pytest.raises(errors.NotFound), client.batch():
        bucket.blob("2").delete()
    missed: list[Any] = []
    bucket.delete_blobs([bucket.blob("4"), bucket.blob("5")], on_error=missed.append)
    assert [each.name for each in missed] == ["5"]


def test_damage_is_found_by_the_client(bucket: Any, cloud: GoogleCloud, errors: Any) -> None:
    exceptions = importlib.import_module("google.cloud.storage.exceptions")
    bucket.blob("good").upload_from_string(b"hello")
    control(cloud, "POST", "faults", [{"kind": "damage", "method": "GET", "subject": f"{bucket.name}/good"}])
    with pytest.raises(exceptions.DataCorruption):
        bucket.blob("good").download_as_bytes(checksum="crc32c")
    data = b"hello" * 20_000  # so that the middle of the request is not in its headers
    for size, method in ((len(data), "POST"), (None, "PUT")):  # without a size it is resumable
        control(cloud, "POST", "faults", [{"kind": "damage", "method": method, "subject": f"{bucket.name}/bad"}])
        with pytest.raises(errors.BadRequest):
            bucket.blob("bad").upload_from_file(BytesIO(data), size=size, checksum="crc32c", retry=None)
        assert control(cloud, "GET", "faults")[-1]["struck"] == 1
    stored = {each["name"] for each in control(cloud, "GET", "history") if each["bucket"] == bucket.name}
    assert stored == {"good"}, "what does not match its checksum was never there"


def test_a_file_in_parts_by_several_threads(bucket: Any, tmp_path: Path) -> None:
    manager = importlib.import_module("google.cloud.storage.transfer_manager")
    data = bytes(range(256)) * 30_000
    (tmp_path / "file").write_bytes(data)
    threads = {"max_workers": 2, "worker_type": manager.THREAD}
    manager.upload_chunks_concurrently(str(tmp_path / "file"), bucket.blob("parts"), chunk_size=5 << 20, **threads)
    manager.download_chunks_concurrently(
        bucket.get_blob("parts"), str(tmp_path / "back"), chunk_size=3 << 20, **threads
    )
    assert (tmp_path / "back").read_bytes() == data
