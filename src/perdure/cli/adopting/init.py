"""`perdure init`: a training script that has never heard of perdure gets a job file and its lines.

The script is read, not run, except with --try. No job file is overwritten. Only --apply changes the
script, and keeps the old one beside it.
"""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perdure.cli.speech.say import Json, answer, note
from perdure.model.errors import ConfigError, PlatformError, SafetyError

if TYPE_CHECKING:
    from perdure.cli.adopting.edits import Change
    from perdure.cli.adopting.jobfile import Project
    from perdure.cli.adopting.script import Reading, Script
    from perdure.drill.card import Card

JOB_FILE = "job.toml"
_KINDS = {
    "perdure": "it uses perdure",
    "torchft": "it trains with torchft",
    "huggingface": "Hugging Face's Trainer trains",
    "lightning": "Lightning's Trainer trains",
    "accelerate": "a loop of its own, by accelerate",
    "deepspeed": "a loop of its own, by DeepSpeed",
    "torch": "a loop of its own, in torch",
    "other": "it does not import torch",
}


def init(
    script: Annotated[
        str | None,
        typer.Argument(help="The training script; else the only one in this folder."),
    ] = None,
    args: Annotated[
        list[str] | None, typer.Argument(help="Its arguments, behind `--`.", metavar="-- ARGS")
    ] = None,
    module: Annotated[
        bool, typer.Option("--module", "-m", help="SCRIPT is a module, as in python -m.")
    ] = False,
    apply: Annotated[
        bool, typer.Option("--apply", help="Change the script, and keep the old one as .orig.")
    ] = False,
    try_: Annotated[
        bool, typer.Option("--try", help="Drill the script with one crash, in a copy.")
    ] = False,
    budget: Annotated[
        float, typer.Option("--budget", min=20, help="With --try: seconds that it may take.")
    ] = 60.0,
    as_json: Json = False,
) -> int:
    """Write a job file for a training script, and propose its lines.

    The proposal is a diff that `patch -p0` and `git apply` take. If perdure is not sure, it lists
    the lines and the places where they belong. Only --try runs the script, in a copy of its folder.
    """
    path = find_script(script, module=module)
    data, text = read_script(path)

    import msgspec

    from perdure.cli.adopting.edits import render_diff
    from perdure.cli.adopting.jobfile import render_job_file

    facts, change, project = look_into(path, text, script if module else None, args or ())
    diff = render_diff(name_in_diff(path), text, change.text) if change.text else ""
    job_text = render_job_file(project, facts, args or (), os.environ)
    job_file, wrote = write_job_file(project, path.stem, job_text)
    applied = ""
    if apply and diff:
        applied = write_script(path, data, change.text)
    elif apply:
        note(f"{path} is left alone: {change.why}")
    told = tell(path, facts, change, diff, job_file, wrote=wrote, applied=applied)
    document: dict[str, Any] = {
        "script": str(path),
        "facts": msgspec.to_builtins(facts),
        "diff": diff,
        "why_no_diff": change.why,
        "by_hand": list(change.by_hand),
        "job_file": str(job_file),
        "job_file_written": wrote,
        "job_file_text": job_text,
        "backup": applied,
    }
    if not try_:
        answer(document, told, as_json=as_json)
        return 0
    if not as_json:
        print(told, flush=True)
    from perdure.drill.screens import render_card

    card = try_script(path, project, job_file, change.text or text, budget)
    document["trial"] = msgspec.to_builtins(card)
    answer(document, render_card(card, 100), as_json=as_json)
    return card.exit_code


def look_into(
    path: Path, text: str, module: str | None = None, args: Sequence[str] = ()
) -> "tuple[Script, Change, Project]":
    """Return what a script is, the change that is proposed, and where it is run.

    It is run in this folder where the user names it as a `module`, with `args`.
    """
    import msgspec

    from perdure.cli.adopting.change import propose_change
    from perdure.cli.adopting.jobfile import Project, find_project
    from perdure.cli.adopting.saves import find_patterns
    from perdure.cli.adopting.script import Reading

    reading = Reading(text, str(path))
    facts, change = reading.describe(), propose_change(reading)
    facts = msgspec.structs.replace(facts, own=find_patterns(reading, args))
    project = Project(Path(), module, True) if module else find_project(path, reading)
    known = change.text or facts.loops or facts.trainers
    if not known and (by_hand := find_elsewhere(path, project, reading)):
        change = msgspec.structs.replace(change, by_hand=tuple(by_hand))
    return facts, change, project


