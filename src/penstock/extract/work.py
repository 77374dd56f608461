"""What a unit is computed from, as the plan holds it: model, tokenizer, dataset and rules, each with its fingerprint.

`tpu extract` makes it once from what the user asked for; every worker compares it with what it finds before it
computes, so that a file that was replaced meanwhile is an error and not a mixture. Weights are known by samples of
their bytes: enough to tell two models apart, and quick for a hundred gigabytes. It must not import jax: planning needs
no device.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from typing import Final

import msgspec

from penstock.domain.admission import BadInput
from penstock.extract import feed
from penstock.extract.config import ModelConfig, load_config
from penstock.extract.plan import DtypeName, RunPlan, make_plan
from penstock.extract.shapes import Site, parse_sites
from penstock.extract.source import Refused, Source
from penstock.extract.tokens import Rules, Tokenizer
from penstock.objects.inputs import Input, find_inputs, normal_address, open_input

#: Of one object, which is one site of one unit. The larger, the less it costs that a unit's last step is not full, and
#: to claim and commit it; but all objects of a unit together should not be more than `UNIT_BYTES`. A bucket takes each
#: in one request, from memory: there they have the least size.
OBJECT_BYTES: Final = (256 << 20, 1 << 30)
UNIT_BYTES: Final = 4 << 30
UNITS_LEAST: Final = 16  #: so that a small dataset, too, is work for several
SAMPLED_ROWS: Final = 200
_SAMPLES: Final = 16
_SAMPLE_BYTES: Final = 64 << 10
_SIZES: Final = {"bfloat16": 2, "float16": 2, "float32": 4}


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """`RunPlan.work` as a struct."""

    model: str
    files: dict[str, str]  #: of the model: name -> fingerprint
    tokenizer: str | None
    tokenizer_sha256: str | None
    source: Source
    rules: Rules
    segments_max: int = 32
    window: int = 4096

    @property
    def order(self) -> feed.Order:
        return feed.Order(source=self.source, rules=self.rules, tokenizer=self.tokenizer)


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """What the user asks for."""

    model: str
    tokenizer: str | None
    source: Source
    sites: str
    rules: Rules
    dtype: DtypeName = "bfloat16"
    max_samples: int | None = None  #: of the whole run, not of each worker
    unit_rows: int | None = None  #: None: chosen by `choose_unit_rows`
    object_bytes_max: int = OBJECT_BYTES[1]


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """A plan, and what was found out while it was made."""

    plan: RunPlan
    config: ModelConfig
    sites: tuple[Site, ...]
    tokens_per_row: float  #: of the rows that were looked at
    refused: int  #: of these

    @property
    def bytes(self) -> int:
        """Of all vectors, as far as the first rows tell."""
        width = sum(self.config.site_width(site) for site in self.sites)
        return int(self.plan.rows * self.tokens_per_row * width * _SIZES[self.plan.dtype])


def plan_run(wish: Wish, environment: Mapping[str, str] = os.environ) -> Planned:
    """Look at model, tokenizer and the first rows, and make the plan."""
    config = load_config(wish.model, environment)
    sites = parse_sites(wish.sites, len(config.layers))
    if wish.rules.width > config.positions_max:
        rule = f"is more than the {config.positions_max} positions the model is made for"
        raise BadInput("width", wish.rules.width, rule, "use a smaller one")
    tokenizer = None if wish.tokenizer is None else Tokenizer.open(wish.tokenizer, environment)
    if tokenizer is not None and tokenizer.vocabulary > config.vocab:
        rule = f"has {tokenizer.vocabulary} tokens, and the model's embedding {config.vocab}"
        raise BadInput("tokenizer", wish.tokenizer, rule, "use the tokenizer that came with the model")
    if wish.max_samples is not None and wish.max_samples < 1:
        raise BadInput("max-samples", wish.max_samples, "is not above 0", "leave it out for all rows")
    work = Work(
        model=normal_address(wish.model),
        files=fingerprints(wish.model, environment),
        tokenizer=None if wish.tokenizer is None else normal_address(wish.tokenizer),
        tokenizer_sha256=None if tokenizer is None else tokenizer.fingerprint,
        source=wish.source,
        rules=msgspec.structs.replace(wish.rules, vocabulary=config.vocab),
    )
    rows = min(wish.source.rows, wish.max_samples or wish.source.rows)
    tokens_per_row, refused = _look(work, min(rows, SAMPLED_ROWS), environment)
    row = [tokens_per_row * config.site_width(site) * _SIZES[wish.dtype] for site in sites]
    plan = make_plan(
        rows=rows,
        unit_rows=wish.unit_rows or choose_unit_rows(rows, max(row), sum(row), wish.object_bytes_max),
        sites=tuple(site.name for site in sites),
        dtype=wish.dtype,
        work=msgspec.to_builtins(work),
    )
    return Planned(plan=plan, config=config, sites=sites, tokens_per_row=tokens_per_row, refused=refused)


def choose_unit_rows(rows: int, object_row: float, unit_row: float, most: int = OBJECT_BYTES[1]) -> int:
    """Rows of a unit, from the bytes of one row in the largest object and in all: and units for several in any case."""
    least = OBJECT_BYTES[0]
    size = min(most, max(least, UNIT_BYTES * object_row / unit_row)) if unit_row else most
    full = int(size / object_row) if object_row else rows
    return max(1, min(full, -(-rows // UNITS_LEAST)))


def work_of(plan: RunPlan) -> Work:
    try:
        return msgspec.convert(plan.work, Work)
    except msgspec.ValidationError as error:
        raise BadInput("run", plan.run, f"has a plan that is not of a model: {error}", "make a new one") from error


def site_of(name: str) -> Site:
    """The site that a name of objects stands for."""
    (site,) = parse_sites(name.replace(".", ":"))
    return site


def check(work: Work, environment: Mapping[str, str] = os.environ) -> None:
    """Refuse to compute from files that are not those of the plan."""
    found = fingerprints(work.model, environment)
    other = sorted(name for name in found.keys() | work.files.keys() if found.get(name) != work.files.get(name))
    if other:
        raise BadInput("model", work.model, f"is not the plan's: {other[0]} differs", "put it back, or make a new run")
    if work.tokenizer is not None and Tokenizer.open(work.tokenizer, environment).fingerprint != work.tokenizer_sha256:
        raise BadInput("tokenizer", work.tokenizer, "is not the plan's", "put it back, or make a new run")


def fingerprints(model: str, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Of config and weights, by name."""
    files = find_inputs(model.rstrip("/") + "/", environment)
    depth = min((file.address.count("/") for file in files), default=0)
    found = {
        name: _fingerprint(file, environment)
        for file in files
        if file.address.count("/") == depth
        and ((name := file.address.rpartition("/")[2]).endswith(".safetensors") or name == "config.json")
    }
    if "config.json" not in found or len(found) == 1:
        fix = "give a Hugging Face directory with config.json and *.safetensors"
        raise BadInput("model", model, "is no directory with a model", fix)
    return found


def _fingerprint(file: Input, environment: Mapping[str, str]) -> str:
    """The hash of the size and of samples all over the file, its beginning and end among them."""
    if file.address.startswith("hf://"):
        return file.tag  # the Hub's own hash of the whole file, which a download is compared with: none is needed here
    digest = hashlib.sha256(str(file.size).encode())
    with open_input(file, environment) as opened:
        for number in range(_SAMPLES + 1):
            opened.seek(max(0, file.size - _SAMPLE_BYTES) * number // _SAMPLES)
            digest.update(opened.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _look(work: Work, rows: int, environment: Mapping[str, str]) -> tuple[float, int]:
    """Kept tokens per row, and how many of the first rows give nothing."""
    refused: list[Refused] = []
    order = msgspec.structs.replace(work.order, environment=dict(environment))
    kept = sum(int(passage.keep.sum()) for passage in feed.passages(order, 0, rows, refused.append))
    return kept / rows, len(refused)
