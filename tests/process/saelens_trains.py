"""A program that trains a sparse autoencoder with SAELens on a finished run, twice: from our iterator, from our export.

`test_saelens` runs it in a process of its own, whose path has SAELens: that is no part of the tests' environment. The
trainer is SAELens' `SAETrainer`, which is handed `torch_batches` as it is; the export is read by SAELens' own
`ActivationsStore`, whose batches train the same way. What was seen is printed as one line of JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from penstock import extract

BATCH = 64
STEPS = 100
TENTH = STEPS // 10

# By name: types of these are found on some machines and not on others.
torch: Any = import_module("torch")
sae_lens: Any = import_module("sae_lens")


def train(provider: Iterator[Any], width: int) -> dict[str, Any]:
    """What SAELens' trainer was given, and how well that was reconstructed before it learned from it."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    sae = sae_lens.StandardTrainingSAE(
        sae_lens.StandardTrainingSAEConfig(d_in=width, d_sae=4 * width, l1_coefficient=0.01)
    )
    settings = import_module("sae_lens.config").SAETrainerConfig(
        total_training_samples=STEPS * BATCH, train_batch_size_samples=BATCH, lr=3e-3, lr_end=3e-4, device="cpu"
    )
    trainer = import_module("sae_lens.training.sae_trainer").SAETrainer(cfg=settings, sae=sae, data_provider=provider)
    step, errors, shapes = trainer.step, list[float](), set[tuple[int, ...]]()

    def watched(batch: Any) -> Any:
        done = step(batch)
        errors.append(done.losses["mse_loss"].item())
        shapes.add(tuple(batch.shape))
        return done

    trainer.step = watched
    trainer.fit()
    return {
        "steps": trainer.n_training_steps,
        "shapes": sorted(shapes),
        "first": sum(errors[:TENTH]) / TENTH,
        "last": sum(errors[-TENTH:]) / TENTH,
    }


def main(address: str, exported: str, site: str, column: str, context: int) -> None:
    with extract.open(address) as run:
        width = run.width(site)
        found = {"version": sae_lens.__version__, "iterator": train(extract.torch_batches(run, site, BATCH), width)}
        rows = torch.from_numpy(run.slice(0, 2 * context, site).astype("float32"))
    store = import_module("sae_lens.training.activations_store").ActivationsStore(
        model=None,
        dataset=None,
        streaming=False,
        hook_name=column,
        hook_head_index=None,
        context_size=context,
        d_in=width,
        n_batches_in_buffer=16,
        total_training_tokens=STEPS * BATCH,
        store_batch_size_prompts=2,
        train_batch_size_tokens=BATCH,
        prepend_bos=False,
        normalize_activations="none",
        device=torch.device("cpu"),
        dtype="float32",
        cached_activations_path=exported,
    )
    values, tokens = store.get_raw_llm_batch()
    found["same"] = bool(torch.equal(values, rows))
    found["tokens"] = tokens.reshape(-1).long().tolist()
    found["export"] = train(iter(store), width)
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5]))
