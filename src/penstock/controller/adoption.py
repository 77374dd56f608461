"""The verb that takes in a TPU somebody else made: it becomes the one slice of a pool that bears its name.

`server.adoption` calls it through `controller.commands`, then labels the machine. Whether it is taken already is
decided here, in the transaction that takes it: of two who ask at once the second gets the first one's slice. It must
not call a provider.
"""

from __future__ import annotations

from penstock.controller import settings, slices
from penstock.controller.verbs import verb
from penstock.domain.admission import BadInput
from penstock.domain.lifecycle import COUNTED_SLICE_STATES, SliceState
from penstock.domain.nouns import Pool, Slice
from penstock.ports.store import Transaction


@verb
def take_in(tx: Transaction, pool: Pool, id: str, machine: str) -> Slice:
    """The pool and its slice `id`, incarnation `machine`; or the slice that the TPU is on its way to be already."""
    known = tx.pool(pool.name)
    if known is not None and not (known.deleted or known.adopted):
        raise BadInput("name", pool.name, "is the name of a pool already", f"`tpu pools rm {pool.name}` first")
    held = next((each for each in tx.live_slices() if _holds(each, pool)), None)
    if held is None:
        return slices.adopt(tx, settings.put_pool(tx, pool), id, machine)
    if known is None or known.deleted or held.zone not in pool.zones or held.state is not SliceState.CREATING:
        rule = f"is slice {held.id} in {held.zone} already, which is {held.state.value}"
        raise BadInput("name", pool.name, rule, f"`tpu pools rm {pool.name}` first")
    return held


def _holds(slice: Slice, pool: Pool) -> bool:
    return slice.pool == pool.name and slice.state in COUNTED_SLICE_STATES
