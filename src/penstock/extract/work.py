"""What a unit is computed from, as the plan holds it: model, tokenizer, dataset and rules, each with its fingerprint.

`tpu extract` makes it once from what the user asked for; every worker compares it with what it finds before it
computes, so that a file that was replaced meanwhile is an error and not a mixture. Weights are known by the hash of all
their bytes, by the bucket's name for a version, or by the Hub's hash (ADR 0041); a dataset's files are compared while
they are read (`source`), the tokenizer when it is opened (`feed`). It must not import jax: planning needs no device.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from penstock.domain import ledger
from penstock.domain.admission import BadInput
from penstock.extract import feed, sampling
from penstock.extract.config import ModelConfig, parse_config, read_config
from penstock.extract.plan import DtypeName, RunPlan, make_plan
from penstock.extract.shapes import Site, parse_sites
from penstock.extract.source import Source
from penstock.extract.tokens import Rules, Tokenizer, is_beyond
from penstock.objects.hashing import checksum_of_file
from penstock.objects.inputs import Input, find_inputs, normal_address, open_input

WIDTH: Final = 2048  #: of a packed row, where nobody says and the model has as many positions

#: Of one object, which is one site of one unit. The larger, the less it costs that a unit's last step is not full, and
#: to claim and commit it; but all objects of a unit together should not be more than `UNIT_BYTES`. A bucket takes each
#: in one request, from memory: there they have the least size.
OBJECT_BYTES: Final = (256 << 20, 1 << 30)
UNIT_BYTES: Final = 4 << 30
UNITS_LEAST: Final = 16  #: so that a small dataset, too, is work for several
_SAMPLES: Final = 16  #: of a file of weights, in plans of older versions
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
    config: dict[str, Any] | None = None  #: what config.json says; None in plans of older versions

    @property
    def order(self) -> feed.Order:
        return feed.Order(
            source=self.source,
            rules=self.rules,
            tokenizer=self.tokenizer,
            tokenizer_sha256=self.tokenizer_sha256,
        )


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
    tokens_per_row: float  #: as far as the rows that were looked at tell
    looked_at: int  #: rows
    refused: int  #: of these
    reason: str | None  #: of the first
    notes: tuple[str, ...]  #: what the user should know

    @property
    def bytes(self) -> int:
        """Of all vectors, as far as the rows that were looked at tell."""
        width = sum(self.config.site_width(site) for site in self.sites)
        return int(self.plan.rows * self.tokens_per_row * width * _SIZES[self.plan.dtype])


def plan_run(wish: Wish, environment: Mapping[str, str] = os.environ) -> Planned:
    """Look at model, tokenizer and some rows, and make the plan."""
    written = read_config(wish.model, environment)
    config = parse_config(written)
    sites = parse_sites(wish.sites, len(config.layers))
    if wish.rules.width > config.positions_max:
        rule = f"is more than the {config.positions_max} positions the model is made for"
        raise BadInput("width", wish.rules.width, rule, "use a smaller one")
    tokenizer = None if wish.tokenizer is None else Tokenizer.open(wish.tokenizer, environment)
    if wish.max_samples is not None and wish.max_samples < 1:
        raise BadInput("max-samples", wish.max_samples, "is not above 0", "leave it out for all rows")
    work = Work(
        model=normal_address(wish.model),
        files=fingerprints(wish.model, environment),
        tokenizer=None if wish.tokenizer is None else normal_address(wish.tokenizer),
        tokenizer_sha256=None if tokenizer is None else tokenizer.fingerprint,
        source=wish.source,
        rules=msgspec.structs.replace(wish.rules, vocabulary=config.vocab),
        config=msgspec.json.decode(written),
    )
    rows = min(wish.source.rows, wish.max_samples or wish.source.rows)
    found = sampling.look(work.order, rows, environment)
    notes = _check_look(found, wish, config, tokenizer, environment)
    row = [found.tokens / rows * config.site_width(site) * _SIZES[wish.dtype] for site in sites]
    unit_rows = wish.unit_rows or choose_unit_rows(rows, max(row), sum(row), wish.object_bytes_max)
    plan = make_plan(
        rows=rows,
        unit_rows=unit_rows,
        stops=() if wish.unit_rows else found.stops(-(-rows // unit_rows)),
        sites=tuple(site.name for site in sites),
        dtype=wish.dtype,
        work=msgspec.to_builtins(work),
    )
    return Planned(
        plan=plan,
        config=config,
        sites=sites,
        tokens_per_row=found.tokens / rows,
        looked_at=found.rows,
        refused=len(found.refused),
        reason=found.refused[0].reason if found.refused else None,
        notes=notes,
    )


def _check_look(
    found: sampling.Look,
    wish: Wish,
    config: ModelConfig,
    tokenizer: Tokenizer | None,
    environment: Mapping[str, str],
) -> tuple[str, ...]:
    """Refuse what the rows show to be a mistake; what else is to be said."""
    beyond = sum(map(is_beyond, found.refused))
    if tokenizer is not None and 2 * beyond > found.rows:
        rule = f"gives tokens beyond the {config.vocab} rows of the model's embedding, in {beyond} of {found.rows} rows"
        raise BadInput("tokenizer", wish.tokenizer, rule, "use the tokenizer that came with the model")
    sampling.check(found, wish.source, environment)
    if tokenizer is None or tokenizer.vocabulary <= config.vocab:
        return ()
    sizes = f"the tokenizer has {tokenizer.vocabulary:,} tokens and the model's embedding {config.vocab:,} rows"
    return (f"{sizes}: rows with a token beyond are set aside ({beyond} of the {found.rows:,} looked at)",)


def choose_unit_rows(rows: int, object_row: float, unit_row: float, most: int = OBJECT_BYTES[1]) -> int:
    """Rows of a unit, from the bytes of one row in the largest object and in all: and units for several in any case.

    Of a dataset too small for sixteen units of full size, objects are smaller: work for several comes first.
    """
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
    """Refuse to compute with a model that is not the plan's. Quick where `checksum_of_file` remembers its files."""
    files = _model_files(work.model, environment)
    for name in sorted(files.keys() | work.files.keys()):
        planned, file = work.files.get(name), files.get(name)
        if planned is None or file is None or _fingerprint(file, environment, like=planned) != planned:
            raise BadInput("model", work.model, f"is not the plan's: {name} differs", "put it back, or make a new run")


