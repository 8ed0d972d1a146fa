"""What must not leave in a bug report, taken out of text: secrets, and who and where.

Secrets are found twice: by value (what is known to be one, such as a value of the job's `[env]`,
in each way in which it may be written down), and by shape (a URL with a password, `--token X`, the
forms of tokens of well-known services, private keys, long random words). People, hosts and
addresses get a pseudonym each, the same one wherever they stand, so that a report still says who
spoke to whom. It is better to take out a word too many: nothing is said of what is left.
"""

import base64
import ipaddress
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from urllib.parse import quote, quote_plus

SECRET_NAME = (
    r"(?:token|secret|passw(?:or)?d|passwd|passphrase|pwd|credential|cookie|authorization|bearer"
    r"|(?:api|access|private|signing|encryption|account|auth|ssh|licen[cs]e|storage|wandb)[._-]?key"
    r"|signature|session[._-]?id|dsn|auth|creds)"
)
VALUE_LEAST = 4
"""A shorter value of `[env]`, such as 1 or on, is no secret that could be told from other words."""
_NAMES_MAX = 2000
_LINE_LEAST = 12
"""Of a value in several lines, those of so many characters are looked for on their own."""
_WORD = r"[A-Za-z0-9]"
_VALUE = r"""(?:(?P<quote>\\{0,8}["'])(?:(?!(?P=quote)|\n).)+|(?P<bare>)[^\s"',;}\])\\]+)"""
"""A value in quotes, which may be escaped, or a bare word."""
_NAMED = re.compile(
    rf"(?P<name>{SECRET_NAME}s?\d{{0,9}}(?:[_.-][\w.-]{{0,64}})?[\\\"']{{0,8}}\s{{0,8}}(?:=>|[:=])\s{{0,8}})"
    rf"(?![\\\"']{{0,8}}<|None\b|null\b|true\b|false\b|[\[{{(]){_VALUE}",
    re.IGNORECASE,
)
_OPTION = re.compile(
    r"(?P<name>(?<![\w-])--?(?P<word>\w[\w.-]{0,80})[\\\"']{0,8}(?:\s{0,8},\s{0,8}|[ \t]{1,8}))"
    rf"(?![\\\"']{{0,8}}[<-]){_VALUE}"
)
_PARAMETER = re.compile(r"(?P<name>[?&;](?P<word>[\w.-]{1,80})=)(?P<quote>)[^&\s\"'<]+")
_SECRET_WORD = re.compile(SECRET_NAME, re.IGNORECASE)
_SECRET_PARAMETER = re.compile(rf"{SECRET_NAME}|sig|key|code", re.IGNORECASE)
_ENV = re.compile(r'"env":\s*\{(?:\s*"(?:[^"\\]|\\.)*"\s*:\s*"(?:[^"\\]|\\.)*"\s*,?)*\s*\}')
_ENV_VALUE = re.compile(r'("(?:[^"\\]|\\.)*"\s*:\s*)"(?:[^"\\]|\\.)*"')
_SHAPES: tuple[tuple[str, re.Pattern[str], str], ...] = (
    (
        "private key",
        re.compile(r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY.*?(?:-----END [A-Z0-9 ]*-----|\Z)", re.S),
        "<private key>",
    ),
    (
        "URL with a login",
        re.compile(r"([a-zA-Z][\w+.-]{0,20}://)[^/\s\"'<>@]{1,2048}@"),
        r"\1<login>@",
    ),
    (
        "webhook",
        re.compile(r"(https?://[^\s\"']{0,200}?/(?:services|webhooks?)/)[^\s\"']+"),
        r"\1<secret>",
    ),
    (
        "authorization",
        re.compile(r"\b(Bearer|Basic|Digest|Token)(\s{1,8}|%20)[\w.~+/=:-]{6,}", re.IGNORECASE),
        r"\1\2<secret>",
    ),
    ("named secret", _NAMED, r"\g<name>\g<quote><secret>"),
    (
        "token",
        re.compile(
            r"\b(?:A[KS]IA[0-9A-Z]{16}|gh[oprsu]_\w{20,}|github_pat_\w{20,}|hf_\w{16,}"
            r"|sk-[\w-]{16,}|xox[a-z]-[\w-]{10,}|glpat-[\w-]{16,}|AIza[\w-]{30,}|npm_\w{20,}"
            r"|pypi-[\w-]{20,}|eyJ[\w-]{8,}(?:\.[\w-]+)*|S[ACNOUX][A-Z2-7]{50,}|[0-9a-f]{40,})\b"
        ),
        "<token>",
    ),
    (
        "long random word",
        re.compile(
            rf"(?<!{_WORD})(?=[A-Za-z+]{{0,99}}\d)(?=[a-z0-9+]{{0,99}}[A-Z])(?=[A-Z0-9+]{{0,99}}[a-z])[A-Za-z0-9+]{{28,}}={{0,2}}"
        ),
        "<random>",
    ),
)
_CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|[\x00-\x08\x0b-\x1f\x7f]"
)
_URL_HOST = re.compile(
    r"(?<=://)(?:(<login>)@)?([A-Za-z0-9][A-Za-z0-9.-]{0,252})(?=[:/?\s\"',)]|$)"
)
_AT = re.compile(
    r"(?<![\w.+-])([A-Za-z0-9][\w.+-]{0,63})@([A-Za-z0-9][A-Za-z0-9.-]{0,252}[A-Za-z0-9])"
)
_IPV4 = re.compile(r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?![\d.]*\d)")
_IPV6 = re.compile(r"(?<![\w:.])[0-9a-fA-F:]{3,45}(?![\w:])")
_HOME = re.compile(r"(/(?:home|Users|export/home)/)([^/\s\"':,]{1,64})")
_INNER_HOST = re.compile(
    r"(?<![\w.-])[A-Za-z0-9][A-Za-z0-9-]{0,62}(?:\.[A-Za-z0-9-]{1,63}){0,8}"
    r"\.(?:internal|local|localdomain|lan|corp|intra|intranet|home|cluster)\b"
)
_PLAIN_HOSTS = frozenset({"localhost", "pytorch.org", "github.com", "docs.nats.io", "nats.io"})
_PLAIN_USERS = frozenset({"root", "user", "nobody"})


