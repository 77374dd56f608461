"""A model's activations over a dataset: what is captured, how it is computed, and the store it ends in.

`penstock.extract.open(address)` reads a finished run. Names are loaded when they are first used, so that a reader needs
numpy and pyarrow, and neither jax nor a model.
"""

from importlib import import_module

_WHERE = {
    "batches": "penstock.extract.iterators:batches",
    "export_dataset": "penstock.extract.export:export_dataset",
    "jax_batches": "penstock.extract.iterators:jax_batches",
    "joint_batches": "penstock.extract.iterators:joint_batches",
    "load_old_shard": "penstock.extract.old_shards:load_old_shard",
    "open": "penstock.extract.reader:open",
    "torch_batches": "penstock.extract.iterators:torch_batches",
}


def __getattr__(name: str) -> object:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    where, _, attribute = _WHERE[name].partition(":")
    value: object = getattr(import_module(where), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE})
