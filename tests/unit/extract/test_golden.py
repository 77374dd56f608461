"""The model of every family against golden tensors, which Hugging Face's code made (`tools/make_golden.py`).

Every site of every layer, documents padded and packed, float32 and bfloat16; needs neither torch nor transformers. And
that the comparison can fail: a wrong rotary scale, a forgotten window, a missing soft cap are seen.
"""

from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest
from safetensors import safe_open

from penstock.extract.config import LayerKind, ModelConfig, load_config
from penstock.extract.shapes import Kind, Site
from tests.unit.extract.reference import CASES, EXPECTED, GOLDEN, Floats, all_sites, documents
from tests.unit.extract.running import LAYOUTS, QUICKLY, Running, check_rounded, check_whole


def expected(case: str) -> tuple[dict[str, Floats], dict[str, float]]:
    """Values by site name, and Hugging Face's own errors in bfloat16."""
    with safe_open(GOLDEN / case / EXPECTED, "numpy") as file:
        values = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dictionary)
        errors = json.loads(file.metadata()["bfloat16_error"])
    values["resid_pre.0"] = values["embed"]
    layers = sum(name.startswith("resid_post") for name in values)
    values |= {f"resid_pre.{layer}": values[f"resid_post.{layer - 1}"] for layer in range(1, layers)}
    return values, errors


@pytest.mark.parametrize("case", CASES)
def test_float32_is_hugging_faces_to_1e_5(case: str) -> None:
    values, _ = expected(case)
    # Both ways of keeping what is read are also seen as they are compiled in earnest.
    model = Running(GOLDEN / case, "float32", options={} if case in ("qwen2", "gemma3") else QUICKLY)
    assert {site.name for site in model.sites} == set(values)
    for layout in LAYOUTS:
        check_whole(model(documents(), layout), values)


@pytest.mark.parametrize("case", CASES)
def test_bfloat16_is_no_worse_than_hugging_faces(case: str) -> None:
    values, errors = expected(case)
    model = Running(GOLDEN / case, "bfloat16", options=QUICKLY, fused=True)
    for layout in LAYOUTS:
        check_rounded(model(documents(), layout), values, errors)


def with_rope(config: ModelConfig, **changes: float) -> ModelConfig:
    """Changes of the rotary rule of layers without a window."""

    def changed(kind: LayerKind) -> LayerKind:
        rope = msgspec.structs.replace(kind.rope, **changes)
        return kind if kind.window else msgspec.structs.replace(kind, rope=rope)

    return msgspec.structs.replace(config, layers=tuple(changed(kind) for kind in config.layers))


def without_windows(config: ModelConfig) -> ModelConfig:
    layers = tuple(msgspec.structs.replace(kind, window=None) for kind in config.layers)
    return msgspec.structs.replace(config, layers=layers)


LLAMA3, GEMMA2, GEMMA3 = (load_config(str(GOLDEN / case)) for case in ("llama3", "gemma2", "gemma3"))


@pytest.mark.parametrize(
    ("case", "wrong", "site"),
    [
        ("llama3", with_rope(LLAMA3, factor=4.4), Site(Kind.ATTN_OUT, 0)),
        ("gemma3", with_rope(GEMMA3, factor=7.0), Site(Kind.ATTN_OUT, 5)),
        ("gemma2", without_windows(GEMMA2), Site(Kind.ATTN_OUT, 0)),
        ("gemma2", msgspec.structs.replace(GEMMA2, soft_cap=None), Site(Kind.ATTN_OUT, 0)),
        ("gemma2", msgspec.structs.replace(GEMMA2, embed_scale=5.0), Site(Kind.EMBED)),
    ],
    ids=["llama3's rotary factor", "gemma3's rotary factor", "windows", "soft cap", "embedding scale"],
)
def test_what_is_computed_wrongly_is_seen(case: str, wrong: ModelConfig, site: Site) -> None:
    values, _ = expected(case)
    found = Running(GOLDEN / case, "float32", sites=[site], config=wrong, options=QUICKLY)(documents(), "packed")
    with pytest.raises(AssertionError, match="off by more than"):
        check_whole(found, values)


def test_what_is_read_does_not_change_with_what_else_is() -> None:
    """Unread layers go through scans in periods; what comes out is the same as with every layer read."""
    values, _ = expected("gemma3")
    for sites in ([Site(Kind.RESID_POST, 6)], [Site(Kind.MLP_OUT, 2), Site(Kind.HEAD_OUT, 4)], [Site(Kind.FINAL_NORM)]):
        check_whole(Running(GOLDEN / "gemma3", "float32", sites=sites, options=QUICKLY)(documents(), "packed"), values)


def test_the_golden_values_are_worth_comparing_with() -> None:
    """Neither flat nor empty: a token's vector says which token it is, and the layers add to it."""
    for case in CASES:
        values, errors = expected(case)
        assert (
            set(errors) == set(values) == {site.name for site in all_sites(len(load_config(str(GOLDEN / case)).layers))}
        )
        last = values[max(name for name in values if name.startswith("resid_post"))]
        assert np.isfinite(last).all()
        assert np.linalg.norm(last - values["embed"]) > 0.5 * np.linalg.norm(values["embed"])
        assert all(0 < errors[name] < 0.1 for name in errors if name not in ("embed", "resid_pre.0")), errors
