"""A queue's nouns: what is to be run, and the records that its journal is made of.

An item is run in attempts, each with a number that is used once. The journal says what was
decided; what became of an attempt is in the attempt's own directory, written by its holder.
"""

import itertools
import math
import re
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from perdure.model.errors import ConfigError

NAME = r"^[A-Za-z0-9][A-Za-z0-9_.=+-]{0,79}$"
GRID_MAX = 10_000
Name = Annotated[str, Meta(pattern=NAME)]
Count = Annotated[int, Meta(ge=0)]
Scalar = bool | int | float | str


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to run, complete: nothing of it is read from a file later."""

    name: Name
    command: tuple[str, ...] = ()
    """A program and its arguments; empty where `job` says it."""
    job: dict[str, Any] | None = None
    """A job's document, run by `perdure run` under the item's name."""
    on: str = ""
    """A profile: the job is launched there and followed to its end; empty: it runs here."""
    cwd: str = "."
    env: dict[str, str] = {}
    done: tuple[str, ...] = ()
    """Files that prove it; where they all are there and hold something, it is not run."""
    after: tuple[str, ...] = ()
    """Items that have to be done before."""
    priority: int = 0
    """Higher ones first; equal ones in the order in which they were added."""
    gpus: Count = 1
    """Slots that it takes."""
    retries: Count = 2
    """Attempts after the first."""
    backoff_s: Annotated[float, Meta(ge=0)] = 10.0
    """Before the first retry; doubled each time, an hour at most."""
    timeout_s: Annotated[float, Meta(ge=0)] = 0.0
    """An attempt is ended after so long; 0: never."""
    no_retry: tuple[int, ...] = (2,)
    """Exit codes after which another attempt would end the same way."""


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """How an attempt ended: written once, by its holder, and copied to the journal."""

    at_s: float
    code: int = 0
    signal: int = 0
    reason: str = ""
    """Where neither code nor signal tells it, such as that nobody saw the end."""
    missing: tuple[str, ...] = ()
    """Of the files in `done`."""

    @property
    def ok(self) -> bool:
        """Whether the item is done by it."""
        return not (self.code or self.signal or self.reason or self.missing)

    @property
    def cause(self) -> str:
        """Return it in words."""
        if self.reason:
            return self.reason
        if self.signal:
            return f"signal {self.signal}"
        if self.code:
            return f"exit code {self.code}"
        if self.missing:
            return f"exit code 0, but not there: {', '.join(self.missing)}"
        return "exit code 0"


class Put(msgspec.Struct, frozen=True, tag=True):
    """An item was added, or one that waits got a new description."""

    at_s: float
    item: Item


class ItemRecord(msgspec.Struct, frozen=True, tag=True):
    """Base of what befalls an item, by its name."""

    at_s: float
    name: str


class Removed(ItemRecord, frozen=True):
    """An item was taken out; an attempt that runs is stopped by its runner."""


class Again(ItemRecord, frozen=True):
    """A person wants an item run again, whatever became of it."""


class Started(ItemRecord, frozen=True):
    """An attempt is to be started; written before it is."""

    attempt: int
    slots: tuple[str, ...]


class Ended(msgspec.Struct, frozen=True, tag=True):
    """An attempt has ended."""

    name: str
    attempt: int
    ending: Ending


class Found(ItemRecord, frozen=True):
    """An item needs no run: its files are there."""


Record = Put | Removed | Again | Started | Ended | Found


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """Who carries out an attempt: made once, before the command is started."""

    boot_id: str
    holder: int
    holder_start: int
    """Ticks since boot, which tells a pid from a later one."""
    child: int = 0
    child_start: int = 0


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """What a holder is told."""

    item: Item
    attempt: int
    slots: tuple[str, ...]
    home: str


class Defaults(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[defaults]` of a queue file: what an item says wins."""

    on: str | None = None
    cwd: str = ""
    env: dict[str, str] = {}
    priority: int | None = None
    gpus: Count | None = None
    retries: Count | None = None
    backoff_s: Annotated[float, Meta(ge=0)] | None = None
    timeout_s: Annotated[float, Meta(ge=0)] | None = None
    no_retry: tuple[int, ...] | None = None


