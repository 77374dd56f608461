"""`tpu tldr`: everything for a working day, on one screen of 24 lines and 100 columns."""

from __future__ import annotations

import click

TEXT = """\
RUN       tpu run train.py lr=0.01              freeze this directory, run it, show logs
          tpu run --on v5e-8 --spot train.py    choose capacity: `tpu catalog`, `tpu pools`
          tpu run --detach -- bash go.sh        any command; do not stay
          tpu run --array 0-9%3 train.py seed={index}         ten jobs, three at once
          tpu exec -c 'result = jax.device_count()'          a snippet; its result is printed
LOOK      tpu ps                                live jobs and the latest; `tpu watch` keeps it up
          tpu show ID   tpu logs -f ID   tpu result ID -o out/   tpu events ID
          tpu why ID                            why it waits, and what would help
CHANGE    tpu cancel ID                         stop it; `tpu kill ID` also waits until it has ended
          tpu resume ID [--on v4-8]             go on from its checkpoint
          tpu rerun ID                          from nothing
          tpu tag ID sweep-3                    then: tpu ps --tag sweep-3
ONCE      tpu alias set wu config.training.warmup_steps      then: tpu run train.py wu=500
          tpu dir set 2                         then: tpu run --dir 2 train.py
          tpu secret set WANDB_API_KEY          then: tpu run --secret WANDB_API_KEY train.py
          tpu settings set style hydra          eval "$(tpu completion bash)"
CAPACITY  tpu slices   tpu queues   tpu pools   tpu pools set big --on v5e-8 --max 4   tpu cost
SERVER    none needed: `tpu run` starts one here, `tpu down` stops it; `tpu serve` for a team,
          PENSTOCK_URL and PENSTOCK_TOKEN to use another
EXIT      0 well; 1-255 the program's own; 124 timeout; 130 cancelled or Ctrl-C; 137 memory;
          75 capacity lost; 2 bad input; 3 not available; 4 not allowed; 5 not found; 6 conflict
MORE      ids may be shortened; every list has --json; `tpu COMMAND --help`
"""


@click.command()
def tldr() -> None:
    """Everything for a working day, on one screen."""
    click.echo(TEXT, nl=False)
