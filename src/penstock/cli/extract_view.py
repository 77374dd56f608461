"""How `tpu extract` shows plans, runs and numbers: tables, a page with a plot, and nothing that is decided.

`cli.extract` calls it with what `wiring.extraction` found. Names of documents and workers come from elsewhere and are
made safe to show.
"""

from __future__ import annotations

import html
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock.cli import terminal

if TYPE_CHECKING:
    from penstock.cli.extract_cost import Spent
    from penstock.cli.extract_options import PlanOptions
    from penstock.wiring.extract_memory import StepMemory
    from penstock.wiring.extraction import Checked, Done, OldSample, Planned, Refused, RunPlan, RunView

BINS = 60  #: of the plot
SHOWN_PROBLEMS = 20
_SHOWN_EVERY_S = 0.1
_STATES = {"working": "green", "recovering": "yellow", "lost": "red", "idle": "bright_black", "ended": "bright_black"}
_PLOT = (900, 260, 60)  #: width, height, margin


def planned(options: PlanOptions, out: str | None) -> Planned:
    """The plan of what was asked for, with a line about the progress of looking the data over."""
    from penstock.wiring.extraction import DataOptions, PlanWish, plan_run

    status, last = terminal.StatusLine(), [0.0]

    def show(done: int, whole: int) -> None:
        if time.monotonic() - last[0] >= _SHOWN_EVERY_S:
            last[0] = time.monotonic()
            status.show(f"looking at {terminal.size(done)} of {terminal.size(whole)}")

    data = DataOptions(
        data=options.data,
        format=options.format,
        split=options.split,
        column=options.column,
        template=options.template,
        chat=options.chat,
        tokens=options.token_column,
        id=options.id_column,
        filter=options.filter,
        open_answer=options.open_answer,
        tokenizer=options.tokenizer or (options.model if options.chat else None),
    )
    wish = PlanWish(
        model=options.model or "",
        data=data,
        sites=options.sites or "",
        dtype=options.dtype,
        width=options.width,
        cut=options.cut,
        overlap=options.overlap,
        max_samples=options.max_samples,
        unit_rows=options.unit_rows,
        out=out,
    )
    found = plan_run(wish, show)
    status.clear()
    return found


def echo_plan(
    found: Planned, options: PlanOptions, mesh: str | None, memory: Sequence[StepMemory], as_json: bool
) -> None:
    """`--dry-run`: what would be done, and what it takes."""
    plan = found.plan
    if as_json:
        terminal.echo_json(
            {
                "run": plan.run,
                "rows": plan.rows,
                "units": len(plan.units),
                "unit_rows": _unit_rows(plan)[1],
                "width": plan.work["rules"]["width"],
                "sites": plan.sites,
                "dtype": plan.dtype,
                "tokens_about": round(plan.rows * found.tokens_per_row),
                "bytes_about": found.bytes,
                "rows_looked_at": found.looked_at,
                "rows_refused": found.refused,
                "first_reason": found.reason,
                "notes": found.notes,
                "mesh": mesh,
                "memory": memory,
            }
        )
        return
    facts = [
        ("run", plan.run),
        ("rows", f"{plan.rows:,}{total_of(options)}"),
        ("units", f"{len(plan.units):,} of {' to '.join(f'{rows:,}' for rows in sorted({*_unit_rows(plan)}))} rows"),
        ("width", _width(found, options)),
        ("tokens", f"about {plan.rows * found.tokens_per_row:,.0f}, as {found.looked_at:,} rows from all over it tell"),
        *(("refused", line) for line in refusals(found)),
        ("sites", ", ".join(plan.sites)),
        ("stored", f"about {terminal.size(found.bytes)} as {plan.dtype}"),
        *(("memory", line) for step in memory for line in _memory(step)),
        ("", "memory is arithmetic on the shapes of arrays, not measured; devices are as Google's pages have them"),
    ]
    facts += [("note", line) for line in found.notes]
    terminal.echo_facts(facts)
    click.echo("nothing was written")


def total_of(options: PlanOptions) -> str:
    """What stands behind a number of rows that the user has bounded."""
    return "" if options.max_samples is None else " in all (--max-samples is the total, not each worker's)"


def refusals(found: Planned) -> list[str]:
    """A line about rows that give nothing, if there were any among those looked at."""
    if not found.refused:
        return []
    reason = terminal.safe(found.reason or "")
    return [f"{found.refused:,} of {found.looked_at:,} rows looked at give nothing; the first {reason}"]


