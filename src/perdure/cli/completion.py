"""`perdure completion`: the lines that make a shell complete commands, options and jobs' names."""

from enum import StrEnum
from typing import Annotated, Any

import typer
from typer import completion as typers

from perdure.cli.speech.say import Json, answer
from perdure.model.errors import ConfigError

VARIABLE = "_PERDURE_COMPLETE"
"""Set by the shell's lines: what is to be completed."""


class Shell(StrEnum):
    """Shells that Typer knows and that Linux has."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


_WHERE = {
    Shell.BASH: 'eval "$(perdure completion bash)"     in ~/.bashrc',
    Shell.ZSH: 'eval "$(perdure completion zsh)"      in ~/.zshrc, behind compinit',
    Shell.FISH: "perdure completion fish > ~/.config/fish/completions/perdure.fish",
}


def completion(
    shell: Annotated[Shell, typer.Argument(help="Whose lines.")], as_json: Json = False
) -> None:
    """Print what makes bash, zsh or fish complete commands and jobs.

    For bash, `eval "$(perdure completion bash)"` in ~/.bashrc; for zsh the same behind compinit in
    ~/.zshrc; for fish, its output as ~/.config/fish/completions/perdure.fish.
    """
    script = typers.get_completion_script(
        prog_name="perdure", complete_var=VARIABLE, shell=shell.value
    )
    answer(
        {"shell": shell.value, "script": script, "where": _WHERE[shell]}, script, as_json=as_json
    )


def complete(command: Any, instruction: str) -> int:
    """Answer a shell that asks by `VARIABLE`; return the exit code.

    Raises:
        ConfigError: the shell is none of those.
    """
    if instruction.partition("_")[2] not in set(Shell):
        raise ConfigError(
            f"{VARIABLE}={instruction}: no such shell", hint="perdure completion bash"
        )
    typers.completion_init()
    return int(typers.shell_complete(command, {}, "perdure", VARIABLE, instruction))