def name_in_diff(path: Path) -> str:
    """Return what a diff that is applied in this folder calls a file; of one elsewhere its name."""
    here = Path(os.path.abspath(path))
    return str(here.relative_to(Path.cwd())) if here.is_relative_to(Path.cwd()) else path.name


def try_script(path: Path, project: "Project", job: Path, text: str, budget_s: float) -> "Card":
    """Return the card of a drill with one crash, of a copy that has `text` as its script.

    Raises:
        ConfigError: such a job cannot be drilled.
        SafetyError: its folder is too large to be copied.
        PlatformError: it cannot be copied.
    """
    from perdure.adapters.confinement import can_confine
    from perdure.cli.drill import Request, look_here
    from perdure.cli.speech.say import show_play

    confined = can_confine()
    changed = {path.parent.resolve() / path.name: text}
    file = job.resolve()
    with contextlib.chdir(project.folder):
        site = look_here(Request(str(file), budget_s, 0, ["crash"], None, [], confined, changed))
    for line in site.told:
        note(line)
    with show_play("init") as bar:
        return site.drill(bar.say)


def find_elsewhere(path: Path, project: "Project", reading: "Reading") -> list[str]:
    """Return which of the files that a script imports has the loop that trains, and its lines."""
    from perdure.cli.adopting.loops import list_lines
    from perdure.cli.adopting.script import Reading

    found: list[str] = []
    lines: tuple[str, ...] = ()
    for file in reading.list_imported_files((project.folder, path.parent)):
        with contextlib.suppress(ConfigError, PlatformError):
            other = Reading(read_script(file)[1], str(file))
            chains = [chain[-1] for chain in other.find_training_loops()]
            for loop in chains or other.find_object_loops():
                found.append(f"line {loop.lineno} of {file} has a loop that trains; in that file:")
                lines = lines or list_lines(other, loop)
    return [*list(dict.fromkeys(found))[:3], *lines]


def find_script(name: str | None, *, module: bool) -> Path:
    """Return the file of the script, or module, that is named.

    Without a name it is the only script in this folder that trains, or `train.py`.

    Raises:
        ConfigError: there is no such module, no script that trains, or several.
    """
    if module:
        return find_module(name or "")
    if name:
        return Path(name)
    from perdure.cli.adopting.script import Reading

    found = []
    for path in sorted(Path.cwd().glob("*.py"))[:200]:
        with contextlib.suppress(ConfigError, PlatformError):
            facts = Reading(read_script(path)[1], path.name).describe()
            if facts.loops or facts.trainers:
                found.append(Path(path.name))
    if Path("train.py") in found:
        return Path("train.py")
    if len(found) == 1:
        return found[0]
    names = ", ".join(map(str, found[:5])) if found else "none was found"
    raise ConfigError(f"which script trains? {names}", hint="perdure init SCRIPT")


def find_module(name: str) -> Path:
    """Return the file that `python -m NAME` runs in this folder.

    Raises:
        ConfigError: there is none.
    """
    words = name.split(".")
    if all(word.isidentifier() for word in words):
        path = Path(*words)
        for file in (path / "__main__.py", path.with_suffix(".py")):
            if file.is_file():
                return file
    raise ConfigError(
        f"no module `{name}` in this folder" if name else "-m without the name of a module",
        hint="run it where `python -m` finds it: perdure init -m PACKAGE.MODULE",
    )


def read_script(path: Path) -> tuple[bytes, str]:
    """Return a script's bytes, and its text without a byte order mark.

    Raises:
        ConfigError: it is not there, too large, or not UTF-8.
        PlatformError: it may not be read.
    """
    from perdure.cli.adopting.script import BYTES_MAX
    from perdure.model.input.source import BOM

    try:
        if path.is_dir():
            raise ConfigError(f"{path} is a directory", hint="name a Python file in it")
        if not path.is_file() and path.exists():
            raise ConfigError(f"{path} is no file", hint="name a Python file")
        with open(path, "rb") as file:
            data = file.read(BYTES_MAX + 1)
    except FileNotFoundError:
        raise ConfigError(f"no such script: {path}", hint="perdure init SCRIPT") from None
    except OSError as error:
        raise PlatformError(f"cannot read {path}: {error.strerror}", hint="its rights?") from error
    except ValueError:  # A NUL in its name.
        raise ConfigError(f"no such script: {str(path)!r}", hint="perdure init SCRIPT") from None
    if len(data) > BYTES_MAX:
        raise ConfigError(
            f"{path} is larger than {BYTES_MAX >> 20} MiB, which no training script is",
            hint="write job.toml by hand, with `script` in it",
        )
    try:
        return data, data.decode().removeprefix(BOM)
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: not UTF-8, at byte {error.start}", hint="save it as UTF-8, or name another"
        ) from None