def _unit_rows(plan: RunPlan) -> tuple[int, int]:
    """Of the smallest and the largest unit; the last is what was left, and says nothing."""
    rows = [unit.stop - unit.start for unit in plan.units[:-1] or plan.units]
    return min(rows), max(rows)


def _width(found: Planned, options: PlanOptions) -> str:
    width = found.plan.work["rules"]["width"]
    of_model = ": the model has no more positions" if width == found.config.positions_max else ""
    return f"{width:,} tokens a row" + ("" if options.width is not None else f", as --width is not given{of_model}")


def _memory(step: StepMemory) -> Iterator[str]:
    """What a worker's step takes, whether it fits and what happens if not, and what it takes of the host."""
    size = terminal.size
    parts = (("weights", step.parts.weights), ("working", step.parts.working), ("results", step.parts.results))
    told = ", ".join(f"{name} {size(count)}" for name, count in parts)
    place = f"{step.on}, {terminal.many(step.devices, 'device')}"
    if step.device is not None:
        place += f" of {size(step.device)}, {size(step.usable or 0)} of it planned with"
    attention = "in blocks" if step.attention == "blocks" else "plain"
    how = f"{step.rows} rows of {step.width} a step, {step.in_flight} under way, attention {attention}"
    yield f"{place}, {step.mesh}: {size(step.total)} per device ({told}); {how}"
    if step.platform == "cpu":
        return
    if step.possible is False:
        yield (
            f"{step.on}: CANNOT FIT: weights and one row's results alone are more than a device has, and a worker "
            "refuses; cut the model with --mesh fsdp=N or tensor=N"
        )
    elif step.fits is False:
        yield (
            f"{step.on}: DOES NOT FIT by this estimate, with one row a device: a worker tries, and refuses when memory "
            "runs out; cut the model with --mesh fsdp=N or tensor=N, or name fewer sites"
        )
    elif step.rows < step.rows_full:
        yield f"{step.on}: {step.rows_full} rows would take {size(step.total_full)}: a worker takes {step.rows}"
    elif step.device is None:
        yield f"{step.on}: with less memory a worker takes fewer rows, down to one a device: {size(step.total_one)}"
    yield f"{step.on}: {size(step.host)} of each host's memory are page-locked, for results on their way to the disk"


def status_json(view: RunView, spent: Spent) -> dict[str, Any]:
    """The view of a run with what it cost."""
    import msgspec

    found: dict[str, Any] = msgspec.to_builtins(view)
    for worker in found["workers"]:
        worker["usd"] = spent.workers.get(worker_attempt(worker["worker"]))
    found["cost"] = {"usd": spent.usd, "chip_s": spent.chip_s, "jobs": spent.jobs, "why": spent.why}
    return found


def worker_attempt(worker: str) -> str:
    """The attempt that a worker's name begins with, if it is a replica of a job."""
    return worker.partition(".")[0]


def echo_status(view: RunView, spent: Spent) -> None:
    """The dashboard: workers, then totals."""
    rows = [
        (
            terminal.safe(worker.worker),
            click.style(worker.state, fg=_STATES.get(worker.state)),
            worker.unit or "-",
            f"{worker.documents:,}",
            f"{worker.shards:,}",
            f"{worker.units:,}",
            f"{worker.tokens:,}",
            spent.of_worker(worker_attempt(worker.worker)),
            terminal.span(worker.seen_s),
        )
        for worker in view.workers
    ]
    if rows:
        header = ("worker", "state", "unit", "samples", "shards", "committed", "tokens", "cost", "seen")
        spare = ("unit", "seen", "tokens")
        terminal.echo_table(header, rows, right=(*header[3:],), spare=spare)
        click.echo()
    left = "unknown" if view.left_s is None else terminal.span(view.left_s)
    rate = f"{view.tokens_per_s:,.0f} tokens/s" if view.healthy else "no worker gives a sign"
    gone = f", {view.lost} lost" if view.lost else ""
    state = "sealed" if view.sealed else "open"
    facts = [
        ("run", f"{view.run}, {state}"),
        ("units", f"{view.committed:,} of {view.units:,} committed"),
        ("samples", f"{view.facts.documents:,} of {view.rows:,}; {_nothing(view.facts.empty)}"),
        ("tokens", f"{view.facts.tokens:,}, {terminal.size(view.facts.bytes)}"),
        ("workers", f"{view.healthy} healthy, {view.working} working, {view.recovering} recovering{gone}"),
        ("rate", "done" if view.sealed else rate),
        ("left", left),
        *spent.facts,
        *(("damaged", each) for each in view.damaged[:SHOWN_PROBLEMS]),
    ]
    terminal.echo_facts(facts)


