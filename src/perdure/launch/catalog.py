"""Profiles by name: found, their diffs applied over their bases, with what each value came from.

Looked for under `$PERDURE_HOME/profiles` first and among the shipped ones then, so that a file of
the user's own may be a diff against the shipped profile of the same name. A path is taken as it is.
"""

import os
import re
from collections.abc import Mapping
from copy import deepcopy
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from perdure.files.regular import read_file
from perdure.model.errors import ConfigError
from perdure.model.input.source import find_misfit, parse_toml
from perdure.model.input.values import VALUE_HINT, find_bad_value
from perdure.model.platforms.profile import HOST_DEPENDENT, Profile

SHIPPED = Path(__file__).resolve().parent / "profiles"
BASELINE = "generic-ssh"


class Resolved(msgspec.Struct, frozen=True):
    """A profile, and the place that each of its values came from."""

    profile: Profile
    origins: dict[str, str]
    """Dotted key -> `generic-ssh`, a path, `measured`, `--host`; defaults have none."""


NO_FACTS = ("platform", "base", "kind", "launch", "daemon", "gotchas", "overrides", "slurm",
            "notebook", "kubernetes", "detach_primitive", "network", "sources")  # fmt: skip
"""What a profile chooses; the rest says what a platform is like."""


def describe_source(resolved: Resolved, key: str) -> str:
    """Return where a fact was read and when, or that this is not known; empty for what is no fact.

    Only a shipped profile's facts have one: what a person writes is their own, and what is
    `host-dependent` is measured.
    """
    origin = resolved.origins.get(key, "")
    shipped = (SHIPPED / f"{origin}.toml").is_file() and "/" not in origin
    if not shipped or origin == BASELINE or key.split(".")[0] in NO_FACTS:
        return ""
    for one in resolved.profile.sources:
        mine = any(key == fact or key.startswith(f"{fact}.") for fact in one.facts)
        if one.profile == origin and mine:
            return f"{one.where} ({one.read})"
    return "source not known"


def list_profiles(home: str) -> list[str]:
    """Return the names of all profiles, the user's own among them."""
    folders = (SHIPPED, Path(home, "profiles"))
    return sorted({path.stem for folder in folders for path in folder.glob("*.toml")})


def load_profile(name: str, home: str) -> Resolved:
    """Return the profile `name` (or of the file at that path).

    Raises:
        ConfigError: there is none, or a file of it is malformed; file and line are named.
    """
    chain: list[tuple[str, dict[str, Any]]] = []
    seen: set[Path] = set()
    wanted = name
    while wanted or not seen:
        path = _find_file(wanted, home, seen)
        seen.add(path)
        document = _read(path)
        document.setdefault("platform", path.stem)
        chain.append((path.stem if path.parent == SHIPPED else str(path), document))
        is_baseline = path == SHIPPED / f"{BASELINE}.toml"
        wanted = "" if is_baseline else document.get("base", BASELINE)
    merged: dict[str, Any] = {}
    origins: dict[str, str] = {}
    sources: list[dict[str, Any]] = []
    for source, document in reversed(chain):
        sources += [{**one, "profile": source} for one in document.pop("sources", ())]
        _overlay(merged, document, origins, source, "")
    merged["sources"] = sources
    return Resolved(msgspec.convert(merged, Profile), origins)


def overlay(resolved: Resolved, values: Mapping[str, Any], source: str) -> Resolved:
    """Return `resolved` with `values` (dotted key -> value) over it, from `source`.

    Raises:
        ConfigError: a value that the key cannot hold.
    """
    document = msgspec.to_builtins(resolved.profile)
    keys, why = find_bad_value(dict(values))
    if why:
        raise ConfigError(f"{source}: {'.'.join(keys)}: {why}", hint=VALUE_HINT)
    for key, value in values.items():
        *sections, last = key.split(".")
        inner = document
        for section in sections:
            inner = inner[section]
        inner[last] = value
    try:
        profile = msgspec.convert(document, Profile)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {error}", hint="perdure profiles shows every key") from error
    return Resolved(profile, resolved.origins | dict.fromkeys(values, source))


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return dotted key -> value of a profile's document, sections taken apart."""
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        if isinstance(inner, dict):
            flat |= flatten(inner, f"{prefix}{key}.")
        else:
            flat[prefix + key] = inner
    return flat


def _find_file(name: str, home: str, seen: set[Path]) -> Path:
    if "/" in name or name.endswith(".toml"):
        candidates = [Path(os.path.expanduser(name)).resolve()]
    else:
        candidates = [Path(home, "profiles", f"{name}.toml"), SHIPPED / f"{name}.toml"]
    for path in candidates:
        if path.is_file() and path not in seen:
            return path
    if any(path in seen for path in candidates):
        raise ConfigError(f"profile {name} is based on itself", hint="name another `base`")
    names = list_profiles(home)
    near = get_close_matches(name, names, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"there is {', '.join(names)}"
    raise ConfigError(f"no profile `{name}`", hint=hint)


def _read(path: Path) -> dict[str, Any]:
    """Return one profile's own document, each of its keys checked."""
    try:
        data = read_file(path, follow=True)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    return deepcopy(_parse(data, path))


@lru_cache(maxsize=2)  # All profiles have the same one below them.
def _parse(data: bytes, path: Path) -> dict[str, Any]:
    document = parse_toml(data, str(path))
    _check(document, data.decode(), path)
    return document


_FILLER: dict[str, Any] = {
    "platform": "x", "kind": "ssh", "meter_stop_verb": "manual", "meter_stop_irreversible": True,
    "detach_primitive": "tmux", "spot_available": False, "spot_grace": "n/a",
    "shared_fs": HOST_DEPENDENT, "inode_cap": HOST_DEPENDENT, "free_egress": HOST_DEPENDENT,
    "mirror": HOST_DEPENDENT, "host_driver_cuda_max": HOST_DEPENDENT,
    "local_nvme": HOST_DEPENDENT,
}  # fmt: skip
"""For what a diff leaves to its base, so that one document can be checked by itself."""


def _check(document: dict[str, Any], text: str, path: Path) -> None:
    """Refuse a document that is wrong by itself, with file, line and a hint."""
    hint = "perdure profiles generic-ssh shows every key with its meaning"
    wrong = find_misfit(_FILLER | document, Profile, hint, "keys")
    if wrong is not None:
        line = find_line(text, wrong.keys) or 1
        at = f" (at {'.'.join(wrong.keys)})" if wrong.keys else ""
        raise ConfigError(f"{path}, line {line}: {wrong.what}{at}", hint=wrong.hint)


def find_line(text: str, keys: list[str]) -> int:
    """Return the line of a TOML document that sets `keys`, or else their table; 0 for neither."""
    table: list[str] = []
    best, depth = 0, 0
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[+\s*([^\]]+?)\s*\]", line):
            table = [part.strip(" \"'") for part in header[1].split(".")]
            found = table
        elif assignment := re.match(r"\s*([A-Za-z0-9_.\"'-]+)\s*=", line):
            found = [*table, *(part.strip("\"'") for part in assignment[1].split("."))]
        else:
            continue
        names = [key for key in keys if not key.isdigit()]
        if found == names[: len(found)] and len(found) > depth:
            best, depth = number, len(found)
    return best


def _overlay(
    into: dict[str, Any], document: dict[str, Any], origins: dict[str, str], source: str, at: str
) -> None:
    for key, value in document.items():
        if isinstance(value, dict):
            _overlay(into.setdefault(key, {}), value, origins, source, f"{at}{key}.")
        else:
            into[key] = value
            origins[at + key] = source
