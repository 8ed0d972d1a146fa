"""What `PERDURE_FAILPOINTS` says: terms, separated by semicolons, each a point, a fault and when.

    journal/appended=crash,nth=2; file/rename=error(ENOSPC),about=latest; outbox/send=delay(1),p=.1

A fault is `crash` (SIGKILL of the process), `error(ERRNO)`, `delay(SECONDS)` of the thread, or
`take(N)`. Conditions, all of which have to hold: `about=PATTERN` (of the shell's),
`node=N`, `rank=N`, `file=PATH` (while that file is there, so that a fault can be switched in a job
that runs), `nth=N` (that time only), `times=N` (the first so many), and `p=P` with `seed=N` (with
this probability, the same each run).

With `PERDURE_FAILPOINTS_FOLDER` times are counted over all processes of the job, so that a part
that is started again is not killed again; each point that was passed is a line of its file `hits`,
and each fault that was made one of `fired`, written before.
"""

import contextlib
import errno
import fcntl
import itertools
import os
import random
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial

from perdure.failpoints import SWITCH
from perdure.failpoints.points import POINTS
from perdure.model.errors import ConfigError

_FAULT = re.compile(r"(\w+)(?:\(([^()]*)\))?")
_CONDITIONS = ("about", "node", "rank", "file", "nth", "times", "p", "seed")


@dataclass(slots=True)
class Term:
    """One fault, and when it happens."""

    name: str
    fault: str
    value: float = 0.0
    """An errno, seconds, or a number, as the fault has it."""
    about: str = "*"
    node: str = ""
    rank: str = ""
    file: str = ""
    """It happens only while this is there; empty: always."""
    nth: int = 0
    """0: each time."""
    times: int = 0
    """0: for ever."""
    p: float = 1.0
    seed: int = 0
    place: str = ""
    """The file in which times are counted; empty: in this process."""
    counter: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))

    def is_due(self, about: str) -> bool:
        """Return whether it happens now; this time is counted."""
        here = (self.node, os.environ.get("PERDURE_NODE")), (self.rank, os.environ.get("RANK"))
        if not fnmatchcase(about, self.about) or any(want not in ("", is_) for want, is_ in here):
            return False
        if self.file and not os.path.exists(self.file):
            return False
        count = _count(self.place) if self.place else next(self.counter)
        if (self.nth and count != self.nth) or (self.times and count > self.times):
            return False
        return random.Random(f"{self.seed} {self.name} {count}").random() < self.p

    def act(self, about: str) -> int | None:
        """Make the fault happen.

        Raises:
            OSError: it is an error.
        """
        match self.fault:
            case "crash":
                os.kill(os.getpid(), signal.SIGKILL)
            case "delay":
                time.sleep(self.value)
            case "error":
                number = int(self.value)
                raise OSError(number, os.strerror(number), about or self.name)
            case "take":
                return int(self.value)
        return None


def parse_terms(text: str) -> list[Term]:
    """Return the terms in `text`.

    Raises:
        ConfigError: it is no list of terms.
    """
    return [_parse_term(part.strip()) for part in text.split(";") if part.strip()]


def _parse_term(text: str) -> Term:
    name, _, rest = text.partition("=")
    fault, *conditions = (word.strip() for word in rest.split(","))
    point = POINTS.get(name.strip())
    if point is None:
        raise _refuse(f"there is no failpoint `{name.strip()}`")
    match = _FAULT.fullmatch(fault)
    if match is None or match[1] not in point.faults:
        faults = ", ".join(point.faults)
        raise _refuse(f"`{fault}` cannot happen at `{name.strip()}`, but one of {faults} can")
    term = Term(name.strip(), match[1], _parse_value(match[1], match[2]))
    for condition in conditions:
        key, _, value = condition.partition("=")
        if key not in _CONDITIONS or not value:
            raise _refuse(f"`{condition}` is no condition; there are {', '.join(_CONDITIONS)}")
        try:
            setattr(term, key, type(getattr(term, key))(value))
        except ValueError:
            raise _refuse(f"`{condition}` is no number") from None
    return term


def _parse_value(fault: str, value: str | None) -> float:
    if fault == "crash":
        if value is None:
            return 0.0
        raise _refuse("`crash` takes no number")
    if fault == "error":
        number = getattr(errno, value or "", None)
        if isinstance(number, int):
            return number
        raise _refuse(f"`{value or ''}` is no errno, such as ENOSPC")
    try:
        number = float(value or "")
    except ValueError:
        number = -1.0
    if not 0.0 <= number < 1e9:
        raise _refuse(f"`{fault}({value or ''})` lacks its number")
    return number


def _refuse(why: str) -> ConfigError:
    return ConfigError(f"{SWITCH}: {why}", hint="docs/failpoints.md has the points and the syntax")


def make_actions(text: str, folder: str) -> dict[str, Callable[[str], int | None]]:
    """Return what happens at each point that is switched; with a `folder`, all are noted.

    Raises:
        ConfigError: `text` is no list of terms.
    """
    terms = parse_terms(text)
    for number, term in enumerate(terms):
        term.place = os.path.join(folder, f"count-{number}") if folder else ""
    names = POINTS if folder else {term.name for term in terms}
    return {
        name: partial(_pass, [term for term in terms if term.name == name], folder, name)
        for name in names
    }


def _pass(terms: list[Term], folder: str, name: str, about: str) -> int | None:
    if folder:
        _note(folder, "hits", name, about)
    taken = None
    for term in terms:
        if term.is_due(about):
            if folder and not (term.fault == "take" and not term.nth):  # Else that is each time.
                _note(folder, "fired", name, about, term.fault, _read_title())
            result = term.act(about)
            taken = result if taken is None else taken
    return taken


def _note(folder: str, file: str, *words: str) -> None:
    """Append a line, whole, whoever else does."""
    line = "\t".join((*words, str(os.getpid()))) + "\n"
    with contextlib.suppress(OSError):
        fd = os.open(os.path.join(folder, file), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(fd, line.encode())
        finally:
            os.close(fd)


def _read_title() -> str:
    """Return the beginning of this process's command line, which says what it is."""
    with contextlib.suppress(OSError), open("/proc/self/cmdline", "rb") as file:
        return " ".join(file.read(200).decode(errors="replace").replace("\0", " ").split())
    return ""


def _count(path: str) -> int:
    """Return how often this was called for `path`, by whatever process."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        count = int(os.pread(fd, 32, 0) or b"0") + 1
        os.pwrite(fd, str(count).encode(), 0)
    finally:
        os.close(fd)
    return count
