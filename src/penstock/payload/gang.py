"""The other hosts of the job: which one this is, how many there are, and how JAX is told.

User code calls `distributed()` before its first use of JAX devices; on one host, and outside of Penstock, it does
nothing. On real TPU slices JAX finds the other hosts by itself and Penstock sets no coordinator. JAX is the user's: it
is imported by name when it is needed, never by Penstock itself.
"""

from __future__ import annotations

import atexit
import importlib
import logging
import os
import sys
from typing import Any


def rank() -> int:
    """The index of this host in its gang; 0 outside of Penstock. JAX's `process_index` may differ on TPUs."""
    return int(os.environ.get("PENSTOCK_RANK", "0"))


def world_size() -> int:
    """How many hosts run this attempt; 1 outside of Penstock."""
    return int(os.environ.get("PENSTOCK_WORLD_SIZE", "1"))


def distributed(jax: Any = None, **options: Any) -> bool:
    """Join the hosts of this attempt into one JAX world; True if there was anything to join.

    `jax` is the module to use, by default the installed one; `options` go to `jax.distributed.initialize`.
    """
    coordinator = os.environ.get("PENSTOCK_COORDINATOR")
    if world_size() <= 1 or not coordinator:
        return False
    module = importlib.import_module("jax") if jax is None else jax
    module.distributed.initialize(
        coordinator_address=coordinator, num_processes=world_size(), process_id=rank(), **options
    )
    atexit.register(_leave_if_failed)
    return True


def _leave_if_failed() -> None:
    """After an uncaught exception the process ends here, and the agent sees it and stops the other hosts.

    JAX's own last act is to wait for all hosts, for minutes, while they wait for this one in a collective. It registers
    that when it is imported, so it comes after this; what the program registered since then has run.
    """
    if getattr(sys, "last_value", None) is None:
        return
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