def _nothing(empty: int) -> str:
    return f"{empty:,} gave nothing" + (" (`tpu extract refused` lists them)" if empty else "")


def echo_refused(found: Sequence[Refused], as_json: bool) -> None:
    """With `as_json` one object a line, as side files have it."""
    if as_json:
        for each in found:
            terminal.echo_json_line(each)
        return
    rows = [
        (terminal.safe(each.file), str(each.line), terminal.safe(each.id or "-"), terminal.safe(each.reason))
        for each in found
    ]
    if rows:
        terminal.echo_table(("file", "line", "id", "reason"), rows, right=("line",), spare=("id",))
    terminal.note(f"{terminal.many(len(rows), 'row')} gave nothing")


def echo_checked(checked: Checked) -> None:
    for problem in checked.problems[:SHOWN_PROBLEMS]:
        click.echo(terminal.safe(problem))
    if len(checked.problems) > SHOWN_PROBLEMS:
        click.echo(f"… and {len(checked.problems) - SHOWN_PROBLEMS} more")
    if checked.damaged:
        click.echo(f"`tpu extract requeue` has them made again: {', '.join(checked.damaged[:SHOWN_PROBLEMS])}")
    facts = [
        ("run", f"{checked.run}, {'sealed' if checked.sealed else 'open'}"),
        ("units", f"{checked.committed:,} of {checked.units:,} committed"),
        ("objects", f"{checked.objects:,}, {terminal.size(checked.bytes)} read and hashed"),
        ("rows", f"sha256 {checked.rows_sha256}"),
        ("garbage", f"{checked.garbage:,} objects that no commit names"),
        *([("ids", _shared(checked.shared_ids))] if checked.shared_ids else []),
        ("problems", f"{len(checked.problems):,}"),
    ]
    terminal.echo_facts(facts)


def _shared(count: int) -> str:
    return f"{count:,} name several input rows each; such a document is read with row="


def stats(plan: RunPlan, done: Sequence[Done]) -> dict[str, Any]:
    """The numbers of a run, ready for JSON."""
    workers: dict[str, dict[str, float]] = {}
    for each in done:
        facts = each.commit.facts
        row = workers.setdefault(facts.worker, {"units": 0, "tokens": 0, "seconds": 0.0})
        row["units"] += 1
        row["tokens"] += facts.tokens
        row["seconds"] += facts.seconds
    sites: dict[str, dict[str, float]] = {}
    for site in plan.sites:
        found = [each.commit.facts.sites[site] for each in done if each.commit.facts.tokens]
        sampled = sum(facts.sampled for facts in found)
        sites[site] = {
            "width": max((facts.width for facts in found), default=0),
            "bytes": sum(facts.bytes for facts in found),
            "mean_norm": sum(facts.mean_norm * facts.sampled for facts in found) / sampled if sampled else 0.0,
            "max_abs": max((facts.max_abs for facts in found), default=0.0),
            "not_finite": sum(facts.not_finite for facts in found),
        }
    return {
        "run": plan.run,
        "units": len(plan.units),
        "committed": len(done),
        "tokens": sum(each.commit.facts.tokens for each in done),
        "sites": sites,
        "workers": workers,
        "rate": [{"at": at, "tokens_per_s": rate} for at, rate in rates(done)],
    }


def rates(done: Sequence[Done]) -> list[tuple[float, float]]:
    """Tokens per second over the run's time, in bins; a unit's tokens are spread over the time it took."""
    if not done:
        return []
    begins = [each.at - max(each.commit.facts.seconds, 1e-3) for each in done]
    first, last = min(begins), max(each.at for each in done)
    step = max((last - first) / BINS, 1e-3)
    sums = [0.0] * BINS
    for begin, each in zip(begins, done, strict=True):
        rate = each.commit.facts.tokens / (each.at - begin)
        for number in range(BINS):
            low, high = first + number * step, first + (number + 1) * step
            sums[number] += rate * max(0.0, min(high, each.at) - max(low, begin))
    return [(first + (number + 0.5) * step, amount / step) for number, amount in enumerate(sums)]


