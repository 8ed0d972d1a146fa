"""Writes `docs/reference` from the code: commands, job file, events, verdicts.

What each thing is for stands where it is defined, in a docstring or in an option's help, and is
only put into tables here. `UPDATE_GOLDEN=1 pytest tests/documents/test_reference.py` writes the
pages anew.
"""

import ast
import functools
import inspect
import itertools
import textwrap
import types
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
from msgspec import inspect as schema

import perdure.model.events as events
import perdure.model.job as job
import perdure.model.verdicts as verdicts
from perdure.cli.app import load_command
from perdure.cli.commands import LAB, PANELS

FOLDER = Path(__file__).resolve().parent.parent.parent / "docs" / "reference"


def render_pages() -> dict[str, str]:
    """Return name -> text of every page."""
    return {
        "commands.md": render_commands("Commands", [p for p in PANELS if p != LAB]),
        "lab.md": render_commands("Commands of perdure-lab", [LAB]),
        "job-file.md": render_job_file(),
        "events.md": render_events(),
        "verdicts.md": render_verdicts(),
    }


def render_commands(title: str, panels: Iterable[str]) -> str:
    """Return a page of the command line."""
    parts = [
        f"# {title}\n\nEvery command has `--json` and `--help`. What the exit codes mean is in "
        "[Exit codes](../exit-codes.md).\n"
    ]
    for panel in panels:
        parts.append(f"## {panel}\n")
        if panel == LAB:
            parts.append("`pip install . ./lab` in a checkout of perdure installs them.\n")
        for name in PANELS[panel]:
            parts += render_command(f"perdure {name}", load_command(name))
    return "\n".join(parts)


def render_command(name: str, command: typing.Any) -> Iterator[str]:
    """Yield the parts of a command, and of those of a group."""
    shown = [p for p in command.params if not getattr(p, "hidden", False)]
    arguments = [p for p in shown if p.param_type_name == "argument"]
    words = [name, *(_name_argument(p) for p in arguments)]
    yield f"### {name}\n"
    yield escape(inspect.cleandoc(command.help or "").replace("\b\n", "")) + "\n"
    if inner := getattr(command, "commands", {}):
        for word, below in inner.items():
            yield from render_command(f"{name} {word}", below)
        return
    yield f"    {' '.join(words)}\n"
    rows = [(_name_argument(p), p.help) for p in arguments]
    rows += [(_name_option(p), p.help) for p in shown if p not in arguments]
    yield table(("", "what"), [(f"`{left}`", right or "") for left, right in rows])


def _name_argument(parameter: typing.Any) -> str:
    word = (parameter.metavar or parameter.name.upper()).strip("[]{}.")
    return (word if parameter.required else f"[{word}]") + ("..." if parameter.nargs < 0 else "")


def _name_option(parameter: typing.Any) -> str:
    names = ", ".join(sorted(parameter.opts, key=len))
    if parameter.secondary_opts:
        names += " / " + ", ".join(parameter.secondary_opts)
    if parameter.is_flag:
        return names
    kinds = {"IntRange": "INT", "FloatRange": "NUMBER", "FloatParamType": "NUMBER"}
    kinds |= {"StringParamType": "TEXT", "IntParamType": "INT"}
    kind = kinds.get(type(parameter.type).__name__, "")
    return f"{names} {parameter.metavar or kind or parameter.type.name.upper()}"


def render_job_file() -> str:
    """Return the page of the job file."""
    parts = [
        "# The job file\n\nTOML. A field that is not named keeps its default; one that does not "
        "exist is refused. Options of `perdure run` win over the file.\n"
    ]
    sections: list[tuple[str, type]] = [("", job.JobSpec)]
    while sections:
        name, kind = sections.pop(0)
        parts.append(f"## {f'[{name}]' if name else 'At the top'}\n")
        parts.append((kind.__doc__ or "").strip() + "\n" if name else "")
        rows, docs = [], list_field_docs(job)[kind.__name__]
        for field in schema.type_info(kind).fields:  # type: ignore[attr-defined]
            value = field.type
            if isinstance(value, schema.StructType) and field.encode_name not in docs:
                sections.append((f"{name}.{field.name}".lstrip("."), value.cls))
                continue
            rows.append(
                (
                    f"`{field.encode_name}`",
                    name_type(value),
                    name_default(field),
                    docs.get(field.name, ""),
                )
            )
        parts.append(table(("field", "type", "default", "what"), rows))
    return "\n".join(part for part in parts if part)


def name_default(field: schema.Field) -> str:
    """Return a field's default as a job file has it; a dash where there is none."""
    value = field.default
    if value is msgspec.NODEFAULT and field.default_factory is not msgspec.NODEFAULT:
        value = field.default_factory()
    if value is msgspec.NODEFAULT:
        return "needed"
    if value is None or value == "" or (isinstance(value, list | dict | tuple) and not value):
        return ""
    return f"`{msgspec.json.encode(value).decode()}`"


