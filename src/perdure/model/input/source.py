"""What a person has written, and where in it something is wrong, and what was expected there."""

import json
import re
import tomllib
from difflib import get_close_matches
from typing import Any, Never, TypeVar

import msgspec

from perdure.model.errors import ConfigError
from perdure.model.input.values import VALUE_HINT, find_bad_value

BOM = "\ufeff"
"""What some editors write in front of a text."""
T = TypeVar("T")
Path = list[str | int]
_PLACE = re.compile(r" - at `\$([^`]*)`$")
_STEP = re.compile(r"\[(\d+)\]|\.([^.\[]+)")
_BYTE = re.compile(r" \(byte (\d+)\)$")
_SPACE = re.compile(r"[ \t\r\n]*")
_decoder = json.JSONDecoder()
_HINT = "docs/traces.md shows each format; --format NAME reads it as that one"


class Misfit(msgspec.Struct, frozen=True):
    """Why a document cannot be taken."""

    what: str
    place: str
    """Such as `detect.node_lost_s`; empty: the document itself."""
    keys: list[str]
    """The way there, a field that is unknown at its end."""
    hint: str


def list_sections(type_: type[msgspec.Struct]) -> dict[str, type[msgspec.Struct]]:
    """Return the fields of a document that have fields of their own, and the types of those."""
    fields = msgspec.structs.fields(type_)
    return {f.name: type(f.default) for f in fields if isinstance(f.default, msgspec.Struct)}


def parse_toml(data: bytes, name: str) -> dict[str, Any]:
    """Return the TOML document in `data`, called `name` in errors.

    Raises:
        ConfigError: it is none; the line is named.
    """
    try:
        return tomllib.loads(data.decode().removeprefix(BOM))
    except (ValueError, RecursionError) as error:  # Also not UTF-8, endless digits, too deep.
        raise ConfigError(f"{name}: not TOML: {error}", hint="see https://toml.io") from error


def find_misfit(
    document: dict[str, Any], type_: type[msgspec.Struct], hint: str, noun: str = ""
) -> Misfit | None:
    """Return why `document` is no `type_` with numbers that can be taken; None where it is.

    With a `noun` for its fields, the hint of an unknown one has a near name, or all that there are.
    """
    try:
        keys, why = find_bad_value(document)
    except RecursionError:
        return Misfit("too deep", "", [], hint)
    if why:
        return Misfit(why, ".".join(keys), keys, VALUE_HINT)
    try:
        msgspec.convert(document, type_)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$")
        place = where.rstrip("`").lstrip(".")
        keys = re.findall(r"[^.\[\]]+", place)
        if noun and "unknown field" in what:
            section = list_sections(type_).get(keys[0]) if keys else None
            known = (section or type_).__struct_encode_fields__
            keys.append(what.split("`")[1])
            near = get_close_matches(keys[-1], known, n=1)
            hint = f"did you mean `{near[0]}`?" if near else f"{noun}: {', '.join(known)}"
        return Misfit(what, place, keys, hint)
    return None


class Source:
    """The text of one file."""

    def __init__(self, name: str, text: str, hint: str = _HINT) -> None:
        """Read `text`, called `name` in errors, which end with `hint`."""
        self.name, self.text, self.hint = name, text.removeprefix(BOM), hint
        self.notes: list[str] = []
        """What was odd and could be put right, each with its place."""

    def lines(self) -> list[tuple[int, str]]:
        """Return (number, line) of all that say something; `#` begins a comment."""
        lines = enumerate(re.split(r"\r\n|\r|\n", self.text), 1)
        return [
            (n, line) for n, line in lines if line.strip() and not line.lstrip().startswith("#")
        ]

    def fail(self, line: int, column: int, what: str) -> Never:
        """Raise what is wrong at a place; both numbers count from 1."""
        raise ConfigError(f"{self.name}:{line}:{column}: {what}", hint=self.hint)

    def fail_at(self, offset: int, what: str) -> Never:
        """Raise what is wrong at a character of the text."""
        before = self.text[:offset]
        self.fail(before.count("\n") + 1, offset - before.rfind("\n"), what)

    def fail_in(self, path: Path, what: str) -> Never:
        """Raise what is wrong with the value at `path` of a JSON document."""
        self.fail_at(locate_value(self.text, path), what)

    def decode(self, type_: type[T] | Any) -> T:
        """Return the text as a JSON document of `type_`.

        Raises:
            ConfigError: It is not such a document; names the place.
        """
        try:
            value: T = msgspec.json.decode(self.text.encode(), type=type_)
        except msgspec.ValidationError as error:
            text, path = split_place(str(error))
            self.fail_in(path, text)
        except msgspec.DecodeError as error:
            offset, text = self._locate_error(str(error))
            self.fail_at(offset, f"{text}; expected JSON")
        return value

    def _locate_error(self, message: str) -> tuple[int, str]:
        match = _BYTE.search(message)
        if match is None:
            return len(self.text.rstrip()), message
        before = self.text.encode()[: int(match[1])]
        return len(before.decode(errors="ignore")), message[: match.start()]


def split_place(message: str) -> tuple[str, Path]:
    """Return a validation error's words and the path of the value that it is about."""
    match = _PLACE.search(message)
    if match is None:
        return _lower(message), []
    path: Path = [int(i) if i else name for i, name in _STEP.findall(match[1])]
    return _lower(message[: match.start()]), path


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def locate_value(text: str, path: Path) -> int:
    """Return where in a JSON text the value at `path` begins; as deep as the path leads."""
    at = _skip(text, 0)
    for step in path:
        inner = (
            _locate_item(text, at, step) if isinstance(step, int) else _locate_key(text, at, step)
        )
        if inner < 0:
            return at
        at = inner
    return at


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None
    return match.end()


def _locate_item(text: str, at: int, index: int) -> int:
    at = _skip(text, at + 1)
    for _ in range(index):
        _, at = _decoder.raw_decode(text, at)
        at = _skip(text, _skip(text, at) + 1)
    return at


def _locate_key(text: str, at: int, key: str) -> int:
    at = _skip(text, at + 1)
    while at < len(text) and text[at] == '"':
        found, at = _decoder.raw_decode(text, at)
        at = _skip(text, _skip(text, at) + 1)
        if found == key:
            return at
        _, at = _decoder.raw_decode(text, at)
        at = _skip(text, _skip(text, at) + 1)
    return -1
