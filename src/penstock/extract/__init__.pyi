# What type checkers see of `penstock.extract`, whose names are loaded when they are first used.

from penstock.extract.export import export_dataset as export_dataset
from penstock.extract.iterators import batches as batches
from penstock.extract.iterators import jax_batches as jax_batches
from penstock.extract.iterators import joint_batches as joint_batches
from penstock.extract.iterators import torch_batches as torch_batches
from penstock.extract.old_shards import load_old_shard as load_old_shard
from penstock.extract.reader import open as open  # noqa: A004 (as gzip.open and the like)
