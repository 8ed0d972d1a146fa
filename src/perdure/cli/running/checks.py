"""What is checked before anything is started, so that a mistake costs no start-up.

Nothing of the user's is imported or executed here; a file is only compiled.
"""

import os
import re
import shutil
import struct
import sys
import tempfile
import warnings
from collections.abc import Mapping
from difflib import get_close_matches
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

import msgspec

from perdure.cli.running.torchrun import count_cpus, find_gpus
from perdure.launch.environment import find_default_threads
from perdure.model.errors import ConfigError, PlatformError
from perdure.model.job import JobSpec
from perdure.service.jobfiles import is_alive, paths_of

FREE_BYTES_MIN = 64 << 20
"""Below this much free space a journal and logs would soon fail."""
_STRING_MAX = 128 << 10
"""Bytes of one variable or argument, with its end, that Linux hands to a program."""
_STRINGS_MAX = 6 << 20
"""Bytes of all of them where the limit of the stack, of which they may fill a quarter, is high."""
_OWN = 32 << 10
"""Bytes of these that are kept for perdure's own variables."""


def check_job(spec: JobSpec, home: str, environ: dict[str, str]) -> list[str]:
    """Check everything; return notes worth showing.

    Raises:
        ConfigError: the script cannot run.
        PlatformError: the machine cannot take the job.
    """
    if spec.no_python:
        check_program(spec)
    elif spec.module:
        check_module(spec)
    else:
        check_script(spec)
    check_environment(spec, environ)
    check_folder(home)
    url = spec.checkpoint.url
    if url and "://" not in url:
        check_folder(url)
    return check_devices(spec, environ)


def check_script(spec: JobSpec) -> None:
    """Check that the script is a readable file whose syntax this Python accepts.

    Raises:
        ConfigError: otherwise; the hint names files of similar names, the message the line.
    """
    path = os.path.join(spec.cwd, os.path.expanduser(spec.script))
    try:
        source = Path(path).read_bytes()
    except FileNotFoundError:
        folder, name = os.path.split(path)
        names = os.listdir(folder) if os.path.isdir(folder) else []
        near = get_close_matches(name, names, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"looked in {folder or '.'}"
        raise ConfigError(f"no such script: {spec.script}", hint=hint) from None
    except IsADirectoryError:
        raise ConfigError(f"{spec.script} is a directory", hint="name a Python file") from None
    except OSError as error:
        raise ConfigError(
            f"cannot read {spec.script}: {error.strerror}", hint="check its permissions"
        ) from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(source, spec.script, "exec", dont_inherit=True)
    except SyntaxError as error:
        text = (error.text or "").strip()
        raise ConfigError(
            f"{spec.script}, line {error.lineno}: {error.msg}" + (f": {text}" if text else ""),
            hint=f"Python {sys.version.split()[0]} cannot compile it; nothing was started",
        ) from None
    except ValueError as error:
        raise ConfigError(
            f"{spec.script}: not Python source: {error}",
            hint="--no-python runs a program, -m a module",
        ) from None


def check_program(spec: JobSpec) -> None:
    """Check that the program can be executed.

    Raises:
        ConfigError: it cannot.
    """
    path = spec.script
    found = shutil.which(path) or shutil.which(os.path.join(spec.cwd, path))
    if found is None or os.path.isdir(found):
        raise ConfigError(
            f"no such program: {spec.script}", hint="a name on PATH, or a path to an executable"
        )


def check_module(spec: JobSpec) -> None:
    """Check that the module can be found, without importing its packages.

    Raises:
        ConfigError: it cannot; the message says which part of its name.
    """
    path: list[str] | None = [spec.cwd, *sys.path]
    parts = spec.script.split(".")
    found: ModuleSpec | None = None
    for index, part in enumerate(parts):
        found = PathFinder.find_spec(part, path) if part and path else None
        if found is None:
            whole = ".".join(parts[: index + 1])
            raise ConfigError(
                f"no such module: {whole}",
                hint="looked in the working directory and on sys.path of " + sys.executable,
            )
        places = found.submodule_search_locations
        path = list(places) if places is not None else None
    if path is not None and PathFinder.find_spec("__main__", path) is None:
        raise ConfigError(
            f"{spec.script} is a package without a __main__ module", hint="name one of its modules"
        )


def check_environment(spec: JobSpec, environ: Mapping[str, str]) -> None:
    """Check that a program can be executed with the job's variables and arguments.

    Raises:
        ConfigError: Linux would refuse; the message names the largest of them.
    """
    texts = {name: f"{name}={value}" for name, value in environ.items() if name not in spec.env}
    texts |= {f"env.{name}": f"{name}={value}" for name, value in spec.env.items()}
    texts |= {f"args[{index}]": text for index, text in enumerate(spec.args)}
    sizes = {what: len(text.encode(errors="replace")) + 1 for what, text in texts.items()}
    largest, size = max(sizes.items(), key=lambda item: item[1], default=("", 0))
    hint = "write it to a file, and hand the script the file's path"
    if size > _STRING_MAX:
        raise ConfigError(
            f"{largest}: {size:,} bytes, and Linux hands a program at most {_STRING_MAX:,} in one",
            hint=hint,
        )
    total = sum(sizes.values()) + struct.calcsize("P") * len(sizes)
    total_max = min(os.sysconf("SC_ARG_MAX"), _STRINGS_MAX) - _OWN
    if total > total_max:
        raise ConfigError(
            f"{total:,} bytes of variables and arguments for a rank, and Linux hands a program "
            f"at most {total_max:,}; the largest is {largest}, {size:,} bytes",
            hint=hint,
        )


def check_folder(folder: str) -> None:
    """Check that files can be made in `folder` and that the disk has room.

    Raises:
        PlatformError: otherwise.
    """
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"perdure")
            file.flush()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise PlatformError(
            f"cannot write to {folder}: {error.strerror}",
            hint="make room, or choose another place with PERDURE_HOME or checkpoint.url",
        ) from error
    if free < FREE_BYTES_MIN:
        raise PlatformError(
            f"no space left: {free >> 20} MiB free at {folder}",
            hint="make room, or choose another place with PERDURE_HOME or checkpoint.url",
        )


def check_devices(spec: JobSpec, environ: dict[str, str]) -> list[str]:
    """Return what is remarkable about devices and threads; as torchrun, say what is defaulted.

    Nothing is refused: whether a script needs a GPU for each rank only the script knows.
    """
    ranks, gpus = spec.machine_ranks, len(find_gpus({**environ, **spec.env}))
    threads = find_default_threads(spec, environ)
    notes = [threads] if threads else []
    if gpus and ranks > gpus and spec.groups:
        notes.append(f"{spec.groups} replica groups of {spec.nproc} share {gpus} visible GPUs")
    elif gpus and ranks > gpus:
        notes.append(
            f"{ranks} ranks and {gpus} visible GPUs: "
            "a script that takes one GPU by LOCAL_RANK will fail"
        )
    elif not gpus and ranks > (cores := count_cpus()):
        notes.append(f"{ranks} ranks share {cores} cores and no GPU: expect them to be slower")
    return notes


def choose_name(spec: JobSpec, home: str) -> JobSpec:
    """Return the job under a name of its own: the script's, numbered while such a job lives."""
    stem = spec.script.rsplit(".", 1)[-1] if spec.module else Path(spec.script).stem
    base = re.sub(r"[^A-Za-z0-9_.-]+", "-", stem).strip("-._")[:56] or "job"
    name, number = base, 2
    while is_alive(paths_of(home, name)):
        name, number = f"{base}-{number}", number + 1
    return msgspec.structs.replace(spec, name=name)