def write_job_file(project: "Project", stem: str, text: str) -> tuple[Path, bool]:
    """Write a job file; return where, and whether it was written now.

    A job file of this script that is there stays, and is the one. If `job.toml` is another's, the
    name is that of the script, with a number if need be.

    Raises:
        PlatformError: it cannot be written.
    """
    from perdure.files import create_file

    names = [JOB_FILE, f"{stem}.toml", *(f"{stem}-{number}.toml" for number in range(2, 100))]
    try:
        for name in names:
            path = project.folder / name
            if create_file(path, text.encode()):
                return path, True
            if read_script_of(path) == project.script:
                return path, False
            note(f"{path} is there already and is left alone")
    except OSError as error:
        raise PlatformError(
            f"cannot write {path}: {error.strerror}", hint="a folder that is yours"
        ) from error
    raise PlatformError(f"no name is free for a job file in {project.folder}", hint="remove some")


def read_script_of(path: Path) -> str:
    """Return the script that a job file names; empty if it is none."""
    import tomllib

    with contextlib.suppress(ValueError):
        return str(tomllib.loads(path.read_text(encoding="utf-8")).get("script", ""))
    return ""


def write_script(path: Path, before: bytes, text: str) -> str:
    """Put a changed text in the place of a script; return the name of what it was.

    Raises:
        SafetyError: it has changed meanwhile, or there is a backup already.
        PlatformError: it cannot be written.
    """
    from perdure.files import replace_file
    from perdure.model.input.source import BOM

    target = path.resolve()  # A link stays one.
    mark = BOM.encode() if before.startswith(BOM.encode()) else b""
    try:
        backup = keep(target, before)
        if target.read_bytes() != before:
            raise SafetyError(f"{path} has changed just now", hint="perdure init again")
        mode = target.stat().st_mode & 0o7777
        replace_file(target, mark + text.encode(), mode=mode, synced=True)
    except OSError as error:
        raise PlatformError(f"cannot write {path}: {error.strerror}", hint="its rights?") from error
    return str(backup)


def keep(path: Path, data: bytes) -> Path:
    """Write the content of a file beside it, as `NAME.orig`; return where.

    Raises:
        SafetyError: something else is there.
    """
    from perdure.files import create_file

    backup = path.with_name(f"{path.name}.orig")
    if not create_file(backup, data) and backup.read_bytes() != data:
        raise SafetyError(
            f"{backup} is there already, and is not what {path.name} is now",
            hint="move it away; it may be what you want to keep",
        )
    return backup


def tell(
    path: Path,
    facts: "Script",
    change: "Change",
    diff: str,
    job_file: Path,
    *,
    wrote: bool,
    applied: str,
) -> str:
    """Return in words what was found, written and proposed."""
    import shlex

    from perdure.cli.speech.pages import point_to_pages

    lines = [f"{path}: {_KINDS[facts.kind]}"]
    lines += [f"  {', '.join(facts.parallel)}"] if facts.parallel else []
    lines += [f"  line {loop.line}: {loop.text}" for loop in facts.loops]
    for word in ("models", "optimizers", "schedulers", "scalers", "trainers"):
        if names := getattr(facts, word):
            lines.append(f"  {word}: {', '.join(names)}")
    lines.append("")
    lines.append(f"wrote {job_file}" if wrote else f"{job_file} is there already, and stays")
    if applied:
        lines += [f"changed {path}, as it was: {applied}", "", diff.rstrip("\n")]
    elif diff:
        lines += [
            "these lines make it resumable (--apply writes them, so does patch -p0):",
            "",
            diff.rstrip("\n"),
        ]
    else:
        lines.append(f"the script is not changed: {change.why}")
    if change.by_hand:
        lines += ["", point_to_pages("by hand (docs/init.md):")]
        lines += [f"- {point_to_pages(word)}" for word in change.by_hand]
    folder = shlex.quote(str(job_file.parent))
    go = "" if folder == "." else f"cd {folder} && "
    lacking = (
        "   # runs the script without these lines; --apply first" if diff and not applied else ""
    )
    lines += ["", f"next: {go}perdure run -c {shlex.quote(job_file.name)}{lacking}"]
    return "\n".join(lines)