def fingerprints(model: str, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Of config and weights, by name."""
    return {name: _fingerprint(file, environment) for name, file in _model_files(model, environment).items()}


def _model_files(model: str, environment: Mapping[str, str]) -> dict[str, Input]:
    files = find_inputs(model.rstrip("/") + "/", environment)
    depth = min((file.address.count("/") for file in files), default=0)
    found = {
        name: file
        for file in files
        if file.address.count("/") == depth
        and ((name := file.address.rpartition("/")[2]).endswith(".safetensors") or name == "config.json")
    }
    if "config.json" not in found or len(found) == 1:
        fix = "give a Hugging Face directory with config.json and *.safetensors"
        raise BadInput("model", model, "is no directory with a model", fix)
    return found


def _fingerprint(file: Input, environment: Mapping[str, str], like: str = ":") -> str:
    """What a file is known by; `like` is a plan's, which may be of an older kind."""
    if ":" not in like:
        return _sampled(file, environment)
    if file.address.startswith("hf://"):
        return file.tag  # the Hub's own hash of the whole file, which a download is compared with: none is needed here
    if file.tag:
        return f"etag:{file.tag}"  # and the bucket is asked for this very version when weights are read
    if "://" not in file.address:
        return checksum_of_file(Path(file.address), environment)
    with open_input(file, environment) as opened:
        blocks = iter(lambda: opened.read(ledger.BLOCK_BYTES), b"")
        return ledger.checksum_of_blocks(hashlib.sha256(block).digest() for block in blocks)


def _sampled(file: Input, environment: Mapping[str, str]) -> str:
    """As older versions knew a file: by its size and samples all over it, its beginning and end among them."""
    digest = hashlib.sha256(str(file.size).encode())
    with open_input(file, environment) as opened:
        for number in range(_SAMPLES + 1):
            opened.seek(max(0, file.size - _SAMPLE_BYTES) * number // _SAMPLES)
            digest.update(opened.read(_SAMPLE_BYTES))
    return digest.hexdigest()
