"""`tpu rules`: how each preset goes on after each cause, what that may cost, and every limit with its reason.

Decides only how these are shown; what is true comes from `domain.policies` and `domain.limits`. The command line loads
it when `rules` is called. It contacts no server.
"""

from __future__ import annotations

from collections.abc import Sequence

import click
import msgspec

from penstock.domain import limits
from penstock.domain.lifecycle import FAILURE_CAUSES, INFRASTRUCTURE_CAUSES, Cause
from penstock.domain.policies import PRESETS, Go

#: What the platform does comes first, then what the job does itself, then the two ends that no rule changes.
_COLUMNS = (
    Cause.PREEMPTED,
    Cause.INFRA,
    Cause.LOST,
    Cause.USER_ERROR,
    Cause.OOM,
    Cause.TIMEOUT,
    Cause.CANCELLED,
    Cause.SUCCEEDED,
)


@click.command(name="rules")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--limits", "show_limits", is_flag=True, help="List every limit and interval with its unit and reason.")
def rules(as_json: bool, show_limits: bool) -> None:
    """Show what each retry rule does for each cause of failure.

    resume: go on from the last checkpoint, one stage further. rerun: start again from nothing. stop: the job ends.
    A job names its rule when it is submitted; the default is `pre`.
    """
    if show_limits and as_json:
        _echo_json(limits.LIMITS)
    elif show_limits:
        lines = [(each.name, f"{each.value:,}", each.unit, each.reason) for each in limits.LIMITS]
        _echo_table(("NAME", "VALUE", "UNIT", "REASON"), lines, numeric=1)
    elif as_json:
        _echo_json({"presets": _presets(), "budgets": _budgets(), "backoff": _backoff()})
    else:
        chosen = [(name, *(_go(name, cause).value for cause in _COLUMNS)) for name in PRESETS]
        _echo_table(("PRESET", *(cause.value for cause in _COLUMNS)), chosen)
        click.echo("")
        _echo_budgets_and_backoff()


def _go(preset: str, cause: Cause) -> Go:
    return PRESETS[preset].on.get(cause, Go.STOP)


def _presets() -> dict[str, object]:
    return {
        name: {"summary": preset.summary, "on": {cause.value: _go(name, cause).value for cause in _COLUMNS}}
        for name, preset in PRESETS.items()
    }


def _budgets() -> dict[str, object]:
    return {
        "failure": {"default": limits.FAILURE_BUDGET_DEFAULT, "causes": _named(FAILURE_CAUSES)},
        "infra": {"default": limits.INFRA_BUDGET_DEFAULT, "causes": _named(INFRASTRUCTURE_CAUSES)},
    }


def _backoff() -> dict[str, object]:
    return {
        "first_s": limits.BACKOFF_FIRST_S,
        "factor": 2,
        "max_s": limits.BACKOFF_MAX_S,
        "jitter": "between half and all of it",
        "none_after": [Cause.PREEMPTED.value],
        "poison_losses": limits.POISON_LOSSES,
        "poison_run_s": limits.POISON_RUN_S,
    }


def _named(causes: frozenset[Cause]) -> list[str]:
    return [cause.value for cause in _COLUMNS if cause in causes]


def _echo_budgets_and_backoff() -> None:
    click.echo(
        f"Budgets: {limits.FAILURE_BUDGET_DEFAULT} retries after {', '.join(_named(FAILURE_CAUSES))}; "
        f"{limits.INFRA_BUDGET_DEFAULT} after {', '.join(_named(INFRASTRUCTURE_CAUSES))}; "
        "per replica, unless the job says otherwise."
    )
    click.echo(
        f"Back-off: {limits.BACKOFF_FIRST_S:g} s, doubling up to {limits.BACKOFF_MAX_S:g} s, half of it by chance, "
        f"none after {Cause.PREEMPTED.value}; {limits.POISON_LOSSES} losses in a row within "
        f"{limits.POISON_RUN_S:g} s of the start end the job."
    )


def _echo_json(value: object) -> None:
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def _echo_table(header: Sequence[str], lines: Sequence[Sequence[str]], numeric: int | None = None) -> None:
    """Columns of text; the one that is `numeric` stands to the right."""
    widths = [max(len(line[column]) for line in (header, *lines)) for column in range(len(header))]
    for line in (header, *lines):
        cells = [
            cell.rjust(width) if column == numeric else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        click.echo("  ".join(cells).rstrip())
