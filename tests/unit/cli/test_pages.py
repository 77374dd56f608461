"""The pages about the command line stay true: every command is on them, and every command they show can be parsed."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from penstock.cli import tldr
from penstock.cli.main import COMMANDS, FORMER_NAMES, ExitCode, tpu
from penstock.wire.problems import JOB_EXIT_CODES, KINDS

DOCS = Path(__file__).parents[3] / "docs"
REFERENCE = (DOCS / "reference" / "cli.md").read_text()
HOWTO = (DOCS / "howto" / "from-tpu-manager.md").read_text()


def shown(text: str) -> list[str]:
    """Commands on a page, as people would copy them: no placeholders left open."""
    return [span.replace("\\|", "|") for span in re.findall(r"`(tpu [^`]+)`", text)]


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_the_reference_has_every_command(name: str) -> None:
    assert f"`tpu {name}" in REFERENCE


def test_the_reference_has_every_exit_code() -> None:
    told = {int(code) for code in re.findall(r"^\| (\d+) \|", REFERENCE, re.MULTILINE)}
    assert told == {*map(int, ExitCode), *JOB_EXIT_CODES.values()}
    assert {kind.exit_code for kind in KINDS.values()} <= set(map(int, ExitCode))


def test_the_way_from_the_older_tool_names_what_it_had() -> None:
    """The commands of the older tool, as listed in its own help."""
    older = (
        "tldr add-user del-user list-users init register-web set-cur set-dir del-dir swap-dir ls lsdir get-dir "
        "get-stage-dir run resume rerun kill kill-job kill-window ignore-error add-tag check check-simp monitor "
        "caj maj ack clean clear-finished clear-error clear-all -czw -czj clean-eu clean-us reset-window-num queue "
        "dequeue dq vq dqr upd-staging-info upd-log finish-job fail-job apply reapply applyy reapplyy -norm delete "
        "restart check-status -cktpu describe -dtpu check-env solve mount-disk mount-disk-new set-wandb "
        "kill-remote lian test change-ip register -atpu rtw del-reg -ta -lta -sta fang fmd zhan rm-lock find "
        "release rel ssn asn keng uss gtis get-settings set-settings reset-settings -a -alias -sa -la "
        "del-config-alias -smc -gmc -agc -mgc -Ml -Mc cp cc cca lock unlock rl lock-data unlock-data check-rules "
        "--log-stage --register rule= tag= dir= monitor= "
    )
    left = " ".join(line.split("|")[1] for line in HOWTO.splitlines() if line.startswith("| "))
    words = set(re.findall(r"[\w-]+=?", left))
    missing = [name for name in older.split() if name not in words]
    assert not missing
    assert set(FORMER_NAMES) <= words


def typed() -> list[str]:
    """What the pages tell people to type."""
    right = "\n".join(line.split("|", 2)[2] for line in HOWTO.splitlines() if line.startswith("| "))
    one_screen = re.findall(r"\btpu (?:(?!  | tpu |`|;).)+", tldr.TEXT)
    return sorted({line.strip() for line in (*shown(right), *shown(REFERENCE), *one_screen) if "COMMAND" not in line})


@pytest.mark.parametrize("line", typed())
def test_what_the_pages_show_exists(line: str) -> None:
    """Every command, subcommand and option on the pages is there."""
    words = re.sub(r"[\[\]()\",]", " ", line.partition(" -- ")[0]).split()[1:]
    command: click.Command = tpu
    context = click.Context(tpu, info_name="tpu")
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        found = command.get_command(context, words.pop(0))
        assert found is not None, line
        command, context = found, click.Context(found, parent=context)
    known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)} | {"--help"}
    unknown = [word for word in words if re.fullmatch(r"--?[a-z][a-z-]*", word) and word not in known]
    assert not unknown, f"{line}: {unknown}"
