"""Loading: what is read, what is left alone, and every way in which a checkpoint can be wrong, said with names."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np
import obstore
import pytest
from obstore.store import MemoryStore
from safetensors.numpy import load_file, save_file

from penstock.domain.admission import BadInput
from penstock.extract.checkpoint import INDEX
from penstock.extract.config import ModelConfig, load_config
from penstock.extract.model import Params
from penstock.extract.shapes import Kind, Site
from penstock.extract.weights import load_weights
from tests.unit.extract.reference import EXPECTED, GOLDEN

LAST = [Site(Kind.RESID_POST, 3)]
FIRST = [Site(Kind.RESID_POST, 0)]
Tensors = dict[str, np.ndarray[Any, Any]]


def copied(case: str, folder: Path, change: Callable[[Tensors], Tensors] = dict) -> Path:
    """A golden model in one file of its own, after a change of its tensors."""
    folder.mkdir(exist_ok=True)
    tensors: Tensors = {}
    for path in sorted((GOLDEN / case).glob("*.safetensors")):
        tensors |= load_file(path)
    save_file(change(tensors), folder / "model.safetensors")
    shutil.copy(GOLDEN / case / "config.json", folder)
    return folder


def load(folder: Path | str, sites: list[Site], dtype: str = "bfloat16", **changes: Any) -> Params:
    config = load_config(str(folder))
    return load_weights(str(folder), msgspec.structs.replace(config, **changes), sites, dtype)


def same(one: Params, other: Params) -> bool:
    alike = jax.tree.map(lambda a, b: a.dtype == b.dtype and bool((a == b).all()), one, other)
    return all(jax.tree.leaves(alike))


def test_one_file_and_several_give_the_same(tmp_path: Path) -> None:
    assert same(load(GOLDEN / "qwen3", LAST), load(copied("qwen3", tmp_path), LAST))


def test_layers_are_stacked_between_wanted_ones_and_none_is_loaded_behind() -> None:
    params = load(GOLDEN / "qwen2", [Site(Kind.MLP_OUT, 2)])
    assert [{name: part["q"].shape for name, part in enumerate(piece)} for piece in params["pieces"]] == [
        {0: (2, 32, 32)},
        {0: (1, 32, 32)},
    ]
    assert "final_norm" not in params
    assert "final_norm" in load(GOLDEN / "qwen2", [Site(Kind.FINAL_NORM)])


def test_files_without_a_wanted_tensor_are_not_opened(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(GOLDEN / "qwen3", folder)
    where = json.loads((folder / INDEX).read_text())["weight_map"]
    damaged = where["model.layers.3.mlp.up_proj.weight"]
    assert damaged not in {file for name, file in where.items() if ".layers.0." in name or "embed" in name}
    (folder / damaged).write_bytes(b"no tensors here")
    load(folder, FIRST)
    with pytest.raises(BadInput, match=f"{damaged}.* has a header of"):
        load(folder, LAST)


def test_weights_are_rounded_to_what_is_asked_for(tmp_path: Path) -> None:
    folder = copied("qwen2", tmp_path, lambda found: {name: each.astype(np.float32) for name, each in found.items()})
    assert same(load(folder, LAST), load(GOLDEN / "qwen2", LAST))
    assert {str(each.dtype) for each in jax.tree.leaves(load(folder, LAST, "float16"))} == {"float16"}
    with pytest.raises(BadInput, match="dtype: 'int8' is not supported; use one of float32, bfloat16, float16"):
        load(folder, LAST, "int8")


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    gone = ("model.layers.1.mlp.down_proj.weight", "model.layers.3.input_layernorm.weight")
    folder = copied("qwen2", tmp_path, lambda found: {name: each for name, each in found.items() if name not in gone})
    with pytest.raises(BadInput, match=f"^weights: '{gone[0]}' is missing in the files, as with {gone[1]};"):
        load(folder, FIRST)  # the second is behind what is read: the checkpoint is wrong all the same


def test_extra_tensors_are_named(tmp_path: Path) -> None:
    extra = "model.layers.4.mlp.up_proj.weight"
    folder = copied("qwen2", tmp_path, lambda found: found | {extra: np.zeros((48, 32), np.float32)})
    with pytest.raises(BadInput, match=f"^weights: '{extra}' is no tensor of the model that config.json describes;"):
        load(folder, FIRST)


def test_an_untied_head_must_be_there_and_a_tied_one_may_be(tmp_path: Path) -> None:
    head = {"lm_head.weight": np.zeros((64, 32), np.float32)}
    with pytest.raises(BadInput, match=r"'lm_head.weight' is missing in the files"):
        load(GOLDEN / "qwen2", FIRST, tied=False)
    load(copied("qwen2", tmp_path, lambda found: found | head), FIRST, tied=True)
    load(copied("qwen2", tmp_path, lambda found: found | head), FIRST, tied=False)


def test_names_without_prefix_old_tables_and_models_that_see(tmp_path: Path) -> None:
    def bare(found: Tensors) -> Tensors:
        old = {"layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
        return {name.removeprefix("model."): each for name, each in found.items() if "lm_head" not in name} | old

    def seeing(found: Tensors) -> Tensors:
        eye = {"vision_tower.patch.weight": np.ones(4, np.float32), "multi_modal_projector.w": np.ones(2, np.float32)}
        return {f"language_model.{name}": each for name, each in found.items()} | eye

    assert same(load(copied("llama3", tmp_path / "bare", bare), LAST), load(GOLDEN / "llama3", LAST))
    assert same(load(copied("gemma3", tmp_path / "seeing", seeing), LAST), load(GOLDEN / "gemma3", LAST))


def test_a_shape_that_is_not_the_configs_is_said_with_both(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    folder = copied("qwen2", tmp_path, lambda found: found | {name: found[name][:40]})
    with pytest.raises(BadInput, match=r"has the shape \[40, 32\], and by config.json it is \[48, 32\]"):
        load(folder, FIRST)


def test_a_dtype_that_holds_no_plain_weights_is_refused(tmp_path: Path) -> None:
    name = "model.embed_tokens.weight"
    folder = copied("qwen2", tmp_path, lambda found: found | {name: found[name].astype(np.int8)})
    with pytest.raises(BadInput, match="has the dtype I8, and only F32, F16, BF16 can be read"):
        load(folder, FIRST)


def header(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Write the file again with another header, which may be nonsense."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    found = json.loads(data[8:end])
    change(found)
    text = json.dumps(found).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])


@pytest.mark.parametrize("offsets", [[0, 10**12], [-4096, 0], [4096, 0], [0, 2]])
def test_offsets_that_cannot_be_are_refused(offsets: list[int], tmp_path: Path) -> None:
    name = "model.embed_tokens.weight"
    folder = copied("qwen2", tmp_path)
    header(folder, lambda found: found[name].update(data_offsets=offsets))
    with pytest.raises(BadInput, match=r"for model.embed_tokens.weight, which cannot be; the file is damaged"):
        load(folder, FIRST)


def test_a_file_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    folder = copied("qwen2", tmp_path)
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(BadInput, match="the file is damaged or cut short"):
        load(folder, LAST)


def test_an_index_that_names_absent_files_or_is_none_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(GOLDEN / "qwen3", folder)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(BadInput, match=r"names 1 files that are not in .*fetch model-00002-of-00003.safetensors"):
        load(folder, FIRST)
    (folder / INDEX).unlink()
    with pytest.raises(BadInput, match=r"has no model.safetensors.index.json and 2 safetensors files"):
        load(folder, FIRST)


def test_a_bucket_serves_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    for path in (GOLDEN / "qwen3").iterdir():
        obstore.put(store, f"models/small/{path.name}", path.read_bytes())
    obstore.put(store, "models/small/original/model.safetensors", b"another copy, which is not looked at")
    obstore.put(store, "models/small2/config.json", b"{}")
    monkeypatch.setattr("penstock.objects.inputs.store_of", lambda *_: store)
    for address in ("gs://bucket/models/small", "gs://bucket/models/small/"):
        assert load_config(address) == load_config(str(GOLDEN / "qwen3"))
        assert same(load(address, LAST), load(GOLDEN / "qwen3", LAST))


def test_the_expected_values_are_no_weights(tmp_path: Path) -> None:
    """The golden folders hold both."""
    config: ModelConfig = load_config(str(GOLDEN / "qwen2"))
    assert (GOLDEN / "qwen2" / EXPECTED).is_file()
    load_weights(str(GOLDEN / "qwen2"), config, FIRST, "float32")
