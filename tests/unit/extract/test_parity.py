"""The model of every family against Hugging Face's own code, run side by side on random-initialised models.

What `test_golden.py` shows for kept values is shown here for whatever version of transformers is installed, for tied
and untied heads, for padding as Hugging Face does it (a mask) beside documents packed into rows, and for rarer rules:
windows in Qwen's upper layers, biases, linear and yarn rotary scaling. Without torch it is left out, but not in CI.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.missing import missing
from tests.unit.extract.reference import CASES, VARIANTS, build, capture, documents, error
from tests.unit.extract.running import QUICKLY, Running, check_rounded, check_whole

for _name in ("torch", "transformers"):
    if importlib.util.find_spec(_name) is None:
        missing(f"{_name}, which `make parity` installs")

#: Hugging Face pads where it would otherwise run one document at a time; each stands beside the layout it is like.
ALONE = {"padded": False, "packed": True}

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True, scope="module")
def quiet() -> Iterator[None]:
    """One thread is enough for such small models, and leaves the others to other tests; no progress bars."""
    torch, logging = importlib.import_module("torch"), importlib.import_module("transformers.utils.logging")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()
    torch.set_num_threads(threads)


def compare(folder: Path, models: tuple[Running, ...]) -> None:
    docs = documents(seed=11)
    whole, rounded = models
    for layout, alone in ALONE.items():
        theirs = capture(folder, docs, "float32", alone=alone)
        assert {site.name for site in whole.sites} == set(theirs)
        check_whole(whole(docs, layout), theirs)
        own = capture(folder, docs, "bfloat16", alone=alone)
        check_rounded(rounded(docs, layout), theirs, {name: error(own[name], theirs[name]) for name in theirs})


def compiled(folder: Path) -> tuple[Running, ...]:
    """In float32 with the engine's joined projections, which the golden test has in bfloat16."""
    return tuple(Running(folder, dtype, options=QUICKLY, fused=dtype == "float32") for dtype in ("float32", "bfloat16"))


@pytest.mark.parametrize("case", CASES)
def test_every_site_of_every_family_with_tied_and_untied_heads(case: str, tmp_path: Path) -> None:
    models: tuple[Running, ...] = ()
    for seed, tied in ((5, True), (8, False)):
        folder = tmp_path / str(tied)
        build(CASES[case] | {"tie_word_embeddings": tied}, folder, seed=seed)
        models = models or compiled(folder)
        for model in models:
            model.load(folder)
            assert model.config.tied is tied
        compare(folder, models)


@pytest.mark.parametrize("case", VARIANTS)
def test_rarer_rules(case: str, tmp_path: Path) -> None:
    build(VARIANTS[case], tmp_path, seed=6, shards=True)
    compare(tmp_path, compiled(tmp_path))