class Entry(Defaults, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One `[[item]]` of a queue file; with a grid it stands for many."""

    name: str
    """Of each item; `{key}` stands for the grid's value, as in `command`, `set`, `env`, `done`."""
    command: tuple[str, ...] = ()
    """A program and its arguments, without a shell."""
    job: str = ""
    """A job file instead; it is read when the item is added."""
    set: dict[str, Any] = {}
    """Fields of the job file to replace, by their path: `"checkpoint.keep_last" = 1`."""
    grid: dict[str, tuple[Scalar, ...]] = {}
    """Key -> values; there is an item for every combination."""
    done: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    """Names of items, or of entries: then of all the items of that entry."""


class QueueFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A queue as a file."""

    item: tuple[Entry, ...]
    defaults: Defaults = Defaults()


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """An item whose job file has yet to be read."""

    item: Item
    job: str = ""
    set: dict[str, Any] = {}


_CHOICES = ("on", "priority", "gpus", "retries", "backoff_s", "timeout_s", "no_retry")
_HOLE = re.compile(r"\{\{(\w+)\}\}|\{(\w+)\}")


def expand_file(document: QueueFile) -> tuple[Planned, ...]:
    """Return the items of a queue file, in its order.

    Raises:
        ConfigError: an entry cannot be; the message names it.
    """
    planned: list[Planned] = []
    families: dict[str, tuple[str, ...]] = {}
    for entry in document.item:
        found = expand_entry(entry, document.defaults)
        if entry.name in families:
            raise ConfigError(f"item `{entry.name}`: there are two of this name")
        families[entry.name] = tuple(p.item.name for p in found)
        planned += found
    names = [p.item.name for p in planned]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(
            f"item `{twice[0]}`: there are two of this name",
            hint="name every key of the grid: name = 'train-{lr}'",
        )
    return tuple(_resolve(one, families) for one in planned)


def _resolve(one: Planned, families: Mapping[str, tuple[str, ...]]) -> Planned:
    after = [name for given in one.item.after for name in families.get(given, (given,))]
    item = msgspec.structs.replace(one.item, after=tuple(dict.fromkeys(after)))
    return msgspec.structs.replace(one, item=item)


def expand_entry(entry: Entry, defaults: Defaults) -> tuple[Planned, ...]:
    """Return the items that an entry stands for.

    Raises:
        ConfigError: it cannot be; the message names it.
    """
    place = f"item `{entry.name}`"
    total, a_job = math.prod(map(len, entry.grid.values())), "job = 'job.toml'"
    both, grid = bool(entry.command) == bool(entry.job), not 0 < total <= GRID_MAX
    for wrong, what, hint in (
        (both, "either `command` or `job`", "one of them, not both"),
        ("name" in entry.grid, "no key of a grid is called `name`", "that is the item's"),
        (entry.on and not entry.job, "`on` is for a job", a_job),
        (entry.set and not entry.job, "`set` changes fields of a job", a_job),
        (grid, f"the grid has {total} points", f"1 to {GRID_MAX}"),
    ):
        if wrong:
            raise ConfigError(f"{place}: {what}", hint=hint)
    named = {found for pair in _HOLE.findall(entry.name) if (found := pair[1])}
    suffix = "".join(f"-{{{key}}}" for key in entry.grid if key not in named)
    rows = itertools.product(*entry.grid.values())
    points = [dict(zip(entry.grid, row, strict=True)) for row in rows]
    return tuple(_make(entry, defaults, entry.name + suffix, point) for point in points)


def _make(entry: Entry, defaults: Defaults, name: str, point: dict[str, Scalar]) -> Planned:
    holes: dict[str, Scalar] = dict(point)
    place = f"item `{entry.name}`"
    holes["name"] = name = str(fill(name, holes, place))
    if not re.match(NAME, name):
        raise ConfigError(
            f"{place}: `{name}` is no name", hint="letters, digits and _.=+-, 80 at most"
        )
    chosen: dict[str, Any] = {}
    for source in (defaults, entry):
        given = {key: getattr(source, key) for key in _CHOICES}
        chosen |= {key: value for key, value in given.items() if value is not None}
    if not entry.job:
        chosen.pop("on", None)  # Of the defaults: a command runs here.
    elif chosen.get("on"):
        chosen.setdefault("gpus", 0)  # Of this machine's.
    item = Item(
        name=name,
        command=tuple(str(fill(word, holes, place)) for word in entry.command),
        cwd=str(fill(entry.cwd or defaults.cwd or ".", holes, place)),
        env={k: str(fill(v, holes, place)) for k, v in {**defaults.env, **entry.env}.items()},
        done=tuple(str(fill(path, holes, place)) for path in entry.done),
        after=tuple(str(fill(other, holes, place)) for other in entry.after),
        **chosen,
    )
    return Planned(
        item=item, job=str(fill(entry.job, holes, place)), set=fill(entry.set, holes, place)
    )


def fill(value: Any, holes: Mapping[str, Scalar], place: str) -> Any:
    """Return `value` with every `{key}` replaced; text that is one hole keeps the value's type.

    `{{word}}` is `{word}` itself. Braces around anything else stay as they are.

    Raises:
        ConfigError: a key is not in the grid.

    >>> fill(["--lr", "{lr}", "{{lr}}"], {"lr": 0.1}, "")
    ['--lr', 0.1, '{lr}']
    """
    if isinstance(value, dict):
        return {key: fill(inner, holes, place) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(fill(inner, holes, place) for inner in value)
    if not isinstance(value, str):
        return value

    def fill_hole(match: re.Match[str]) -> str:
        plain, key = match.groups()
        if plain:
            return "{" + plain + "}"
        if key not in holes:
            known = ", ".join(holes) or "none"
            raise ConfigError(
                f"{place}: no `{key}` in its grid",
                hint=f"there is {known}; write {{{{{key}}}}} for {{{key}}} itself",
            )
        return str(holes[key])

    whole = _HOLE.fullmatch(value)
    if whole and whole.group(2) in holes:
        return holes[whole.group(2)]
    return _HOLE.sub(fill_hole, value)


def replace_fields(document: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return `document` with the fields at the dotted paths of `changes` replaced.

    >>> replace_fields({"a": {"b": 1}}, {"a.c": 2})
    {'a': {'b': 1, 'c': 2}}
    """
    result = dict(document)
    for path, value in changes.items():
        head, _, rest = path.partition(".")
        inner = result.get(head)
        if rest:
            value = replace_fields(inner if isinstance(inner, dict) else {}, {rest: value})
        result[head] = value
    return result
