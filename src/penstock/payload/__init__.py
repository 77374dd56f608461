"""For user code inside a job: stage, directories, deadline, the wish to stop, progress, the other hosts of a gang.

Import it in a training script (`from penstock import payload`); nothing requires it, the environment variables say the
same. Outside of Penstock every function has a sensible answer, so the script runs anywhere. Standard library only: it
must not import the rest of Penstock, so that it costs a user's program nothing.
"""

from penstock.payload.gang import distributed, rank, world_size
from penstock.payload.places import checkpoint_dir, job_id, output_dir, restore_dir, restore_dirs, stage
from penstock.payload.reporting import progress, saving
from penstock.payload.stopping import STOPPED, deadline, seconds_left, should_stop

__all__ = [
    "STOPPED",
    "checkpoint_dir",
    "deadline",
    "distributed",
    "job_id",
    "output_dir",
    "progress",
    "rank",
    "restore_dir",
    "restore_dirs",
    "saving",
    "seconds_left",
    "should_stop",
    "stage",
    "world_size",
]
