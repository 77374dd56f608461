"""Writes a tiny model with random weights, its tokenizer, and some documents: all that `tpu extract` needs to be tried.

`python examples/extract_tiny/make.py FOLDER` makes FOLDER/model (a Qwen2 of 4 layers, 64 wide, as a Hugging Face
directory) and FOLDER/docs.jsonl. The same seed gives the same bytes. It downloads nothing and needs no torch.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers, trainers

SEED = 7
DOCUMENTS = 400
WORDS = ("water", "gate", "valve", "turbine", "penstock", "slice", "chip", "tensor", "layer", "river", "dam", "flow")
LAYERS = 4
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


def weights(rng: np.random.Generator) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    width, hidden, kv, vocab = 64, 128, 32, 512
    shapes = {
        "self_attn.q_proj.weight": (width, width),
        "self_attn.q_proj.bias": (width,),
        "self_attn.k_proj.weight": (kv, width),
        "self_attn.k_proj.bias": (kv,),
        "self_attn.v_proj.weight": (kv, width),
        "self_attn.v_proj.bias": (kv,),
        "self_attn.o_proj.weight": (width, width),
        "mlp.gate_proj.weight": (hidden, width),
        "mlp.up_proj.weight": (hidden, width),
        "mlp.down_proj.weight": (width, hidden),
    }
    found = {"model.embed_tokens.weight": (rng.normal(size=(vocab, width)) * 0.5).astype(np.float32)}
    for layer in range(LAYERS):
        for name, shape in shapes.items():
            found[f"model.layers.{layer}.{name}"] = (rng.normal(size=shape) * 0.1).astype(np.float32)
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"model.layers.{layer}.{name}.weight"] = np.ones(width, np.float32)
    return found | {"model.norm.weight": np.ones(width, np.float32)}


def documents(rng: random.Random) -> list[dict[str, str]]:
    """Of one to three hundred words, most of them short."""
    return [
        {"id": f"doc-{number:04d}", "text": " ".join(rng.choices(WORDS, k=1 + int(300 * rng.random() ** 3)))}
        for number in range(DOCUMENTS)
    ]


def make(folder: Path) -> None:
    model = folder / "model"
    model.mkdir(parents=True, exist_ok=True)
    found = documents(random.Random(SEED))
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([each["text"] for each in found[:50]], trainer)
    tokenizer.save(str(model / "tokenizer.json"))
    (model / "config.json").write_text(json.dumps(CONFIG, indent=2))
    save_file(weights(np.random.default_rng(SEED)), model / "model.safetensors")
    (folder / "docs.jsonl").write_text("".join(json.dumps(each) + "\n" for each in found))


if __name__ == "__main__":
    make(Path(sys.argv[1]))
