"""Blobs: round trips, every way in which bytes can be wrong, and packs that stay where they are."""

from __future__ import annotations

import hashlib
import os
import sys
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.domain import limits
from penstock.objects import content
from penstock.objects.content import PLAIN, ZSTD, BadBlob, decode, encode, name_of, packs

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd


@given(st.binary(max_size=5000) | st.binary(max_size=40).map(lambda piece: piece * 300))
def test_what_is_encoded_is_decoded(raw: bytes) -> None:
    stored = encode(raw)
    assert decode(name_of(stored), stored, len(raw)) == raw
    assert encode(raw) == stored


def test_what_does_not_shrink_is_stored_plain() -> None:
    noise = os.urandom(300_000)
    assert encode(noise) == PLAIN + noise
    text = b"learning_rate = 0.01\n" * 10_000
    assert encode(text)[:4] == ZSTD
    assert len(encode(text)) < len(text) / 50
    # Noise behind a text: the sample promises more than the whole keeps.
    assert encode(text[: content.SAMPLE_BYTES] + os.urandom(5_000_000))[:4] == PLAIN


def test_a_name_is_the_hash_of_the_stored_bytes() -> None:
    stored = encode(b"x" * 1000)
    assert name_of(stored) == hashlib.sha256(stored).hexdigest()


def packed(raw: bytes) -> bytes:
    return ZSTD + zstd.compress(raw)


@pytest.mark.parametrize(
    ("stored", "size", "why"),
    [
        (PLAIN + b"abc", 2, "holds 3 bytes where 2"),
        (PLAIN + b"abc", 4, "holds 3 bytes where 4"),
        (packed(b"a" * 100), 99, "more than the 99 bytes"),
        (packed(b"a" * 100), 101, "holds 100 bytes where 101"),
        (packed(os.urandom(1000))[:-3], 1000, "cut short"),
        (packed(b"a" * 100) + b"junk", 100, "bytes after its end"),
        (packed(b"a" * 100) + zstd.compress(b"b"), 100, "bytes after its end"),
        (ZSTD + b"no zstd at all", 10, "is not what zstd wrote"),
        (b"PSX9abc", 3, "no known form"),
        (b"", 0, "no known form"),
        (PLAIN, limits.BLOB_BYTES_MAX + 1, "more than the"),
    ],
)
def test_wrong_bytes_are_refused(stored: bytes, size: int, why: str) -> None:
    with pytest.raises(BadBlob, match=why) as caught:
        decode(name_of(stored), stored, size)
    assert not caught.value.damaged
    assert "\n" not in str(caught.value)


def test_a_flipped_bit_shows_before_anything_is_decoded() -> None:
    stored = bytearray(encode(b"some text " * 100))
    name = name_of(bytes(stored))
    stored[20] ^= 1
    with pytest.raises(BadBlob, match="another SHA-256") as caught:
        decode(name, bytes(stored), 1000)
    assert caught.value.damaged


def test_a_bomb_costs_no_more_memory_than_it_declared() -> None:
    bomb = packed(bytes(200 << 20))
    tracemalloc.start()
    with pytest.raises(BadBlob, match="more than the 1000 bytes"):
        decode(name_of(bomb), bomb, 1000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20


files = st.dictionaries(
    st.text("abc/", min_size=1, max_size=12), st.integers(1, limits.SNAPSHOT_SMALL_BYTES - 1), max_size=300
).map(lambda sizes: sorted(sizes.items()))


@given(files)
def test_packs_hold_every_file_once_in_order_and_stay_small(small: list[tuple[str, int]]) -> None:
    cuts = packs(small)
    assert [index for cut in cuts for index in cut] == list(range(len(small)))
    for cut in cuts:
        assert len(cut) > 0
        assert sum(small[index][1] for index in cut) <= limits.SNAPSHOT_PACK_BYTES


def test_ten_thousand_small_files_are_few_packs() -> None:
    small = sorted((f"src/package{number % 40}/module{number}.py", 2_000) for number in range(10_000))
    assert 80 < len(packs(small)) < 300


@given(st.integers(0, 1999), st.sampled_from(["change", "add", "remove"]))
def test_one_change_moves_few_packs(place: int, what: str) -> None:
    before = sorted((f"src/package{number % 40}/module{number}.py", 2_000) for number in range(2_000))
    after = list(before)
    if what == "change":
        after[place] = (after[place][0], 31_000)
    elif what == "add":
        after.insert(place + 1, (after[place][0] + "c", 2_000))
    else:
        del after[place]

    def contents(listed: list[tuple[str, int]]) -> set[tuple[tuple[str, int], ...]]:
        return {tuple(listed[index] for index in cut) for cut in packs(listed)}

    assert len(contents(after) - contents(before)) <= 2
