"""The benchmark's corpus: lengths like those of a mixed text corpus, packed into batches or written out as text.

4,096 documents, log-normal: mean 400 tokens, median 268, 5% under 64 tokens, 1.3% at the cut of 2,048. Every part of
the benchmark takes its documents from here, so that all of them work on the same.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import numpy.typing as npt

from penstock.extract.packing import Placement, batches, pack
from penstock.extract.shapes import PackedBatch

DOCUMENTS = 4096
WIDTH = 2048
SEGMENTS = 32
SEED = 84  #: 1,635,356 tokens, which fill 25 steps of 65,536 to 99.8%, in rows or without them
WORDS = 6000
Ints = npt.NDArray[np.int32]


def lengths(documents: int = DOCUMENTS, seed: int = SEED) -> list[int]:
    rng = np.random.default_rng(seed)
    drawn = rng.lognormal(math.log(268), 0.905, documents)
    return [int(each) for each in np.clip(drawn, 8, WIDTH)]


def tokens(vocabulary: int, documents: int = DOCUMENTS, seed: int = SEED) -> list[Ints]:
    rng = np.random.default_rng(seed + 1)
    return [rng.integers(0, vocabulary, each).astype(np.int32) for each in lengths(documents, seed)]


def packed(docs: list[Ints], rows: int) -> list[tuple[PackedBatch, list[Placement]]]:
    places = pack([len(doc) for doc in docs], WIDTH, SEGMENTS, len(docs))
    return list(batches(docs, places, rows, WIDTH))


def flat(docs: list[Ints], size: int) -> list[list[int]]:
    """Documents in bins of `size` tokens, without rows: what attention over a list of lengths can take."""
    return pack([len(doc) for doc in docs], size, len(docs), len(docs))


def write_text(folder: Path, documents: int, seed: int = SEED) -> int:
    """`corpus.jsonl` and a `tokenizer.json` trained on it, whose tokens are mostly words; the number of words."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    rng = np.random.default_rng(seed)
    letters = np.array(list("etaoinshrdlucmfwypvbgkjqxz"))
    words = np.array(
        ["".join(letters[(rng.random(size) ** 1.7 * 26).astype(int)]) for size in rng.integers(2, 9, WORDS)]
    )
    folder.mkdir(parents=True, exist_ok=True)
    total = 0
    with (folder / "corpus.jsonl").open("w") as file:
        for number, length in enumerate(lengths(documents, seed)):
            chosen = words[(rng.random(length) ** 2 * WORDS).astype(int)]
            file.write(json.dumps({"id": f"doc-{number}", "text": " ".join(chosen)}) + "\n")
            total += length
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=16_000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator((" ".join(words[at::4]) for at in range(4)), trainer)
    made.save(str(folder / "tokenizer.json"))
    return total
