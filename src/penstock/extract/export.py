"""A run in the layout of SAELens' cached activations: a Hugging Face dataset directory that `load_from_disk` reads.

`tpu extract export` calls it. That layout has contexts of a fixed length and no documents, so rows are taken in the
run's order, `context` at a time; the rows left at the end fill no context and are counted. Values become float32,
because Arrow has no bfloat16. It writes Arrow by itself and needs neither datasets nor torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from penstock.domain.admission import BadInput
from penstock.extract.reader import Run

#: Of one file, as float32: datasets maps files whole, and list offsets are 32 bits.
FILE_BYTES: Final = 500_000_000
TOKENS_COLUMN: Final = "token_ids"


class Exported(NamedTuple):
    contexts: int
    left_over: int  #: rows
    files: int


def export_dataset(run: Run, site: str, folder: str | Path, *, context: int, column: str) -> Exported:
    """Write the directory, which must not exist or be empty. `column` is the hook's name as SAELens calls it."""
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise BadInput("folder", str(folder), "is not empty", "give another one")
    if not 1 <= context <= max(1, len(run)):
        raise BadInput("context", context, f"is not between 1 and the run's {len(run)} rows", "give another one")
    folder.mkdir(parents=True, exist_ok=True)
    width, contexts = run.width(site), len(run) // context
    per_file = max(1, FILE_BYTES // (context * width * 4))
    starts = range(0, contexts, per_file)
    names = [f"data-{number:05d}-of-{len(starts):05d}.arrow" for number in range(len(starts))]
    features = _features(column, context, width)
    for name, start in zip(names, starts, strict=True):
        _write(run, site, folder / name, range(start, min(start + per_file, contexts)), context, features, column)
    (folder / "dataset_info.json").write_text(json.dumps({"features": features}, indent=2))
    state: dict[str, Any] = {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": run.manifest.run[:16],
        "_format_columns": [column, TOKENS_COLUMN],
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    (folder / "state.json").write_text(json.dumps(state, indent=2))
    return Exported(contexts, len(run) - contexts * context, len(names))


def _features(column: str, context: int, width: int) -> dict[str, Any]:
    return {
        column: {"shape": [context, width], "dtype": "float32", "_type": "Array2D"},
        TOKENS_COLUMN: {"feature": {"dtype": "int32", "_type": "Value"}, "length": context, "_type": "Sequence"},
    }


def _write(
    run: Run, site: str, path: Path, contexts: range, context: int, features: dict[str, Any], column: str
) -> None:
    import pyarrow as pa

    width = run.width(site)
    rows = range(contexts.start * context, contexts.stop * context)
    values = run.slice(rows.start, rows.stop, site).astype(np.float32).reshape(-1)
    inner = pa.ListArray.from_arrays(np.arange(len(rows) + 1, dtype=np.int32) * width, pa.array(values))
    outer = pa.ListArray.from_arrays(np.arange(len(contexts) + 1, dtype=np.int32) * context, inner)
    tokens = pa.FixedSizeListArray.from_arrays(pa.array(_tokens(run, rows)), context)
    # What datasets itself writes for an Array2D: an extension type over lists of lists.
    extension = {
        "ARROW:extension:name": "datasets.features.features.Array2DExtensionType",
        "ARROW:extension:metadata": json.dumps([[context, width], "float32"]),
    }
    schema = pa.schema(
        [pa.field(column, outer.type, metadata=extension), pa.field(TOKENS_COLUMN, tokens.type)],
        metadata={"huggingface": json.dumps({"info": {"features": features}})},
    )
    with path.open("wb") as file, pa.ipc.new_stream(file, schema) as writer:
        writer.write_batch(pa.record_batch([outer, tokens], schema=schema))


def _tokens(run: Run, rows: range) -> Any:
    """Token ids of rows of the whole run."""
    found = [np.zeros(0, np.int32)]
    for block in run.blocks(1 << 20):
        base = int(run.starts[block.unit])
        low, high = max(rows.start, base + block.start), min(rows.stop, base + block.stop)
        if low < high:
            found.append(run.block(block._replace(start=low - base, stop=high - base), "tokens"))
    return np.concatenate(found)
