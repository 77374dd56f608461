"""A worker as a replica of a Penstock job: what it is called, how it says how much is open, and when it should stop.

`wiring.extraction` uses it for every worker; outside of Penstock each answer is the harmless one. The control plane
only supplies workers and shows how they get on: nothing here may matter for what ends up in the bucket.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from penstock import payload
from penstock.extract.worker import Standing
from penstock.payload import STOPPED, should_stop

__all__ = ["STOPPED", "replica_name", "should_stop", "tell"]

_OTHER = re.compile(r"[^A-Za-z0-9.]+")


def replica_name(environment: Mapping[str, str], host: str, chance: str) -> str:
    """Unlike any other's through `chance`; people recognise the attempt of the job, or the host."""
    known = environment.get("PENSTOCK_ATTEMPT") or host or "worker"
    return f"{_OTHER.sub('.', known)[:80]}.{environment.get('PENSTOCK_RANK', '0')}.{chance}"


def tell(standing: Standing) -> None:
    """There are never more replicas than open units, and a job whose last unit is committed ends well."""
    payload.progress(
        standing.units - standing.open,
        standing.units,
        open_units=standing.open,
        tokens=standing.tokens,
        rows=standing.documents,
    )