class Redactor:
    """Takes out what is known, and what looks like it; counts what it took out, by kind."""

    def __init__(self) -> None:
        """Know nothing yet."""
        self.counts: Counter[str] = Counter()
        self._values: dict[str, str] = {}
        """Text -> what stands in its place."""
        self._names: dict[str, dict[str, str]] = {}
        """Kind -> name -> pseudonym."""
        self._words: dict[str, tuple[str, str]] = {}
        """Name of a host or a person, in small letters -> kind and pseudonym."""

    def add_secret(self, value: str, label: str = "<secret>") -> None:
        """Take `value` out wherever it stands, as it is or as JSON, a URL or base64 write it."""
        for text in {value, value.strip(), *_long_lines(value)}:
            if len(text) >= VALUE_LEAST:
                self._values |= dict.fromkeys(_ways_to_write(text), label)

    def add_path(self, path: str, label: str) -> None:
        """Write `path` as `label`."""
        if len(path) > 1:
            self._values.setdefault(path.rstrip("/"), label)

    def add_host(self, name: str) -> None:
        """Give a host its pseudonym, by its whole and by its short name."""
        for known in {name, name.partition(".")[0]} if not _is_address(name) else {name}:
            if len(known) > 1 and known.lower() not in _PLAIN_HOSTS and not known.isdigit():
                short = self._name("host", name.partition(".")[0].lower())
                self._add_word(known, "host name", short)

    def add_user(self, name: str) -> None:
        """Give a person a pseudonym."""
        if len(name) > 1 and name.lower() not in _PLAIN_USERS:
            self._add_word(name, "user name", self._name("user", name.lower()))

    def _add_word(self, word: str, kind: str, stand_in: str) -> None:
        if word.lower() not in self._words and not self._is_full:
            self._words[word.lower()] = (kind, stand_in)

    def redact(self, text: str) -> str:
        """Return `text` without all that; no control characters are left in it either."""
        text = _CONTROL.sub("", text.encode("utf-8", "replace").decode())
        text = self._sub(_ENV, "[env]", text, lambda m: _ENV_VALUE.sub(r'\1"<env>"', m[0]))
        text = self._sub_known(text)
        for kind, pattern, stand_in in _SHAPES:
            text, count = pattern.subn(stand_in, text)
            self._count(kind, count)
        text = self._sub(_OPTION, "secret option", text, _hide_if(_SECRET_WORD))
        text = self._sub(_PARAMETER, "secret of a URL", text, _hide_if(_SECRET_PARAMETER))
        text = self._sub(_AT, "address", text, self._mail)
        text = self._sub(_URL_HOST, "host name", text, self._url_host)
        text = self._sub(_INNER_HOST, "host name", text, self._inner_host)
        text = self._sub(_HOME, "user name", text, self._home)
        text = self._sub(_IPV4, "IP address", text, self._address)
        text = self._sub(_IPV6, "IP address", text, self._address)
        return self._sub_words(text)

    @property
    def _is_full(self) -> bool:
        """Whether so many names are known that further ones are taken out where they stand only."""
        return len(self._words) >= _NAMES_MAX

    # --- one at a time ------------------------------------------------------------------------

    def _sub_known(self, text: str) -> str:
        known = re.compile(_match_any(self._values))  # Which `re` keeps, until more is known.
        return self._sub(known, "known secret or path", text, lambda m: self._values[m[0]])

    def _sub_words(self, text: str) -> str:
        any_word = rf"(?<![A-Za-z0-9])(?:{_match_any(self._words)})(?![A-Za-z0-9])"

        def replace(match: re.Match[str]) -> str:
            kind, stand_in = self._words[match[0].lower()]
            self._count(kind, 1)
            return stand_in

        return re.compile(any_word, re.IGNORECASE).sub(replace, text)

    def _sub(
        self,
        pattern: re.Pattern[str],
        kind: str,
        text: str,
        replace: Callable[[re.Match[str]], str],
    ) -> str:
        def counted(match: re.Match[str]) -> str:
            stand_in = replace(match)
            self._count(kind, stand_in != match[0])
            return stand_in

        return pattern.sub(counted, text)

    def _count(self, kind: str, count: int) -> None:
        if count:
            self.counts[kind] += count

    def _name(self, kind: str, name: str) -> str:
        names = self._names.setdefault(kind, {})
        return names.setdefault(name, f"{kind}-{len(names) + 1}")

    def _mail(self, match: re.Match[str]) -> str:
        """Of `user@host`, both; `<login>@` has gone before."""
        self.add_host(match[2])
        self.add_user(match[1])
        return "<address>" if self._is_full else match[0]  # The words are taken out in the end.

    def _url_host(self, match: re.Match[str]) -> str:
        name = match[2]
        if not _is_address(name) and name.lower() not in _PLAIN_HOSTS:
            self.add_host(name)
            return "<host>" if self._is_full else match[0]
        return match[0]

    def _inner_host(self, match: re.Match[str]) -> str:
        if not match[0].startswith("torch."):
            self.add_host(match[0])
            return "<host>" if self._is_full else match[0]
        return match[0]

    def _home(self, match: re.Match[str]) -> str:
        self.add_user(match[2])
        return f"{match[1]}<user>" if self._is_full else match[0]

    def _address(self, match: re.Match[str]) -> str:
        """Of what looks like one: `19:41:53` and a version in four parts too big are none."""
        if re.fullmatch(r"(?:[0-9a-fA-F]{2}:){5}[0-9a-fA-F]{2}", match[0]):  # of a network card
            return self._name("mac", match[0].lower())
        try:
            address = ipaddress.ip_address(match[0])
        except ValueError:
            return match[0]
        plain = address.is_loopback or address.is_unspecified
        return match[0] if plain else self._name("ip", str(address))


