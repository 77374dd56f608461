"""The rival: Hugging Face's own layers, packed without padding, compiled whole, with copies to page-locked memory.

`python bench/extract/rival.py PART FOLDER` on a machine with PyTorch and transformers; `h200.py` calls it. Parts:
`make` writes a random-initialised model of the true shape and reference values for `ours.py numerics`; `speed` and
`tuned` measure. It is given all that a careful user would give it: early exit, no language-model head, documents
isolated by a list of lengths, no row structure, three steps under way with copies on their own stream, and
`torch.compile` over all layers at once (`tuned`: with max-autotune).
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import corpus
import numpy as np
import torch
from transformers import AttentionInterface, Qwen2Config, Qwen2Model

WANTED = {"0.5b": (6, 12, 18), "7b": (7, 14, 21)}
STEP = 65_536
SHAPES: dict[str, dict[str, Any]] = {
    "0.5b": {
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    "7b": {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
}
REFERENCE_DOCUMENTS = 24


def varlen(_: Any, query: Any, key: Any, value: Any, __: Any, scaling: float, **rest: Any) -> tuple[Any, None]:
    """Flash attention over a list of lengths, as PyTorch brings it."""
    starts, longest = rest["starts"], corpus.WIDTH
    q, k, v = (each[0].transpose(0, 1) for each in (query, key, value))
    out = torch.ops.aten._flash_attention_forward(
        q, k, v, starts, starts, longest, longest, 0.0, True, False, scale=scaling
    )[0]
    return out[None], None


AttentionInterface.register("varlen", varlen)


def build(shape: str, attention: str, layers: int | None = None) -> Any:
    facts = dict(SHAPES[shape])
    if layers is not None:
        facts["num_hidden_layers"] = layers
    config = Qwen2Config(**facts, rope_theta=1e6, rms_norm_eps=1e-6, max_position_embeddings=32768, use_cache=False)
    config._attn_implementation = attention
    return config


def make(folder: Path) -> None:
    """The model of the 0.5B shape with random weights, and what Hugging Face computes with it."""
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    model = Qwen2Model(build("0.5b", "sdpa")).to("cuda")
    with torch.no_grad():
        for name, value in model.named_parameters():
            # biases start at zero and norms at one: random ones, so that leaving one out is seen
            if name.endswith("bias"):
                value.normal_(0.0, 0.5)
            elif "norm" in name:
                value.uniform_(0.5, 1.5)
    model = model.to(torch.bfloat16)
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config.setdefault("rope_theta", 1e6)
    (folder / "config.json").write_text(json.dumps(config))
    docs = corpus.tokens(151_000)[:REFERENCE_DOCUMENTS]
    found: dict[str, list[np.ndarray]] = {}
    for kind in (torch.float32, torch.bfloat16):
        model = model.to(kind)
        with torch.no_grad():
            for doc in docs:
                states = model(torch.tensor(doc, dtype=torch.long, device="cuda")[None], output_hidden_states=True)
                for layer in WANTED["0.5b"]:
                    values = states.hidden_states[layer + 1][0].float().cpu().numpy()
                    found.setdefault(f"{str(kind).removeprefix('torch.')}.{layer}", []).append(values)
    np.savez(folder / "reference.npz", **{name: np.concatenate(parts) for name, parts in found.items()})


def forward(model: Any, wanted: tuple[int, ...]) -> Any:
    def run(ids: Any, positions: Any, starts: Any) -> list[Any]:
        x = model.embed_tokens(ids)
        turned = model.rotary_emb(x, positions)
        kept = []
        for number, layer in enumerate(model.layers):
            x = layer(x, attention_mask=None, position_ids=positions, position_embeddings=turned, starts=starts)
            x = x[0] if isinstance(x, tuple) else x
            if number in wanted:
                kept.append(x)
        return kept

    return run


def inputs(docs: list[Any]) -> list[tuple[Any, Any, Any, int]]:
    """Padding up to the step is one more document; the list of starts has one length, so that nothing recompiles."""
    bins = corpus.flat(docs, STEP)
    most = max(len(each) for each in bins) + 40
    given = []
    for members in bins:
        real = sum(len(docs[at]) for at in members)
        ids = np.zeros(STEP, np.int64)
        ids[:real] = np.concatenate([docs[at] for at in members])
        ends = np.cumsum([len(docs[at]) for at in members]).tolist()
        positions = np.concatenate([np.arange(len(docs[at])) for at in members] + [np.arange(STEP - real)])
        at = real
        while at < STEP:
            at = min(at + corpus.WIDTH, STEP)
            ends.append(at)
        starts = np.full(most + 1, STEP, np.int32)
        starts[0], starts[1 : len(ends) + 1] = 0, ends
        put = [torch.tensor(each, device="cuda") for each in (ids[None], positions[None].astype(np.int64), starts)]
        given.append((*put, real))
    return given


def speed(shape: str, mode: str | None, passes: int = 3) -> dict[str, Any]:
    wanted = WANTED[shape]
    torch.manual_seed(0)
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = Qwen2Model(build(shape, "varlen", wanted[-1] + 1)).eval()
    torch.set_default_dtype(torch.float32)
    model.rotary_emb.inv_freq = model.rotary_emb.inv_freq.float()
    run = torch.compile(forward(model, wanted), mode=mode, dynamic=False)
    given = inputs(corpus.tokens(151_000))
    copier = torch.cuda.Stream()
    width = SHAPES[shape]["hidden_size"]
    buffers = [[torch.empty((1, STEP, width), dtype=torch.bfloat16, pin_memory=True) for _ in wanted] for _ in range(3)]

    def go() -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        done: list[Any] = []
        for number, (ids, positions, starts, _) in enumerate(given):
            if number >= len(buffers):
                done[number - len(buffers)].synchronize()
            found = run(ids, positions, starts)
            copier.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(copier):
                for value, buffer in zip(found, buffers[number % len(buffers)], strict=True):
                    value.record_stream(copier)
                    buffer.copy_(value, non_blocking=True)
                done.append(copier.record_event())
        torch.cuda.synchronize()
        return time.perf_counter() - started

    with torch.no_grad():
        began = time.perf_counter()
        go()
        compiled = time.perf_counter() - began
        go()
        seconds = [go() for _ in range(passes)]
    real = sum(each[3] for each in given)
    rate = real / statistics.median(seconds)
    return {
        "tokens_s": rate,
        "fill": real / (len(given) * STEP),
        "first_s": compiled,
        "spread": max(seconds) / min(seconds),
    }


def main() -> None:
    part, folder = sys.argv[1], Path(sys.argv[2])
    if part == "make":
        make(folder)
        return
    mode = None if part == "speed" else "max-autotune-no-cudagraphs"
    shape = sys.argv[3] if len(sys.argv) > 3 else "0.5b"
    import transformers

    result = speed(shape, mode) | {"torch": torch.__version__, "transformers": transformers.__version__}
    (folder / f"rival-{part}-{shape}.json").write_text(json.dumps(result))
    print(part, shape, result)


if __name__ == "__main__":
    main()
