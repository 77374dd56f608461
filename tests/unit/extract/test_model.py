"""The step: it computes nothing that is not asked for, keeps documents apart, and keeps many sites in one program."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from penstock.domain.admission import BadInput
from penstock.extract import capture
from penstock.extract.attention import plain
from penstock.extract.config import load_config
from penstock.extract.model import make_step
from penstock.extract.shapes import Kind, PackedBatch, Site
from penstock.extract.weights import load_weights
from tests.unit.extract.reference import GOLDEN, ROWS, WIDTH, all_sites, documents, packed, rows_of
from tests.unit.extract.running import QUICKLY, Running

PER_LAYER = 7  #: products of matrices: five with weights (keys and values, gate and up share one), two in the attention


def products(jaxpr: Any) -> int:
    """How many products of matrices a program makes; those in a loop count as often as it runs."""
    count = 0
    for equation in jaxpr.eqns:
        times = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
        count += equation.primitive.name == "dot_general"
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                count += times * products(inner)
    return count


def traced(case: str, *sites: Site) -> Any:
    config = load_config(str(GOLDEN / case))
    params = load_weights(str(GOLDEN / case), config, sites, "float32")
    step = make_step(config, sites, attention=plain(), dtype="float32")
    given = np.zeros((ROWS, WIDTH), np.int32)
    return jax.make_jaxpr(step)(params, given, given, given).jaxpr


@pytest.mark.parametrize(
    ("site", "count"),
    [
        (Site(Kind.EMBED), 0),
        (Site(Kind.RESID_PRE, 0), 0),
        (Site(Kind.RESID_PRE, 2), 2 * PER_LAYER),
        (Site(Kind.HEAD_OUT, 2), 2 * PER_LAYER + 4),
        (Site(Kind.ATTN_OUT, 2), 2 * PER_LAYER + 5),
        (Site(Kind.MLP_OUT, 2), 3 * PER_LAYER),
        (Site(Kind.RESID_POST, 2), 3 * PER_LAYER),
        (Site(Kind.FINAL_NORM), 4 * PER_LAYER),
    ],
    ids=str,
)
def test_nothing_is_computed_behind_what_is_read(site: Site, count: int) -> None:
    assert products(traced("qwen2", site)) == count


def test_a_buffered_program_stops_there_too() -> None:
    sites = [Site(Kind.ATTN_OUT, layer) for layer in range(6)]
    assert products(traced("gemma3", *sites)) == 5 * PER_LAYER + 5


def test_a_buffered_program_does_not_grow_with_what_is_read() -> None:
    every = [Site(Kind.RESID_POST, layer) for layer in range(7)]
    assert len(traced("gemma3", *every).eqns) - len(traced("gemma3", *every[1:]).eqns) < 10


def test_a_buffer_holds_what_separate_results_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    sites = [site for site in all_sites(4) if site.layer in (None, 0, 2, 3)]
    apart = Running(GOLDEN / "gemma2", "float32", sites=sites, options=QUICKLY)(documents(), "packed")
    monkeypatch.setattr(capture, "BUFFERED_FROM", 1)
    config = load_config(str(GOLDEN / "gemma2"))
    assert capture.arrange(config, sites).buffered
    together = Running(GOLDEN / "gemma2", "float32", sites=sites, options=QUICKLY)(documents(), "packed")
    for name, values in apart.items():
        np.testing.assert_allclose(together[name], values, rtol=1e-4, atol=1e-5, err_msg=name)


def test_documents_of_a_row_do_not_see_each_other() -> None:
    model = Running(GOLDEN / "qwen3", "float32", sites=[Site(Kind.RESID_POST, 3)], options=QUICKLY)
    docs = documents()
    before = model(docs, "packed")["resid_post.3"]
    docs[0] = (docs[0] + 1) % 64
    after = model(docs, "packed")["resid_post.3"]
    assert (before[: len(docs[0])] != after[: len(docs[0])]).all()
    np.testing.assert_array_equal(before[len(docs[0]) :], after[len(docs[0]) :])


def test_what_lies_in_the_padding_does_not_matter() -> None:
    config = load_config(str(GOLDEN / "gemma2"))
    sites = [Site(Kind.FINAL_NORM)]
    params = load_weights(str(GOLDEN / "gemma2"), config, sites, "float32")
    step = jax.jit(make_step(config, sites, attention=plain(), dtype="float32"), compiler_options=QUICKLY)
    batch, places = packed(documents())
    other = PackedBatch(np.where(batch.segments, batch.tokens, 9), batch.positions, batch.segments)
    one, two = (step(params, each.tokens, each.positions, each.segments)["final_norm"] for each in (batch, other))
    np.testing.assert_array_equal(rows_of(np.asarray(one), places), rows_of(np.asarray(two), places))


def test_a_token_the_model_does_not_have_gives_no_number() -> None:
    model = Running(GOLDEN / "qwen2", "float32", sites=[Site(Kind.EMBED)], options=QUICKLY)
    docs = documents()
    docs[1][3] = 64
    found = model(docs, "padded")["embed"]
    assert list(np.flatnonzero(np.isnan(found).any(axis=-1))) == [len(docs[0]) + 3]


def test_float16_is_served_and_other_dtypes_are_refused() -> None:
    model = Running(GOLDEN / "qwen2", "float16", sites=[Site(Kind.RESID_POST, 1)], options=QUICKLY)
    assert np.isfinite(model(documents(), "padded")["resid_post.1"]).all()
    with pytest.raises(BadInput, match="dtype: 'float64' is not supported"):
        make_step(model.config, model.sites, attention=plain(), dtype="float64")
