"""Which bucket an address means."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.domain.admission import BadInput
from penstock.objects.bucket import BucketObjects, StampedObjects
from penstock.objects.directory import DirectoryObjects
from penstock.wiring.roots import open_objects, open_regions


def test_paths_and_file_addresses_are_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for address in (str(tmp_path / "a b"), (tmp_path / "a b").as_uri(), "a b", f"file://localhost{tmp_path}/a%20b"):
        objects, shown = open_objects(address)
        assert isinstance(objects, DirectoryObjects)
        assert objects.root == tmp_path / "a b"
        assert shown == (tmp_path / "a b").as_uri()


@pytest.mark.parametrize(
    "address", ["ftp://bucket/x", "http://x", "file://elsewhere/x", "gs://", "s3:///x", "GS://bucket/x", " gs://b/x"]
)
def test_what_cannot_be_used_is_refused_in_one_line(address: str) -> None:
    with pytest.raises(BadInput, match=r"^root: "):
        open_objects(address)


def test_buckets_are_opened_by_their_scheme(caplog: pytest.LogCaptureFixture) -> None:
    """A service that does not answer just now is no reason not to start."""
    nowhere = "http://127.0.0.1:9"
    credential = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    given = {"STORAGE_EMULATOR_HOST": nowhere, "AWS_ENDPOINT_URL": nowhere, **credential}
    for address, kind in (("gs://bucket/team/", BucketObjects), ("s3://bucket", StampedObjects)):
        objects, shown = open_objects(address, given)
        assert type(objects) is kind
        assert shown == address.rstrip("/")
    assert [record.message.partition(":")[0] for record in caplog.records] == ["the bucket does not answer yet"] * 2


def test_regions_have_roots_of_their_own_or_the_main_one(tmp_path: Path) -> None:
    _, main = open_objects(str(tmp_path / "main"))
    named = [("us-central1", str(tmp_path / "main")), ("europe-west4", "/srv/eu"), ("europe-west1", "/srv/eu")]
    region, roots = open_regions(named, main)
    assert region == "us-central1"
    assert roots.keys() == {"europe-west4", "europe-west1"}
    assert roots["europe-west4"] is roots["europe-west1"], "one root is one, whoever shares it"
    assert open_regions([], main) == ("", {})
    with pytest.raises(BadInput, match=r"^regions.us-east1: "):
        open_regions([("us-east1", "ftp://x")], main)