def find_secrets_in_args(args: Iterable[str]) -> list[str]:
    """Return what a command line hands over as a secret: `--token X`, `api_key=X`, `-p X`.

    >>> find_secrets_in_args(["--lr", "0.1", "--hf-token", "abcd", "wandb.api_key=efgh"])
    ['abcd', 'efgh']
    """
    named = re.compile(rf"^-{{0,2}}[\w.+-]*{SECRET_NAME}[\w.-]*$", re.IGNORECASE)
    found, before = [], ""
    for arg in args:
        name, equals, value = arg.partition("=")
        if equals and named.match(name):
            found.append(value)
        elif before.startswith("-") and "=" not in before and named.match(before):
            found.append(arg)
        before = arg
    return found


def _hide_if(pattern: re.Pattern[str]) -> Callable[[re.Match[str]], str]:
    """Return what takes out the value of a match whose `word` has `pattern` in it."""

    def hide(match: re.Match[str]) -> str:
        found = pattern.search(match["word"])
        return f"{match['name']}{match['quote'] or ''}<secret>" if found else match[0]

    return hide


def _match_any(texts: Iterable[str]) -> str:
    """Return a pattern of any of `texts`, the longest first; of none, what matches nothing."""
    longest_first = sorted(texts, key=lambda text: (-len(text), text))
    return "|".join(map(re.escape, longest_first)) or r"(?!)"


def _is_address(name: str) -> bool:
    return bool(re.fullmatch(r"[\d.]+|[0-9a-fA-F:]*:[0-9a-fA-F:]*", name))


def _long_lines(value: str) -> list[str]:
    lines = [line.strip() for line in value.splitlines()]
    return [line for line in lines if len(line) >= _LINE_LEAST] if len(lines) > 1 else []


def _ways_to_write(text: str) -> list[str]:
    raw = text.encode("utf-8", "surrogateescape")
    plain = raw.decode("utf-8", "replace")
    return [
        plain,
        json.dumps(plain)[1:-1],
        json.dumps(plain, ensure_ascii=False)[1:-1],
        json.dumps(json.dumps(plain))[3:-3],
        repr(plain)[1:-1],
        quote(raw, safe=""),
        quote(raw),
        quote_plus(raw),
        base64.b64encode(raw).decode().rstrip("="),
        base64.urlsafe_b64encode(raw).decode().rstrip("="),
    ]
