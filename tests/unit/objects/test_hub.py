"""Models of the Hub: pinned to a commit, fetched once, resumed after a cut, believed only with the right hash."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from penstock.domain.admission import BadInput
from penstock.objects import hub
from penstock.objects.inputs import (
    Input,
    find_inputs,
    is_folder,
    normal_address,
    open_input,
    read_beginning,
    read_input,
)
from penstock.ports.objects import Damaged, ObjectsError
from tests.unit.objects.fake_hub import FakeHub, serving

MODEL = "org/tiny-1.5"
WEIGHTS = bytes(range(256)) * 40
FILES = {
    "config.json": b'{"model_type": "qwen2"}',
    "model.safetensors": WEIGHTS,
    "original/model.safetensors": WEIGHTS,
    ".gitattributes": b"x",
}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setattr(hub, "PAUSE_S", 0.001)
    with serving() as known:
        known.add(MODEL, FILES)
        yield known


@pytest.fixture
def env(fake: FakeHub, tmp_path: Path) -> dict[str, str]:
    return {"HF_ENDPOINT": fake.endpoint + "/", "HF_HOME": str(tmp_path / "hf"), "HF_TOKEN": "hf_secret"}


def weights(env: dict[str, str]) -> bytes:
    (found,) = find_inputs(f"{hub.pin('model', MODEL, env)}/model.safetensors", env)
    with open_input(found, env) as file:
        return file.read()


def test_a_name_is_pinned_to_the_commit_it_means(fake: FakeHub, env: dict[str, str]) -> None:
    commit = fake.refs[MODEL, "main"]
    other = fake.add(MODEL, {"config.json": b"{}"}, revision="refs/pr/1")
    assert hub.pin("model", MODEL, env) == f"hf://{MODEL}@{commit}"
    assert hub.pin("model", f"hf://{MODEL}@refs/pr/1", env) == f"hf://{MODEL}@{other}"
    assert hub.pin("model", f"{MODEL}@{commit}", env) == f"hf://{MODEL}@{commit}"
    assert [hub.is_name(text) for text in (MODEL, "org/name@v1", "name", "a/b/c", "/a/b", "../b", "a/b@")] == [
        True, True, False, False, False, False, False,
    ]  # fmt: skip


def test_the_files_of_a_commit_are_inputs_like_others(fake: FakeHub, env: dict[str, str]) -> None:
    address = hub.pin("model", MODEL, env)
    found = find_inputs(f"{address}/", env)
    assert [each.address.removeprefix(address) for each in found] == [
        "/config.json",
        "/model.safetensors",
        "/original/model.safetensors",
    ]
    assert [each.size for each in found] == [23, len(WEIGHTS), len(WEIGHTS)]
    assert normal_address(f"{address}/") == address
    assert (is_folder(address), is_folder(f"{address}/config.json")) == (True, False)
    assert read_input(f"{address}/config.json", env, at_most=100) == FILES["config.json"]
    assert read_input(f"{address}/absent.json", env, at_most=100) is None
    assert not fake.of("store"), "a listing fetches no weights"


def test_a_file_is_fetched_once_and_lies_where_hugging_face_looks(fake: FakeHub, env: dict[str, str]) -> None:
    with ThreadPoolExecutor(4) as threads:
        assert set(threads.map(lambda _: weights(env), range(4))) == {WEIGHTS}
    assert len(fake.of("store")) == 1
    commit = fake.refs[MODEL, "main"]
    snapshot = Path(env["HF_HOME"]) / "hub" / "models--org--tiny-1.5" / "snapshots" / commit
    assert (snapshot / "model.safetensors").is_symlink()
    assert (snapshot / "model.safetensors").resolve().parent.name == "blobs"
    address = f"hf://{MODEL}@{commit}"
    fake.files.clear()  # from here on the Hub knows nothing
    hub._files.cache_clear()
    assert read_input(f"{address}/model.safetensors", env, at_most=1 << 20) == WEIGHTS
    assert hub.pin("model", f"{MODEL}@{commit}", env) == address, "a commit that is here needs no network"


def test_a_cache_that_others_filled_is_read_though_it_cannot_be_written(
    fake: FakeHub, env: dict[str, str], tmp_path: Path
) -> None:
    commit = fake.refs[MODEL, "main"]
    own = {**env, "HF_HUB_CACHE": str(tmp_path / "shared")}
    snapshot = tmp_path / "shared" / "models--org--tiny-1.5" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").write_bytes(WEIGHTS)
    (tmp_path / "shared" / "models--org--tiny-1.5" / "penstock").write_text("no folder can be made here")
    (tmp_path / "shared" / ".locks").write_text("nor here")
    assert weights(own) == WEIGHTS
    assert not fake.of("store")
    with pytest.raises(BadInput, match=r"HF_HUB_CACHE: .* cannot be written"):
        read_input(f"hf://{MODEL}@{commit}/config.json", own, at_most=100)


def test_the_token_goes_to_the_hub_and_to_nobody_else(fake: FakeHub, env: dict[str, str]) -> None:
    fake.gated.add(MODEL)
    assert weights(env) == WEIGHTS
    assert all(each.headers["authorization"] == "Bearer hf_secret" for each in fake.of("hub"))
    assert not any("authorization" in each.headers for each in fake.of("store"))


def test_a_download_that_was_cut_goes_on_where_it_ended(fake: FakeHub, env: dict[str, str]) -> None:
    fake.cuts = [4000, 0, 0, 3000]
    assert weights(env) == WEIGHTS
    starts = [each.headers.get("range", "") for each in fake.of("store")]
    assert starts == ["", "bytes=4000-", "bytes=4000-", "bytes=4000-", "bytes=7000-"]


def test_another_process_goes_on_with_what_one_left(
    fake: FakeHub, env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.cuts = [4000, *[0] * hub.TRIES]
    with pytest.raises(ObjectsError, match="cannot be reached from here"):
        weights(env)
    assert len(fake.of("store")) == 1 + hub.TRIES
    assert weights(env) == WEIGHTS
    assert fake.of("store")[-1].headers["range"] == "bytes=4000-"


def test_who_does_not_know_ranges_sends_it_all_again(fake: FakeHub, env: dict[str, str]) -> None:
    fake.ignores_ranges, fake.cuts = True, [4000]
    assert weights(env) == WEIGHTS


@pytest.mark.parametrize("ignores", [False, True])
def test_the_beginning_of_a_file_is_had_without_the_rest(ignores: bool, fake: FakeHub, env: dict[str, str]) -> None:
    fake.ignores_ranges = ignores
    (file,) = find_inputs(f"{hub.pin('model', MODEL, env)}/model.safetensors", env)
    assert read_beginning(file, 100, env) == WEIGHTS[:100]
    assert [each.headers.get("range") for each in fake.of("store")] == ["bytes=0-99"]
    assert weights(env) == WEIGHTS
    count = len(fake.of("store"))
    assert read_beginning(file, len(WEIGHTS) + 5, env) == WEIGHTS
    assert len(fake.of("store")) == count, "it lies here by now"


def test_a_busy_hub_is_asked_again(fake: FakeHub, env: dict[str, str]) -> None:
    fake.busy = 3
    assert weights(env) == WEIGHTS


def test_wrong_bytes_are_fetched_anew_and_never_believed(fake: FakeHub, env: dict[str, str]) -> None:
    fake.damaged = 1
    assert weights(env) == WEIGHTS
    fake.add("org/other", {"model.safetensors": WEIGHTS + b"x"})
    fake.damaged = 2
    (found,) = find_inputs(f"{hub.pin('model', 'org/other', env)}/", env)
    with pytest.raises(Damaged, match="not those that the Hub names"):
        open_input(found, env)
    assert not list((Path(env["HF_HOME"]) / "hub" / "models--org--other" / "blobs").iterdir())


def test_what_an_earlier_process_left_damaged_is_thrown_away(fake: FakeHub, env: dict[str, str]) -> None:
    (found,) = find_inputs(f"{hub.pin('model', MODEL, env)}/model.safetensors", env)
    blobs = Path(env["HF_HOME"]) / "hub" / "models--org--tiny-1.5" / "blobs"
    blobs.mkdir(parents=True)
    part = blobs / f"{found.tag.partition(':')[2]}.incomplete"
    part.write_bytes(b"?" * 100)
    assert weights(env) == WEIGHTS
    part.write_bytes(WEIGHTS * 2)
    (blobs / found.tag.partition(":")[2]).unlink()
    assert weights(env) == WEIGHTS


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("org/none", "no model on the Hub that may be read (401)"),
        (f"{MODEL}@v9", "has no such revision on the Hub"),
        ("hf://one", "is no name of a model on the Hub"),
    ],
)
def test_a_name_that_means_nothing_is_refused(text: str, said: str, env: dict[str, str]) -> None:
    with pytest.raises(BadInput) as refused:
        hub.pin("model", text, env)
    assert said in str(refused.value)
    assert "hf_secret" not in str(refused.value)


def test_a_gated_model_says_what_to_do(fake: FakeHub, env: dict[str, str]) -> None:
    fake.gated.add(MODEL)
    with pytest.raises(BadInput, match=r"is gated: .*/org/tiny-1\.5 has the terms .*set HF_TOKEN"):
        weights({name: text for name, text in env.items() if name != "HF_TOKEN"})


def test_names_that_lead_out_of_the_folder_are_nobodys(fake: FakeHub, env: dict[str, str]) -> None:
    fake.add("org/evil", {"../../x": b"x", "a//b": b"x", "config.json": b"{}"})
    found = find_inputs(f"{hub.pin('model', 'org/evil', env)}/", env)
    assert [each.address.rpartition("/")[2] for each in found] == ["config.json"]


def test_without_a_network_one_line_says_so(tmp_path: Path) -> None:
    env = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_CACHE": str(tmp_path)}  # nobody listens there
    with pytest.raises(ObjectsError, match=r"http://127\.0\.0\.1:9 cannot be reached from here .* HF_ENDPOINT"):
        hub.pin("model", MODEL, env)
    with pytest.raises(BadInput, match="HF_ENDPOINT: 'hub' is no address"):
        hub.pin("model", MODEL, {**env, "HF_ENDPOINT": "hub"})


def test_the_cache_is_where_hugging_face_has_it(tmp_path: Path) -> None:
    assert hub.cache({"HF_HUB_CACHE": "/c", "HF_HOME": "/h"}) == Path("/c")
    assert hub.cache({"HF_HOME": "/h"}) == Path("/h/hub")
    assert hub.cache({"HOME": "/root"}) == Path("/root/.cache/huggingface/hub")
    assert hub.cache(os.environ).is_absolute()


def test_an_address_without_a_commit_is_refused(env: dict[str, str]) -> None:
    with pytest.raises(BadInput, match="names no commit"):
        find_inputs(f"hf://{MODEL}/config.json", env)


@pytest.mark.parametrize("path", ["../../../x", "a/../../b", "a//b", "./a", "a\x00"])
def test_an_address_that_leads_out_of_the_cache_is_refused(fake: FakeHub, env: dict[str, str], path: str) -> None:
    """A plan, which somebody else may have written, names files by such addresses, and with any hash."""
    address = f"hf://{MODEL}@{fake.refs[MODEL, 'main']}/{path}"
    with pytest.raises(BadInput, match="names no commit"):
        open_input(Input(address, 1, f"sha1:{'0' * 40}"), env)
    assert fake.asked == []


def test_a_redirect_that_never_ends_is_an_error_of_the_hub(
    fake: FakeHub, env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.store = f"{fake.endpoint}/{MODEL}/resolve/{fake.refs[MODEL, 'main']}/model.safetensors?to="
    monkeypatch.setattr(hub, "TRIES", 1)
    with pytest.raises(ObjectsError, match=r"cannot be reached from here .*redirect"):
        weights(env)