def name_type(kind: schema.Type) -> str:
    """Return a type in words, such as `number > 0`."""
    if isinstance(kind, schema.UnionType):
        return " or ".join(name_type(t) for t in kind.types if not isinstance(t, schema.NoneType))
    if isinstance(kind, schema.LiteralType):
        return ", ".join(f"`{value}`" for value in kind.values)
    if isinstance(kind, schema.ListType | schema.VarTupleType | schema.SetType):
        return f"list of {name_type(kind.item_type)}"
    if isinstance(kind, schema.DictType):
        return f"table of {name_type(kind.value_type)}"
    if isinstance(kind, schema.StructType):
        return f"table ({', '.join(field.name for field in kind.fields)})"
    words = {"IntType": "integer", "FloatType": "number", "StrType": "text", "BoolType": "boolean"}
    name = words.get(type(kind).__name__, "any")
    for bound, sign in (("gt", ">"), ("ge", "≥"), ("lt", "<"), ("le", "≤")):
        limit = getattr(kind, bound, None)
        name += f" {sign} {limit:g}" if limit is not None else ""
    return name


def render_events() -> str:
    """Return the page of the events."""
    parts = [
        "# Events\n\nWhat a journal is made of, as `perdure events JOB --json` prints it: facts, "
        "written down before anything follows from them. A time that ends in `_s` is job time. A "
        "field that has its default is left out.\n"
    ]
    for kind in typing.get_args(events.AnyEvent):
        parts.append(f"## {kind.__name__}\n")
        parts.append(escape(inspect.cleandoc(kind.__doc__)) + "\n")
        parts.append(_render_fields(kind, events))
    return "\n".join(parts)


def render_verdicts() -> str:
    """Return the page of the verdicts."""
    named = list_alias_docs(verdicts)
    parts = [
        "# Fields of a verdict\n\nAs `perdure diagnose JOB --json` prints them. What each kind "
        "looks like in a real job is in [Verdicts](../verdicts.md).\n"
    ]
    for name in ("VerdictKind", "Activity", "Ground"):
        values = [value or '""' for value in typing.get_args(getattr(verdicts, name))]
        parts.append(f"## {name}\n")
        parts.append(", ".join(f"`{value}`" for value in values) + "\n")
        parts.append(escape(named.get(name, "")) + "\n")
    for kind in (verdicts.Verdict, verdicts.Culprit, verdicts.Slowness):
        parts.append(f"## {kind.__name__}\n")
        parts.append(escape(inspect.cleandoc(kind.__doc__ or "")) + "\n")
        parts.append(_render_fields(kind, verdicts))
    return "\n".join(parts)


def _render_fields(kind: type, module: types.ModuleType) -> str:
    docs, own, kinds = list_field_docs(module), dict[str, str](), dict[str, str]()
    for base in reversed(kind.__mro__):
        own |= docs.get(base.__name__, {})
        kinds |= list_annotations(module).get(base.__name__, {})
    names = kind.__struct_fields__  # type: ignore[attr-defined]
    rows = [(f"`{name}`", f"`{kinds.get(name, '')}`", own.get(name, "")) for name in names]
    return table(("field", "type", "what"), rows) if rows else ""


@functools.cache
def list_field_docs(module: types.ModuleType) -> dict[str, dict[str, str]]:
    """Return class -> field -> the docstring below it."""
    return {
        node.name: dict(_pair_docs(node.body))
        for node in ast.parse(inspect.getsource(module)).body
        if isinstance(node, ast.ClassDef)
    }


def list_alias_docs(module: types.ModuleType) -> dict[str, str]:
    """Return name -> docstring of what a module assigns."""
    return dict(_pair_docs(ast.parse(inspect.getsource(module)).body))


@functools.cache
def list_annotations(module: types.ModuleType) -> dict[str, dict[str, str]]:
    """Return class -> field -> its type as it is written."""
    return {
        node.name: {
            field.target.id: " ".join(ast.unparse(field.annotation).split())
            for field in node.body
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        }
        for node in ast.parse(inspect.getsource(module)).body
        if isinstance(node, ast.ClassDef)
    }


def _pair_docs(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    for field, below in itertools.pairwise(body):
        target = field.target if isinstance(field, ast.AnnAssign) else None
        if isinstance(field, ast.Assign):
            target = field.targets[0]
        if isinstance(target, ast.Name) and isinstance(below, ast.Expr):
            value = below.value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield target.id, inspect.cleandoc(value.value)


def escape(text: str) -> str:
    """Return prose so that Markdown shows it as it is, but for `code`."""
    parts = textwrap.dedent(text).split("`")
    parts[::2] = [
        part.replace("<", "&lt;").replace("*", r"\*").replace("_", r"\_") for part in parts[::2]
    ]
    return "`".join(parts)


def table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Return a table of Markdown."""
    lines = [heads, tuple("---" for _ in heads)]
    for row in rows:
        cells = [" ".join(cell.split()).replace("|", r"\|") for cell in row]
        lines.append((*cells[:-1], escape(cells[-1])))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
