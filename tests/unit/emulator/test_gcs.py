"""The emulated Cloud Storage, call by call: both dialects, preconditions, ranges, pages, uploads in several requests.

What obstore does with it is in the objects contract; here is what other clients need and what faults do.
"""

from __future__ import annotations

import base64
import hashlib

import msgspec
import pytest

from penstock.emulator.gcs import GcsEmulator
from penstock.emulator.gcs_faults import Fault
from penstock.emulator.gcs_uploads import QUANTUM
from tests.unit.emulator.calls import BUCKET, call, upload

OBJECTS = f"/storage/v1/b/{BUCKET}/o"
RESUMABLE = f"/upload/storage/v1/b/{BUCKET}/o?uploadType=resumable"


@pytest.fixture
def gcs() -> GcsEmulator:
    return GcsEmulator([BUCKET], lambda: 1_800_000_000.5)


def test_an_object_is_the_same_in_both_dialects(gcs: GcsEmulator) -> None:
    made = upload(gcs, "a%2Fb", b"abc").json()
    assert made["name"] == "a/b"
    assert made["md5Hash"] == base64.b64encode(hashlib.md5(b"abc", usedforsecurity=False).digest()).decode()
    assert made["crc32c"] == "Nks/tw=="
    assert made["timeCreated"] == "2027-01-15T08:00:00.500Z"
    for path in (f"/{BUCKET}/a%2Fb", f"/{BUCKET}/a/b", f"{OBJECTS}/a%2Fb?alt=media"):
        got = call(gcs, "GET", path)
        assert (got.status, got.body) == (200, b"abc")
        assert got.headers["x-goog-generation"] == made["generation"]
        assert got.headers["etag"] == f'"{hashlib.md5(b"abc", usedforsecurity=False).hexdigest()}"'
        assert got.headers["x-goog-hash"] == f"crc32c={made['crc32c']},md5={made['md5Hash']}"
    head = call(gcs, "HEAD", f"/{BUCKET}/a/b")
    assert (head.status, head.body, head.headers["content-length"]) == (200, b"", "3")


def test_generations_rise_and_conditions_are_by_them(gcs: GcsEmulator) -> None:
    first = upload(gcs, "x", b"1", "&ifGenerationMatch=0").json()["generation"]
    again = upload(gcs, "x", b"2", "&ifGenerationMatch=0")
    assert (again.status, again.json()["error"]["errors"][0]["reason"]) == (412, "conditionNotMet")
    taken = call(gcs, "PUT", f"/{BUCKET}/x", b"2", {"x-goog-if-generation-match": "0"})
    assert taken.status == 412
    assert b"<Code>PreconditionFailed</Code>" in taken.body
    second = call(gcs, "PUT", f"/{BUCKET}/x", b"2", {"x-goog-if-generation-match": first})
    assert int(second.headers["x-goog-generation"]) > int(first)
    assert call(gcs, "DELETE", f"{OBJECTS}/x?ifGenerationMatch={first}").status == 412
    assert call(gcs, "GET", f"{OBJECTS}/x?ifGenerationNotMatch={second.headers['x-goog-generation']}").status == 304
    assert call(gcs, "GET", f"{OBJECTS}/x?generation={first}").status == 404
    assert call(gcs, "GET", f"{OBJECTS}/x?ifMetagenerationMatch=2").status == 412
    assert call(gcs, "DELETE", f"/{BUCKET}/x").status == 204
    assert call(gcs, "DELETE", f"/{BUCKET}/x").status == 404
    third = upload(gcs, "x", b"3", "&ifGenerationMatch=0").json()["generation"]
    assert int(third) > int(second.headers["x-goog-generation"])
    assert [each.verb for each in gcs.buckets.history] == ["put", "put", "delete", "put"]


@pytest.mark.parametrize(
    ("asked", "status", "got", "said"),
    [
        ("bytes=2-4", 206, b"234", "bytes 2-4/10"),
        ("bytes=7-", 206, b"789", "bytes 7-9/10"),
        ("bytes=-2", 206, b"89", "bytes 8-9/10"),
        ("bytes=8-100", 206, b"89", "bytes 8-9/10"),
        ("bytes=10-", 416, None, None),
        ("bytes=0-1,4-5", 200, b"0123456789", None),
    ],
)
def test_ranges(gcs: GcsEmulator, asked: str, status: int, got: bytes | None, said: str | None) -> None:
    upload(gcs, "x", b"0123456789")
    for path in (f"/{BUCKET}/x", f"/download{OBJECTS}/x"):
        answer = call(gcs, "GET", path, headers={"range": asked})
        assert answer.status == status
        assert got is None or answer.body == got
        assert answer.headers.get("content-range") == said


