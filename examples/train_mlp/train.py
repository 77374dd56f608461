"""A training run that can be interrupted anywhere and ends with the same weights, bit for bit.

JAX, optax and orbax; a small network learns a teacher's function from made-up data. It goes on from the newest finished
checkpoint, saves often, says how far it is, and leaves when it is asked to. Everything that is random comes from the
step's number, so a step is the same whenever and wherever it is made. It runs alone as well:

    python train.py                      # here
    tpu run train.py lr=0.01             # on an accelerator, with one override

What it leaves: metrics.json and weights.sha256 in the output directory.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

from penstock import payload

INPUTS, HIDDEN, OUTPUTS = 32, 128, 8
EVAL_EXAMPLES = 1024

Params = list[dict[str, jax.Array]]


class State(NamedTuple):
    """Everything the next step depends on."""

    step: jax.Array
    params: Params
    optimizer: Any


def read_options() -> argparse.Namespace:
    """Names are those that the default aliases of `tpu run` mean: lr, bs, ep, wd, b1, b2, ckpt."""
    parser = argparse.ArgumentParser(description="Train a small network; interrupt it where you like.")
    parser.add_argument("--config.training.num_epochs", dest="epochs", type=int, default=3)
    parser.add_argument("--config.training.steps_per_epoch", dest="steps_per_epoch", type=int, default=100)
    parser.add_argument("--config.training.checkpoint_per_epoch", dest="checkpoint_per_epoch", type=int, default=4)
    parser.add_argument("--config.training.learning_rate", dest="learning_rate", type=float, default=3e-3)
    parser.add_argument("--config.training.batch_size", dest="batch_size", type=int, default=128)
    parser.add_argument("--config.training.weight_decay", dest="weight_decay", type=float, default=1e-4)
    parser.add_argument("--config.training.adam_b1", dest="beta1", type=float, default=0.9)
    parser.add_argument("--config.training.adam_b2", dest="beta2", type=float, default=0.999)
    parser.add_argument("--config.seed", dest="seed", type=int, default=0)
    parser.add_argument("--config.stage", dest="stage", type=int, default=payload.stage())
    parser.add_argument("--pause", type=float, default=0.0, help="seconds to rest in each step, to have time to watch")
    options = parser.parse_args()
    options.steps = options.epochs * options.steps_per_epoch
    options.checkpoint_every = max(1, options.steps_per_epoch // options.checkpoint_per_epoch)
    return options


# --- the model ---
def make_params(key: jax.Array, sizes: tuple[int, ...]) -> Params:
    keys = jax.random.split(key, len(sizes) - 1)
    return [
        {"weight": jax.random.normal(k, (m, n)) * (2 / m) ** 0.5, "bias": jnp.zeros(n)}
        for k, m, n in zip(keys, sizes, sizes[1:], strict=False)
    ]


def predict(params: Params, inputs: jax.Array) -> jax.Array:
    *hidden, last = params
    for layer in hidden:
        inputs = jax.nn.relu(inputs @ layer["weight"] + layer["bias"])
    return inputs @ last["weight"] + last["bias"]


def make_batch(seed: int, step: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """The examples of one step, from its number alone: there is no place in a data set to remember."""
    root = jax.random.key(seed)
    teacher = make_params(jax.random.fold_in(root, 2**31 - 1), (INPUTS, 16, OUTPUTS))
    inputs = jax.random.normal(jax.random.fold_in(root, step), (size, INPUTS))
    return inputs, jnp.tanh(predict(teacher, inputs))


def loss_of(params: Params, inputs: jax.Array, targets: jax.Array) -> jax.Array:
    return jnp.mean((predict(params, inputs) - targets) ** 2)


class Trainer:
    """One step and the first state, compiled for these options."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        schedule = optax.warmup_cosine_decay_schedule(0.0, options.learning_rate, options.steps // 10, options.steps)
        self._optimizer = optax.adamw(schedule, b1=options.beta1, b2=options.beta2, weight_decay=options.weight_decay)
        self.advance = jax.jit(self._advance, donate_argnums=0)
        self.evaluate = jax.jit(self._evaluate)

    def first(self) -> State:
        params = make_params(jax.random.key(self._options.seed), (INPUTS, HIDDEN, HIDDEN, OUTPUTS))
        return State(jnp.zeros((), jnp.int32), params, self._optimizer.init(params))

    def _advance(self, state: State) -> tuple[State, jax.Array]:
        inputs, targets = make_batch(self._options.seed, state.step, self._options.batch_size)
        loss, gradients = jax.value_and_grad(loss_of)(state.params, inputs, targets)
        updates, optimizer = self._optimizer.update(gradients, state.optimizer, state.params)
        return State(state.step + 1, optax.apply_updates(state.params, updates), optimizer), loss

    def _evaluate(self, state: State) -> jax.Array:
        return loss_of(state.params, *make_batch(self._options.seed, jnp.int32(-1), EVAL_EXAMPLES))


