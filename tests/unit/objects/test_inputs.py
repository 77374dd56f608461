"""What is asked of a bucket for the beginning of a file; the contract suite has the rest, with real stores."""

from __future__ import annotations

from typing import Any

import obstore
import pytest
from obstore.store import MemoryStore

from penstock.objects import inputs
from penstock.objects.inputs import Input, open_input, read_beginning

DATA = bytes(range(256)) * 400


@pytest.fixture
def store() -> MemoryStore:
    """Holds DATA as `weights`."""
    store = MemoryStore()
    obstore.put(store, "weights", DATA)
    return store


@pytest.fixture
def ranges(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Of each request to a bucket, which is `store`."""
    found: list[tuple[int, int]] = []
    get = obstore.get

    def noted(where: Any, path: str, *, options: Any) -> Any:
        found.append(options["range"])
        return get(where, path, options=options)

    monkeypatch.setattr(obstore, "get", noted)
    monkeypatch.setattr(inputs, "store_of", lambda *_: store)
    monkeypatch.setattr(inputs, "RANGE_BYTES", 10_000)
    return found


@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_the_beginning_of_a_file_costs_no_more_than_itself(
    scheme: str, store: MemoryStore, ranges: list[tuple[int, int]]
) -> None:
    file = Input(f"{scheme}://b/weights", len(DATA), obstore.head(store, "weights")["e_tag"] or "")
    assert read_beginning(file, 300, {}) == DATA[:300]
    assert ranges == [(0, 300)]
    ranges.clear()
    assert read_beginning(file, 20_500, {}) == DATA[:20_500]
    assert ranges[-1][1] <= 30_000, "a header that is longer than one request is asked for in whole ones"
    ranges.clear()
    assert read_beginning(file, 2 * len(DATA), {}) == DATA
    ranges.clear()
    with open_input(file, {}) as opened:
        assert opened.read(300) == DATA[:300]
    assert ranges == [(0, 10_000)], "who reads on has the next lines at hand"


def test_a_file_of_a_store_without_tags_is_read(store: MemoryStore, ranges: list[tuple[int, int]]) -> None:
    with open_input(Input("s3://b/weights", len(DATA), ""), {}) as opened:
        assert opened.read() == DATA
