"""`tpu completion`: the script that lets a shell complete commands, options and job ids.

Prints what click writes for the shell; `tpu` itself answers the shell's questions (see `main.run`).
"""

from __future__ import annotations

import click


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the completion script for a shell.

    \b
    eval "$(tpu completion bash)"       in ~/.bashrc
    eval "$(tpu completion zsh)"        in ~/.zshrc, after compinit
    tpu completion fish > ~/.config/fish/completions/tpu.fish
    """
    from click.shell_completion import get_completion_class

    root = context.find_root()
    program = root.info_name or "tpu"
    kind = get_completion_class(shell)
    if kind is None:
        raise click.UsageError(f"click knows no completion for {shell}")
    maker = kind(root.command, {}, program, f"_{program.upper()}_COMPLETE")
    # Not `source()`: for bash it starts one to ask its version, and warns where there is none.
    click.echo(maker.source_template % maker.source_vars())