def test_pages_by_prefix_and_delimiter(gcs: GcsEmulator) -> None:
    names = ["a", "b/1", "b/2", "b/c/3", "b0", "c/4"]
    for name in names:
        upload(gcs, name, b"")
    for most in (1, 2, 3, 100):
        items: list[str] = []
        prefixes: list[str] = []
        token = ""
        while True:
            page = call(gcs, "GET", f"{OBJECTS}?delimiter=/&maxResults={most}{token}").json()
            items += [each["name"] for each in page.get("items", ())]
            prefixes += page.get("prefixes", ())
            if "nextPageToken" not in page:
                break
            token = f"&pageToken={page['nextPageToken']}"
        assert (items, prefixes) == (["a", "b0"], ["b/", "c/"])
    inner = call(gcs, "GET", f"{OBJECTS}?delimiter=/&prefix=b/").json()
    assert ([each["name"] for each in inner["items"]], inner["prefixes"]) == (["b/1", "b/2"], ["b/c/"])
    between = call(gcs, "GET", f"{OBJECTS}?startOffset=b/2&endOffset=b0").json()
    assert [each["name"] for each in between["items"]] == ["b/2", "b/c/3"]
    xml = call(gcs, "GET", f"/{BUCKET}?list-type=2&start-after=b/c&max-keys=2").body.decode()
    assert "<Key>b/c/3</Key>" in xml
    assert "<Key>b0</Key>" in xml
    assert "<IsTruncated>true</IsTruncated>" in xml
    assert call(gcs, "GET", f"{OBJECTS}?pageToken=nonsense").status == 400


