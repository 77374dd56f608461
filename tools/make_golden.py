#!/usr/bin/env python3
"""Makes the golden tensors of `tests/unit/extract/golden`: small models, and what Hugging Face's code gives for them.

Run by hand when a family is added or `tests/unit/extract/reference.py` changes: `.venv/bin/python tools/make_golden.py
[FAMILY…]`, where torch and transformers are installed (`make parity`). It must not use Penstock's model: what it writes
is what that is held against. The stream before a layer is not kept, being the one after the layer before.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOTAL_BYTES_MAX = 2_000_000  # it is kept in git


def make(case: str) -> None:
    from safetensors.numpy import save_file

    from tests.unit.extract import reference

    folder = reference.GOLDEN / case
    shutil.rmtree(folder, ignore_errors=True)
    reference.build(reference.CASES[case], folder, shards=case in reference.SHARDED)
    docs = reference.documents()
    whole = reference.capture(folder, docs, "float32", alone=True)
    rounded = reference.capture(folder, docs, "bfloat16", alone=True)
    errors = {name: reference.error(rounded[name], whole[name]) for name in whole}
    kept = {name: values for name, values in whole.items() if not name.startswith("resid_pre")}
    metadata = {"bfloat16_error": json.dumps(errors), **reference.versions()}
    save_file(kept, folder / reference.EXPECTED, metadata)
    for path in folder.iterdir():
        path.chmod(0o644)  # the library makes them for their owner alone


def main() -> None:
    sys.path.insert(0, str(ROOT))
    from tests.unit.extract import reference

    for case in sys.argv[1:] or reference.CASES:
        make(case)
    total = sum(path.stat().st_size for path in reference.GOLDEN.rglob("*") if path.is_file())
    print(f"{total} bytes in {reference.GOLDEN}")
    if total > TOTAL_BYTES_MAX:
        sys.exit(f"error: more than {TOTAL_BYTES_MAX} bytes: make the models smaller")


if __name__ == "__main__":
    main()
