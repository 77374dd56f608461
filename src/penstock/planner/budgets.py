"""Whether a queue has spent its budget: what closed attempts used, and what live ones have used until now.

`planner.admission` asks before it looks at a queue's new jobs, `planner.reasons` to say why they wait. It costs what
lives in the queues that have a budget, and nothing elsewhere. It must not stop anything: jobs that have begun go on,
after a preemption too.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.domain import budgets
from penstock.domain.budgets import Spent
from penstock.domain.nouns import Attempt, Queue
from penstock.planner.snapshot import QueueView


def spent(queue: Queue, live: Iterable[Attempt], now: float) -> Spent | None:
    """What counts against a queue's budget now; None without one. `live` are its attempts that run."""
    budget = queue.budget
    if budget is None:
        return None
    book = budgets.current(queue.spent, budget.window, now)
    chip_s = usd = unpriced = 0.0
    for attempt in live:
        held = attempt.chips * max(0.0, now - max(attempt.created_at, book.since))
        chip_s += held
        if attempt.usd_per_chip_hour is None:
            unpriced += held
        else:
            usd += held * attempt.usd_per_chip_hour / budgets.HOUR_S
    return Spent(
        window=book.window,
        since=book.since,
        chip_s=book.chip_s + chip_s,
        usd=book.usd + usd,
        unpriced_chip_s=book.unpriced_chip_s + unpriced,
    )


def used_up(view: QueueView, now: float) -> Spent | None:
    """What was spent, if that is all of the budget or more: then nothing new of the queue starts."""
    book = spent(view.queue, view.live.values(), now)
    if book is None or view.queue.budget is None:
        return None
    return book if book.of(view.queue.budget.unit) >= view.queue.budget.limit else None
