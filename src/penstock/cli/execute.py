"""`tpu exec`: a snippet of Python on an accelerator; what it leaves in `result` is the answer.

Reads the code from the command line, a file or standard input; one job, or one per line of a batch. What the snippet
prints goes where it printed it, then its result as JSON on standard output. The exit code is the snippet's, or that of
the cause (`wire.problems.JOB_EXIT_CODES`).
"""

from __future__ import annotations

import re
import shlex
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from penstock.cli import follow, many, preferences, terminal
from penstock.cli.submit import JobOptions, job_options, job_request
from penstock.cli.talk import talking
from penstock.cli.words import Pair, as_json
from penstock.domain.limits import CODE_BYTES_MAX

if TYPE_CHECKING:
    from penstock.cli.targets import Target
    from penstock.client.client import Client
    from penstock.wire.api import JobRequest

BATCH_LINES_MAX = 100_000  #: of one file: more belong into several


class BatchLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of a batch; what it leaves out comes from the command line."""

    code: str | None = None
    variables: dict[str, object] = {}
    name: str = ""
    tags: tuple[str, ...] = ()
    timeout_s: float | None = None
    idempotency_key: str | None = None


class SnippetWish(msgspec.Struct, frozen=True):
    """What the command line says of the snippet itself."""

    code: str | None
    variables: dict[str, object]
    isolation: str
    setup: str


@click.command(name="exec")
@click.argument("file", required=False, metavar="[FILE.py|-]")
@click.option("-c", "code", metavar="CODE", help="The code itself.")
@click.option("--var", "variables", multiple=True, type=Pair(), metavar="K=JSON", help="A variable in its scope.")
@click.option("--batch", metavar="FILE.jsonl", help="One job per line: {code, variables, name, …}; - reads stdin.")
@click.option(
    "--isolation",
    type=click.Choice(["fork", "inline"]),
    default="fork",
    show_default=True,
    help="A process of its own, or one trusted interpreter for many.",
)
@click.option("--setup", default="", metavar="COMMAND", help="Makes its environment, once per host; kept by its hash.")
@click.option("--requirements", metavar="FILE", help="Its environment has these packages: a plain requirements file.")
@click.option("--detach", is_flag=True, help="Submit, print the id, leave.")
@as_json
@job_options
@click.pass_context
def execute(
    context: click.Context,
    *,
    file: str | None,
    code: str | None,
    variables: tuple[tuple[str, str], ...],
    batch: str | None,
    isolation: str,
    setup: str,
    requirements: str | None,
    detach: bool,
    as_json: bool,
    job: JobOptions,
) -> None:
    """Run a snippet of Python; `jax`, `jnp` and `logger` are in scope, `result` is what comes back.

    \b
    tpu exec -c 'result = jax.device_count()'
    tpu exec --on v5e-8 --var n=100 probe.py
    tpu exec --setup 'pip install einops' probe.py
    echo 'result = 1 + 1' | tpu exec -
    tpu exec --batch work.jsonl --json > outcomes.jsonl
    """
    known = preferences.load()
    if batch is None or code is not None or file is not None:
        code = _code(code, file)
    values = {key: _json("--var", f"{key}={text}", text) for key, text in variables}
    lines = [BatchLine()] if batch is None else _batch(batch)
    setup = _setup(setup, requirements)
    with talking(start=True, stay=not detach) as client:
        from penstock.cli.targets import resolve

        target = resolve(known.settings.on if job.on is None else job.on, client)
        requests = [
            _request(number, line, SnippetWish(code, values, isolation, setup), job, target)
            for number, line in enumerate(lines, 1)
        ]
        if batch is not None:
            _run_batch(context, client, requests, detach, as_json)
        else:
            _run_one(context, client, requests[0], detach, as_json)


def _request(
    number: int,
    line: BatchLine,
    wish: SnippetWish,
    job: JobOptions,
    target: Target,
) -> JobRequest:
    from penstock.wire.api import SnippetRequest

    text = line.code if line.code is not None else wish.code
    if text is None:
        raise click.UsageError(f"--batch, line {number}: it has no code, and neither -c nor a file gives one")
    payload = msgspec.convert(
        {
            "type": "snippet",
            "code": text,
            "variables": {**wish.variables, **line.variables},
            "isolation": wish.isolation,
            "setup": wish.setup,
        },
        SnippetRequest,
    )
    request = job_request(payload, job, target)
    return msgspec.structs.replace(
        request,
        name=line.name or request.name,
        tags=tuple(dict.fromkeys((*request.tags, *line.tags))),
        timeout_s=request.timeout_s if line.timeout_s is None else line.timeout_s,
        idempotency_key=line.idempotency_key or _line_key(request.idempotency_key, number),
    )


def _setup(setup: str, requirements: str | None) -> str:
    """The command that makes the environment; a requirements file is spelled out, since a snippet brings no files."""
    if requirements is None:
        return setup
    if setup:
        raise click.UsageError("--setup and --requirements: give one of them")
    wanted: list[str] = []
    for number, line in enumerate(_text(requirements, 1 << 20, "use `tpu run`").splitlines(), 1):
        text = re.sub(r"(^|\s)#.*$", "", line).strip()
        if text.startswith(("-", ".", "/")) or text.endswith("\\"):
            rule = "only packages by name; use --setup or `tpu run`"
            raise click.UsageError(f"--requirements {requirements}, line {number}: {text!r}: {rule}")
        wanted += [text] if text else []
    if not wanted:
        raise click.UsageError(f"--requirements {requirements}: there is no package in it")
    return shlex.join(["pip", "install", *wanted])


def _line_key(key: str | None, number: int) -> str | None:
    """One key cannot name many jobs; the first line keeps it, so that it means the same without a batch."""
    return key if key is None or number == 1 else f"{key}/{number}"


def _code(code: str | None, file: str | None) -> str:
    if code is not None and file is not None:
        raise click.UsageError(f"-c and {file}: give the code once")
    if code is not None:
        return code
    if file is None:
        raise click.UsageError("there is no code; give -c CODE, FILE.py, or - for standard input")
    return _text(file, CODE_BYTES_MAX, "put larger programs into a directory and use `tpu run`")


def _text(file: str, most: int, advice: str) -> str:
    """A file or standard input as text, read no further than allowed."""
    if file == "-":
        data = sys.stdin.buffer.read(most + 1)
    else:
        try:
            if not stat.S_ISREG(Path(file).stat().st_mode) and not stat.S_ISFIFO(Path(file).stat().st_mode):
                raise click.BadParameter(f"{file!r} is no regular file", param_hint="FILE")
            with Path(file).open("rb") as stream:
                data = stream.read(most + 1)
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else "not a file name"
            raise click.BadParameter(f"{file!r} cannot be read: {why}", param_hint="FILE") from error
    if len(data) > most:
        raise click.BadParameter(f"{file!r} is over {terminal.size(most)}; {advice}", param_hint="FILE")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise click.BadParameter(f"{file!r} is not UTF-8 text (byte {error.start})", param_hint="FILE") from error


def _json(option: str, shown: str, text: str) -> object:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise click.UsageError(
            f"{option} {shown}: the value is not JSON ({error}); quote text: k='\"text\"'"
        ) from error


def _batch(file: str) -> list[BatchLine]:
    text = _text(file, 1 << 30, "split it")
    lines: list[BatchLine] = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        if len(lines) == BATCH_LINES_MAX:
            raise click.UsageError(f"--batch {file}: more than {BATCH_LINES_MAX} lines; split it")
        try:
            lines.append(msgspec.json.decode(line, type=BatchLine))
        except msgspec.DecodeError as error:
            raise click.UsageError(f"--batch {file}, line {number}: {error}") from error
    if not lines:
        raise click.UsageError(f"--batch {file}: there is no line in it")
    return lines


def _run_one(context: click.Context, client: Client, request: JobRequest, detach: bool, as_json: bool) -> None:
    accepted = client.submit(request)
    if detach:
        if as_json:
            terminal.echo_json(accepted)
        else:
            click.echo(accepted.id)
        return
    outcome = follow.follow(client, accepted.id, silent=as_json, quiet_logs=as_json)
    if as_json:
        terminal.echo_json(outcome)
    else:
        follow.echo_error(outcome)
        if outcome.state != "succeeded":
            terminal.note(follow.summary(outcome))
        elif outcome.result is not None:
            terminal.echo_json_line(outcome.result)
            follow.echo_note(outcome)
    context.exit(follow.exit_code(outcome))


def _run_batch(context: click.Context, client: Client, requests: list[JobRequest], detach: bool, as_json: bool) -> None:
    ids = many.submit_all(client, requests)
    if detach:
        for id in ids:
            click.echo(id)
        return
    status = terminal.StatusLine(silent=as_json)
    codes = []
    try:
        for outcome in many.wait_all(client, ids, status):
            codes.append(follow.exit_code(outcome))
            if as_json:
                terminal.echo_json_line(outcome)
            else:
                status.clear()
                said = follow.summary(outcome) if codes[-1] else _one_line(outcome.result)
                click.echo(f"{outcome.id}  {said}")
    except KeyboardInterrupt:
        raise many.detached(ids, "tpu ps") from None
    terminal.note(f"{codes.count(0)} of {len(codes)} succeeded")
    context.exit(next((code for code in codes if code), 0))


def _one_line(value: object) -> str:
    return msgspec.json.encode(value).decode()
