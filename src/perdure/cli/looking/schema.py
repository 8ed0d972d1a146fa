"""`perdure doctor --schema`: schemas of a job file and a profile, and permissions on the bus.

The schemas of files are shipped as well (`launch/schemas`), where editors find them: a line
`#:schema PATH` on top of a TOML file tells taplo and Even Better TOML of one.
"""

from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

from perdure.cli.speech.say import read_meanings
from perdure.launch.catalog import SHIPPED
from perdure.model.bus.access import ROLES, build_access
from perdure.model.errors import ConfigError
from perdure.model.job import JobSpec
from perdure.model.platforms.profile import Profile

SCHEMAS = SHIPPED.parent / "schemas"
"""`job.json` and `profile.json`, as this module makes them."""


_STRUCTS: dict[str, type[msgspec.Struct]] = {"job": JobSpec, "profile": Profile}


def print_schema(what: str | None, permissions: bool) -> None:
    """Print the fields of a job file or a profile, or each role's permissions in the job `what`.

    All are JSON.

    Raises:
        ConfigError: there is no such schema.
    """
    if permissions:
        access = {role: build_access(role, what or "JOB") for role in ROLES}
        print(render_schema(msgspec.to_builtins(access)), end="")
    else:
        print(render_schema(make_file_schema(what or "job")), end="")


def render_schema(document: dict[str, Any]) -> str:
    """Return a schema as it is printed and shipped."""
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n"


def make_file_schema(what: str) -> dict[str, Any]:
    """Return the JSON Schema of a job file or a profile; each field says what its docstring says.

    `nproc` of a job file may be a word. A profile is a difference to its base, which lacks nothing.
    """
    if what not in _STRUCTS:
        raise ConfigError(f"there is no schema of `{what}`", hint=f"one of {', '.join(_STRUCTS)}")
    type_ = _STRUCTS[what]
    document = msgspec.json.schema(type_)
    document = {"$schema": "https://json-schema.org/draft/2020-12/schema", **document}
    for cls in _list_structs(inspect.type_info(type_), set()):
        definition = document["$defs"][cls.__name__]
        if "description" in definition:
            definition["description"] = cleandoc(definition["description"])
        properties = definition["properties"]
        for property_ in properties.values():  # Not every version of msgspec lists the keys.
            property_.pop("propertyNames", None)
        meanings = read_meanings(cls)
        for name, key in zip(cls.__struct_fields__, cls.__struct_encode_fields__, strict=True):
            if name in meanings:
                properties[key]["description"] = meanings[name]
    if type_ is Profile:
        del document["$defs"]["Profile"]["required"]
    else:
        nproc = document["$defs"]["JobSpec"]["properties"]["nproc"]
        ranks = {"type": nproc.pop("type"), "minimum": nproc.pop("minimum")}
        nproc["anyOf"] = [ranks, {"enum": ["auto", "cpu", "gpu"]}]
    return document


def _list_structs(node: Any, seen: set[type]) -> Iterator[type[msgspec.Struct]]:
    """Yield every struct that a document may hold, once."""
    if isinstance(node, inspect.StructType) and node.cls not in seen:
        seen.add(node.cls)
        yield node.cls
        for field in node.fields:
            yield from _list_structs(field.type, seen)
    for name in ("item_type", "value_type", "type"):
        if isinstance(inner := getattr(node, name, None), inspect.Type):
            yield from _list_structs(inner, seen)
    for inner in (*getattr(node, "types", ()), *getattr(node, "item_types", ())):
        yield from _list_structs(inner, seen)


def make_schema_line(folder: Path) -> str:
    """Return the line by which a TOML job file in `folder` tells editors of the shipped schema.

    The path is relative where perdure is installed below the folder (`.venv`), so that the file may
    be committed; else absolute, and where it leads nowhere editors do without.
    """
    path, folder = SCHEMAS / "job.json", folder.resolve()
    inside = path.is_relative_to(folder)
    return f"#:schema {'./' + str(path.relative_to(folder)) if inside else path.as_uri()}"
