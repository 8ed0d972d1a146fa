"""Containers under Slurm: what asks Slurm stays outside, and what trains is inside.

The batch script, its program and `perdure run` need `scontrol` and `srun`, which no image has; each
node's agent, with its ranks, needs torch, which the nodes may lack. So the agents are carried into
the container, by a command (Apptainer, Singularity, Charliecloud, ...) or by Pyxis' options of
`srun`. Both sides have perdure, and see the project and DURABLE_DIR at the same paths.
"""

import os
import re
import shlex
import shutil
from collections.abc import Sequence
from pathlib import PurePosixPath

import msgspec

from perdure.model.errors import PlatformError
from perdure.model.platforms.launching import Finding
from perdure.model.platforms.slurm import SlurmSection
from perdure.traps.findings import error, warning

_BINDS = ("APPTAINER_BIND", "SINGULARITY_BIND")
"""What Apptainer and Singularity read of mounts beside their options."""
_APART = {"-p": "--pid", "--pid": "--pid", "-C": "--containall", "--containall": "--containall"}
_CLEAN = {"-e": "--cleanenv", "--cleanenv": "--cleanenv"}
_SUITES = ("apptainer", "singularity")


class Container(msgspec.Struct, frozen=True, kw_only=True):
    """How an agent comes into its container; part of `chain.json`."""

    command: tuple[str, ...] = ()
    """Before the agent's own command line; `$NAME` is expanded where the job runs."""
    options: tuple[str, ...] = ()
    """Of srun."""
    python: str = ""
    """The Python in it; empty: there is no container."""

    def expand(self) -> tuple[list[str], list[str]]:
        """Return options of srun, and the words before the Python in the container.

        Raises:
            PlatformError: the command is not there.
        """
        command = [os.path.expandvars(word) for word in self.command]
        if command and shutil.which(command[0]) is None:
            raise PlatformError(
                f"slurm.container: {command[0]} is not there", hint="slurm.modules, or its path"
            )
        return [os.path.expandvars(word) for word in self.options], command


def make_container(section: SlurmSection, seen: Sequence[str]) -> Container:
    """Return how agents come into their container, in which the folders `seen` are the same."""
    if section.container_image:
        mounts = [f"{folder}:{folder}" for folder in seen]
        mounts += [m if ":" in m else f"{m}:{m}" for m in section.container_mounts]
        options = (
            f"--container-image={section.container_image}",
            f"--container-mounts={','.join(mounts)}",
        )
        return Container(options=options, python=section.container_python)
    if section.container:
        command = tuple(shlex.split(section.container))
        return Container(command=command, python=section.container_python)
    return Container()


def render_binds(section: SlurmSection, seen: Sequence[str]) -> str:
    """Return the lines of a script that have a container of a command see what it has to."""
    if not section.container:
        return ""
    mounts = ",".join((*seen, *section.container_mounts))
    mounts = re.sub(r'(["\\`])', r"\\\1", mounts)
    return "".join(f'export {name}="{mounts}${{{name}:+,${name}}}"\n' for name in _BINDS)


def check_container(section: SlurmSection, *, gpus: bool, groups: bool) -> list[Finding]:
    """Return what cannot work of a container, of a job with GPUs or with replica groups."""
    try:
        words = shlex.split(section.container)
    except ValueError as problem:
        return error(True, f"slurm.container: {problem}", "quotes come in pairs")
    suite = bool(words) and PurePosixPath(words[0]).name in _SUITES
    before = words[: next((i for i, word in enumerate(words) if _is_image(word)), len(words))]
    apart = next((_APART[word] for word in before if word in _APART), "") if suite else ""
    clean = next((_CLEAN[word] for word in before if word in _CLEAN), "") if suite else ""
    return [
        *error(
            section.container and section.container_image,
            "slurm.container and slurm.container_image are two ways into a container",
            "one of them",
        ),
        *error(
            section.container_mounts and not (section.container or section.container_image),
            "slurm.container_mounts without a container",
            "slurm.container or slurm.container_image",
        ),
        *error(
            groups and section.container_image,
            "slurm.container_image: replica groups share a node, and are no steps of their own",
            "slurm.container",
        ),
        *error(
            suite and len(words) > 1 and words[1] in ("run", "shell", "instance"),
            f"slurm.container: `{' '.join(words[:2])}` does not run what follows it as it is",
            f"{words[0] if words else ''} exec",
        ),
        *error(
            apart,
            f"slurm.container: {apart} hides the job's other processes, whose end ends a node",
            "leave it out",
        ),
        *error(
            clean,
            f"slurm.container: {clean} keeps from the agent which job is its own",
            "leave it out",
        ),
        *warning(
            suite and gpus and not {"--nv", "--rocm", "--nvccli"} & set(before),
            "slurm.container: GPUs are not seen in it without --nv (or --rocm)",
            f"{words[0] if words else ''} exec --nv",
        ),
    ]


def _is_image(word: str) -> bool:
    return "://" in word or word.endswith((".sif", ".simg", ".sqsh", ".img"))
