"""What may leave in a bug report: perdure's own words and numbers, and nothing else.

Each word that perdure's source does not have gets a pseudonym, the same one everywhere, so that a
report still says which host spoke to which. Of what a script has printed or raised, only the lines
and types of tracebacks stay. Values that are known to be secret are taken out before.
"""

import builtins
import contextlib
import errno
import functools
import json
import re
import signal
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

SECRET_NAME = re.compile(
    r"token|secret|passw|pwd|credential|cookie|authorization|bearer|signature|session|dsn|auth"
    r"|creds|key$|[._-]key",
    re.IGNORECASE,
)
"""Names of variables and options whose values are secret."""
VALUE_LEAST = 4
"""A shorter value, such as 1 or on, cannot be told from other words."""
_ADDRESS = re.compile(
    r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w.])"
    r"|(?<![\w:])[0-9a-fA-F]{0,4}(?::[0-9a-fA-F]{0,4}){3,8}(?![\w:])"
    r"|(?<![\w.+-])[\w.+-]{1,64}@[\w.-]{1,255}|(?<=://)[^/\s\"':,<>]{1,255}"
)
_NAMED = re.compile(rf"((?:{SECRET_NAME.pattern})\w{{0,64}}+[\"']?\s?[:=]).*", re.IGNORECASE)
"""A name that says that the rest of the line is secret."""
_LOOPBACK = ("127.0.0.1", "0.0.0.0")
_WORD = re.compile(r"\w+")
_NUMBER = re.compile(r"\d{1,19}|\d+[eE]\d+|\d{1,6}[smhKMGT]i?B?|[a-zA-Z]\d{1,4}")
_PSEUDONYM = re.compile(r"(?:word|address)\d+")
_TYPE = re.compile(r"([\w.]{0,200}(?:Error|Exception|Interrupt|Exit|Warning))\b")
_FRAME = re.compile(r'\s*File ".*", line \d+, in .*')
_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f]")
_SCRIPT = frozenset({"last_output", "traceback", "error"})
"""Fields of an exit record that have a script's own text."""


@functools.cache
def read_vocabulary() -> frozenset[str]:
    """Return the words of perdure's source, in small letters, and names of Python's own."""
    root = Path(sys.modules["perdure"].__path__[0])
    words = {*sys.stdlib_module_names, *dir(builtins), *errno.errorcode.values()}
    words |= {one.name for one in signal.Signals}
    for path in root.rglob("*.py"):
        words |= set(_WORD.findall(path.read_text(encoding="utf-8")))
    parts = {part for word in words for part in word.split("_")}
    return frozenset(word.lower() for word in words | parts)


class Redactor:
    """Replaces words that are not perdure's; counts them by kind."""

    def __init__(self) -> None:
        """Know no secret yet."""
        self.counts: Counter[str] = Counter()
        self._words = set(read_vocabulary())
        self._values: dict[str, str] = {}
        """Secret text -> its replacement."""
        self._known = re.compile(r"(?!)")
        """Matches any secret text, the longest first."""
        self._names: dict[str, str] = {}
        """Word -> its pseudonym."""

    def add_secret(self, value: str, label: str = "<secret>") -> None:
        """Replace `value` wherever it stands, and each of its lines."""
        for text in {value, value.strip(), *map(str.strip, value.splitlines())}:
            if len(text) >= VALUE_LEAST:
                ways = (text, json.dumps(text)[1:-1], repr(text)[1:-1])
                self._values |= dict.fromkeys(ways, label)
        longest = sorted(self._values, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, longest)) or r"(?!)")

    def add_name(self, name: str) -> None:
        """Replace the words of a person's, a host's, or a folder's name as well."""
        self._words -= {word for word in _WORD.findall(name.lower()) if len(word) > 1}

    def redact(self, text: str) -> str:
        """Return `text` in perdure's words; it is JSON, lines of JSON, or plain text."""
        lines = text.splitlines(keepends=True)
        if len(lines) > 1:
            with contextlib.suppress(ValueError, RecursionError):
                return json.dumps(self._clean(json.loads(text)), indent=1) + "\n"
        return "".join(map(self._redact_line, lines))

    def redact_name(self, text: str) -> str:
        """Return a file's name in perdure's words."""
        return self._replace(text)

    def _redact_line(self, line: str) -> str:
        try:
            return json.dumps(self._clean(json.loads(line)), separators=(",", ":")) + "\n"
        except (ValueError, RecursionError):
            return self._replace(line)

    def _clean(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._replace(value)
        if isinstance(value, list):
            return [self._clean(one) for one in value]
        if not isinstance(value, dict):
            return value
        script = _SCRIPT if "last_output" in value else ()
        return {
            self._replace(key): dict.fromkeys(map(self._replace, one), "<env>")
            if key == "env" and isinstance(one, dict)
            else self._keep_types(one)
            if key in script
            else "<secret>"
            if isinstance(one, str) and key != "key" and SECRET_NAME.search(key)
            else self._clean(one)
            for key, one in value.items()
        }

    def _keep_types(self, value: Any) -> Any:
        """Return a script's text without all but the places and types of its errors."""
        if isinstance(value, list):
            return [f"<{len(value)} lines of the script>"] if value else []
        kept = []
        for line in str(value).splitlines():
            if _FRAME.fullmatch(line):
                kept.append(self._replace(line))
            elif found := _TYPE.match(line):
                kept.append(self._replace(found[1]))
        return "\n".join(kept)

    def _replace(self, text: str) -> str:
        text = _CONTROL.sub("", text.encode("utf-8", "replace").decode())
        text = self._known.sub(self._replace_value, text)
        text = _NAMED.sub(r"\1 <secret>", text)
        return _WORD.sub(self._replace_word, _ADDRESS.sub(self._replace_address, text))

    def _replace_value(self, match: re.Match[str]) -> str:
        self.counts["known secret"] += 1
        return self._values[match[0]]

    def _replace_address(self, match: re.Match[str]) -> str:
        if match[0] in _LOOPBACK or not re.search(r"\w", match[0]):
            return match[0]
        return self._name("address", match[0])

    def _replace_word(self, match: re.Match[str]) -> str:
        word = match[0]
        if word.lower() in self._words or _NUMBER.fullmatch(word) or _PSEUDONYM.fullmatch(word):
            return word
        return self._names.get(word) or self._name("word", word)

    def _name(self, kind: str, word: str) -> str:
        self.counts[kind] += 1
        return self._names.setdefault(word, f"{kind}{len(self._names) + 1}")


def find_secrets_in_args(args: Iterable[str]) -> list[str]:
    """Return what a command line hands over as a secret: `--token X`, `api_key=X`.

    >>> find_secrets_in_args(["--lr", "0.1", "--hf-token", "abcd", "wandb.api_key=efgh"])
    ['abcd', 'efgh']
    """
    found, before = [], ""
    for arg in args:
        name, equals, value = arg.partition("=")
        if equals and SECRET_NAME.search(name):
            found.append(value)
        elif before.startswith("-") and "=" not in before and SECRET_NAME.search(before):
            found.append(arg)
        before = arg
    return found
