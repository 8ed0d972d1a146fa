r"""Text that somebody else wrote, made fit to be shown: no character of it acts on a terminal.

A host's name, an exception, a reason or a line of output may hold sequences that write into the
clipboard (OSC 52), move the cursor, ask the terminal questions whose answers are typed into the
shell, or turn the direction of writing, so that a line reads as another than it is. What acts is
shown as an escape instead of being carried out. The escapes of characters above U+007E are JSON's
own, so that a JSON document stays one, and stays exact.
"""

import re
from collections.abc import Sequence

from perdure.model.codec import make_encodable

TEXT_MAX = 200
"""Characters of a reason and of an example."""
LINE_MAX = 200
"""Characters of a line of somebody else's text on a screen; --json has the rest."""
REASON_MAX = 400
"""Characters of a reason, which may hold such a text among words of perdure's own."""
_FIRST_LINES, _LAST_LINES = 2, 8
"""Of a longer text."""
_ACTS = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f"  # Controls but for the newline.
    "\u2028\u2029"  # Separators of lines and paragraphs.
    "\u202a-\u202e\u2066-\u2069"  # Directions of writing that last.
    "\ud800-\udfff]"  # Halves of characters, which no terminal's encoding can carry.
)
_COLOR = re.compile(r"(\x1b\[[0-9;:]*m)")
_RESET = "\x1b[0m"


def show_controls(text: str) -> str:
    r"""Return `text` with what would act on a terminal as an escape; a tab is four spaces.

    >>> show_controls("box\x1b]52;c;cm0K\x07"), show_controls("\u202etxt.exe")
    ('box\\x1b]52;c;cm0K\\x07', '\\u202etxt.exe')
    """
    return _ACTS.sub(_escape, text)


def show_overwritten(line: str) -> str:
    r"""Return what is left of a line that a program wrote over with carriage returns, as bars are.

    >>> show_overwritten("10%\r20%\r")
    '20%'
    """
    return next((part for part in reversed(line.split("\r")) if part), "")


def show_output(line: str) -> str:
    r"""Return one line of a program's own output: colours stay, nothing else that would act does.

    A colour ends with its line. Of what a program wrote over itself the last is shown.

    >>> show_output("10%\r20%\r"), show_output("\x1b[31mred"), show_output("\x1b[2Jgone")
    ('20%', '\x1b[31mred\x1b[0m', '\\x1b[2Jgone')
    """
    line = show_overwritten(line)
    parts = _COLOR.split(line)  # Every second one is a colour.
    shown = "".join(
        part if index % 2 else show_controls(part).replace("\n", "\\n")
        for index, part in enumerate(parts)
    )
    return shown + _RESET if len(parts) > 1 and not shown.endswith(_RESET) else shown


def shorten_line(line: str, limit: int = LINE_MAX) -> str:
    """Return one line as it fits a screen; of a long one about `limit` characters of both ends.

    >>> shorten_line("ValueError: " + "x" * 1000 + " at step 3", 20)
    'ValueError: xxx ... 1,002 more characters; --json has all ... tep 3'
    """
    more = len(line) - limit
    if more <= 0:
        return line
    end = limit // 4
    mark = f" ... {more:,} more characters; --json has all ... "
    return f"{line[: limit - end]}{mark}{line[-end:]}"


def shorten_lines(lines: Sequence[str]) -> list[str]:
    """Return `lines` as they fit a screen: each shortened, of many the first and the last."""
    left = lines[_FIRST_LINES:-_LAST_LINES]
    shown = [shorten_line(line) for line in lines]
    if len(left) <= 1:
        return shown
    count = sum(len(line) for line in left)
    mark = f"... {len(left):,} more lines, {count:,} more characters; --json has all"
    return [*shown[:_FIRST_LINES], mark, *shown[-_LAST_LINES:]]


def name_step(step: int) -> str:
    """Return ` at step 7`, or nothing where it is not known."""
    return f" at step {step}" if step >= 0 else ""


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code == 9:
        return "    "
    return f"\\x{code:02x}" if code < 0x7F else f"\\u{code:04x}"


def make_plain(text: str | bytes, limit: int = TEXT_MAX) -> str:
    """Return the first `limit` characters of `text` on one line, with all else escaped."""
    if isinstance(text, bytes):
        text = text[: 4 * limit].decode("utf-8", "backslashreplace")
    plain = "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode()
        for each in make_encodable(text[:limit])
    )
    return plain if len(text) <= limit and len(plain) <= limit else plain[: limit - 1] + "…"