# --- checkpoints ---
def open_checkpoints(directory: str, *, to_save: bool) -> ocp.CheckpointManager:
    options = ocp.CheckpointManagerOptions(
        max_to_keep=2 if to_save else None,
        read_only=not to_save,
        enable_async_checkpointing=False,  # a step that was said to be saved is saved
    )
    place = directory if "://" in directory else Path(directory).resolve()
    return ocp.CheckpointManager(place, options=options)


def restored(first: State, directories: list[str]) -> State:
    """The newest state that was saved whole; the first one if there is none.

    An attempt killed while it saved leaves a checkpoint that is not finished: orbax does not count it, and the one
    before it, perhaps of an earlier attempt, is used.
    """
    for directory in directories:
        if "://" not in directory and not Path(directory).is_dir():
            continue
        with open_checkpoints(directory, to_save=False) as checkpoints:
            step = checkpoints.latest_step()
            if step is not None:
                print(f"resumed at step {step} from {directory}", flush=True)
                found: State = checkpoints.restore(step, args=ocp.args.StandardRestore(first))
                return found
    return first


# --- the run ---
def weights_hash(params: Params) -> str:
    """One number for all weights: equal only if every bit is."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        array = np.asarray(leaf)
        digest.update(f"{array.dtype} {array.shape}".encode() + array.tobytes())
    return digest.hexdigest()


def train(options: argparse.Namespace) -> int:
    """Train to the last step; the exit code."""
    logging.getLogger("absl").setLevel(logging.ERROR)  # orbax tells of each choice it makes
    directory = payload.checkpoint_dir()
    trainer = Trainer(options)
    state = restored(trainer.first(), [directory, *payload.restore_dirs()])
    print(f"stage {options.stage}: step {int(state.step)} of {options.steps} on {jax.devices()}", flush=True)
    with open_checkpoints(directory, to_save=True) as checkpoints:
        for step in range(int(state.step) + 1, options.steps + 1):
            state, loss = trainer.advance(state)
            time.sleep(options.pause)
            payload.progress(step, options.steps, loss=loss)
            stopping = payload.should_stop()
            if stopping or step % options.checkpoint_every == 0 or step == options.steps:
                checkpoints.save(step, args=ocp.args.StandardSave(state))
                print(f"step {step}: loss {float(loss):.6f}, saved", flush=True)
            if stopping and step < options.steps:
                print(f"asked to stop: leaving at step {step}", flush=True)
                return payload.STOPPED
    report(options, state, trainer)
    return 0


def report(options: argparse.Namespace, state: State, trainer: Trainer) -> None:
    weights = weights_hash(state.params)
    metrics = {
        "steps": options.steps,
        "stage": options.stage,
        "eval_loss": float(trainer.evaluate(state)),
        "weights_sha256": weights,
    }
    output = Path(payload.output_dir())
    (output / "weights.sha256").write_text(weights + "\n")
    (output / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    print(json.dumps(metrics), flush=True)


if __name__ == "__main__":
    sys.exit(train(read_options()))
