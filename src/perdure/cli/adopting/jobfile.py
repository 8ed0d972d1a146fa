"""The job file that is written for a script: what matters to it, and what else could be said."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from perdure.cli.adopting.script import Reading, Script
from perdure.cli.looking.schema import make_schema_line
from perdure.cli.running.jobspec import name_after
from perdure.cli.running.torchrun import list_visible_gpus


class Project(NamedTuple):
    """Where a script is run, which is where its job file lies."""

    folder: Path
    script: str
    """What the job file calls it: a path in the folder, or the name of a module."""
    module: bool = False


def find_project(path: Path, reading: Reading) -> Project:
    """Return where a script is run: in its own folder, or above its package.

    Of a script that takes something from its own package (`from package.data import Data`) Python
    finds that only if it is run as a module of it, as by `python -m package.train`.
    """
    folder, names = path.absolute().parent, [path.stem]
    while (folder / "__init__.py").is_file() and folder.name.isidentifier():
        names.insert(0, folder.name)
        folder = folder.parent
    if len(names) == 1 or not reading.is_module_of(names[0]):
        return Project(path.parent, path.name)
    if not path.is_absolute():
        folder = Path(os.path.relpath(folder))
    return Project(folder, ".".join(names), True)


def suggest_nproc(script: Script, environ: Mapping[str, str]) -> tuple[int, str]:
    """Return how many ranks a script is given on this machine, and why."""
    spread = script.parallel or script.kind in ("huggingface", "accelerate", "perdure", "torchft")
    if not spread and script.kind == "lightning":
        return 1, "more: Trainer(devices=...) has to be as many"
    if not spread:
        return 1, "it does not look as if it trains with several; each would train for itself"
    if gpus := len(list_visible_gpus(dict(environ))):
        return gpus, "as many as there are GPUs here; `gpu` takes as many as there are anywhere"
    return 2, "there is no GPU here; `gpu` takes as many as a machine has"


def render_job_file(
    project: Project, script: Script, args: Sequence[str], environ: Mapping[str, str]
) -> str:
    """Return a job file for a script, to lie in the folder in which it is run."""
    nproc, why = suggest_nproc(script, environ)
    # A basic string of TOML is written as JSON's, whose escapes it knows, but for this one.
    word = {text: json.dumps(text).replace("\x7f", "\\u007f") for text in (project.script, *args)}
    stem = project.script.rpartition(".")[2] if project.module else Path(project.script).stem
    head = (
        f"{make_schema_line(project.folder)}\n"
        "# In this folder: perdure run -c job.toml\n"
        "# Elsewhere:      perdure launch job.toml --on PROFILE      (perdure profiles)\n"
        "# What stands behind # is a suggestion; every field: perdure doctor --schema\n\n"
        f'name = "{name_after(stem)}"  # the same name again goes on where it was\n'
        f"script = {word[project.script]}\n"
    )
    head += "module = true  # as by python -m, in this folder\n" * project.module
    head += (
        f"args = [{', '.join(word[arg] for arg in args)}]\n"
        if args
        else '# args = ["--lr", "0.1"]\n'
    )
    if script.kind == "torchft":
        head += f"nproc = 1  # ranks of each replica group\n\n[torchft]\nreplicas = {nproc}\n"
        return head + _SUGGESTED
    head += f"nproc = {nproc}  # ranks on a machine; {why}\n"
    head += "# nodes = 2  # machines, where the profile has several\n"
    head += '# env = { OMP_NUM_THREADS = "1" }\n\n[checkpoint]\n'
    head += "# every_steps = 500  # else as often as is best by what a checkpoint costs\n"
    head += '# url = "s3://bucket/folder"  # else in the job\'s directory\n# keep_last = 3\n'
    if script.own:
        named = ", ".join(json.dumps(pattern) for pattern in script.own)
        head += f"own = [{named}]  # what the script saves; a torn newest one is moved aside\n"
        if not any("*" in pattern for pattern in script.own):
            head += "own_copy = true  # the script overwrites it: a copy of the last whole one\n"
    elif script.saves or script.trainers:
        head += '# own = ["out/checkpoint-*"]  # what the script saves itself\n'
    return head + _SUGGESTED


_SUGGESTED = """
# [restart]
# max_restarts = 3  # failures in a row without progress between them

# [launch]
# requirements = "requirements.txt"  # installed by pip where an environment is made
# outputs = ["runs"]  # folders that are brought home like the checkpoints

# [alerts]
# webhook = "@/path/of/a/file/with/the/url"
"""