def test_a_resumable_upload_goes_on_where_it_was_cut(gcs: GcsEmulator) -> None:
    """O1: what had arrived is kept, the client asks how far it is, and sends the rest."""
    data = bytes(range(256)) * (QUANTUM * 3 // 256)
    begun = call(gcs, "POST", f"{RESUMABLE}&ifGenerationMatch=0", b'{"name": "big", "metadata": {"k": "v"}}')
    place = begun.headers["location"].removeprefix("http://here")
    gcs.faults.plant([Fault("cut", f"{BUCKET}/big")])
    assert call(gcs, "PUT", place, data, {"content-range": f"bytes 0-{len(data) - 1}/{len(data)}"}).status == 0
    asked = call(gcs, "PUT", place, b"", {"content-range": f"bytes */{len(data)}"})
    assert (asked.status, asked.headers["range"]) == (308, f"bytes=0-{QUANTUM - 1}")
    gap = call(gcs, "PUT", place, data[-5:], {"content-range": f"bytes {len(data) - 5}-{len(data) - 1}/{len(data)}"})
    assert gap.status == 400
    gcs.faults.plant([Fault("lose", f"{BUCKET}/big")])
    rest = {"content-range": f"bytes {QUANTUM}-{len(data) - 1}/{len(data)}"}
    assert call(gcs, "PUT", place, data[QUANTUM:], rest).status == 0
    done = call(gcs, "PUT", place, b"", {"content-range": f"bytes */{len(data)}"})
    assert (done.status, done.json()["size"], done.json()["metadata"]) == (200, str(len(data)), {"k": "v"})
    assert call(gcs, "GET", f"/{BUCKET}/big").body == data
    assert len(gcs.buckets.history) == 1


def test_a_resumable_upload_meets_its_condition_at_the_end(gcs: GcsEmulator) -> None:
    """O2: two writers of one shard; both began when it was not there."""
    places = [
        call(gcs, "POST", f"{RESUMABLE}&name=shard&ifGenerationMatch=0").headers["location"].removeprefix("http://here")
        for _ in range(2)
    ]
    assert [call(gcs, "PUT", place, f"writer {place}".encode()).status for place in places] == [200, 412]
    assert call(gcs, "GET", f"/{BUCKET}/shard").body == f"writer {places[0]}".encode()


def test_a_multipart_upload_keeps_every_byte(gcs: GcsEmulator) -> None:
    data = b"\r\n--not the mark\r\n\x00\xff\n\r\n\r\n"
    body = (
        b'--mark\r\ncontent-type: application/json\r\n\r\n{"name": "m", "metadata": {"k": "v"}}\r\n'
        b"--mark\r\ncontent-type: text/x\r\n\r\n" + data + b"\r\n--mark--\r\n"
    )
    path = f"/upload/storage/v1/b/{BUCKET}/o?uploadType=multipart"
    made = call(gcs, "POST", path, body, {"content-type": "multipart/related; boundary=mark"})
    assert (made.json()["contentType"], made.json()["metadata"]) == ("text/x", {"k": "v"})
    assert call(gcs, "GET", f"/{BUCKET}/m").body == data


def test_an_upload_in_parts_is_put_together_in_order(gcs: GcsEmulator) -> None:
    begun = call(gcs, "POST", f"/{BUCKET}/p?uploads", b"", {"x-goog-meta-k": "v"}).body.decode()
    id = begun.partition("<UploadId>")[2].partition("<")[0]
    for number, data in ((2, b"two"), (1, b"one")):
        assert call(gcs, "PUT", f"/{BUCKET}/p?partNumber={number}&uploadId={id}", data).headers["etag"]
    wish = b"<C><Part><PartNumber>1</PartNumber></Part><Part><PartNumber>2</PartNumber></Part></C>"
    assert call(gcs, "POST", f"/{BUCKET}/p?uploadId={id}", wish.replace(b"2", b"3")).status == 400
    assert call(gcs, "POST", f"/{BUCKET}/p?uploadId={id}", wish).status == 200
    got = call(gcs, "GET", f"/{BUCKET}/p")
    assert (got.body, got.headers["x-goog-meta-k"]) == (b"onetwo", "v")
    assert "md5" not in got.headers["x-goog-hash"]
    assert call(gcs, "POST", f"/{BUCKET}/p?uploadId={id}", wish).status == 404


def test_copies_and_compositions(gcs: GcsEmulator) -> None:
    upload(gcs, "one", b"1")
    upload(gcs, "two", b"2")
    wish = b'{"sourceObjects": [{"name": "one"}, {"name": "two"}]}'
    assert call(gcs, "POST", f"{OBJECTS}/both/compose?ifGenerationMatch=0", wish).json()["size"] == "2"
    assert call(gcs, "POST", f"{OBJECTS}/both/compose?ifGenerationMatch=0", wish).status == 412
    moved = call(gcs, "POST", f"{OBJECTS}/both/rewriteTo/b/{BUCKET}/o/d%2Fthere").json()
    assert (moved["done"], moved["resource"]["name"]) == (True, "d/there")
    copied = {"x-goog-copy-source": f"{BUCKET}/d%2Fthere", "x-goog-if-generation-match": "0"}
    assert [call(gcs, "PUT", f"/{BUCKET}/last", b"", copied).status for _ in range(2)] == [200, 412]
    assert call(gcs, "GET", f"/{BUCKET}/last").body == b"12"


def test_a_body_that_is_not_what_was_hashed_is_refused(gcs: GcsEmulator) -> None:
    """O1: a checksum that does not match."""
    digest = base64.b64encode(hashlib.md5(b"abc", usedforsecurity=False).digest()).decode()
    headers = {"content-md5": digest, "x-goog-hash": "crc32c=Nks/tw=="}
    assert call(gcs, "PUT", f"/{BUCKET}/x", b"abc", headers).status == 200
    gcs.faults.plant([Fault("damage", f"{BUCKET}/x", "PUT")])
    refused = call(gcs, "PUT", f"/{BUCKET}/x", b"abc", headers)
    assert refused.status == 400
    assert b"BadDigest" in refused.body
    assert call(gcs, "GET", f"/{BUCKET}/x").body == b"abc"


def test_a_batch_does_each_call(gcs: GcsEmulator) -> None:
    upload(gcs, "x", b"")
    parts = "".join(
        f"--b\r\nContent-Type: application/http\r\nContent-ID: <{name}>\r\n\r\n"
        f"DELETE {OBJECTS}/{name} HTTP/1.1\r\n\r\n\r\n"
        for name in ("x", "y")
    )
    headers = {"content-type": "multipart/mixed; boundary=b"}
    answer = call(gcs, "POST", "/batch/storage/v1", f"{parts}--b--\r\n".encode(), headers).body.decode()
    assert answer.count("HTTP/1.1 204") == 1
    assert answer.count("HTTP/1.1 404") == 1
    assert call(gcs, "GET", f"{OBJECTS}/x").status == 404


def test_buckets(gcs: GcsEmulator) -> None:
    assert call(gcs, "POST", "/storage/v1/b?project=p", b'{"name": "other"}').json()["name"] == "other"
    assert call(gcs, "POST", "/storage/v1/b?project=p", b'{"name": "other"}').status == 409
    assert call(gcs, "POST", "/storage/v1/b?project=p", b'{"name": "No"}').status == 400
    assert [each["name"] for each in call(gcs, "GET", "/storage/v1/b?project=p").json()["items"]] == [BUCKET, "other"]
    assert call(gcs, "DELETE", "/storage/v1/b/other").status == 204
    assert call(gcs, "GET", "/storage/v1/b/other").status == 404
    assert b"NoSuchBucket" in call(gcs, "GET", "/other/x").body
    upload(gcs, "x", b"")
    assert call(gcs, "DELETE", f"/{BUCKET}").status == 409


def test_metadata_changes_without_a_new_generation(gcs: GcsEmulator) -> None:
    made = upload(gcs, "x", b"1").json()
    changed = call(gcs, "PATCH", f"{OBJECTS}/x", b'{"metadata": {"a": "1", "b": "2"}, "contentType": "text/x"}').json()
    assert (changed["generation"], changed["metageneration"]) == (made["generation"], "2")
    less = call(gcs, "PATCH", f"{OBJECTS}/x?ifMetagenerationMatch=2", b'{"metadata": {"a": null}}').json()
    assert (less["metadata"], less["contentType"]) == ({"b": "2"}, "text/x")
    assert call(gcs, "PATCH", f"{OBJECTS}/x?ifMetagenerationMatch=2", b'{"metadata": {"a": null}}').status == 412


@pytest.mark.parametrize(
    ("method", "target", "body"),
    [
        ("POST", f"/upload/storage/v1/b/{BUCKET}/o?uploadType=what&name=x", b""),
        ("POST", f"/upload/storage/v1/b/{BUCKET}/o?uploadType=media", b""),
        ("POST", f"/upload/storage/v1/b/{BUCKET}/o?uploadType=multipart", b"no mark"),
        ("POST", RESUMABLE, b"{"),
        ("POST", f"{OBJECTS}/x/compose", b"[]"),
        ("PUT", f"/{BUCKET}/x?uploadId=none&partNumber=first", b""),
        ("GET", f"{OBJECTS}?maxResults=many", b""),
        ("GET", f"/{BUCKET}?list-type=1", b""),
        ("PUT", f"/{BUCKET}/x%0Ay", b""),
    ],
)
def test_what_cannot_be_read_is_refused_in_words(gcs: GcsEmulator, method: str, target: str, body: bytes) -> None:
    answer = call(gcs, method, target, body)
    assert answer.status == 400
    assert answer.body
    assert gcs.buckets.history == []


def test_faults_are_aimed_counted_and_cleared(gcs: GcsEmulator) -> None:
    fault = {
        "kind": "refuse",
        "subject": f"{BUCKET}/hot",
        "method": "PUT",
        "skip": 1,
        "status": 429,
        "retry_after_s": 7,
    }
    assert call(gcs, "POST", "/_emulator/faults", msgspec.json.encode([fault])).status == 200
    answers = [call(gcs, "PUT", f"/{BUCKET}/{name}", b"") for name in ("hot", "cold", "hot", "hot")]
    assert [answer.status for answer in answers] == [200, 200, 429, 200]
    assert answers[2].headers["retry-after"] == "7"
    assert call(gcs, "GET", "/_emulator/faults").json()[0]["struck"] == 1
    assert [each["name"] for each in call(gcs, "GET", "/_emulator/history").json()] == ["hot", "cold", "hot"]
    assert call(gcs, "DELETE", "/_emulator/faults").status == 204
    assert call(gcs, "GET", "/_emulator/faults").json() == []
    wrong = call(gcs, "POST", "/_emulator/faults", b'[{"kind": "explode"}]')
    assert wrong.status == 400
    assert "explode" in wrong.json()["error"]["message"]
