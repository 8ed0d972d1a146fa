"""perdure's own live keys: those of its configuration that may change while a job runs."""

from functools import cache
from typing import Any

import msgspec
from msgspec import inspect

from perdure.model.errors import ConfigError
from perdure.model.job import CheckpointConfig, DetectConfig, JobSpec, PolicyConfig
from perdure.model.steering import KeySpec, Value

LOG_LEVELS = ("", "debug", "info", "warning", "error")
SECTIONS: dict[str, type[msgspec.Struct]] = {
    "detect": DetectConfig,
    "policy": PolicyConfig,
    "checkpoint": CheckpointConfig,
}
_LIVE = {"checkpoint": ("every_steps", "every_s")}
"""Of a section that is not live as a whole."""


def list_own_keys(spec: JobSpec) -> tuple[KeySpec, ...]:
    """Return perdure's keys, each with the value that the job began with as its default."""
    keys = [
        msgspec.structs.replace(key, default=getattr(getattr(spec, section), name))
        for section, name, key in _list_fields()
    ]
    level = KeySpec(
        name="log_level",
        type="str",
        default="",
        choices=LOG_LEVELS,
        note="Level of the ranks' root logger; empty: as the script has set it.",
        owner="perdure",
    )
    return (*keys, level)


def apply_spec(spec: JobSpec, values: dict[str, Value]) -> JobSpec:
    """Return `spec` with perdure's own keys of `values` in it; others are ignored.

    Raises:
        ConfigError: a section cannot hold one of them.
    """
    changed: dict[str, Any] = {}
    for name, value in values.items():
        section, _, field = name.partition(".")
        if section in SECTIONS and field:
            fields = changed.setdefault(section, msgspec.to_builtins(getattr(spec, section)))
            fields[field] = value
    try:
        sections = {name: msgspec.convert(f, SECTIONS[name]) for name, f in changed.items()}
    except msgspec.ValidationError as error:
        raise ConfigError(str(error)) from None
    return msgspec.structs.replace(spec, **sections) if sections else spec


@cache
def _list_fields() -> tuple[tuple[str, str, KeySpec], ...]:
    found = []
    for section, type_ in SECTIONS.items():
        described = inspect.type_info(type_)
        assert isinstance(described, inspect.StructType)
        for field in described.fields:
            if section in _LIVE and field.name not in _LIVE[section]:
                continue
            key = _describe(f"{section}.{field.name}", field.type, field.default)
            found.append((section, field.name, key))
    return tuple(found)


def _describe(name: str, type_: inspect.Type, default: Any) -> KeySpec:
    low: float | None = None
    high: float | None = None
    choices: tuple[Any, ...] = ()
    kind = "str"
    optional = isinstance(type_, inspect.UnionType)
    if isinstance(type_, inspect.UnionType):
        (type_,) = (one for one in type_.types if not isinstance(one, inspect.NoneType))
    match type_:
        case inspect.BoolType():
            kind = "bool"
        case inspect.IntType():
            kind, low, high = "int", type_.ge, type_.le
        case inspect.FloatType():
            kind, high = "float", type_.le
            low = type_.gt if type_.ge is None else type_.ge
        case inspect.LiteralType():
            choices = tuple(type_.values)
    return msgspec.convert(
        {
            "name": name,
            "type": kind,
            "default": default,
            "min": low,
            "max": high,
            "choices": list(choices),
            "owner": "perdure",
            "optional": optional,
        },
        KeySpec,
    )