def echo_stats(shown: dict[str, Any]) -> None:
    header = ("site", "width", "size", "mean norm", "largest", "not finite")
    rows = [
        (
            site,
            f"{row['width']:,}",
            terminal.size(row["bytes"]),
            f"{row['mean_norm']:.4g}",
            f"{row['max_abs']:.4g}",
            f"{row['not_finite']:,}",
        )
        for site, row in shown["sites"].items()
    ]
    terminal.echo_table(header, rows, right=header[1:])
    click.echo()
    titles = ("worker", "units", "tokens", "tokens/s")
    lines = [
        (
            terminal.safe(worker),
            f"{row['units']:,}",
            f"{row['tokens']:,}",
            f"{row['tokens'] / row['seconds'] if row['seconds'] else 0:,.0f}",
        )
        for worker, row in sorted(shown["workers"].items())
    ]
    terminal.echo_table(titles, lines, right=titles[1:])


def stats_page(plan: RunPlan, done: Sequence[Done]) -> str:
    """One HTML page without anything from elsewhere: a plot of the rate and the tables."""
    shown = stats(plan, done)
    sites = "".join(
        f"<tr><td>{html.escape(site)}<td>{row['width']}<td>{terminal.size(row['bytes'])}<td>{row['mean_norm']:.4g}"
        f"<td>{row['max_abs']:.4g}<td>{row['not_finite']}"
        for site, row in shown["sites"].items()
    )
    workers = "".join(
        f"<tr><td>{html.escape(worker)}<td>{row['units']:,}<td>{row['tokens']:,}"
        f"<td>{row['tokens'] / row['seconds'] if row['seconds'] else 0:,.0f}"
        for worker, row in sorted(shown["workers"].items())
    )
    return (
        "<!doctype html><meta charset=utf-8><title>Extraction</title>"
        "<style>body{font:15px system-ui;margin:2em auto;max-width:60em}table{border-collapse:collapse;margin:1em 0}"
        "td,th{padding:.2em .8em;text-align:right;border-bottom:1px solid #ddd}td:first-child,th:first-child"
        "{text-align:left}svg{width:100%;height:auto}</style>"
        f"<h1>Extraction {html.escape(plan.run)}</h1>"
        f"<p>{shown['committed']:,} of {shown['units']:,} units, {shown['tokens']:,} tokens"
        f"{_plot(rates(done))}"
        "<h2>Sites</h2><table><tr><th>site<th>width<th>size<th>mean norm<th>largest<th>not finite"
        f"{sites}</table><h2>Workers</h2><table><tr><th>worker<th>units<th>tokens<th>tokens/s{workers}</table>"
    )


def _plot(points: Sequence[tuple[float, float]]) -> str:
    if not points:
        return "<p>Nothing is committed yet."
    width, height, margin = _PLOT
    first, last = points[0][0], points[-1][0]
    most = max(rate for _, rate in points) or 1.0
    spread = max(last - first, 1e-3)

    def place(at: float, rate: float) -> str:
        x = margin + (at - first) / spread * (width - 2 * margin)
        return f"{x:.1f},{height - margin - rate / most * (height - 2 * margin):.1f}"

    line = " ".join(place(at, rate) for at, rate in points)
    floor = height - margin
    return (
        f'<h2>Tokens per second</h2><svg viewBox="0 0 {width} {height}" role="img" aria-label="tokens per second">'
        f'<line x1="{margin}" y1="{floor}" x2="{width - margin}" y2="{floor}" stroke="#888"/>'
        f'<polyline fill="none" stroke="#06c" stroke-width="2" points="{line}"/>'
        f'<text x="{margin}" y="{margin - 8}" font-size="13">{most:,.0f}</text>'
        f'<text x="{width - margin}" y="{floor + 20}" font-size="13" text-anchor="end">{terminal.span(spread)}</text>'
        "</svg>"
    )


def echo_old_shard(path: Path, samples: Sequence[OldSample], as_json: bool) -> None:
    layers: dict[str, int] = {}
    for sample in samples:
        layers[sample.layer] = layers.get(sample.layer, 0) + 1
    shapes = sorted({tuple(int(side) for side in sample.activation.shape) for sample in samples})
    if as_json:
        terminal.echo_json_line({"file": str(path), "layers": layers, "shapes": shapes})
        return
    counts = ", ".join(f"layer {terminal.safe(layer)}: {count} samples" for layer, count in layers.items())
    click.echo(f"{terminal.safe(str(path))}: {counts or 'nothing'}; shapes {', '.join(map(str, shapes[:4]))}")
