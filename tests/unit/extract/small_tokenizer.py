"""A small byte-level tokenizer with special tokens, made on the spot, for tests of tokens and of feeding."""

from __future__ import annotations

from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

TEXT = "the quick brown fox jumps over the lazy dog while forty-two élan vital naïve ones look on and on"
BEGIN, END = "<s>", "</s>"


def write_tokenizer(folder: Path) -> Path:
    """`tokenizer.json` in a folder; it puts `<s>` before every text and would cut at 5 tokens if it were let."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[BEGIN, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([TEXT] * 4, trainer)
    made.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[(BEGIN, 0)])
    made.enable_truncation(5)
    made.enable_padding(length=9)
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    return folder
