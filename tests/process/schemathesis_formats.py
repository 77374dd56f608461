"""How schemathesis makes values of the formats that our OpenAPI page names; it loads this file by itself."""

from __future__ import annotations

import schemathesis
from hypothesis import strategies as st

from penstock.domain.catalogue import all_accelerators

PRINTABLE = st.text(st.characters(exclude_categories=("C", "Z"), include_characters=" "), min_size=1, max_size=128)
WORD = st.from_regex(r"[a-z0-9_-]{1,12}(\.[a-z]{1,4})?", fullmatch=True)

schemathesis.openapi.format("printable", PRINTABLE)
schemathesis.openapi.format(
    "accelerator", st.sampled_from([each.name for each in all_accelerators() if each.chips <= 16])
)
schemathesis.openapi.format("relative-path", st.lists(WORD, min_size=1, max_size=3).map("/".join))
schemathesis.openapi.format("identifier", st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,20}", fullmatch=True))
